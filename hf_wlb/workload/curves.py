"""Interpolation of measured times: monotone between the samples, at the last sample's rate beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.workload.base import FloatArray, IntArray


class PowerCurve:
    """Time as a function of an amount of work, piecewise a power law through the samples.

    In logarithms the curve is linear between neighbouring samples, so time per unit of work changes smoothly
    and time never falls as work grows. A sample that took less than a smaller one (timing noise) is lifted to
    it. Beyond both ends time is proportional to work.

    >>> curve = PowerCurve([10.0, 1000.0], [1.0, 10.0])
    >>> [round(float(t), 6) for t in curve(np.array([0.0, 5.0, 10.0, 100.0, 1000.0, 4000.0]))]
    [0.0, 0.5, 1.0, 3.162278, 10.0, 40.0]
    """

    def __init__(self, work: Sequence[float], seconds: Sequence[float]) -> None:
        self._log_work = np.log(np.asarray(work, dtype=np.float64))
        self._log_seconds = np.maximum.accumulate(np.log(np.asarray(seconds, dtype=np.float64)))

    def log(self, work: FloatArray) -> FloatArray:
        """Logarithm of the time; -inf for no work."""
        with np.errstate(divide="ignore"):
            log_work = np.log(work)
        beyond = np.minimum(log_work - self._log_work[0], 0) + np.maximum(log_work - self._log_work[-1], 0)
        inside: FloatArray = np.interp(log_work, self._log_work, self._log_seconds) + beyond
        return inside

    def __call__(self, work: FloatArray) -> FloatArray:
        """Seconds for that much work; float64 array of the same shape."""
        seconds: FloatArray = np.exp(self.log(work))
        return seconds


class AttentionCurve:
    """Seconds of one layer's attention over a chunk, from samples of (q_len, kv_len).

    Whole documents (q_len = kv_len) follow a ``PowerCurve`` over their causal pairs. A chunk starts from the
    document as long as its queries and grows with the keys before them: each q_len measured with more keys
    gives a curve of the growth over the mean number of keys a query sees, and growths are blended between
    neighbouring q_len in log q_len. Without such samples a chunk takes the document's time per pair.

    Time never falls with more keys before the same queries, nor with a longer document.
    """

    def __init__(self, q_lens: Sequence[int], kv_lens: Sequence[int], seconds: Sequence[float]) -> None:
        samples = list(zip(q_lens, kv_lens, seconds, strict=True))
        documents = sorted((q, s) for q, kv, s in samples if q == kv)
        self._document_q = [float(q) for q, _ in documents]
        self._documents = PowerCurve([q * (q + 1) / 2 for q, _ in documents], [s for _, s in documents])
        self._row_log_q: list[float] = []
        self._rows: list[tuple[FloatArray, FloatArray]] = []
        for q in sorted({q for q, kv, _ in samples if q < kv}):
            row = sorted((kv, s) for row_q, kv, s in samples if row_q == q < kv)
            row_kv, row_seconds = (np.array(column, dtype=np.float64) for column in zip(*row, strict=True))
            own: FloatArray = np.asarray(q, dtype=np.float64)
            log_keys = np.log(_mean_keys(own, row_kv) / _mean_keys(own, own))
            growth = np.log(row_seconds) - self._documents.log(own * (own + 1) / 2)
            self._row_log_q.append(float(np.log(own)))
            # Growth starts at 0, the document of q tokens, and may not fall.
            self._rows.append((np.append(0.0, log_keys), np.maximum.accumulate(np.append(0.0, growth))))

    def seconds(self, q_len: FloatArray, kv_len: FloatArray, window: int | None = None) -> FloatArray:
        """Seconds of chunks whose ``q_len`` queries end at position ``kv_len``.

        Under a sliding window the pairs are those within it, at the time per pair of a chunk whose keys fill
        the window. Both arrays hold whole numbers as float64 and broadcast; no queries take no time.
        """
        limit = np.inf if window is None else float(window)
        pairs = _pairs(kv_len, limit) - _pairs(kv_len - q_len, limit)
        queries, keys = np.minimum(np.maximum(q_len, 1.0), limit), np.minimum(np.maximum(kv_len, 1.0), limit)
        own_pairs = queries * (queries + 1) / 2
        log_time = self._documents.log(own_pairs) + self._growth(queries, keys)
        seconds: FloatArray = pairs * np.exp(log_time) / (queries * _mean_keys(queries, keys))
        return seconds

    def _growth(self, q_len: FloatArray, kv_len: FloatArray) -> FloatArray:
        """Logarithm of a chunk's time over that of a document of q_len tokens."""
        log_keys = np.log(_mean_keys(q_len, kv_len) / _mean_keys(q_len, q_len))
        if not self._rows:
            return np.asarray(log_keys)
        rows = [np.interp(log_keys, x, y) + np.maximum(log_keys - x[-1], 0) for x, y in self._rows]
        # Position of q_len among the rows' q_len: 1.25 is a quarter of the way from row 1 to row 2.
        place = np.interp(np.log(q_len), self._row_log_q, np.arange(len(rows)))
        growth = np.zeros_like(log_keys)
        for index, row in enumerate(rows):
            growth += np.maximum(1 - np.abs(place - index), 0) * row
        return growth

    def kinks(self, steps: FloatArray, window: int | None = None) -> tuple[FloatArray, FloatArray]:
        """Points on the lines along which ``seconds`` bends: at samples' queries, at their keys, at the window.

        Args:
            steps: Where to take points of a line, as q_len and as kv_len / q_len; those where lines cross are added.
            window: As in ``seconds``.

        Returns:
            q_len and kv_len, both ``[points]``; not whole numbers.
        """
        keys = np.exp(np.unique(np.concatenate([np.zeros(1), *(x for x, _ in self._rows)])))
        lines = np.concatenate([self._document_q, np.exp(self._row_log_q)])
        if window is not None:  # beyond it samples' keys are reached, if at all, by other queries
            lines = np.concatenate([lines, [window], np.maximum((2 * window + 1 - keys) / (keys + 1), 1.0)])
        q_lens = np.concatenate([steps, lines])
        points: list[tuple[FloatArray, ...]] = [
            np.broadcast_arrays(lines[:, None], lines[:, None] * steps),
            np.broadcast_arrays(q_lens[:, None], keys * (q_lens[:, None] + 1) / 2 + (q_lens[:, None] - 1) / 2),
        ]
        if window is not None:  # lies across cells, on whose corners steps may be: half-way between them as well
            steps = np.concatenate([steps, np.sqrt(steps[1:] * steps[:-1])])
            reached = np.minimum(np.concatenate([q_lens, steps, np.maximum(window / steps, 1.0)]), window)
            points.append((reached, np.full_like(reached, window)))
        q_len, kv_len = (np.concatenate([part.ravel() for part in column]) for column in zip(*points, strict=True))
        return q_len, kv_len


def _mean_keys(q_len: FloatArray, kv_len: FloatArray) -> FloatArray:
    """Keys that a query of the chunk sees on average."""
    return kv_len - (q_len - 1) / 2


def _pairs(lengths: FloatArray, window: float) -> FloatArray:
    """Causal pairs of whole documents, in floating point: sum over i of min(i, window)."""
    ramps = np.minimum(lengths, window)
    pairs: FloatArray = ramps * (ramps + 1) / 2
    return pairs if np.isinf(window) else pairs + (lengths - ramps) * window


class SegmentTable:
    """A function of (q_len, kv_len) read off a grid that is even in the logarithms: fast, for pricing many plans.

    Args:
        seconds: The function, for arrays of lengths as float64.
        longest: Length up to which the grid reaches; beyond it the function is called itself.
        kinks: Given the grid's q_len (and kv_len / q_len), points of (q_len, kv_len) on the lines along which the
            function bends; ``None`` if it does not.

    Between grid points the time per causal pair is interpolated linearly in the logarithms: within 1%, near a kink of
    the function within 3%. A function with steeper kinks than that allows is called itself, which takes a few times
    as long: samples can be any times, such as 30 s for one more key.

    >>> table = SegmentTable(lambda q, kv: q * kv, longest=1000)
    >>> [round(float(t)) for t in table(np.array([10, 100, 0]), np.array([700, 100, 50]))]
    [7000, 10000, 0]
    """

    _PER_OCTAVE = 32
    _MOST_ERROR = 0.02  # at kinks, where it is largest, and short of what is promised

    def __init__(
        self,
        seconds: Callable[[FloatArray, FloatArray], FloatArray],
        longest: int,
        kinks: Callable[[FloatArray], tuple[FloatArray, FloatArray]] | None = None,
    ) -> None:
        self._seconds, self._longest = seconds, longest
        self._last = int(np.ceil(np.log2(longest) * self._PER_OCTAVE)) - 1
        steps = np.exp2(np.arange(self._last + 2) / self._PER_OCTAVE)
        q, kv = np.broadcast_arrays(steps[:, None], steps[:, None] * steps[None, :])
        with np.errstate(all="ignore"):
            self._log_rate = np.log(seconds(q, kv) / _chunk_pairs(q, kv))
        self.too_steep = False
        """Whether the function bends too much for the grid, and is called itself."""
        if kinks is not None:
            q, kv = kinks(steps)
            with np.errstate(all="ignore"):
                error = np.abs(np.log(self._read(q, kv) / seconds(q, kv))).max()
            self.too_steep = not error <= self._MOST_ERROR  # so that an error which is no number is too much

    def __call__(self, q_len: NDArray[Any], kv_len: NDArray[Any]) -> FloatArray:
        """Seconds of segments; no queries take no time."""
        if self.too_steep or np.max(kv_len, initial=0) > self._longest:
            return self._seconds(np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64))
        return self._read(q_len, kv_len)

    def _read(self, q_len: NDArray[Any], kv_len: NDArray[Any]) -> FloatArray:
        queries, keys = np.maximum(q_len, 1), np.maximum(kv_len, 1)
        log_q = np.log2(queries)
        row, down = self._place(log_q)
        column, right = self._place(np.log2(keys) - log_q)
        rate, rest = self._log_rate, 1 - right
        upper = rate[row, column] * rest + rate[row, column + 1] * right
        lower = rate[row + 1, column] * rest + rate[row + 1, column + 1] * right
        seconds: FloatArray = np.exp(upper + (lower - upper) * down) * _chunk_pairs(q_len, kv_len)
        return seconds

    def _place(self, log_length: FloatArray) -> tuple[IntArray, FloatArray]:
        place = np.maximum(log_length * self._PER_OCTAVE, 0.0)
        cell = np.minimum(place.astype(np.int64), self._last)
        return cell, place - cell


def _chunk_pairs(q_len: Any, kv_len: Any) -> Any:
    """Causal pairs of queries that are the last of their keys."""
    return q_len * (kv_len - (q_len - 1) / 2)
