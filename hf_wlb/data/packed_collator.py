"""Turning rows written by ``pack_dataset`` back into micro-batches, and noticing when they come in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.utils.data

from hf_wlb.data.collator import WLBDataCollator
from hf_wlb.data.documents import read_tokens

_HOW_TO_READ = (
    "The rows of pack_dataset are whole micro-batches in step order and must be read one at a time, in order, by "
    "dp_size={dp_size} processes: TrainingArguments(**packed.training_arguments()), which sets "
    "train_sampling_strategy='sequential'. Shuffle documents with pack_dataset(seed=...) instead."
)


class PackedDataCollator:
    """Makes one row of a :class:`~hf_wlb.data.PackedDataset` into a micro-batch, and refuses rows out of order.

    A process (or each of its data loader workers) sees every ``dp_size``-th row (times the number of workers). What
    it got last is remembered: the next row must follow on it, or begin a new pass. So a shuffled order, another
    number of processes and a skipped row are found at the second row at the latest; a resume may start anywhere.

    Micro-batches come whole: a plain Trainer gives every process rows of its own, so context-parallel ranks cannot
    share one. Use ``WLBTrainer`` for that, on the documents themselves.

    Args:
        dp_size: Replicas that the rows were written for.
        pad_token_id: The token of dummy micro-batches.
        max_position_embeddings: Longest document that the model takes; None for no check.
    """

    def __init__(self, dp_size: int, pad_token_id: int = 0, max_position_embeddings: int | None = None) -> None:
        self.dp_size = dp_size
        self._collate = WLBDataCollator(pad_token_id, max_position_embeddings)
        self._last: int | None = None

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate one row; see :class:`WLBDataCollator` for the result.

        Raises:
            ValueError: For several rows at once, a row out of order, or rows that ``pack_dataset`` did not write.
        """
        how_to_read = _HOW_TO_READ.format(dp_size=self.dp_size)
        if len(features) != 1:
            raise ValueError(f"{len(features)} rows came at once, each of them a micro-batch. {how_to_read}")
        row = features[0]
        missing = [name for name in ("input_ids", "labels", "document_lengths", "row") if name not in row]
        if missing:
            raise ValueError(
                f"A row lacks {', '.join(missing)}; its columns are {sorted(row)}. Give rows of pack_dataset with all "
                f"their columns (remove_unused_columns=False). {how_to_read}"
            )
        self._check_order(int(row["row"]), how_to_read)
        lengths = np.asarray(row["document_lengths"], dtype=np.int64).tolist()
        # Without what says that it is packed, which is refused elsewhere.
        columns = {name: row[name] for name in ("input_ids", "labels")}
        tokens = read_tokens(columns, f"Row {int(row['row'])}")
        if sum(lengths) != len(tokens.input_ids):
            raise ValueError(
                f"Row {int(row['row'])} has {len(tokens.input_ids)} tokens but documents of {sum(lengths)}; it was "
                "changed after packing. Pack again."
            )
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        pieces = [tokens.piece(start, length) for start, length in zip(starts, lengths, strict=False)]
        return self._collate([piece.as_feature() for piece in pieces])

    def _check_order(self, row: int, how_to_read: str) -> None:
        worker = torch.utils.data.get_worker_info()
        stride = self.dp_size * (1 if worker is None else worker.num_workers)
        last, self._last = self._last, row
        if last is None or row == last + stride or row < stride:  # the last: a new pass begins
            return
        raise ValueError(f"Row {row} came after row {last}, where row {last + stride} comes next. {how_to_read}")
