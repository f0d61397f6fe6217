"""The protocol every workload model obeys, and the arithmetic of causal pairs they share.

A workload model prices a document: ``W(d) = W_a(d) + W_l(d)``, W_a quadratic (attention), W_l linear
(matmuls, element-wise kernels, collectives); PAPER "Workload". Packers and sharding strategies only ever
see this protocol, so a model made of FLOP counts and one made of measurements are interchangeable.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Lengths = int | np.integer[Any] | NDArray[Any] | Sequence[int]

MAX_LENGTH = 2**31 - 1
"""Longest document a workload model prices: its causal pairs still fit a 64-bit integer."""


def is_whole_number(value: Any) -> bool:
    """Whether ``value`` is a Python or NumPy integer (``True`` and ``False`` are not)."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@overload
def check_lengths(lengths: int | np.integer[Any], what: str = ...) -> int: ...
@overload
def check_lengths(lengths: NDArray[Any] | Sequence[int], what: str = ...) -> IntArray: ...
def check_lengths(lengths: Lengths, what: str = "document lengths") -> int | IntArray:
    """Return ``lengths`` as an ``int`` or an int64 array of the same shape, after checking them.

    Args:
        lengths: one token count, or an integer array (any shape) or a sequence of token counts.
        what: what the numbers are, for the error.

    Raises:
        TypeError: if they are not integers.
        ValueError: if one is negative or above ``MAX_LENGTH``.
    """
    if isinstance(lengths, (int, np.integer)) and not isinstance(lengths, bool):
        value = int(lengths)
        if not 0 <= value <= MAX_LENGTH:
            raise ValueError(f"{what} must lie between 0 and {MAX_LENGTH} tokens, but {value} was given.")
        return value
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(array.shape, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{what} must be integers (an int, an integer array or a list of ints), "
            f"but {type(lengths).__name__} of dtype {array.dtype} was given."
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_LENGTH:
        bad = low if low < 0 else high
        raise ValueError(f"{what} must lie between 0 and {MAX_LENGTH} tokens, but {bad} was given.")
    return array.astype(np.int64, copy=False)


def check_chunk(q_len: Lengths, kv_len: Lengths) -> tuple[int | IntArray, int | IntArray]:
    """Return checked (q_len, kv_len); see ``WorkloadModel.chunk``.

    Raises:
        TypeError: if they are not integers.
        ValueError: if a chunk has more queries than keys, or a length is out of range.
    """
    queries: int | IntArray = check_lengths(q_len, "chunk query lengths (q_len)")
    keys: int | IntArray = check_lengths(kv_len, "chunk key lengths (kv_len)")
    if np.any(np.greater(queries, keys)):
        raise ValueError(
            "A chunk's q_len must not exceed its kv_len, because its queries are the last q_len tokens of "
            f"a prefix of kv_len tokens; got q_len={queries}, kv_len={keys}."
        )
    return queries, keys


@overload
def causal_pairs(lengths: int, window: int | None = ...) -> int: ...
@overload
def causal_pairs(lengths: IntArray, window: int | None = ...) -> IntArray: ...
def causal_pairs(lengths: int | IntArray, window: int | None = None) -> int | IntArray:
    """Number of (query, key) pairs of a whole document under a causal mask: sum over i of min(i, window).

    Args:
        lengths: checked token counts, an ``int`` or an int64 array.
        window: keys a query sees at most, itself included; ``None`` for full attention.

    >>> causal_pairs(4), causal_pairs(4, window=2)
    (10, 7)
    """
    if window is None:
        return lengths * (lengths + 1) // 2
    if isinstance(lengths, int):
        ramp = min(lengths, int(window))
        return ramp * (ramp + 1) // 2 + (lengths - ramp) * window
    ramps = np.minimum(lengths, window)
    pairs: IntArray = ramps * (ramps + 1) // 2 + (lengths - ramps) * window
    return pairs


class WorkloadModel(ABC):
    """Seconds (or relative units) of forward plus backward over the whole model.

    Lengths are an ``int`` (the result is a ``float``) or an integer array (the result is a float64 array of
    the same shape). Every method is non-decreasing in the document length.
    """

    schema: ClassVar[str]
    """Value of the ``schema`` key in ``to_dict()``: the name and version of the format."""

    @overload
    def attention(self, lengths: int | np.integer[Any]) -> float: ...
    @overload
    def attention(self, lengths: NDArray[Any] | Sequence[int]) -> FloatArray: ...
    @abstractmethod
    def attention(self, lengths: Lengths) -> float | FloatArray:
        """W_a of whole documents."""

    @overload
    def linear(self, lengths: int | np.integer[Any]) -> float: ...
    @overload
    def linear(self, lengths: NDArray[Any] | Sequence[int]) -> FloatArray: ...
    @abstractmethod
    def linear(self, lengths: Lengths) -> float | FloatArray:
        """W_l of whole documents, or of that many tokens of anything."""

    @overload
    def document(self, lengths: int | np.integer[Any]) -> float: ...
    @overload
    def document(self, lengths: NDArray[Any] | Sequence[int]) -> FloatArray: ...
    def document(self, lengths: Lengths) -> float | FloatArray:
        """W = W_a + W_l of whole documents."""
        checked: Any = check_lengths(lengths)
        total: float | FloatArray = self.attention(checked) + self.linear(checked)
        return total

    @overload
    def chunk(self, q_len: int | np.integer[Any], kv_len: int | np.integer[Any]) -> float: ...
    @overload
    def chunk(self, q_len: NDArray[Any] | Sequence[int], kv_len: Lengths) -> FloatArray: ...
    @abstractmethod
    def chunk(self, q_len: Lengths, kv_len: Lengths) -> float | FloatArray:
        """W of a chunk: ``q_len`` queries, the last of which is token ``kv_len`` (counted from 1).

        Its attention covers ``q_len * kv_len - q_len * (q_len - 1) / 2`` causal pairs (fewer under a sliding
        window), its linear work is that of ``q_len`` tokens. ``chunk(d, d)`` equals ``document(d)``.
        """

    def segment(self, q_len: NDArray[Any] | Sequence[int], kv_len: NDArray[Any] | Sequence[int]) -> FloatArray:
        """Attention alone of one row of a variable-length kernel call, over the whole model, forward plus backward.

        As ``chunk`` without the linear work, with what a short row wastes: the segments of a document may cost more
        together than the document. Sharding compares plans by it.

        Args:
            q_len: Queries of every row, an integer array; 0 for a row that only steps over keys.
            kv_len: Keys up to the row's last query, of the same shape.

        Returns:
            float64 array of that shape.
        """
        queries, keys = np.asarray(q_len), np.asarray(kv_len)
        seconds: FloatArray = self.chunk(queries, keys) - self.linear(queries)
        return seconds

    @abstractmethod
    def exchange(self, tokens: int, cp_size: int) -> float:
        """Gathering keys and values among ``cp_size`` ranks in every layer, and reducing their gradients.

        Args:
            tokens: Tokens gathered on every rank, padding included.
            cp_size: Ranks; 1 costs nothing.
        """

    def micro_batch(self, lengths: NDArray[Any] | Sequence[int]) -> float:
        """W of a micro-batch: the sum over its documents' lengths (an empty one costs 0)."""
        return float(np.sum(self.document(np.asarray(lengths))))

    @property
    @abstractmethod
    def crossover_length(self) -> float:
        """Document length in tokens at which attention equals linear work; ``inf`` if it never does."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable description from which ``from_dict`` rebuilds an equal model."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = ...) -> WorkloadModel:
        """Rebuild a model from ``to_dict()``; errors about malformed data call it ``where``."""

    def save(self, path: str | Path) -> None:
        """Write ``to_dict()`` as JSON with sorted keys, for ``load_workload``."""
        text = json.dumps(self.to_dict(), sort_keys=True, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that name this model: equal on every machine for equal ``to_dict()``."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
