"""The two plain baselines: documents packed in arrival order to the context length, no look at their workload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_wlb.packing.base import Packer, Replicas, documents_from_state, documents_to_state
from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.reader import DocumentReader
from hf_wlb.packing.types import Document
from hf_wlb.workload import WorkloadModel


class NextFitPacker(Packer):
    """Fills micro-batches one after the other; a document that does not fit opens the next one.

    Keeps documents whole, wastes the tail of every micro-batch.
    """

    name = "next-fit"

    def next_step(self, reader: DocumentReader, step: int) -> Replicas | None:
        """See ``Packer.next_step``."""
        if reader.exhausted:
            return None
        micro_batches: list[list[Document]] = []
        for _ in range(self.config.micro_batches):
            micro_batch: list[Document] = []
            room = self.config.capacity
            while (length := reader.peek()) is not None and length <= room:
                document = reader.read(step)
                assert document is not None
                micro_batch.append(document)
                room -= length
            micro_batches.append(micro_batch)
        return self.in_order(micro_batches)

    @property
    def waiting(self) -> Iterable[Document]:
        """Nothing ever waits."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Empty: all state is the reader's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class ConcatAndCutPacker(Packer):
    """Concatenates all documents and cuts the stream at every context length: Plain-4D's usual data loader.

    Wastes nothing, but cuts documents: the rest of one starts anew without its prefix in the next micro-batch, and so
    does less attention than the uncut document would. Compare on equal documents and look at ``context_lost``.
    """

    name = "concat-and-cut"

    def __init__(self, config: PackingConfig, workload: WorkloadModel) -> None:
        super().__init__(config)
        self._workload = workload
        self._rest: Document | None = None

    def next_step(self, reader: DocumentReader, step: int) -> Replicas | None:
        """See ``Packer.next_step``."""
        if self._rest is None and reader.exhausted:
            return None
        micro_batches = [self._fill(reader, step) for _ in range(self.config.micro_batches)]
        return self.in_order(micro_batches)

    def _fill(self, reader: DocumentReader, step: int) -> list[Document]:
        micro_batch: list[Document] = []
        room = self.config.context_length
        while room > 0:
            document = self._rest or reader.read(step)
            self._rest = None
            if document is None:
                break
            if document.length > room:
                self._rest = self._piece(document, document.start + room, document.length - room, step + 1)
                document = self._piece(document, document.start, room, step)
            micro_batch.append(document._replace(arrived=step))
            room -= document.length
        return micro_batch

    def _piece(self, document: Document, start: int, length: int, step: int) -> Document:
        return Document(document.index, start, length, float(self._workload.document(length)), step)

    @property
    def waiting(self) -> Iterable[Document]:
        """The rest of the document cut last."""
        return () if self._rest is None else (self._rest,)

    def state_dict(self) -> dict[str, Any]:
        """The rest of the document cut last."""
        return {"rest": documents_to_state(self.waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Packer.load_state_dict``."""
        rest = documents_from_state(state["rest"])
        self._rest = rest[0] if rest else None
