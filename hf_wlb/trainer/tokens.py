"""What the tokens of a micro-batch must be: entries of the model's vocabulary, some of them to be learned."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_wlb.sharding import IGNORE_INDEX

logger = logging.getLogger(__name__)


class Vocabulary:
    """The token ids that a model knows. On a GPU another one would end the process, without saying which it was.

    Args:
        model: Before it is split; one pipeline stage, where each was read by itself.

    Attributes:
        entries: How many of them ``input_ids`` may hold, and ``labels``; None where the embedding, or the head, is on
            another stage, which then checks, or not known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.entries = _entries_of(model)

    def check(self, micro_batch: Mapping[str, Any], model: PreTrainedModel, *, labels: bool = True) -> None:
        """Refuses what the model has no entry for. Two passes over the tokens; none where they are on a device already.

        Args:
            micro_batch: ``input_ids`` and perhaps ``labels``, int64 of any shape, in the CPU's memory.
            model: As it is now: it may have got further entries since.
            labels: Whether to look at these, too; else they are whatever the loss takes.

        Raises:
            ValueError: Naming one of them, the vocabulary, and what to do.
        """
        for name in ("input_ids", "labels") if labels else ("input_ids",):
            ids, entries = micro_batch.get(name), self.entries[name]
            if entries is None or _outside(ids, entries, name) is None:
                continue
            self.entries[name] = entries = max(entries, _entries_of(model)[name] or 0)
            found = _outside(ids, entries, name)
            if found is not None:
                raise ValueError(
                    f"the {name} hold {found}, but the model's vocabulary has {entries:,} entries, 0 to {entries - 1}. "
                    f"{_advice(name, found)}"
                )


class TargetWatch:
    """Says once in a run that a step had nothing to learn from: its loss of 0 would look like a good one.

    Args:
        warns: Whether this process is the one that says so.
    """

    def __init__(self, warns: bool) -> None:
        self._warns = warns

    def add(self, targets: int, step: int) -> None:
        """Takes in how many labels of a step, counted from 1, are not masked on all ranks together."""
        if targets or not self._warns:
            return
        self._warns = False
        logger.warning(
            "Step %d has nothing to learn from: all of its labels are %d, and its loss is 0. Labels are so where "
            "prompts are masked whole, without an answer behind them, and in documents of one token, whose first token "
            "is no target. Look at the labels of the train_dataset; further such steps are not mentioned.",
            *(step, IGNORE_INDEX),
        )


def _advice(name: str, found: int) -> str:
    if name == "labels":
        return (
            f"Labels are token ids, or {IGNORE_INDEX} where nothing is to be learned; the model gets entries for "
            "tokens that were added to its tokenizer by model.resize_token_embeddings(len(tokenizer)), before the "
            "trainer is made."
        )
    if found < 0:
        return "Token ids are not negative: documents are not padded, and masked are their labels."
    return (
        "Tokenise the documents with the model's own tokenizer, or, where tokens were added to it, give the model "
        "entries for them before the trainer is made: model.resize_token_embeddings(len(tokenizer))."
    )


def _entries_of(model: PreTrainedModel) -> dict[str, int | None]:
    """Rows of the embedding and of the head, whatever the configuration says: they may be padded."""
    found: dict[str, int | None] = {}
    for name, find in (("input_ids", model.get_input_embeddings), ("labels", model.get_output_embeddings)):
        weight = None
        with contextlib.suppress(RuntimeError):  # where Transformers does not know which module it is
            weight = getattr(find(), "weight", None)
        found[name] = int(weight.shape[0]) if isinstance(weight, torch.Tensor) else None
    return found


def _outside(ids: Any, entries: int, name: str) -> int | None:
    """An id that is negative or not below ``entries``; -100 is none among labels."""
    if not isinstance(ids, torch.Tensor) or ids.device.type != "cpu" or not ids.numel():
        return None
    lowest, highest = torch.aminmax(torch.where(ids == IGNORE_INDEX, 0, ids) if name == "labels" else ids)
    return next((extreme for extreme in (int(highest), int(lowest)) if not 0 <= extreme < entries), None)
