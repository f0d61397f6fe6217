"""One context-parallel rank's shard of a micro-batch, as a model takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_wlb.attention import ShardTensors
from hf_wlb.data.documents import Tokens, join_documents, masked_document
from hf_wlb.sharding import Sharder, ShardPlan, shard_layout, shift_labels


@dataclass(frozen=True, eq=False)
class ShardInfo:
    """What a trainer wants to know of a sharded micro-batch, and the model does not; the same on every rank of it.

    Attributes:
        plan: Who holds what, and what that is predicted to take.
        topped_up: Whether a masked dummy document was added, so that every rank has a token.
    """

    plan: ShardPlan
    topped_up: bool


def shard_documents(documents: Sequence[Tokens], sharder: Sharder, cp_rank: int, pad_token_id: int) -> dict[str, Any]:
    """Plan a micro-batch and take one rank's shard of it.

    With fewer tokens than ranks, a document of ``2 cp_size`` masked tokens is added at the end: the last micro-batches
    of the data may be as small as that, and training shall not end there.

    Returns:
        See ``WLBDataCollator.__call__``.
    """
    cp_size = sharder.config.cp_size
    topped_up = sum(len(document.input_ids) for document in documents) < cp_size
    if topped_up:
        documents = [*documents, masked_document(2 * cp_size, pad_token_id)]
    lengths, input_ids, labels = join_documents(documents)
    plan = sharder.plan(lengths)
    layout = shard_layout(plan, cp_rank)
    targets = torch.from_numpy(shift_labels(labels, lengths)[layout.tokens])[None]
    return {
        "input_ids": torch.from_numpy(input_ids[layout.tokens])[None],
        "labels": targets,
        "shift_labels": targets.clone(),
        "position_ids": torch.from_numpy(layout.position_ids)[None],
        "use_cache": False,
        "wlb_shard": ShardTensors.of(layout),
        "wlb_info": ShardInfo(plan, topped_up),
    }
