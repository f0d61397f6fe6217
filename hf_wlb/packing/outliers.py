"""The outlier queue of Algorithm 1: rare long documents wait until every micro-batch can have one."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from hf_wlb.packing.base import documents_from_state, documents_to_state
from hf_wlb.packing.types import Document


class OutlierQueue:
    """First in, first out, one level per range of lengths (paper, section 4 and Algorithm 1).

    Args:
        thresholds: Ascending lengths L_1 < L_2 < ...; a document of L_i <= d < L_{i+1} waits in level i.
        release: How many documents a level gives at once: the micro-batches of one step.

    >>> queue = OutlierQueue([10, 100], release=2)
    >>> queue.add(Document(0, 0, 9, 9.0, 0))  # too short to wait
    False
    >>> [queue.add(Document(i, 0, n, float(n), 0)) for i, n in enumerate([50, 400, 10])]
    [True, True, True]
    >>> [d.length for d in queue.pop_full_levels()]
    [50, 10]
    """

    def __init__(self, thresholds: Sequence[int], release: int) -> None:
        self._thresholds = list(thresholds)
        self._release = release
        self._levels: list[deque[Document]] = [deque() for _ in thresholds]

    def add(self, document: Document) -> bool:
        """Takes an outlier in; False for a document below the first threshold, which need not wait."""
        level = bisect_right(self._thresholds, document.length) - 1
        if level < 0:
            return False
        self._levels[level].append(document)
        return True

    @property
    def has_full_level(self) -> bool:
        """Whether ``pop_full_levels`` would give something."""
        return any(len(level) >= self._release for level in self._levels)

    def pop_full_levels(self) -> list[Document]:
        """One document per micro-batch from every level that has enough of them."""
        released = []
        for level in self._levels:
            if len(level) >= self._release:
                released += [level.popleft() for _ in range(self._release)]
        return released

    def pop_all(self) -> list[Document]:
        """Everything, longest level first: the data has ended."""
        released = [document for level in reversed(self._levels) for document in level]
        for level in self._levels:
            level.clear()
        return released

    def __iter__(self) -> Iterator[Document]:
        return (document for level in self._levels for document in level)

    def state_dict(self) -> list[Any]:
        """One list of documents a level."""
        return [documents_to_state(level) for level in self._levels]

    def load_state_dict(self, state: list[Any]) -> None:
        """Reverses ``state_dict``."""
        self._levels = [deque(documents_from_state(level)) for level in state]
