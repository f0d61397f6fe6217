"""Reads documents in order, one at a time, and says what happens to those that are too long or empty.

The packers pull: each reads as much as its own rule asks for. All state that a resume needs is the position in the
source and the pieces of at most one split document.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from hf_wlb.lengths import Order, StoredOrder, fingerprint_lengths
from hf_wlb.packing.types import Document
from hf_wlb.workload import WorkloadModel

OversizePolicy = Literal["split", "truncate", "error"]
EmptyPolicy = Literal["error", "skip"]


class DocumentSource(Protocol):
    """Where lengths come from: an array of known lengths, or a stream that is tokenised as it is read."""

    #: How many documents to ask for at once: large for arrays, 1 for streams that must not run ahead.
    block_size: int

    @property
    def fingerprint(self) -> str:
        """Identifies the data and its order, so that a resume on another data set is noticed."""
        ...

    def block(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices and lengths (int64, shape [n]) of the documents ``start`` to ``stop``; shorter at the end."""
        ...


class ArraySource:
    """Known lengths, in memory or memory-mapped, read in a given order.

    Args:
        lengths: Token counts, integer array of shape [documents]. A ``numpy.memmap`` is never copied whole.
        order: Reading order; the stored one by default.

    >>> ArraySource(np.array([5, 3, 8])).block(1, 9)[1].tolist()
    [3, 8]
    """

    block_size = 4096

    def __init__(self, lengths: np.ndarray, order: Order | None = None) -> None:
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                f"lengths must be a one-dimensional array of integers, got shape {lengths.shape} of {lengths.dtype}"
            )
        self._lengths = lengths
        self._order = StoredOrder(len(lengths)) if order is None else order
        if len(self._order) != len(lengths):
            raise ValueError(f"the order covers {len(self._order)} documents but there are {len(lengths)} lengths")
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def fingerprint(self) -> str:
        """See ``DocumentSource.fingerprint``."""
        if self._fingerprint is None:
            self._fingerprint = f"{fingerprint_lengths(self._lengths)}/{self._order.fingerprint}"
        return self._fingerprint

    def block(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See ``DocumentSource.block``."""
        indices = self._order.block(start, min(stop, len(self._lengths)))
        return indices, np.asarray(self._lengths[indices], dtype=np.int64)


@dataclass
class ReaderCounts:
    """What the reader has met so far.

    Attributes:
        documents: Source documents read, all of them: whole, split, truncated or empty.
        source_tokens: Tokens in them.
        split: Documents cut into pieces.
        pieces: Pieces made of those.
        truncated: Documents shortened.
        truncated_tokens: Tokens lost by shortening.
        empty: Documents without tokens that were skipped.
        dropped: Documents lost in any other way. Always 0; reported so that it can be checked.
    """

    documents: int = 0
    source_tokens: int = 0
    split: int = 0
    pieces: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    empty: int = 0
    dropped: int = 0


class DocumentReader:
    """One-document look-ahead over a source.

    Args:
        source: Lengths in reading order.
        workload: Gives every document its W.
        max_document_tokens: Longest document that stays whole; None for no limit (concat-and-cut cuts anyway).
        oversize: What happens to longer ones. ``split``: pieces of ``max_document_tokens`` (the last one shorter), so
            that as few tokens as possible lose their prefix. ``truncate``: the rest is dropped, counted. ``error``.
        empty: What happens to documents of 0 tokens.
    """

    def __init__(
        self,
        source: DocumentSource,
        workload: WorkloadModel,
        max_document_tokens: int | None,
        oversize: OversizePolicy = "split",
        empty: EmptyPolicy = "error",
    ) -> None:
        self.source = source
        self.counts = ReaderCounts()
        self._workload = workload
        self._max = max_document_tokens
        self._oversize = oversize
        self._empty = empty
        self._pending: deque[tuple[int, int, int, float]] = deque()  # index, start, length, workload
        self._block: list[tuple[int, int, float]] = []  # index, length, workload
        self._block_start = 0
        self._position = 0  # source documents taken out of the source

    def peek(self) -> int | None:
        """Length of the next document, None at the end."""
        return self._pending[0][2] if self._fill() else None

    def read(self, step: int) -> Document | None:
        """The next document, marked as having arrived in ``step``; None at the end."""
        if not self._fill():
            return None
        index, start, length, workload = self._pending.popleft()
        return Document(index, start, length, workload, step)

    @property
    def exhausted(self) -> bool:
        """Whether the source has ended."""
        return not self._fill()

    def _fill(self) -> bool:
        while not self._pending:
            offset = self._position - self._block_start
            if offset >= len(self._block):
                if not self._load_block():
                    return False
                offset = 0
            self._position += 1
            self._accept(*self._block[offset])
        return True

    def _load_block(self) -> bool:
        indices, lengths = self.source.block(self._position, self._position + self.source.block_size)
        # Negative lengths are refused, and long ones cut or refused, when their turn comes.
        workloads = self._workload.document(np.clip(lengths, 0, self._max))
        self._block = list(zip(indices.tolist(), lengths.tolist(), np.asarray(workloads).tolist(), strict=True))
        self._block_start = self._position
        return bool(self._block)

    def _accept(self, index: int, length: int, workload: float) -> None:
        counts = self.counts
        counts.documents += 1
        counts.source_tokens += max(length, 0)
        if length <= 0:
            self._refuse_empty(index, length)
        elif self._max is None or length <= self._max:
            self._pending.append((index, 0, length, workload))
        elif self._oversize == "split":
            counts.split += 1
            for start in range(0, length, self._max):
                piece = min(self._max, length - start)
                counts.pieces += 1
                self._pending.append((index, start, piece, float(self._workload.document(piece))))
        elif self._oversize == "truncate":
            counts.truncated += 1
            counts.truncated_tokens += length - self._max
            self._pending.append((index, 0, self._max, float(self._workload.document(self._max))))
        else:
            raise ValueError(
                f"document {index} has {length:,} tokens, more than max_document_tokens={self._max:,}. Choose "
                "oversize='split' or 'truncate' (oversize_documents of WLBTrainingArguments), raise the limit, or "
                "remove such documents beforehand."
            )

    def _refuse_empty(self, index: int, length: int) -> None:
        if length < 0:
            raise ValueError(
                f"document {index} has a negative length ({length}); lengths are numbers of tokens, 1 or more. "
                "Check how the lengths were counted or stored."
            )
        if self._empty == "error":
            raise ValueError(
                f"document {index} has no tokens. Remove empty documents beforehand "
                "(dataset.filter(lambda row: len(row['input_ids']) > 0)) or choose empty='skip' "
                "(empty_documents='skip' of WLBTrainingArguments) to have them counted."
            )
        self.counts.empty += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "position": self._position,
            "pending": [list(piece) for piece in self._pending],
            "counts": asdict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state_dict`` was taken; the source is asked from that position on."""
        self._position = int(state["position"])
        self._pending = deque((int(i), int(s), int(n), float(w)) for i, s, n, w in state["pending"])
        self.counts = ReaderCounts(**state["counts"])
        self._block, self._block_start = [], self._position
