"""What every packer is: something that takes documents from a reader and gives one step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, ClassVar

from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.reader import DocumentReader
from hf_wlb.packing.types import Document, MicroBatch

Replicas = tuple[tuple[MicroBatch, ...], ...]


class Packer(ABC):
    """Decides micro-batch, replica and order of every document, one step at a time.

    A packer is a pure function of what it has read and of its state: replicated on all ranks it needs no
    communication. All waiting documents are part of ``state_dict``.
    """

    name: ClassVar[str]

    def __init__(self, config: PackingConfig) -> None:
        self.config = config

    @abstractmethod
    def next_step(self, reader: DocumentReader, step: int) -> Replicas | None:
        """Plans step number ``step``: ``[replica][micro-batch]``.

        Returns None when the reader has ended and nothing waits. Every call that returns a plan places at least one
        document, so a pass always ends.
        """

    @property
    @abstractmethod
    def waiting(self) -> Iterable[Document]:
        """Documents that were read and not yet trained."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State between two steps, in plain JSON types."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave, for the same configuration."""

    def arrange(self, micro_batches: Sequence[list[Document]]) -> Replicas:
        """Deals micro-batches to replicas and orders them by the step-time model."""
        packed = [MicroBatch.of(documents) for documents in micro_batches]
        return self.config.step_time.arrange(packed, self.config.dp_size)

    def in_order(self, micro_batches: Sequence[list[Document]]) -> Replicas:
        """Deals micro-batches to replicas as they come, as plain training does."""
        size = self.config.micro_batches_per_replica
        packed = [MicroBatch.of(documents) for documents in micro_batches]
        return tuple(tuple(packed[r * size : (r + 1) * size]) for r in range(self.config.dp_size))


class TokenBudget:
    """Reads whole documents so that the tokens read are ``tokens_per_read`` on average, never drifting.

    What the last document exceeds the budget by is taken from the next one. Nothing is read while a whole budget's
    worth is left over from before: data that packs badly would otherwise pile up without end.
    """

    def __init__(self, tokens_per_read: int) -> None:
        self._tokens_per_read = tokens_per_read
        self.credit = 0

    def read(self, reader: DocumentReader, step: int, left_over: Sequence[Document] = ()) -> list[Document]:
        """Reads one budget's worth, unless ``left_over`` holds as much."""
        if sum(document.length for document in left_over) >= self._tokens_per_read:
            return []
        self.credit += self._tokens_per_read
        documents = []
        while self.credit > 0:
            document = reader.read(step)
            if document is None:
                break
            self.credit -= document.length
            documents.append(document)
        return documents


class Bins:
    """Micro-batches being filled: tokens and workload of each, the least loaded found in O(log n).

    Args:
        count: Micro-batches.
        capacity: Tokens that each can hold.
        offsets: Added to the workload wherever micro-batches are compared; a large one keeps a micro-batch light.
    """

    def __init__(self, count: int, capacity: int, offsets: Sequence[float] | None = None) -> None:
        self.capacity = capacity
        self.documents: list[list[Document]] = [[] for _ in range(count)]
        self.tokens = [0] * count
        self.workloads = [0.0] * count
        self.offsets = [0.0] * count if offsets is None else list(offsets)
        self._heap: list[tuple[float, int]] = []
        self._full: list[int] = []  # taken out of the heap for want of room
        self._full_room = -1  # the most room that any of them has
        self._rebuild()

    def add(self, place: int, document: Document) -> None:
        """Puts a document into a given micro-batch."""
        self._put(place, document)
        self._rebuild()

    def add_to_least_loaded(self, document: Document) -> bool:
        """Into the micro-batch of least workload if it fits, else into the shortest if it fits (Algorithm 1)."""
        place = self._heap[0][1]
        if self.tokens[place] + document.length <= self.capacity:
            self._put(place, document)
            heapreplace(self._heap, (self.workloads[place] + self.offsets[place], place))
            return True
        shortest = min(range(len(self.tokens)), key=self.tokens.__getitem__)
        if self.tokens[shortest] + document.length > self.capacity:
            return False
        self.add(shortest, document)
        return True

    def add_to_least_loaded_with_room(self, document: Document) -> bool:
        """Into the least loaded micro-batch that has room; for documents that come longest first."""
        if self._full_room >= document.length:
            for place in self._full:
                heappush(self._heap, (self.workloads[place] + self.offsets[place], place))
            self._full, self._full_room = [], -1
        while self._heap:
            place = self._heap[0][1]
            room = self.capacity - self.tokens[place]
            if room >= document.length:
                self._put(place, document)
                heapreplace(self._heap, (self.workloads[place] + self.offsets[place], place))
                return True
            heappop(self._heap)
            self._full.append(place)
            self._full_room = max(self._full_room, room)
        return False

    def exchange(self, a: int, from_a: int, b: int, from_b: int | None) -> None:
        """Swaps two documents of micro-batches ``a`` and ``b``, or moves one from ``a`` to ``b``."""
        going = self.documents[a].pop(from_a)
        coming = None if from_b is None else self.documents[b].pop(from_b)
        for place, new, old in ((a, coming, going), (b, going, coming)):
            if old is not None:
                self.tokens[place] -= old.length
                self.workloads[place] -= old.workload
            if new is not None:
                self._put(place, new)
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(w + o, i) for i, (w, o) in enumerate(zip(self.workloads, self.offsets, strict=True))]
        heapify(self._heap)
        self._full, self._full_room = [], -1

    def _put(self, place: int, document: Document) -> None:
        self.documents[place].append(document)
        self.tokens[place] += document.length
        self.workloads[place] += document.workload


def documents_to_state(documents: Iterable[Document]) -> list[list[float]]:
    """JSON form of waiting documents."""
    return [list(document) for document in documents]


def documents_from_state(rows: Iterable[Sequence[float]]) -> list[Document]:
    """Reverses ``documents_to_state``."""
    return [Document(int(i), int(s), int(n), float(w), int(a)) for i, s, n, w, a in rows]
