"""What the convergence benchmark runs: its settings, its runs, the files that they leave."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_wlb.workload import AnalyticWorkload

SCHEMA = "hf_wlb.convergence_benchmark/2"
#: What the tokenised documents depend on.
OF_DOCUMENTS = ("vocabulary", "tokenizer_characters")
#: What the base's weights do not depend on, or not more than on the order of sums.
NOT_OF_BASE = (
    *("steps", "micro_batches", "crossover", "pp_size", "learning_rate"),
    *("kernel", "compiled", "fused_loss"),
)


@dataclass(frozen=True)
class Settings:
    """What all runs have in common. Lengths are in tokens.

    Attributes:
        base_steps: Of the base, from scratch, whose weights all runs start from; 0 for runs from scratch without one.
            Fewer where documents do not fill micro-batches evenly, see ``convergence_documents.matched_context``.
        base_context_length: Longest document of the base: longer ones are split.
        base_tokens_per_step: Of the base on average, one micro-batch.
        base_learning_rate: Of the base at its highest; a cosine of the share of the steps after the warm-up.
        steps: So many on average; fewer where there is too little text for one pass of so many.
        context_length: Of a micro-batch on average, and the longest document: longer ones are split.
        micro_batches: Of a step.
        crossover: Length at which attention costs as much as the rest. A context is 5.3 of it, as 128K are of the 24K
            of a 7B model: documents weigh on balance as they do there.
        pp_size: Packed as for a pipeline of so many stages; the model itself is trained on one device.
        vocabulary: Entries of the byte-level BPE that is trained on part of the documents.
        tokenizer_characters: So much of them.
        hidden_size: Of the Llama.
        intermediate_size: Of its feed-forward layers.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        learning_rate: Of the runs at its highest; a cosine of the share of the steps after the warm-up.
        warmup: Its steps, the base's as well.
        weight_decay: AdamW's.
        held_out_tokens: Of documents that are not trained.
        evaluations: Of the held-out documents while training, the one at the end included.
        seed: Of the weights and of the order of documents, except in the runs that show the noise.
        kernel: Attention kernel, or ``auto``.
        compiled: Whether decoder layers are compiled (``torch_compile``).
        fused_loss: How the loss is computed, see ``WLBTrainingArguments``.
    """

    base_steps: int = 3_000
    base_context_length: int = 8_192
    base_tokens_per_step: int = 32_768
    base_learning_rate: float = 1e-3
    steps: int = 1_500
    context_length: int = 8_192
    micro_batches: int = 4
    crossover: float = 1_536.0
    pp_size: int = 4
    vocabulary: int = 4_096
    tokenizer_characters: int = 8_000_000
    hidden_size: int = 512
    intermediate_size: int = 1_408
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    learning_rate: float = 5e-4
    warmup: int = 100
    weight_decay: float = 0.1
    held_out_tokens: int = 1_000_000
    evaluations: int = 10
    seed: int = 0
    kernel: str = "auto"
    compiled: bool = True
    fused_loss: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "context_length", "micro_batches", "evaluations", "held_out_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.base_steps < 0:
            raise ValueError(f"base_steps must be at least 1, or 0 for runs from scratch, got {self.base_steps}.")
        for name in ("steps", "base_steps") if self.base_steps else ("steps",):
            if self.warmup >= getattr(self, name):
                raise ValueError(
                    f"A warm-up of {self.warmup} steps leaves none of {getattr(self, name)} ({name}) to train: lower "
                    "--warmup."
                )
        if self.base_steps and not 4 <= self.base_context_length <= min(self.base_tokens_per_step, self.context_length):
            raise ValueError(
                f"base_context_length must be 4 to {min(self.base_tokens_per_step, self.context_length)}, the smaller "
                f"of base_tokens_per_step and context_length, got {self.base_context_length}."
            )

    @property
    def tokens_per_step(self) -> int:
        """On average."""
        return self.micro_batches * self.context_length

    @property
    def tokens_needed(self) -> int:
        """Of all documents together: held out, for the base, for the runs."""
        return self.held_out_tokens + self.base_steps * self.base_tokens_per_step + self.steps * self.tokens_per_step

    @property
    def shortest_context(self) -> int:
        """What no document of base and runs is longer than."""
        return self.base_context_length if self.base_steps else self.context_length

    @property
    def workload(self) -> AnalyticWorkload:
        """What documents cost, for the packers."""
        return AnalyticWorkload.from_crossover(self.crossover)


QUICK = Settings(
    base_steps=12,
    base_context_length=256,
    base_tokens_per_step=512,
    base_learning_rate=3e-3,
    steps=20,
    context_length=512,
    crossover=96.0,
    vocabulary=512,
    tokenizer_characters=300_000,
    hidden_size=64,
    intermediate_size=192,
    layers=2,
    heads=4,
    kv_heads=2,
    learning_rate=3e-3,
    warmup=4,
    held_out_tokens=4_000,
    evaluations=4,
    compiled=False,
)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: As in the results.
        packer: How its documents are packed.
        seed_offset: Its weights' seed is so much above that of the settings.
        order_offset: The seed of the order of its documents is so much above that of the settings.
    """

    name: str
    packer: str
    seed_offset: int = 0
    order_offset: int = 0

    @property
    def file_name(self) -> str:
        """Of its files, without ending.

        >>> Run("sequential, seed 1", "next-fit", 1).file_name
        'sequential_seed_1'
        """
        return self.name.replace(", ", "_").replace(" ", "_")

    @property
    def is_base(self) -> bool:
        """Whether it is the one that the others start from."""
        return self.name == BASE.name


BASE = Run("base", "next-fit")
_COMPARED = (Run("sequential", "next-fit"), Run("steady", "steady"), Run("wlb", "wlb"))
#: The important ones first; the last two are sequential as well and show what another order of documents makes of it.
RUNS = (
    *_COMPARED,
    Run("sequential, order 1", "next-fit", order_offset=1),
    Run("sequential, order 2", "next-fit", order_offset=2),
)
#: Without a base; the last two show what other initial weights make of it.
FROM_SCRATCH = (
    *_COMPARED,
    Run("sequential, seed 1", "next-fit", seed_offset=1),
    Run("sequential, seed 2", "next-fit", seed_offset=2),
)


def runs_of(settings: Settings) -> tuple[Run, ...]:
    """All runs but the base.

    >>> [run.name for run in runs_of(QUICK)][2:]
    ['wlb', 'sequential, order 1', 'sequential, order 2']
    """
    return RUNS if settings.base_steps else FROM_SCRATCH


def chosen_runs(only: Sequence[str], settings: Settings) -> list[Run]:
    """The runs of these names, all of them if there are none; the base, which comes before them anyway, is left out.

    Raises:
        ValueError: If there is no run of a name.
    """
    runs = runs_of(settings)
    names = [*([BASE.name] if settings.base_steps else []), *(run.name for run in runs)]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ValueError(f"There is no run {unknown[0]!r}; there are {'; '.join(names)}.")
    return [run for run in runs if not only or run.name in only]


# ---- files ----


def write_json(file: Path, value: Any, text: Callable[[Any], str] = json.dumps) -> None:
    """Writes a file as a whole or not at all."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(text(value) + "\n", encoding="utf-8")
    os.replace(unfinished, file)


def read_json(file: Path, settings: Settings, fingerprint: str | None = None, base: str | None = None) -> Any:
    """What an earlier call wrote.

    Args:
        file: A run's, the base's, or that of the documents.
        settings: Of this call; what the file does not depend on may be other.
        fingerprint: Of its documents, which a run must have trained; None for the documents' own file.
        base: Of the weights that a run must have started from; None for the base itself and for runs without one.

    Raises:
        ValueError: If it cannot be read, is of another version, or was written with other settings, documents or base.
    """
    away = f"Remove it to begin anew, or give another --{'folder' if fingerprint else 'documents'}."
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}. {away}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{file} is not a file of this benchmark's version ({SCHEMA}). {away}")
    of_base = found.get("run", {}).get("name") == BASE.name
    then, now = found.get("settings", {}), asdict(settings)
    if fingerprint is None:
        names = list(OF_DOCUMENTS)
    else:
        names = [name for name in now if not (of_base and name in NOT_OF_BASE)]
    changed = [f"{name} {then.get(name)!r} there, {now[name]!r} now" for name in names if then.get(name) != now[name]]
    if changed:
        raise ValueError(f"{file} was written with other settings: {'; '.join(changed)}. {away}")
    if fingerprint is not None and found.get("fingerprint") != fingerprint:
        raise ValueError(f"{file} is of a run that trained other documents. {away}")
    if not of_base and found.get("base") != base:
        raise ValueError(f"{file} is of a run that started from other weights than those of the base there is. {away}")
    return found


# ---- processes ----


@dataclass(frozen=True)
class Job:
    """What the process of a run does.

    Attributes:
        settings: Common to all runs.
        run: This one.
        about: What is known of the documents, see ``convergence_documents.chosen_documents``.
        documents: Their folder.
        folder: The results go there, and the trainer's own files.
        use_cpu: On the CPU.
        checkpoints: Written in the course of the run, evenly spaced; the latest is kept until the run is finished.
        base: What the base's results say of its weights (``weights``); None without one, and for the base itself.
    """

    settings: Settings
    run: Run
    about: dict[str, Any]
    documents: str
    folder: str
    use_cpu: bool = False
    checkpoints: int = 0
    base: str | None = None

    @property
    def output(self) -> Path:
        """The trainer's folder; at last it holds the weights of the base, and nothing of other runs."""
        return Path(self.folder) / self.run.file_name

    @property
    def results(self) -> Path:
        """The file that says what came out; the run is finished once it is there."""
        return Path(self.folder) / f"{self.run.file_name}.json"

    @property
    def fingerprint(self) -> str:
        """Of the documents that this run trains and is evaluated on."""
        return str(self.about["base_fingerprint" if self.run.is_base else "fingerprint"])

    def save(self) -> Path:
        """Writes it for the process; returns the file."""
        file = Path(self.folder) / f"{self.run.file_name}.job"
        write_json(file, asdict(self))
        return file

    @classmethod
    def load(cls, file: Path) -> Job:
        """Reads it."""
        given = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**given, "settings": Settings(**given["settings"]), "run": Run(**given["run"])})
