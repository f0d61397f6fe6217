"""What the training recipes share: their arguments, the model, and what they print and draw."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_wlb import WLBTrainer
from hf_wlb.packing import PackingReport, StepPlanner, measure
from hf_wlb.plots import plot_micro_batch_workloads
from hf_wlb.presets import MODEL_PRESETS, preset_config
from hf_wlb.trainer import agreed_sizes

CONFIGS = Path(__file__).parent / "configs"
PICTURED_STEPS = 32
WEIGHTS = ("float32", "bfloat16", "auto")
#: One of them is in every folder with a tokenizer.
_TOKENIZER_FILES = ("tokenizer*", "tokenization*", "vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken")
#: Arguments that say what is trained on what; with one of them it is no demonstration.
_OWN = ("model", "tokenizer", "dataset")


@dataclass
class ModelArguments:
    """What to train on what."""

    model: str = field(
        default="tiny",
        metadata={"help": f"A preset ({', '.join(MODEL_PRESETS)}), a folder or a name on the hub."},
    )
    weights: str = field(
        default="float32",
        metadata={
            "help": "Type of the weights that the optimizer updates: float32 (with bf16 they are computed with in "
            "bf16), bfloat16, or auto for that of the checkpoint."
        },
    )
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "Folder or name. Default: the model's own; for a preset one is trained on the documents."},
    )
    vocab_size: int = field(default=2048, metadata={"help": "Entries of a tokenizer trained on the spot."})
    dataset: str | None = field(
        default=None, metadata={"help": "A file, a folder or a name. Default: made from the Python standard library."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a named data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a named data set."})
    max_documents: int | None = field(default=None, metadata={"help": "Train on the first so many documents only."})
    preprocessing_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}.")


def parse_arguments(argv: Sequence[str], kinds: Sequence[type], demo: Path) -> tuple[Any, ...]:
    """Reads ``--config FILE`` and arguments over it.

    Without a file the demonstration's is read, unless a model, tokenizer or data set of one's own is named: its
    settings suit a tiny model, and would be taken over unseen.

    Args:
        argv: The command line, without the program.
        kinds: Data classes of arguments.
        demo: The demonstration's settings.

    Returns:
        An instance of every kind. Ends the program with a sentence where there is something wrong.
    """
    parser: Any = HfArgumentParser(tuple(kinds), allow_abbrev=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file with arguments. Default: {demo.name}, unless model, tokenizer or dataset is given.",
    )
    if argv and argv[-1] == "--config":
        parser.error("--config needs a file")
    own = parser.parse_known_args(argv)[0]
    config = None if own.config is None else Path(own.config)
    if config is None and not any(_is_given(argv, name) for name in _OWN):
        config = demo
    if config is not None:
        settings = _read_settings(parser, config)
        if (getattr(own, "pp_size", None) or 1) > 1 and not _is_given(argv, "plan_pp_size"):
            settings.pop("plan_pp_size", None)  # a pipeline that is there is not rehearsed
        parser.set_defaults(**settings)
    try:
        *parsed, rest = parser.parse_args_into_dataclasses(argv)
    except ValueError as error:
        parser.error(str(error))
    del rest  # the name of the file
    return tuple(parsed)


def _is_given(argv: Sequence[str], name: str) -> bool:
    return any(word == f"--{name}" or word.startswith(f"--{name}=") for word in argv)


def _read_settings(parser: Any, config: Path) -> dict[str, Any]:
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
    return values


def first_of(rows: Any, recipe: ModelArguments) -> Any:
    """As many rows as are asked for."""
    return rows if recipe.max_documents is None else rows.select(range(min(recipe.max_documents, len(rows))))


def with_lengths(rows: Any, recipe: ModelArguments) -> Any:
    """Documents that were tokenised before, with the column that planning reads."""
    if "length" in rows.column_names:
        return rows

    def measured(row: dict[str, Any]) -> dict[str, int]:
        return {"length": len(row["input_ids"])}

    return rows.map(measured, num_proc=recipe.preprocessing_workers, desc="Measuring")


def load_tokenizer(place: str) -> PreTrainedTokenizerBase:
    """The tokenizer of that folder or name.

    Raises:
        ValueError: There is no file of a tokenizer in the folder: Transformers would speak of missing packages then, or
            make an empty tokenizer.
    """
    folder = Path(place)
    if folder.is_dir() and not any(path for kind in _TOKENIZER_FILES for path in folder.glob(kind)):
        raise ValueError(f"There is no tokenizer in {place}; give the folder or name of one as --tokenizer.")
    return AutoTokenizer.from_pretrained(place)


def model_source(
    recipe: ModelArguments, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedConfig | str, dict[str, Any]]:
    """What ``WLBTrainer`` is to make the model of: a configuration for fresh weights, or where the weights lie.

    Args:
        recipe: Says which.
        tokenizer: Of the documents; None where they were tokenised before, by the model's own.

    Returns:
        The source, and its ``model_init_kwargs``.

    Raises:
        ValueError: If the tokenizer has more tokens than the model.
    """
    source: PreTrainedConfig | str = recipe.model
    if recipe.model in MODEL_PRESETS:
        config: Any = preset_config(recipe.model, vocab_size=None if tokenizer is None else len(tokenizer))
        if tokenizer is not None:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        source = config
    else:
        config = AutoConfig.from_pretrained(recipe.model)
        folder = Path(recipe.model)
        if (folder / "config.json").is_file() and not any(_weight_files(folder)):
            source = config
    entries = config.get_text_config().vocab_size
    if tokenizer is not None and len(tokenizer) > entries:
        raise ValueError(
            f"The tokenizer has {len(tokenizer):,} tokens, but {recipe.model} has embeddings for {entries:,}. Give the "
            "tokenizer that belongs to the model."
        )
    return source, {"dtype": recipe.weights}


def build_model(recipe: ModelArguments, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
    """The model of ``model_source``, whole, for what is to be changed before it is trained.

    Args:
        recipe: Says which.
        seed: Of fresh weights.
        tokenizer: Of the documents; None where they were tokenised before, by the model's own.

    Raises:
        ValueError: If the tokenizer has more tokens than the model.
    """
    source, options = model_source(recipe, tokenizer)
    if isinstance(source, str):
        return AutoModelForCausalLM.from_pretrained(source, **options)
    set_seed(seed)
    return AutoModelForCausalLM.from_config(source, dtype=None if recipe.weights == "auto" else recipe.weights)


def _weight_files(folder: Path) -> list[Path]:
    return [path for kind in ("*.safetensors*", "pytorch_model*.bin*") for path in folder.glob(kind)]


def last_complete_checkpoint(folder: Path) -> Path:
    """The newest checkpoint whose writing was finished: ``trainer_state.json`` is the last file that is written."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    if not found:
        raise FileNotFoundError(f"there is no complete checkpoint in {folder} to resume from")
    return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def run(training: Any, prepare: Callable[[], tuple[WLBTrainer, dict[str, str]]]) -> WLBTrainer:
    """Prepares, trains, saves, and says what happened.

    Args:
        training: Its ``resume_from_checkpoint`` may be ``"last"``.
        prepare: Gives the trainer, and rows for the table that describes the run. What it raises as ``ValueError`` or
            ``OSError`` ends the program with that sentence.
    """
    console = Console(quiet=training.process_index != 0)
    folder = Path(training.output_dir)
    resume = training.resume_from_checkpoint
    try:
        agreed_sizes(training)  # before anything that takes long
        if resume == "last":
            resume = str(last_complete_checkpoint(folder))
            console.print(f"Resuming from {resume}")
        trainer, rows = prepare()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    describe_run(console, trainer, rows)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if losses:
        console.print(f"Loss: {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")
    if trainer.eval_dataset is not None:
        console.print(f"Loss on held-out documents: {trainer.evaluate()['eval_loss']:.3f}")
    if trainer.is_world_process_zero():
        compare_with_next_fit(console, trainer, folder)
        console.print(f"Model and metrics: {folder}")
    return trainer


def describe_run(console: Console, trainer: WLBTrainer, more: dict[str, str]) -> None:
    """Says what is going to happen."""
    packing = trainer.packing
    tokens = int(np.asarray(trainer.train_dataset.with_format("numpy")["length"][:]).sum())
    sharder, sizes = trainer.data_collator.sharder, trainer.mesh.sizes
    table = Table(title="Run", show_header=False)
    rows = {
        "model": f"{type(trainer.model).__name__}, {trainer.model.num_parameters():,} parameters"
        f"{' on the first process' if sizes.pp * sizes.tp > 1 else ''}",
        "data": f"{len(trainer.train_dataset):,} documents, {tokens:,} tokens",
        **more,
        "micro-batches": f"{packing.micro_batches_per_replica} per step and replica, {packing.dp_size} replica(s), "
        f"{packing.context_length:,} tokens on average, at most {packing.capacity:,}",
        **({"pipeline stages": str(trainer.stage_layout)} if sizes.pp > 1 else {}),
        "processes": f"{sizes}{'' if sharder is None else f', sharding: {sharder.config.strategy}'}",
        "attention kernel": ", ".join(trainer.attention_kernels),
        "packer": f"{packing.packer}, planned for {packing.pp_size} pipeline stage(s)",
        "attention = linear work at": f"{trainer.workload.crossover_length:,.0f} tokens",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def compare_with_next_fit(console: Console, trainer: WLBTrainer, folder: Path) -> None:
    """Prints and draws the micro-batches of this run beside those that plain packing would have formed."""
    packing = trainer.packing
    plain = replace(packing, packer="next-fit", max_document_tokens=None)
    source = trainer.get_train_dataloader().sampler.planner(0).source
    table = Table(title="The first epoch's micro-batches")
    for heading in ("packer", "imbalance", "modelled time over perfect balance", "delay (steps)", "steps"):
        table.add_column(heading, justify="left" if heading == "packer" else "right")
    panels = {}
    for config in (plain, packing) if packing.packer != plain.packer else (packing,):
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
