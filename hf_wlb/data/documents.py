"""Documents as rows of a data set: reading one with its checks, measuring all of them, slicing out pieces."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import torch.utils.data

from hf_wlb.data.given import TARGET_COLUMNS, check_documents, check_kind, check_row, is_plain_table
from hf_wlb.lengths import IntArray, LengthArray
from hf_wlb.packing import Document
from hf_wlb.sharding import IGNORE_INDEX

logger = logging.getLogger(__name__)

_PACKED_COLUMNS = ("document_lengths", "seq_lengths", "position_ids")
_TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", *TARGET_COLUMNS, *_PACKED_COLUMNS)

_CHECKED = 32  # documents that a checksum looks at


class DocumentKey(NamedTuple):
    """One document, or a piece of it, as the planner hands it to a data set.

    Attributes:
        index: Row of the data set.
        start: First token of the piece.
        length: Tokens in the piece.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    start: int
    length: int

    @classmethod
    def of(cls, document: Document) -> DocumentKey:
        """Return the key of a planned document."""
        return cls(document.index, document.start, document.length)


class Tokens(NamedTuple):
    """Tokens of one document: ``input_ids`` and ``labels`` (None: the tokens themselves), both int64 ``[length]``."""

    input_ids: IntArray
    labels: IntArray | None

    def piece(self, start: int, length: int) -> Tokens:
        """Return ``length`` tokens from ``start`` on, without copying."""
        stop = start + length
        return Tokens(self.input_ids[start:stop], None if self.labels is None else self.labels[start:stop])

    def as_feature(self) -> dict[str, IntArray]:
        """Return what a collator takes."""
        if self.labels is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "labels": self.labels}


def masked_document(tokens: int, pad_token_id: int) -> Tokens:
    """A document of padding, none of which is a target."""
    dummy = np.full(tokens, pad_token_id, dtype=np.int64)
    return Tokens(dummy, np.full_like(dummy, IGNORE_INDEX))


def join_documents(documents: Sequence[Tokens]) -> tuple[IntArray, IntArray, IntArray]:
    """Lengths, and the ``input_ids`` and labels (not shifted) of documents one after the other, as copies."""
    lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int64)
    input_ids = np.concatenate([document.input_ids for document in documents])
    labels = np.concatenate([d.input_ids if d.labels is None else d.labels for d in documents])
    return lengths, input_ids, labels


def read_tokens(row: Any, name: str) -> Tokens:
    """Take the tokens out of a row, after checking it.

    Args:
        row: A mapping with ``input_ids`` and perhaps ``labels``: lists, NumPy arrays or tensors of one dimension.
            Other columns are ignored, but an ``attention_mask`` must not mask anything, nor, without labels, one of
            ``TARGET_COLUMNS``, and no column may say that several documents were packed into the row.
        name: The document, for errors, such as ``"Document 3"``.

    Raises:
        ValueError: If there are no ``input_ids``, they are no flat list of integers, the labels are of another
            length, the attention mask holds zeros (padding), another mask leaves tokens out and there are no labels,
            or the row was packed before.
    """
    check_row(row, name)
    mask = row.get("attention_mask")
    if mask is not None and not np.asarray(mask).all():
        raise ValueError(
            f"{name} is padded: its attention_mask holds zeros. Micro-batches are packed without padding; give the "
            "documents as they are (padding=False in the tokenizer call)."
        )
    _refuse_packed_row(row, name)
    input_ids = _integers(row["input_ids"], "input_ids", name)
    labels = row.get("labels")
    if labels is None:
        _refuse_other_targets(row, name)
    else:
        labels = _integers(labels, "labels", name)
        if len(labels) != len(input_ids):
            raise ValueError(
                f"{name} has {len(input_ids)} input_ids but {len(labels)} labels. Labels are one a token, -100 where "
                "nothing is to be learned, and are shifted by the model."
            )
    return Tokens(input_ids, labels)


def _refuse_packed_row(row: Mapping[str, Any], name: str) -> None:
    if row.get("document_lengths") is not None:
        raise ValueError(
            f"{name} is a row of pack_dataset, which holds a whole micro-batch, and whose order matters. Train on such "
            "rows with Trainer and packed.data_collator() (a PackedDataCollator); whatever packs takes the documents."
        )
    positions = row.get("position_ids")
    if positions is not None:
        if isinstance(positions, torch.Tensor):
            positions = positions.detach().cpu().to(torch.int64).numpy()
        steps_back = np.diff(np.atleast_2d(np.asarray(positions)), axis=-1) < 0  # several rows: of several axes
        if restarts := int(steps_back.sum(axis=-1).max(initial=0)):
            raise ValueError(
                f"{name} holds {restarts + 1} documents that were packed before (its position_ids begin again), and "
                "they would be trained as one. Give every document a row of its own: documents are packed here."
            )
    packed = row.get("seq_lengths")
    if packed is not None and len(packed) > 1:
        raise ValueError(
            f"{name} holds {len(packed)} documents that were packed before (its column seq_lengths says so), and they "
            "would be trained as one. Switch that packing off (packing=False in SFTConfig): documents are packed here."
        )


def _refuse_other_targets(row: Mapping[str, Any], name: str) -> None:
    """For a row without labels."""
    for column in TARGET_COLUMNS:
        mask = row.get(column)
        if mask is not None and not np.asarray(mask).all():
            raise ValueError(
                f"{name} has no labels, but its {column} leaves tokens out: all of them would be trained. Make a "
                "column labels of it, the token where the mask is 1 and -100 where it is 0, or remove it."
            )


def _integers(values: Any, column: str, name: str) -> IntArray:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        collated = array.ndim == 2 and len(array) == 1
        hint = (
            " If it is a micro-batch of StreamingPackedDataset, the Trainer removed what else belongs to it: set "
            "remove_unused_columns=False in TrainingArguments."
        )
        raise ValueError(
            f"The {column} of {name[0].lower()}{name[1:]} are of shape {list(array.shape)} and dtype {array.dtype}; a "
            f"document is a flat list of integers, one document a row.{hint if collated else ''}"
        )
    return array.astype(np.int64, copy=False)


class DocumentDataset(torch.utils.data.Dataset[dict[str, IntArray]]):
    """Documents, and pieces of them, by :class:`DocumentKey`: what data loader workers fetch.

    Args:
        dataset: Map-style, one document a row, with ``input_ids`` and perhaps ``labels``.
        lengths: The lengths the plan was made from, shape ``[documents]``; each fetched document is held
            against them. Without them it is only checked that a piece lies within its document.

    Example:
        >>> documents = DocumentDataset([{"input_ids": [5, 6, 7, 8]}])
        >>> documents[DocumentKey(index=0, start=1, length=2)]
        {'input_ids': array([6, 7])}
    """

    def __init__(self, dataset: Any, lengths: LengthArray | None = None) -> None:
        if is_plain_table(dataset):  # Arrow to NumPy, without Python integers or the text in between
            kept = [name for name in _TOKEN_COLUMNS if name in dataset.column_names]
            dataset = (dataset.select_columns(kept) if "input_ids" in kept else dataset).with_format("numpy")
        self._rows = dataset
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: tuple[int, int, int]) -> dict[str, IntArray]:
        """Return ``input_ids`` (and ``labels``, if there are any) of one piece, int64 ``[length]``.

        Raises:
            ValueError: If the document is not as long as the plan says, or malformed.
        """
        return self.tokens(key).as_feature()

    def __getitems__(self, keys: Sequence[tuple[int, int, int]]) -> list[dict[str, IntArray]]:
        """Return the pieces of one micro-batch; none for a dummy."""
        return [self[key] for key in keys]

    def tokens(self, key: tuple[int, int, int]) -> Tokens:
        """Return the piece itself; see :meth:`__getitem__`."""
        index, start, length = key
        tokens = read_tokens(self._rows[index], f"Document {index}")
        found = len(tokens.input_ids)
        planned = start + length if self._lengths is None else int(self._lengths[index])
        if found < start + length or (self._lengths is not None and found != planned):
            at_least = "at least " if self._lengths is None else ""
            raise ValueError(
                f"Document {index} has {found:,} tokens, but the plan was made for {at_least}{planned:,}. The lengths "
                "must be those of this very data set: pass the right lengths, or correct its 'length' column."
            )
        return tokens.piece(start, length)

    def checksum(self) -> int:
        """CRC-32 of tokens and labels of up to 32 documents, evenly spread: tells data sets apart at little cost."""
        count = len(self)
        places = sorted({place * (count - 1) // (_CHECKED - 1) for place in range(_CHECKED)}) if count else []
        crc = 0
        for place in places:
            tokens = read_tokens(self._rows[place], f"Document {place}")
            for column in tokens:
                if column is not None:
                    crc = zlib.crc32(np.ascontiguousarray(column, dtype=np.int64).tobytes(), crc)
        return crc


def document_lengths(dataset: Any) -> LengthArray:
    """Return the lengths in tokens of all documents, int64 ``[documents]``.

    They come from the column ``length`` where there is one, else from the ``input_ids``, which takes a pass over
    the data (over the offsets only for a ``datasets.Dataset``).

    Args:
        dataset: Map-style, one document a row.

    Raises:
        ValueError: If there is neither column, or a ``length`` that is no whole number; and for what is no data set,
            such as a dictionary of splits.

    Example:
        >>> document_lengths([{"input_ids": [5, 7, 2]}, {"input_ids": [5]}])
        array([3, 1])
    """
    check_kind(dataset, "The data set")
    if is_plain_table(dataset):
        return _lengths_of_table(dataset)
    count = len(dataset)
    if count and isinstance(dataset[0], Mapping) and "length" in dataset[0]:
        return np.fromiter((int(dataset[i]["length"]) for i in range(count)), dtype=np.int64, count=count)
    logger.info("Measuring %d documents; a column 'length' or lengths=... would spare this pass.", count)
    measured = (len(read_tokens(dataset[i], f"Document {i}").input_ids) for i in range(count))
    return np.fromiter(measured, dtype=np.int64, count=count)


def _lengths_of_table(dataset: datasets.Dataset) -> LengthArray:
    from pyarrow import compute  # type: ignore[import-untyped]

    names = dataset.column_names
    if "length" in names:
        column = np.asarray(dataset.with_format("numpy")["length"][:]).reshape(-1)
        if len(column) and column.dtype.kind not in "iu":
            raise ValueError(
                f"The column length holds {dataset.features['length']}, perhaps empty in places; it is read as tokens "
                "of every document, a whole number each. Correct it, or remove it to have the documents measured: "
                "dataset.remove_columns('length')."
            )
        return column.astype(np.int64)
    if len(dataset) == 0:
        return np.zeros(0, dtype=np.int64)
    check_documents(dataset, "The data set")
    logger.info("Measuring %d documents; a column 'length' or lengths=... would spare this pass.", len(dataset))
    parts = [np.zeros(0, dtype=np.int64)]
    for table in dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=1024):
        counts = compute.fill_null(compute.list_value_length(table["input_ids"]), 0)
        parts.append(np.asarray(counts.to_numpy(), dtype=np.int64))
    return np.concatenate(parts)
