"""Types of length arrays, and walking one a block at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.integer[Any]]

BLOCK_ENTRIES = 1 << 20
"""Entries handled at a time when an array is walked in blocks."""

MOST_TOKENS = 1 << 40
"""Tokens of a document, at most: what is longer is a slip, and would be cut into pieces without end."""


def iter_blocks(lengths: LengthArray, block: int) -> Iterator[tuple[int, LengthArray]]:
    """Yield ``(start, view)`` over the array, ``block`` entries at a time."""
    for start in range(0, len(lengths), block):
        yield start, np.asarray(lengths[start : start + block])
