"""Trains a causal language model on long documents with workload-balanced micro-batches.

Without arguments, a tiny Llama on the functions and classes of the Python standard library, on the CPU:

    accelerate launch recipes/llama_long_context.py

With your own model and text, from a YAML file and arguments (arguments win):

    accelerate launch recipes/llama_long_context.py --config recipes/configs/demo.yaml \
        --model ./my-model --dataset ./my-documents.jsonl --context_length 32768

With context parallelism, here two processes on the CPU that share every micro-batch:

    torchrun --nproc_per_node 2 recipes/llama_long_context.py --cp_size 2 --use_cpu

``--resume_from_checkpoint last`` continues after the last complete checkpoint in ``output_dir``. The run leaves there
the model in Hugging Face format, ``metrics.jsonl`` and ``micro_batch_workloads.png``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_wlb import WLBTrainer, WLBTrainingArguments
from hf_wlb.callbacks import MetricsFileCallback
from hf_wlb.data.text import load_documents
from hf_wlb.data.tokenization import tokenize_documents, train_byte_level_bpe
from hf_wlb.packing import PackingReport, StepPlanner, measure
from hf_wlb.parallel import check_cp_size
from hf_wlb.plots import plot_micro_batch_workloads
from hf_wlb.presets import MODEL_PRESETS, preset_config

DEMO = Path(__file__).parent / "configs" / "demo.yaml"
PICTURED_STEPS = 32


@dataclass
class RecipeArguments:
    """What to train on what."""

    model: str = field(
        default="tiny",
        metadata={"help": f"A preset ({', '.join(MODEL_PRESETS)}), a folder or a name on the hub."},
    )
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "Folder or name. Default: the model's own; for a preset one is trained on the documents."},
    )
    vocab_size: int = field(default=2048, metadata={"help": "Entries of a tokenizer trained on the spot."})
    dataset: str | None = field(
        default=None,
        metadata={"help": "A text, jsonl or parquet file, a folder or a name. Default: the Python standard library."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a named data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a named data set."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the text; default: text."})
    max_documents: int | None = field(default=None, metadata={"help": "Train on the first so many documents only."})
    preprocessing_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})


def parse_arguments(argv: Sequence[str]) -> tuple[RecipeArguments, WLBTrainingArguments]:
    """Reads ``--config FILE`` (default: the demo's, if there are no arguments about the run) and arguments over it."""
    parser: Any = HfArgumentParser((RecipeArguments, WLBTrainingArguments))
    rest = list(argv)
    config = DEMO
    if "--config" in rest:
        place = rest.index("--config")
        if place + 1 == len(rest):
            parser.error("--config needs a file")
        config = Path(rest[place + 1])
        del rest[place : place + 2]
    if not config.is_file():
        parser.error(f"there is no file {config}")
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        parser.error(f"{config} is not valid YAML: {error}")
    if not isinstance(values, dict):
        parser.error(f"{config} must hold settings, one 'name: value' a line")
    known = {action.dest for action in parser._actions}
    unknown = sorted(set(values) - known)
    if unknown:
        parser.error(f"{config} has unknown settings: {', '.join(unknown)}")
    parser.set_defaults(**values)
    try:
        recipe, training = parser.parse_args_into_dataclasses(rest)
    except ValueError as error:
        parser.error(str(error))
    return recipe, training


def build_tokenizer(recipe: RecipeArguments, texts: Any) -> PreTrainedTokenizerBase:
    """The named tokenizer, the model's own, or one trained on the documents."""
    if recipe.tokenizer is not None:
        return AutoTokenizer.from_pretrained(recipe.tokenizer)
    if recipe.model not in MODEL_PRESETS:
        return AutoTokenizer.from_pretrained(recipe.model)
    return train_byte_level_bpe(texts["text"], vocab_size=recipe.vocab_size)


def build_model(
    recipe: RecipeArguments, training: WLBTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """A preset with fresh weights, or a pretrained model; weights in bf16 only if pretrained ones are."""
    if recipe.model not in MODEL_PRESETS:
        if (Path(recipe.model) / "config.json").is_file() and not any(Path(recipe.model).glob("*.safetensors*")):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model))
        return AutoModelForCausalLM.from_pretrained(recipe.model)
    config = preset_config(recipe.model, vocab_size=len(tokenizer))
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    set_seed(training.seed)
    return AutoModelForCausalLM.from_config(config)


def last_complete_checkpoint(folder: Path) -> Path:
    """The newest checkpoint whose writing was finished: ``trainer_state.json`` is the last file that is written."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    if not found:
        raise FileNotFoundError(f"there is no complete checkpoint in {folder} to resume from")
    return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def describe_run(console: Console, trainer: WLBTrainer, tokens: int) -> None:
    """Says what is going to happen."""
    packing = trainer.packing
    table = Table(title="Run", show_header=False)
    rows = {
        "model": f"{type(trainer.model).__name__}, {trainer.model.num_parameters():,} parameters",
        "data": f"{len(trainer.train_dataset):,} documents, {tokens:,} tokens",
        "micro-batches": f"{packing.micro_batches_per_replica} per step and replica, {packing.dp_size} replica(s), "
        f"{packing.context_length:,} tokens on average, at most {packing.capacity:,}",
        "processes": _processes(trainer),
        "attention kernel": ", ".join(trainer.attention_kernels),
        "packer": f"{packing.packer}, planned for {packing.pp_size} pipeline stage(s)",
        "attention = linear work at": f"{trainer.workload.crossover_length:,.0f} tokens",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def _processes(trainer: WLBTrainer) -> str:
    mesh, sharder = trainer.mesh, trainer.data_collator.sharder
    text = f"dp {mesh.dp_size} x cp {mesh.cp_size}"
    return text if sharder is None else f"{text}, sharding: {sharder.config.strategy}"


def compare_with_next_fit(console: Console, trainer: WLBTrainer, folder: Path) -> None:
    """Prints and draws the micro-batches of this run beside those that plain packing would have formed."""
    packing = trainer.packing
    plain = replace(packing, packer="next-fit", max_document_tokens=None)
    source = trainer.get_train_dataloader().sampler.planner(0).source
    table = Table(title="The first epoch's micro-batches")
    for heading in ("packer", "imbalance", "modelled time over perfect balance", "delay (steps)", "steps"):
        table.add_column(heading, justify="left" if heading == "packer" else "right")
    panels = {}
    for config in (plain, packing):
        report = measure(StepPlanner(source, trainer.workload, config))
        table.add_row(*_cells(report))
        plans = list(itertools.islice(StepPlanner(source, trainer.workload, config), PICTURED_STEPS))
        regular = [plan for plan in plans if not plan.flush] or plans  # little data may end in the very first step
        panels[config.packer] = [[w for replica in plan.workloads() for w in replica] for plan in regular]
    console.print(table)
    path = folder / "micro_batch_workloads.png"
    plot_micro_batch_workloads(panels, path, title="Workload of every micro-batch, step by step", unit="modelled time")
    console.print(f"Picture: {path}")


def _cells(report: PackingReport) -> list[str]:
    return [
        report.packer,
        f"{report.imbalance:.3f}",
        f"{report.time_gap:.3f}",
        f"{report.delay:.2f}",
        str(report.steps + report.flush_steps),
    ]


def prepare(recipe: RecipeArguments, training: WLBTrainingArguments) -> WLBTrainer:
    """Documents, tokenizer and model in a trainer.

    Raises:
        ValueError, OSError: In words for the user, where a path, a column or a setting is wrong.
    """
    check_cp_size(training.cp_size, training.world_size)  # before anything that takes long
    with training.main_process_first(desc="preparing the documents"):
        texts = load_documents(
            recipe.dataset,
            split=recipe.dataset_split,
            text_column=recipe.text_column,
            config_name=recipe.dataset_config,
        )
        if recipe.max_documents is not None:
            texts = texts.select(range(min(recipe.max_documents, len(texts))))
        tokenizer = build_tokenizer(recipe, texts)
        documents = tokenize_documents(
            texts,
            tokenizer,
            num_proc=recipe.preprocessing_workers,
            drop_empty=training.empty_documents == "skip",
        )
    return WLBTrainer(
        model=build_model(recipe, training, tokenizer),
        args=training,
        train_dataset=documents,
        processing_class=tokenizer,
        callbacks=[MetricsFileCallback(Path(training.output_dir) / "metrics.jsonl")],
    )


def main() -> None:
    """Trains from the arguments on the command line."""
    recipe, training = parse_arguments(sys.argv[1:])
    console = Console(quiet=training.process_index != 0)
    folder = Path(training.output_dir)
    resume = training.resume_from_checkpoint
    try:
        if resume == "last":
            resume = str(last_complete_checkpoint(folder))
            console.print(f"Resuming from {resume}")
        trainer = prepare(recipe, training)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    describe_run(console, trainer, sum(trainer.train_dataset["length"]))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if losses:
        console.print(f"Loss: {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")
    if trainer.is_world_process_zero():
        compare_with_next_fit(console, trainer, folder)
        console.print(f"Model and metrics: {folder}")


if __name__ == "__main__":
    main()
