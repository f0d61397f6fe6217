"""What the planner talks about: documents, micro-batches and steps.

Everything here is a frozen value. A step's plan can therefore be shared between data loader workers, pipeline
stages and gradient checkpointing without anybody being able to change it under somebody else.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Document(NamedTuple):
    """One document, or one piece of a document that was split, as the packers see it.

    Attributes:
        index: Position of the source document in its data set (or its ordinal in a stream).
        start: First token of the source document that this piece holds; 0 for a whole document.
        length: Tokens in this piece, at least 1.
        workload: W(length) in the units of the workload model.
        arrived: Step in which the planner read it; its delay is the step that trains it minus this.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    start: int
    length: int
    workload: float
    arrived: int


def longest_first(documents: Iterable[Document]) -> list[Document]:
    """Sorted by length, descending; ties in data set order, so that all ranks agree."""
    return sorted(documents, key=lambda d: (-d.length, d.index, d.start))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Documents packed together. May be longer than the context length; empty means a dummy of all -100.

    Attributes:
        documents: In the order in which their tokens are laid out.
        tokens: Sum of their lengths.
        workload: Sum of their workloads.
    """

    documents: tuple[Document, ...]
    tokens: int
    workload: float

    @classmethod
    def of(cls, documents: list[Document]) -> MicroBatch:
        """Packs ``documents``, longest first (ties in data set order), so that the layout is canonical.

        >>> MicroBatch.of([Document(0, 0, 3, 3.0, 0), Document(1, 0, 5, 5.0, 0)]).tokens
        8
        """
        ordered = longest_first(documents)
        return cls(tuple(ordered), sum(d.length for d in ordered), sum(d.workload for d in ordered))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: which documents every replica trains, in which micro-batch and in which order.

    Attributes:
        step: Number of the step within its pass over the data, from 0.
        replicas: ``replicas[r][m]`` is micro-batch ``m`` of data-parallel replica ``r``; the same number of
            micro-batches on every replica, padded with empty ones at the end of the data.
        flush: The data had ended when this step was planned, so it holds what was still waiting.
    """

    step: int
    replicas: tuple[tuple[MicroBatch, ...], ...]
    flush: bool = False

    @property
    def micro_batches(self) -> Iterator[MicroBatch]:
        """All micro-batches, replica by replica."""
        return (micro_batch for replica in self.replicas for micro_batch in replica)

    @property
    def documents(self) -> Iterator[Document]:
        """All documents, in layout order."""
        return (document for micro_batch in self.micro_batches for document in micro_batch.documents)

    @property
    def tokens(self) -> int:
        """Tokens trained by this step on all replicas."""
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)

    def workloads(self) -> list[list[float]]:
        """Workload of every micro-batch, ``[replica][micro-batch]``."""
        return [[micro_batch.workload for micro_batch in replica] for replica in self.replicas]

    def digest(self) -> int:
        """A 63-bit hash of the whole plan, for comparing ranks: equal plans have equal digests.

        Lengths and places are hashed, workloads are not: they follow from the lengths.
        """
        packed = bytearray(struct.pack("<qq", self.step, len(self.replicas)))
        for replica in self.replicas:
            packed += struct.pack("<q", len(replica))
            for micro_batch in replica:
                packed += struct.pack("<q", len(micro_batch.documents))
                for document in micro_batch.documents:
                    packed += struct.pack("<qqq", document.index, document.start, document.length)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
