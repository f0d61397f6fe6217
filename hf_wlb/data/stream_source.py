"""A stream of documents as the planner's source: read one at a time, tokens kept until they are trained."""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from hf_wlb.data.documents import Tokens, read_tokens
from hf_wlb.data.given import check_documents
from hf_wlb.lengths import IntArray
from hf_wlb.packing import Document

FINGERPRINT = "stream/1"
_END = object()


@dataclass(slots=True)
class _Held:
    """Tokens of a document of which ``remaining`` are still to be trained."""

    tokens: Tokens
    remaining: int


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """Where a stream stood between two steps. The arrays in it are shared, and never written to.

    Attributes:
        read: Documents read.
        checksum: CRC-32 of all their tokens.
        first: CRC-32 of the first one's tokens; 0 before it.
        source_state: The source's own state, where it can be trusted.
        held: (index, tokens, tokens still to be trained) of every document read and not trained completely.
    """

    read: int
    checksum: int
    first: int
    source_state: Any
    held: tuple[tuple[int, Tokens, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the tokens as base64 of compressed int64 numbers."""
        return {
            "read": self.read,
            "checksum": self.checksum,
            "first": self.first,
            "source_state": self.source_state,
            "held": [
                {
                    "index": index,
                    "remaining": remaining,
                    "input_ids": _encode(tokens.input_ids),
                    "labels": None if tokens.labels is None else _encode(tokens.labels),
                }
                for index, tokens, remaining in self.held
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StreamSnapshot:
        """Reverse ``to_dict``."""
        held = tuple(
            (
                int(row["index"]),
                Tokens(_decode(row["input_ids"]), None if row["labels"] is None else _decode(row["labels"])),
                int(row["remaining"]),
            )
            for row in values["held"]
        )
        return cls(
            int(values["read"]),
            int(values["checksum"]),
            int(values["first"]),
            copy.deepcopy(values["source_state"]),
            held,
        )


class Stream:
    """Something that can be read from its beginning any number of times, and perhaps from a state of its own.

    A source with a state of its own has one position: nobody else may read that object during a pass.

    Args:
        source: An iterable of documents, or a function that returns one.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is an iterator, which can be read once only, or holds no documents, see ``check_documents``.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, Iterator):
            raise ValueError(
                f"The source is a {type(source).__name__}, which can be read only once, so that neither a second epoch "
                "nor a resume would work. Pass the function that makes it (without calling it), or a data set."
            )
        if not isinstance(source, Iterable) and not callable(source):
            raise TypeError(
                f"The source is a {type(source).__name__}; give an iterable of documents (an IterableDataset, a list) "
                "or a function that returns one."
            )
        check_documents(source, "The source")
        self._source = source
        self.has_state = (
            callable(getattr(source, "state_dict", None))
            and callable(getattr(source, "load_state_dict", None))
            and not _shuffles_through_a_buffer(source)
        )
        self._beginning = _beginning_of(source) if self.has_state else None

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a source that wants to know it (to reshuffle)."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def open(self, state: Any = None) -> Iterator[Any]:
        """Start reading from the beginning, or from a state."""
        if self.has_state:
            self._source.load_state_dict(copy.deepcopy(self._beginning if state is None else state))
        return iter(self._source if isinstance(self._source, Iterable) else self._source())

    def state(self) -> Any:
        """Return the state after the document read last; None for a source without."""
        return copy.deepcopy(self._source.state_dict()) if self.has_state else None


def _beginning_of(source: Any) -> Any:
    """A state to start from.

    A ``datasets`` stream tells where it was left, which may be in the middle of somebody's pass; it starts at the
    beginning with the state of an epoch that it is not in.
    """
    return {"epoch": -1} if isinstance(source, datasets.IterableDataset) else copy.deepcopy(source.state_dict())


def _shuffles_through_a_buffer(source: Any) -> bool:
    """Whether this is a ``datasets`` stream with a shuffle buffer, whose state leaves the buffer's content out."""
    found = getattr(source, "_ex_iterable", None)
    pending = [found] if found is not None else []
    while pending:
        layer = pending.pop()
        if type(layer).__name__ == "BufferShuffledExamplesIterable":
            return True
        pending += [layer.ex_iterable] if hasattr(layer, "ex_iterable") else getattr(layer, "ex_iterables", [])
    return False


class StreamSource:
    """The planner's view of one pass over a stream (a ``DocumentSource``), and the tokens of what it has read.

    Reads no document before the planner asks for it, and forgets one as soon as all of it is planned.

    Args:
        stream: What is read.
        longest: Tokens at most trained of a document, where the rest is truncated; None where nothing is lost.
    """

    block_size = 1
    fingerprint = FINGERPRINT

    def __init__(self, stream: Stream, longest: int | None) -> None:
        self._stream = stream
        self._longest = longest
        self._documents: Iterator[Any] | None = None
        self._held: dict[int, _Held] = {}
        self._read = 0
        self._first = 0
        self.checksum = 0

    def block(self, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Read the next document; none at the end. See ``DocumentSource.block``."""
        assert start == self._read and stop == start + 1, "documents are read one after the other"
        tokens = self._next()
        if tokens is None:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing
        length = len(tokens.input_ids)
        if length:
            trained = length if self._longest is None else min(length, self._longest)
            self._held[start] = _Held(tokens, trained)
        return np.array([start], dtype=np.int64), np.array([length], dtype=np.int64)

    def _next(self) -> Tokens | None:
        if self._documents is None:
            self._documents = self._stream.open()
        row = next(self._documents, _END)
        if row is _END:
            return None
        tokens = read_tokens(row, f"Document {self._read} of the stream")
        crc = _checksum(tokens)
        if self._read == 0:
            self._first = crc
        self._read += 1
        self.checksum = zlib.crc32(crc.to_bytes(4, "little"), self.checksum)
        return tokens

    def piece(self, document: Document) -> Tokens:
        """Return the tokens of a planned document that was not released yet."""
        return self._held[document.index].tokens.piece(document.start, document.length)

    def release(self, documents: Iterable[Document]) -> None:
        """Forget documents all of whose tokens have been planned."""
        for document in documents:
            held = self._held[document.index]
            held.remaining -= document.length
            if held.remaining == 0:
                del self._held[document.index]

    def snapshot(self) -> StreamSnapshot:
        """Return the present position, at no cost that grows with the tokens held."""
        held = tuple((index, held.tokens, held.remaining) for index, held in self._held.items())
        state = self._stream.state() if self._read else None  # before, it may be that of an earlier pass
        return StreamSnapshot(self._read, self.checksum, self._first, state, held)

    def restore(self, snapshot: StreamSnapshot) -> None:
        """Go to a position, by the source's own state or else by reading up to it.

        Raises:
            ValueError: If the stream is not the one that the position was noted in.
        """
        if snapshot.read and self._stream.has_state and snapshot.source_state is not None:
            if self._next() is None or self._first != snapshot.first:
                raise _other_stream("its first document is another one")
            self._documents = self._stream.open(snapshot.source_state)
        else:
            while self._read < snapshot.read:
                if self._next() is None:
                    raise _other_stream(f"it has {self._read} documents, and {snapshot.read} had been read")
            if self.checksum != snapshot.checksum:
                raise _other_stream(f"its first {snapshot.read} documents are others")
        self._read, self._first, self.checksum = snapshot.read, snapshot.first, snapshot.checksum
        self._held = {index: _Held(tokens, remaining) for index, tokens, remaining in snapshot.held}


def _other_stream(reason: str) -> ValueError:
    return ValueError(
        f"This state belongs to another stream than the one given: {reason}. Pass the same documents in the same "
        "order (the same seed and epoch), or start anew without the state."
    )


def _checksum(tokens: Tokens) -> int:
    crc = zlib.crc32(tokens.input_ids.astype("<i8").tobytes())
    return crc if tokens.labels is None else zlib.crc32(tokens.labels.astype("<i8").tobytes(), crc)


def _encode(values: IntArray) -> str:
    return base64.b64encode(zlib.compress(values.astype("<i8").tobytes(), 1)).decode("ascii")


def _decode(text: str) -> IntArray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i8").astype(np.int64)
