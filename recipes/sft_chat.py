"""Fine-tunes a causal language model on conversations, packed into workload-balanced micro-batches.

Only the assistant's words are trained; prompts are masked. Without arguments, a tiny Llama on questions and answers
about the Python standard library, on the CPU, in a minute or two:

    accelerate launch recipes/sft_chat.py

With your own model and conversations (jsonl or parquet with ``messages``, or ``prompt`` and ``completion``):

    accelerate launch --config_file recipes/launch/one_node_8_gpus.yaml recipes/sft_chat.py \
        --config recipes/configs/chat.yaml --model ./my-model --dataset ./my-conversations.jsonl

``--chat_template chatml`` gives a base model a chat format. ``--lora_rank 16`` trains adapters. How to launch on which
machines: docs/launching.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import recipe_parts as parts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_wlb import WLBTrainer, WLBTrainingArguments
from hf_wlb.callbacks import MetricsFileCallback
from hf_wlb.data.chat import TokenizedChats, add_chat_format, load_chats, tokenize_chats
from hf_wlb.data.tokenization import train_byte_level_bpe
from hf_wlb.presets import MODEL_PRESETS

DEMO = parts.CONFIGS / "chat_demo.yaml"


@dataclass
class ChatArguments(parts.ModelArguments):
    """What to train on what; data are jsonl or parquet with ``messages``, or ``prompt`` and ``completion``."""

    chat_template: str | None = field(
        default=None,
        metadata={"help": "A Jinja file, or chatml to give a base model that format. Default: the tokenizer's own."},
    )
    answers: str = field(default="all", metadata={"help": "Answers of a conversation to train: all, or the last."})
    max_conversation_tokens: int | None = field(
        default=None, metadata={"help": "Longest conversation; default: what fits into a micro-batch."}
    )
    oversize_conversations: str = field(
        default="error", metadata={"help": "What happens to longer ones: error, truncate or skip (both counted)."}
    )
    unanswered_conversations: str = field(
        default="error", metadata={"help": "What happens where nothing would be trained: error, or skip (counted)."}
    )
    held_out: int = field(default=0, metadata={"help": "Conversations kept for evaluation, from the end."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train LoRA adapters of this rank (needs peft)."})


def parse_arguments(argv: Sequence[str]) -> tuple[ChatArguments, WLBTrainingArguments]:
    """Reads ``--config FILE`` and arguments over it; the demonstration's file where nothing of one's own is named."""
    recipe, training = parts.parse_arguments(argv, (ChatArguments, WLBTrainingArguments), DEMO)
    return recipe, training


def build_tokenizer(recipe: ChatArguments, chats: Any) -> PreTrainedTokenizerBase:
    """The named tokenizer, the model's own, or one trained on the conversations; with a chat template.

    Raises:
        ValueError, OSError: If ``chatml`` is asked of a tokenizer with a template, or a file cannot be read.
    """
    if recipe.tokenizer is None and recipe.model in MODEL_PRESETS:
        rows = (
            row.get("messages") or [*_as_messages(row["prompt"]), *_as_messages(row["completion"])] for row in chats
        )
        contents = (message["content"] or "" for messages in rows for message in messages)
        tokenizer = train_byte_level_bpe(contents, vocab_size=recipe.vocab_size - 2)  # and two that begin and end turns
        return add_chat_format(tokenizer) if recipe.chat_template is None else _with_template(tokenizer, recipe)
    tokenizer = parts.load_tokenizer(recipe.tokenizer or recipe.model)
    return tokenizer if recipe.chat_template is None else _with_template(tokenizer, recipe)


def _as_messages(value: Any) -> list[dict[str, Any]]:
    return [{"content": value}] if isinstance(value, str) else list(value)


def _with_template(tokenizer: PreTrainedTokenizerBase, recipe: ChatArguments) -> PreTrainedTokenizerBase:
    if recipe.chat_template == "chatml":
        return add_chat_format(tokenizer)
    tokenizer.chat_template = Path(str(recipe.chat_template)).read_text(encoding="utf-8")
    return tokenizer


def prepare_chats(
    recipe: ChatArguments, training: Any, max_tokens: int | None
) -> tuple[PreTrainedTokenizerBase, TokenizedChats]:
    """The tokenizer and the tokenised conversations, made by the first process and read by the others."""
    with training.main_process_first(desc="preparing the conversations"):
        chats = load_chats(recipe.dataset, split=recipe.dataset_split, config_name=recipe.dataset_config)
        if recipe.max_documents is not None:
            chats = chats.select(range(min(recipe.max_documents, len(chats))))
        tokenizer = build_tokenizer(recipe, chats)
        tokenized = tokenize_chats(
            chats,
            tokenizer,
            answers=recipe.answers,  # type: ignore[arg-type]  # checked there
            max_tokens=recipe.max_conversation_tokens or max_tokens,
            oversize=recipe.oversize_conversations,  # type: ignore[arg-type]
            unanswered=recipe.unanswered_conversations,  # type: ignore[arg-type]
            num_proc=recipe.preprocessing_workers,
        )
    return tokenizer, tokenized


def hold_out(documents: datasets.Dataset, count: int) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Documents to train on, and the last so many to evaluate on."""
    if not 0 <= count < len(documents):
        raise ValueError(f"held_out={count} must leave at least one of the {len(documents)} documents to train on.")
    rest = len(documents) - count
    return documents.select(range(rest)), documents.select(range(rest, len(documents))) if count else None


def build_model(recipe: ChatArguments, seed: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model, with embeddings for the tokens of a chat format that it was given, and perhaps with adapters.

    Raises:
        ValueError: If adapters were to be trained on new tokens, whose embeddings would stay what they are.
    """
    if recipe.chat_template == "chatml" and recipe.model not in MODEL_PRESETS:
        if recipe.lora_rank is not None:
            raise ValueError(
                "chat_template=chatml adds tokens whose embeddings lora_rank would leave untrained. Train the whole "
                "model, or give a Jinja file that uses tokens which the model knows."
            )
        known = parts.load_tokenizer(recipe.tokenizer or recipe.model)
        model = parts.build_model(recipe, seed, known)
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
        model.config.eos_token_id = tokenizer.eos_token_id
        if model.generation_config is not None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        return model
    return with_adapters(parts.build_model(recipe, seed, tokenizer), recipe.lora_rank)


def with_adapters(model: PreTrainedModel, rank: int | None) -> Any:
    """The model itself, or with LoRA adapters on all its linear layers but the head."""
    if rank is None:
        return model
    from peft import get_peft_model

    return get_peft_model(model, lora_config(rank))


def lora_config(rank: int) -> Any:
    """LoRA on all linear layers but the head, scaled by 2."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def prepare(recipe: ChatArguments, training: WLBTrainingArguments) -> tuple[WLBTrainer, dict[str, str]]:
    """Conversations, tokenizer and model in a trainer.

    Raises:
        ValueError, OSError: In words for the user, where a path, a column or a setting is wrong.
    """
    longest = training.max_document_tokens or training.packing_config(1).capacity
    tokenizer, (documents, counts) = prepare_chats(recipe, training, longest)
    train, held_out = hold_out(documents, recipe.held_out)
    trainer = WLBTrainer(
        model=build_model(recipe, training.seed, tokenizer),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[MetricsFileCallback(Path(training.output_dir) / "metrics.jsonl")],
    )
    return trainer, {"conversations": str(counts)}


def main() -> None:
    """Trains from the arguments on the command line."""
    recipe, training = parse_arguments(sys.argv[1:])
    parts.run(training, lambda: prepare(recipe, training))


if __name__ == "__main__":
    main()
