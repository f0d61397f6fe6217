"""The paper's Algorithm 1: variable-length packing with an outlier queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_wlb.packing.base import (
    Bins,
    Packer,
    Replicas,
    TokenBudget,
    documents_from_state,
    documents_to_state,
)
from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.outliers import OutlierQueue
from hf_wlb.packing.reader import DocumentReader
from hf_wlb.packing.types import Document, longest_first


class WlbPacker(Packer):
    """Algorithm 1 of the paper, with three things it leaves open decided.

    * A document that fills a micro-batch to exactly S_max is placed (the paper's ``<`` would let it starve).
    * At the end of the data queues and left-overs are flushed, over as many steps as they need.
    * New documents are read by a token budget that does not drift. None are read while a step's worth is left over,
      or a level still holds enough for another release: on data full of outliers the queue would grow without end.

    How long a document waits is not bounded: its level is released once it holds enough of them, or at the end.
    """

    name = "wlb"

    def __init__(self, config: PackingConfig) -> None:
        super().__init__(config)
        self._queue = OutlierQueue(config.outlier_levels, release=config.micro_batches)
        self._remained: list[Document] = []
        self._budget = TokenBudget(config.tokens_per_step)

    def next_step(self, reader: DocumentReader, step: int) -> Replicas | None:
        """See ``Packer.next_step``."""
        documents = self._remained + longest_first(self._new_documents(reader, step))
        while not documents:  # everything read went into the queue
            if reader.exhausted:
                return None
            documents = longest_first(self._new_documents(reader, step))
        bins = Bins(self.config.micro_batches, self.config.s_max)
        self._remained = [document for document in documents if not bins.add_to_least_loaded(document)]
        return self.arrange(bins.documents)

    def _new_documents(self, reader: DocumentReader, step: int) -> list[Document]:
        read = [] if self._queue.has_full_level else self._budget.read(reader, step, self._remained)
        new = [document for document in read if not self._queue.add(document)]
        return new + (self._queue.pop_all() if reader.exhausted else self._queue.pop_full_levels())

    @property
    def waiting(self) -> Iterable[Document]:
        """Outliers and left-overs."""
        return [*self._queue, *self._remained]

    def state_dict(self) -> dict[str, Any]:
        """See ``Packer.state_dict``."""
        return {
            "queue": self._queue.state_dict(),
            "remained": documents_to_state(self._remained),
            "credit": self._budget.credit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Packer.load_state_dict``."""
        self._queue.load_state_dict(state["queue"])
        self._remained = documents_from_state(state["remained"])
        self._budget.credit = int(state["credit"])
