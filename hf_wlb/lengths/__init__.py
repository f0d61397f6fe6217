"""Document lengths: reading them, sampling them, summing them up, and the order they are visited in.

Everything here works on a one-dimensional integer array of lengths in tokens, which may be a memory map of
tens of millions of entries: nothing but :func:`sample_lengths` and the readers of JSON and text files uses
memory that grows with the number of documents. NumPy and the standard library only.
"""

from hf_wlb.lengths.arrays import BLOCK_ENTRIES, MOST_TOKENS, IntArray, LengthArray, iter_blocks
from hf_wlb.lengths.order import Order, RandomOrder, StoredOrder
from hf_wlb.lengths.reading import (
    HOW_TO_MAKE_LENGTHS,
    fingerprint_lengths,
    holds_lengths,
    load_lengths,
    parse_length,
)
from hf_wlb.lengths.sampling import sample_lengths
from hf_wlb.lengths.summary import SUMMARY_PERCENTILES, LengthHistogram, LengthSummary, length_summary

__all__ = [
    "BLOCK_ENTRIES",
    "HOW_TO_MAKE_LENGTHS",
    "MOST_TOKENS",
    "SUMMARY_PERCENTILES",
    "IntArray",
    "LengthArray",
    "LengthHistogram",
    "LengthSummary",
    "Order",
    "RandomOrder",
    "StoredOrder",
    "fingerprint_lengths",
    "holds_lengths",
    "iter_blocks",
    "length_summary",
    "load_lengths",
    "parse_length",
    "sample_lengths",
]
