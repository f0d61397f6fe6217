"""What a script that was written for ``Trainer`` means to ``WLBTrainer``: its arguments and its collator."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedConfig,
    TrainingArguments,
    default_data_collator,
)

from hf_wlb.attention import PositionLimit, position_limit
from hf_wlb.data import WLBDataCollator
from hf_wlb.data.given import check_row
from hf_wlb.training_args import WLBTrainingArguments

logger = logging.getLogger(__name__)

#: Collators that pad or pack and leave the documents' labels as they are.
_PADDING = (
    *(DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithFlattening, DataCollatorWithPadding),
    DefaultDataCollator,
)
_SAMPLED = 1000  # documents to look at for the context length
_ROUNDED_TO = 128  # tokens


def without_mixed_precision(model: Any) -> None:
    """Undoes what Accelerate wrapped a model's forward in for an earlier trainer.

    Else the model would compute in that one's type, whatever this one's arguments say.
    """
    own = vars(model).pop("_original_forward", None) if isinstance(model, torch.nn.Module) else None
    if own is None:
        return
    if getattr(own, "__func__", None) is type(model).forward:
        del model.forward
    else:
        model.forward = own


def planned_arguments(
    args: TrainingArguments | None,
    train_dataset: Any,
    model: Any = None,
    model_options: Mapping[str, Any] | None = None,
) -> WLBTrainingArguments:
    """``args`` as they are, or what plain ``TrainingArguments`` mean.

    Plain ones train data parallel over all processes; a device gets one packed micro-batch at a time, of the length of
    the longest document in a sample of the data, and ``gradient_accumulation_steps`` is the number of micro-batches
    per replica. Documents that the model has no positions for are split. What is different from ``Trainer`` is said in
    a warning.

    Args:
        args: Given by the user; not changed.
        train_dataset: To look at, if there is no context length.
        model: What the trainer was given; for its positions.
        model_options: For the configuration of a model that was given by name: ``revision``, ``trust_remote_code``.

    Raises:
        ValueError: If the data cannot be looked at beforehand, or the arguments do not go together with planning.
    """
    if isinstance(args, WLBTrainingArguments):
        return args
    if args is None:
        args = TrainingArguments(output_dir="tmp_trainer")  # as Trainer does
    if not isinstance(args, TrainingArguments):
        raise ValueError(f"WLBTrainer needs WLBTrainingArguments or TrainingArguments, got {type(args).__name__}")
    limit = _positions_of(model, model_options or {})
    most = None if limit is None else limit.tokens
    context_length = _sampled_context_length(train_dataset, most)
    planned = WLBTrainingArguments.from_plain(args, context_length=context_length)
    split = ""
    if limit is not None and limit.tokens < planned.packing_config(1).capacity:
        planned.max_document_tokens = limit.tokens
        split = f" Documents of more than {limit.tokens:,} tokens are split: {limit.reason}."
    logger.warning(
        "WLBTrainer got plain TrainingArguments: a device trains one packed micro-batch of about %s tokens at a time "
        "(context_length, the longest of up to %s documents%s, rounded up) instead of %s padded rows, and %s of them "
        "per step (gradient_accumulation_steps).%s Give WLBTrainingArguments(context_length=...) to choose yourself.",
        f"{context_length:,}",
        f"{_SAMPLED:,}",
        " or their longest piece" if split else "",
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        split,
    )
    return planned


def _positions_of(model: Any, options: Mapping[str, Any]) -> PositionLimit | None:
    """Longest document that the model takes, if it is known before the model is made."""
    config = model if isinstance(model, PreTrainedConfig) else getattr(model, "config", None)
    if isinstance(model, str | os.PathLike):
        known = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
        config = AutoConfig.from_pretrained(model, **known)
    return position_limit(config) if isinstance(config, PreTrainedConfig) else None


def planned_collator(given: Any) -> WLBDataCollator | None:
    """The user's collator if it packs, else None, with a warning that says so.

    Raises:
        ValueError: For one that may do more than to pad: its labels would be lost.
    """
    if given is None or isinstance(given, WLBDataCollator):
        return given
    if getattr(given, "mlm", False):
        raise ValueError(
            f"{type(given).__name__}(mlm=True) masks tokens to predict, but WLBTrainer trains causal language models "
            "on every next token. Give mlm=False, or no data_collator."
        )
    name = getattr(given, "__name__", type(given).__name__)
    if type(given) not in _PADDING and given is not default_data_collator:
        raise ValueError(
            f"data_collator {name} would not be called: WLBTrainer packs documents by itself, and what {name} does to "
            "labels would be lost. Make the labels in the data set (a column labels, -100 where nothing is to be "
            "learned) and give no data_collator, or one of hf_wlb.WLBDataCollator."
        )
    logger.warning("WLBTrainer packs documents without padding: data_collator %s is replaced by WLBDataCollator.", name)
    return None


def _sampled_context_length(train_dataset: Any, limit: int | None) -> int:
    needed = "Give WLBTrainingArguments(context_length=...): the tokens that a micro-batch holds on average."
    if train_dataset is None or not hasattr(train_dataset, "__len__") or not hasattr(train_dataset, "__getitem__"):
        raise ValueError(
            "plain TrainingArguments say nothing of a context length, and there is no train_dataset with a length to "
            f"look at. {needed}"
        )
    documents = cast(Sequence[Any], train_dataset)
    step = max(1, len(documents) // _SAMPLED)
    longest = 0
    for index in range(0, len(documents), step):
        row = documents[index]
        check_row(row, f"Row {index} of the train_dataset")
        longest = max(longest, len(row["input_ids"]))
    if not longest:
        raise ValueError(f"the train_dataset holds no documents with tokens. {needed}")
    return -(-min(longest, limit or longest) // _ROUNDED_TO) * _ROUNDED_TO
