"""What greedy and solver share: fixed-length packing of a window of several global batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from typing import Any

from hf_wlb.packing.base import (
    Packer,
    Replicas,
    TokenBudget,
    documents_from_state,
    documents_to_state,
)
from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.reader import DocumentReader
from hf_wlb.packing.types import Document, longest_first


class WindowedPacker(Packer):
    """Reads ``window_steps`` global batches at once, packs them to the context length, gives them step by step.

    Documents that found no room open the next window. Micro-batches of similar workload go into the same step, which
    favours this baseline; the steps come in the order of the earliest document in them.
    """

    def __init__(self, config: PackingConfig) -> None:
        super().__init__(config)
        self._budget = TokenBudget(config.tokens_per_step * config.window_steps)
        self._remained: list[Document] = []
        self._planned: list[list[list[Document]]] = []  # steps still to give

    @abstractmethod
    def pack_window(self, documents: list[Document]) -> tuple[list[list[Document]], list[Document]]:
        """Micro-batches of one window (``window_steps * micro_batches`` of them) and the documents without room."""

    def next_step(self, reader: DocumentReader, step: int) -> Replicas | None:
        """See ``Packer.next_step``."""
        if not self._planned:
            documents = [*self._remained, *longest_first(self._budget.read(reader, step, self._remained))]
            if not documents:
                return None
            micro_batches, self._remained = self.pack_window(documents)
            self._planned = self._group(micro_batches)
        return self.arrange(self._planned.pop(0))

    def _group(self, micro_batches: list[list[Document]]) -> list[list[list[Document]]]:
        size = self.config.micro_batches
        ordered = sorted(
            range(len(micro_batches)),
            key=lambda i: (-sum(document.workload for document in micro_batches[i]), i),
        )
        steps = [[micro_batches[i] for i in ordered[k : k + size]] for k in range(0, len(ordered), size)]
        steps = [step for step in steps if any(step)]
        return sorted(steps, key=lambda step: min(d.index for micro_batch in step for d in micro_batch))

    @property
    def waiting(self) -> Iterable[Document]:
        """Left-overs, and what is planned for the later steps of the window."""
        planned = [d for step in self._planned for micro_batch in step for d in micro_batch]
        return [*self._remained, *planned]

    def state_dict(self) -> dict[str, Any]:
        """See ``Packer.state_dict``."""
        return {
            "credit": self._budget.credit,
            "remained": documents_to_state(self._remained),
            "planned": [[documents_to_state(m) for m in step] for step in self._planned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Packer.load_state_dict``."""
        self._budget.credit = int(state["credit"])
        self._remained = documents_from_state(state["remained"])
        self._planned = [[documents_from_state(m) for m in step] for step in state["planned"]]


class GreedyPacker(WindowedPacker):
    """Fixed-4D's packing: longest document first, each into the micro-batch of least attention work that has room.

    Attention work is sum d^2, as in the paper's section 3, not the workload model: this baseline does not know about
    linear work.
    """

    name = "greedy"

    def pack_window(self, documents: list[Document]) -> tuple[list[list[Document]], list[Document]]:
        """See ``WindowedPacker.pack_window``."""
        return pack_greedily(documents, self.config)


def pack_greedily(documents: list[Document], config: PackingConfig) -> tuple[list[list[Document]], list[Document]]:
    """Least sum d^2 first among the micro-batches with room; ``documents`` come longest first."""
    count = config.micro_batches * config.window_steps
    micro_batches: list[list[Document]] = [[] for _ in range(count)]
    rooms = [config.context_length] * count
    loads = [(0, place) for place in range(count)]  # sum d^2, a heap
    left_over = []
    full: list[tuple[int, int]] = []  # taken out of the heap for want of room
    full_room = -1  # the most room that any of them has
    for document in documents:
        if full_room >= document.length:
            for entry in full:
                heappush(loads, entry)
            full, full_room = [], -1
        while loads and rooms[loads[0][1]] < document.length:
            full.append(heappop(loads))
            full_room = max(full_room, rooms[full[-1][1]])
        if loads:
            load, place = loads[0]
            heapreplace(loads, (load + document.length**2, place))
            micro_batches[place].append(document)
            rooms[place] -= document.length
        else:
            left_over.append(document)
    return micro_batches, left_over
