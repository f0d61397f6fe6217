"""Moments, percentiles and a histogram of document lengths."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_wlb.lengths.arrays import BLOCK_ENTRIES, IntArray, LengthArray, iter_blocks

SUMMARY_PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 97.0, 98.0, 99.0, 99.3, 99.6, 99.8, 99.9)
"""Percentiles reported by :func:`length_summary`."""

_BINS_PER_OCTAVE = 4


@dataclass(frozen=True)
class LengthHistogram:
    """A histogram of lengths over bins spaced evenly in the logarithm.

    Bin ``i`` holds the documents with ``edges[i] <= length < edges[i + 1]``. Empty documents (length 0) are
    in no bin: they have neither tokens nor attention work.

    Attributes:
        edges: Bin edges in tokens, increasing integers, one more than there are bins.
        documents: Documents in each bin.
        tokens: Tokens in each bin.
        attention_pairs: Causal query-key pairs in each bin, the sum of d (d + 1) / 2.
    """

    edges: tuple[int, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    attention_pairs: tuple[float, ...]


@dataclass(frozen=True)
class LengthSummary:
    """What :func:`length_summary` found; all lengths in tokens.

    Attributes:
        count: Documents.
        empty: Documents of length 0.
        tokens: Sum of the lengths.
        mean: Mean length (0 if there are no documents).
        maximum: Longest document (0 if there are none).
        squared_over_mean: ``E[d^2] / E[d]``, the length of the document that a random token lies in.
        percentiles: Percent -> the smallest length that at least so many percent of the documents do not
            exceed. Empty if there are no documents.
        histogram: Documents, tokens and attention work by length.
    """

    count: int
    empty: int
    tokens: int
    mean: float
    maximum: int
    squared_over_mean: float
    percentiles: dict[float, int]
    histogram: LengthHistogram

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; percentiles are keyed by text such as ``"99.3"``."""
        return {
            "count": self.count,
            "empty": self.empty,
            "tokens": self.tokens,
            "mean": self.mean,
            "maximum": self.maximum,
            "squared_over_mean": self.squared_over_mean,
            "percentiles": {f"{percent:g}": length for percent, length in self.percentiles.items()},
            "histogram": {
                "edges": list(self.histogram.edges),
                "documents": list(self.histogram.documents),
                "tokens": list(self.histogram.tokens),
                "attention_pairs": list(self.histogram.attention_pairs),
            },
        }


def length_summary(lengths: LengthArray, block: int = BLOCK_ENTRIES) -> LengthSummary:
    """Sum up document lengths in one pass, a block at a time.

    Exact, not sampled: the pass counts how often each length occurs, so its memory grows with the number
    of different lengths (at most the longest length) and not with the number of documents.

    Args:
        lengths: Lengths in tokens, shape ``(documents,)``, any integer dtype; may be a memory map.
        block: Entries read at a time.

    Returns:
        Counts, moments, percentiles and a histogram with four bins per doubling of the length.

    Raises:
        ValueError: If a length is negative or ``block`` is below 1.

    Example:
        >>> summary = length_summary(np.array([1, 1, 2, 8]))
        >>> summary.count, summary.tokens, summary.maximum, summary.percentiles[50.0]
        (4, 12, 8, 1)
        >>> round(summary.squared_over_mean, 3)  # (1 + 1 + 4 + 64) / 12
        5.833
    """
    if block < 1:
        raise ValueError(f"length_summary was given block={block}; it must be 1 or more.")
    values, counts = _count_lengths(lengths, block)
    exact = values.astype(np.float64)
    count, tokens = int(counts.sum()), int((values * counts).sum())
    squares = float((exact * exact * counts).sum())
    percentiles: dict[float, int] = {}
    if count:
        cumulative = np.cumsum(counts)
        # The small tolerance keeps 99.3% of 1,000 at the 993rd document, not the 994th, despite rounding.
        ranks = np.ceil(np.array(SUMMARY_PERCENTILES) * count / 100.0 - 1e-6)
        places = np.searchsorted(cumulative, np.maximum(ranks, 1))
        percentiles = {q: int(values[place]) for q, place in zip(SUMMARY_PERCENTILES, places, strict=True)}
    return LengthSummary(
        count=count,
        empty=int(counts[0]) if count and values[0] == 0 else 0,
        tokens=tokens,
        mean=tokens / count if count else 0.0,
        maximum=int(values[-1]) if count else 0,
        squared_over_mean=squares / tokens if tokens else 0.0,
        percentiles=percentiles,
        histogram=_histogram(values, counts),
    )


def _count_lengths(lengths: LengthArray, block: int) -> tuple[IntArray, IntArray]:
    """Return the different lengths, increasing, and how often each occurs."""
    values, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for start, part in iter_blocks(lengths, block):
        new_values, new_counts = np.unique(part.astype(np.int64), return_counts=True)
        if new_values[0] < 0:
            place = start + int(np.argmax(part < 0))
            raise ValueError(f"The length of document {place} is {lengths[place]}; lengths are 0 or more.")
        merged = np.union1d(values, new_values)
        total = np.zeros(len(merged), dtype=np.int64)
        total[np.searchsorted(merged, values)] += counts
        total[np.searchsorted(merged, new_values)] += new_counts
        values, counts = merged, total
    return values, counts


def _histogram(values: IntArray, counts: IntArray) -> LengthHistogram:
    positive = values > 0
    values, counts = values[positive], counts[positive]
    if not values.size:
        return LengthHistogram(edges=(), documents=(), tokens=(), attention_pairs=())
    first, last = np.floor(np.log2(values[0])), np.log2(float(values[-1]) + 1.0)
    exponents = np.arange(first * _BINS_PER_OCTAVE, np.ceil(last * _BINS_PER_OCTAVE) + 1) / _BINS_PER_OCTAVE
    edges = np.unique(np.rint(np.exp2(exponents)).astype(np.int64))
    if edges[-1] <= values[-1]:
        edges = np.append(edges, values[-1] + 1)
    bins = np.searchsorted(edges, values, side="right") - 1
    exact = values.astype(np.float64)

    def total(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.bincount(bins, weights=weights, minlength=len(edges) - 1).astype(np.float64)

    return LengthHistogram(
        edges=tuple(int(edge) for edge in edges),
        documents=tuple(int(x) for x in total(counts.astype(np.float64))),
        tokens=tuple(int(x) for x in total(exact * counts)),
        attention_pairs=tuple(float(x) for x in total(exact * (exact + 1.0) * 0.5 * counts)),
    )
