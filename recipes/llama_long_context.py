"""Trains a causal language model on long documents with workload-balanced micro-batches: continued pretraining.

Without arguments, a tiny Llama on the functions and classes of the Python standard library, on the CPU:

    accelerate launch recipes/llama_long_context.py

With your own model and text, from a YAML file and arguments (arguments win):

    accelerate launch --config_file recipes/launch/one_node_8_gpus.yaml recipes/llama_long_context.py \
        --config recipes/configs/long_context.yaml --model ./my-model --dataset ./my-documents.jsonl --cp_size 2

With context parallelism, here two processes on the CPU that share every micro-batch:

    torchrun --nproc_per_node 2 recipes/llama_long_context.py --cp_size 2 --use_cpu

With all kinds of parallelism, eight processes on the CPU: two pipeline stages of two ranks that share micro-batches and
two that share matrices each (needs DeepSpeed: pip install "hf_wlb[pipeline]"):

    torchrun --nproc_per_node 8 recipes/llama_long_context.py --pp_size 2 --cp_size 2 --tp_size 2 --use_cpu

``--resume_from_checkpoint last`` continues after the last complete checkpoint in ``output_dir``. The run leaves there
the model in Hugging Face format, ``metrics.jsonl`` and ``micro_batch_workloads.png``. How to launch on which machines:
docs/launching.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import recipe_parts as parts
from transformers import PreTrainedTokenizerBase

from hf_wlb import WLBTrainer, WLBTrainingArguments
from hf_wlb.callbacks import MetricsFileCallback
from hf_wlb.data.text import load_documents, load_rows
from hf_wlb.data.tokenization import tokenize_documents, train_byte_level_bpe
from hf_wlb.presets import MODEL_PRESETS

DEMO = parts.CONFIGS / "demo.yaml"


@dataclass
class RecipeArguments(parts.ModelArguments):
    """What to train on what; data are text, jsonl, parquet, or rows with input_ids that were tokenised before."""

    text_column: str | None = field(default=None, metadata={"help": "Column with the text; default: text."})


def parse_arguments(argv: Sequence[str]) -> tuple[RecipeArguments, WLBTrainingArguments]:
    """Reads ``--config FILE`` and arguments over it; the demonstration's file where nothing of one's own is named."""
    recipe, training = parts.parse_arguments(argv, (RecipeArguments, WLBTrainingArguments), DEMO)
    return recipe, training


def build_tokenizer(recipe: RecipeArguments, texts: Any) -> PreTrainedTokenizerBase:
    """The named tokenizer, the model's own, or one trained on the documents."""
    if recipe.tokenizer is not None:
        return parts.load_tokenizer(recipe.tokenizer)
    if recipe.model not in MODEL_PRESETS:
        return parts.load_tokenizer(recipe.model)
    return train_byte_level_bpe(texts["text"], vocab_size=recipe.vocab_size)


def load_tokenised(recipe: RecipeArguments, training: WLBTrainingArguments) -> tuple[Any, Any]:
    """Documents with the columns input_ids and length, and their tokenizer (None for those tokenised before)."""
    if recipe.dataset is not None and recipe.text_column is None:
        rows = load_rows(recipe.dataset, split=recipe.dataset_split, config_name=recipe.dataset_config)
        if "input_ids" in rows.column_names:
            tokenizer = None if recipe.tokenizer is None else parts.load_tokenizer(recipe.tokenizer)
            return parts.first_of(parts.with_lengths(rows, recipe), recipe), tokenizer
    texts = load_documents(
        recipe.dataset,
        split=recipe.dataset_split,
        text_column=recipe.text_column,
        config_name=recipe.dataset_config,
    )
    texts = parts.first_of(texts, recipe)
    tokenizer = build_tokenizer(recipe, texts)
    documents = tokenize_documents(
        texts, tokenizer, num_proc=recipe.preprocessing_workers, drop_empty=training.empty_documents == "skip"
    )
    return documents, tokenizer


def prepare(recipe: RecipeArguments, training: WLBTrainingArguments) -> tuple[WLBTrainer, dict[str, str]]:
    """Documents, tokenizer and model in a trainer.

    Raises:
        ValueError, OSError: In words for the user, where a path, a column or a setting is wrong.
    """
    with training.main_process_first(desc="preparing the documents"):
        documents, tokenizer = load_tokenised(recipe, training)
    source, options = parts.model_source(recipe, tokenizer)
    trainer = WLBTrainer(
        model=source,
        model_init_kwargs=options,
        args=training,
        train_dataset=documents,
        processing_class=tokenizer,
        callbacks=[MetricsFileCallback(Path(training.output_dir) / "metrics.jsonl")],
    )
    return trainer, {}


def main() -> WLBTrainer:
    """Trains from the arguments on the command line."""
    recipe, training = parse_arguments(sys.argv[1:])
    return parts.run(training, lambda: prepare(recipe, training))


if __name__ == "__main__":
    main()
