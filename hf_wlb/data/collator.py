"""Flattening documents into one micro-batch that keeps them apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from hf_wlb.data.documents import Tokens, join_documents, masked_document, read_tokens
from hf_wlb.parallel import process_count
from hf_wlb.sharding import IGNORE_INDEX, Sharder

_DUMMY_TOKENS = 2  # one position with a (masked) target, so that the loss is a sum over no token, not over nothing


class WLBDataCollator:
    """Puts the documents it is given one after the other into a single micro-batch, without padding.

    It keeps no state and does not balance anything: which documents make a micro-batch is decided by
    :class:`~hf_wlb.data.WLBDataLoader`, :class:`~hf_wlb.data.StreamingPackedDataset` or
    :func:`~hf_wlb.data.pack_dataset`, or simply by ``per_device_train_batch_size``.

    There is never an ``attention_mask``: documents are told apart by ``position_ids`` (sdpa, eager, flex) and
    ``cu_seq_lens`` (flash attention), and a two-dimensional mask, even of ones only, would switch that off. For the
    same reason ``use_cache`` is False.

    Under context parallelism it gives one rank's shard of the micro-batch, planned anew on every rank by the same pure
    function. Such a shard is for ``attn_implementation="wlb"`` with an ``AttentionContext``, as ``WLBTrainer`` sets
    up: nothing else can tell its documents apart.

    Args:
        pad_token_id: The token of the dummy micro-batch that stands in where there are no documents.
        max_position_embeddings: Longest document that the model takes; None for no check.
        sharder: Shares micro-batches out over context-parallel ranks; None (or its ``cp_size`` 1) for whole ones.
        cp_rank: Whose shard to give.

    Raises:
        TypeError: For what is no whole number, such as a tokenizer.
        ValueError: For a token or a length that cannot be, or a rank that there is not.

    Example, documents of 3 and 2 tokens:
        >>> micro_batch = WLBDataCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> micro_batch["input_ids"].tolist(), micro_batch["labels"].tolist()
        ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
        >>> micro_batch["position_ids"].tolist(), micro_batch["cu_seq_lens_q"].tolist()
        ([[0, 1, 2, 0, 1]], [0, 3, 5])
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        max_position_embeddings: int | None = None,
        sharder: Sharder | None = None,
        cp_rank: int = 0,
    ) -> None:
        pad_token_id = _whole_number(pad_token_id, "pad_token_id", "the number of a token")
        if max_position_embeddings is not None:
            max_position_embeddings = _whole_number(
                max_position_embeddings, "max_position_embeddings", "a number of tokens or None"
            )
        if pad_token_id < 0:
            raise ValueError(f"pad_token_id must be a token of the vocabulary, at least 0, got {pad_token_id}.")
        if max_position_embeddings is not None and max_position_embeddings < 1:
            raise ValueError(f"max_position_embeddings must be at least 1 or None, got {max_position_embeddings}.")
        self.pad_token_id = pad_token_id
        self.max_position_embeddings = max_position_embeddings
        self.sharder = sharder
        self.cp_rank = cp_rank
        if not 0 <= cp_rank < self.cp_size:
            without = " Give it a sharder for several ranks." if sharder is None else ""
            raise ValueError(
                f"cp_rank must be from 0 to {self.cp_size - 1} (cp_size - 1), the rank whose shard is wanted, got "
                f"{cp_rank}.{without}"
            )

    @property
    def cp_size(self) -> int:
        """Ranks that a micro-batch is shared out over."""
        return 1 if self.sharder is None else self.sharder.config.cp_size

    @property
    def fingerprint(self) -> int:
        """A 63-bit number that is the same on ranks that share micro-batches out alike; 0 where they are whole."""
        return 0 if self.sharder is None or self.cp_size == 1 else self.sharder.fingerprint

    def for_rank(self, sharder: Sharder, cp_rank: int) -> WLBDataCollator:
        """Return a copy that gives this rank's shards.

        Raises:
            ValueError: If this one shards already, in another way or for another rank.
        """
        if self.sharder is None:
            sharding = copy.copy(self)
            sharding.sharder, sharding.cp_rank = sharder, cp_rank
            return sharding
        if (self.fingerprint, self.cp_rank) != (sharder.fingerprint, cp_rank):
            raise ValueError(
                f"This collator gives shards of rank {self.cp_rank} by {self.sharder.config}, but rank {cp_rank} by "
                f"{sharder.config} is wanted, with the trainer's workload model. Leave its sharder away: the trainer "
                "sets it."
            )
        return self

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Flatten documents into one micro-batch.

        Args:
            features: Documents with ``input_ids`` and perhaps ``labels`` (not shifted, the model does that); lists,
                arrays or tensors. None at all give a dummy of two tokens whose labels are all -100. A single
                micro-batch that is collated already, as a streaming data set yields it, comes back as it is (on one
                process).

        Returns:
            ``input_ids``, ``labels`` (-100 at each document's first token) and ``position_ids``, int64 ``[1, T]``;
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 ``[documents + 1]``; ``max_length_q`` and
            ``max_length_k``, int; ``use_cache``, False.

            Under context parallelism the rank's shard of T tokens, in the plan's order: ``input_ids`` and
            ``position_ids``; ``labels`` and ``shift_labels``, both the next token of the document, -100 at its last
            one, shifted before sharding; ``wlb_shard`` (``ShardTensors``); ``use_cache``, False; and ``wlb_info``
            (``ShardInfo``), for whoever trains: the model ignores it. No ``cu_seq_lens``. A micro-batch of fewer
            tokens than ranks ends in a masked document of ``2 cp_size`` tokens.

        Raises:
            ValueError: For documents that are empty, padded, malformed or longer than ``max_position_embeddings``,
                and for rows that were packed before.
        """
        if any(_is_collated(feature) for feature in features):
            return _already_collated(features, self.cp_size)
        documents = [
            read_tokens(feature, f"Document {place} of the micro-batch") for place, feature in enumerate(features)
        ]
        for place, document in enumerate(documents):
            self._check_length(len(document.input_ids), place)
        if self.sharder is not None and self.cp_size > 1:
            from hf_wlb.data.shards import shard_documents  # loads Transformers

            return shard_documents(documents, self.sharder, self.cp_rank, self.pad_token_id)
        if not documents:
            documents = [masked_document(_DUMMY_TOKENS, self.pad_token_id)]
        return _flatten(documents)

    def _check_length(self, length: int, place: int) -> None:
        if length == 0:
            raise ValueError(
                f"Document {place} of the micro-batch has no tokens. Remove empty documents beforehand: "
                "dataset.filter(lambda row: len(row['input_ids']) > 0)."
            )
        limit = self.max_position_embeddings
        if limit is not None and length > limit:
            raise ValueError(
                f"Document {place} of the micro-batch has {length:,} tokens, more than the {limit:,} positions of the "
                "model (max_position_embeddings; of longrope, those before its other factors). Split it: "
                f"max_document_tokens={limit} in PackingConfig does so."
            )


def _whole_number(value: Any, name: str, meaning: str) -> int:
    """The value, if it is a whole number.

    Raises:
        TypeError: If it is not; says what to do where it is a tokenizer or a model.
    """
    if type(value) is not bool and isinstance(value, Integral):
        return int(value)
    hint = ""
    if hasattr(value, "pad_token_id"):
        hint = (
            " It needs no tokenizer: it pads nothing. Call WLBDataCollator(), or "
            "WLBDataCollator(pad_token_id=tokenizer.pad_token_id)."
        )
    elif value is None:
        hint = " Leave it out where the tokenizer has no pad_token: the token is trained on nowhere."
    raise TypeError(f"WLBDataCollator takes {name}, {meaning}, got {type(value).__name__}.{hint}")


def _is_collated(feature: Any) -> bool:
    return isinstance(feature, Mapping) and ("cu_seq_lens_q" in feature or "wlb_shard" in feature)


def _flatten(documents: Sequence[Tokens]) -> dict[str, Any]:
    lengths, input_ids, labels = join_documents(documents)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    labels[bounds[:-1]] = IGNORE_INDEX  # nothing of its own document precedes it
    positions = np.arange(bounds[-1], dtype=np.int64) - np.repeat(bounds[:-1], lengths)
    cu_seq_lens = torch.from_numpy(bounds.astype(np.int32))
    return {
        "input_ids": torch.from_numpy(input_ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens.clone(),
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
        "use_cache": False,
    }


def _already_collated(features: Sequence[Mapping[str, Any]], cp_size: int) -> dict[str, Any]:
    if len(features) != 1:
        raise ValueError(
            f"{len(features)} micro-batches that are packed already came together. Take them one at a time: "
            "per_device_train_batch_size=1, or batch_size=None in a torch DataLoader."
        )
    if process_count() > 1:
        raise ValueError(
            f"A packed micro-batch came through a data loader on {process_count()} processes, where a Trainer or "
            "accelerator.prepare shares the micro-batches of each rank out once more, and most would be lost. Iterate "
            "over the StreamingPackedDataset itself, or pass it to DataLoader(data, batch_size=None) without prepare."
        )
    shard = features[0].get("wlb_shard")
    collated_for = 1 if shard is None else shard.cp_size
    if collated_for != cp_size:
        raise ValueError(
            f"A micro-batch was collated for {collated_for} context-parallel rank{'s' * (collated_for != 1)}, but this "
            f"collator is for {cp_size}. Give the sharder to the collator that gets the documents."
        )
    return dict(features[0])
