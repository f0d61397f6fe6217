"""What the convergence benchmark runs: its settings, its runs, its documents and where they lie."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_wlb.lengths import IntArray
from hf_wlb.packing import ArraySource, PackingConfig, StepPlanner
from hf_wlb.workload import AnalyticWorkload

SCHEMA = "hf_wlb.convergence_benchmark/1"
#: Whose folders, and what is installed beside them, hold the text that is trained.
PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "sympy", "matplotlib")


@dataclass(frozen=True)
class Settings:
    """What all runs have in common. Lengths are in tokens.

    Attributes:
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
        learning_rate: At its highest; a cosine of the share of the steps after the warm-up.
        warmup: Its steps.
        weight_decay: AdamW's.
        held_out_tokens: Of documents that are not trained.
        evaluations: Of the held-out documents while training, the one at the end included.
        seed: Of the weights, except in the runs that show the noise.
        kernel: Attention kernel, or ``auto``.
    """

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
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    held_out_tokens: int = 1_000_000
    evaluations: int = 10
    seed: int = 0
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "context_length", "micro_batches", "evaluations", "held_out_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.warmup >= self.steps:
            raise ValueError(f"A warm-up of {self.warmup} steps leaves none of {self.steps} to train: lower --warmup.")

    @property
    def tokens_per_step(self) -> int:
        """On average."""
        return self.micro_batches * self.context_length

    @property
    def workload(self) -> AnalyticWorkload:
        """What documents cost, for the packers."""
        return AnalyticWorkload.from_crossover(self.crossover)


QUICK = Settings(
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
)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: As in the results.
        packer: How its documents are packed.
        seed_offset: Its weights' seed is so much above that of the settings.
    """

    name: str
    packer: str
    seed_offset: int = 0

    @property
    def file_name(self) -> str:
        """Of its files, without ending.

        >>> Run("sequential, seed 1", "next-fit", 1).file_name
        'sequential_seed_1'
        """
        return self.name.replace(", ", "_").replace(" ", "_")


#: The important ones first; the last two are sequential as well and show what other initial weights make of it.
RUNS = (
    Run("sequential", "next-fit"),
    Run("steady", "steady"),
    Run("wlb", "wlb"),
    Run("sequential, seed 1", "next-fit", 1),
    Run("sequential, seed 2", "next-fit", 2),
)


def chosen_runs(only: Sequence[str]) -> list[Run]:
    """The runs of these names, all of them if there are none.

    Raises:
        ValueError: If there is no run of a name.
    """
    names = [run.name for run in RUNS]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ValueError(f"There is no run {unknown[0]!r}; there are {'; '.join(names)}.")
    return [run for run in RUNS if not only or run.name in only]


# ---- documents ----


def text_folders() -> list[str]:
    """The standard library, and every folder that one of ``PACKAGES`` is installed in."""
    found = [sysconfig.get_path("stdlib")]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).resolve().parents[1]))
    return list(dict.fromkeys(found))


class Documents(Sequence[dict[str, IntArray]]):
    """Tokenised documents in two files, one a row, as data loaders take them.

    Args:
        folder: Holds ``tokens.npy`` (one document behind the other) and ``lengths.npy``.
    """

    def __init__(self, folder: Path) -> None:
        self.lengths: IntArray = np.load(folder / "lengths.npy")
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        end = int(self._ends[index])
        length = int(self.lengths[index])
        return {"input_ids": self._tokens[end - length : end], "length": length}

    @staticmethod
    def save(documents: Sequence[IntArray], folder: Path) -> int:
        """Writes documents; returns their tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        np.save(folder / "tokens.npy", np.concatenate(documents))
        np.save(folder / "lengths.npy", lengths)
        return int(lengths.sum())


def tokenised(texts: Sequence[str], settings: Settings, processes: int | None) -> Iterator[IntArray]:
    """Documents with an end token each, uint16, in their order, as many as somebody takes."""
    import datasets

    from hf_wlb.data.text import tokenize_documents, train_byte_level_bpe

    datasets.disable_progress_bars()
    sizes = np.cumsum([len(text) for text in texts])
    shown = int(np.searchsorted(sizes, settings.tokenizer_characters)) + 1
    tokenizer = train_byte_level_bpe(texts[:shown], vocab_size=settings.vocabulary)
    portion = settings.steps * settings.tokens_per_step * 3 // 4  # in characters: all is done in about four portions
    begin = 0
    while begin < len(texts):
        done = int(sizes[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(sizes, done + portion)))
        rows = datasets.Dataset.from_dict({"text": list(texts[begin:end])})
        ids = tokenize_documents(rows, tokenizer, num_proc=min(processes or 1, end - begin)).with_format("numpy")
        for batch in ids.select_columns(["input_ids"]).iter(batch_size=1_000):
            yield from (np.asarray(document, dtype=np.uint16) for document in batch["input_ids"])
        begin = end


def prepare_documents(texts: Sequence[str], settings: Settings, folder: Path, processes: int | None) -> dict[str, Any]:
    """Tokenises as many documents as are needed and writes them: the first are held out, the others trained.

    Returns:
        What is known of them, also written to ``documents.json``: ``documents``, ``tokens``, ``longest`` and ``median``
        (tokens, before splitting) of those trained, ``held_out`` (documents and tokens), ``steps`` (which the tokens
        suffice for), ``sequential_context`` (see ``matched_context``), ``characters``, and ``fingerprint``.

    Raises:
        ValueError: If there is too little text even for the warm-up.
    """
    stream = tokenised(texts, settings, processes)
    held_out = _taken(stream, settings.held_out_tokens)
    train = _taken(stream, settings.steps * settings.tokens_per_step)
    tokens = sum(map(len, train))
    steps = min(settings.steps, tokens // settings.tokens_per_step)
    if steps <= settings.warmup:
        raise ValueError(
            f"There is text for {tokens:,} tokens besides those held out, {steps} steps of "
            f"{settings.tokens_per_step:,}; the warm-up alone takes {settings.warmup}. Name folders with more text "
            "(--text)."
        )
    digest = hashlib.sha256(b"".join(document.tobytes() for document in (*held_out, *train)))
    lengths = np.array([len(document) for document in train])
    about = {
        "documents": len(train),
        "tokens": Documents.save(train, folder / "train"),
        "longest": int(lengths.max()),
        "median": int(np.median(lengths)),
        "above_context": round(float(lengths[lengths > settings.context_length].sum() / tokens), 4),
        "held_out": [len(held_out), Documents.save(held_out, folder / "held_out")],
        "steps": steps,
        "sequential_context": matched_context(lengths, settings, steps),
        "characters": sum(map(len, texts[: len(held_out) + len(train)])),
        "fingerprint": digest.hexdigest()[:16],
    }
    write_json(folder / "documents.json", {"schema": SCHEMA, "settings": asdict(settings), **about})
    return about


def _taken(stream: Iterator[IntArray], tokens: int) -> list[IntArray]:
    """The next documents, of so many tokens if there are: the last one is cut there."""
    found: list[IntArray] = []
    while tokens > 0 and (document := next(stream, None)) is not None:
        found.append(document[:tokens])
        tokens -= len(document)
    return found


def matched_context(lengths: IntArray, settings: Settings, steps: int) -> int:
    """What a micro-batch of sequential packing may hold so that it trains as many tokens a step as the others.

    Documents stay whole, so sequential packing leaves the end of every micro-batch empty: with the same context its
    steps would be smaller and more.
    """

    def needed(context: int) -> int:
        config = PackingConfig(
            context_length=context,
            micro_batches_per_replica=settings.micro_batches,
            packer="next-fit",
            max_document_tokens=settings.context_length,
        )
        return sum(1 for _ in StepPlanner(ArraySource(lengths), settings.workload, config))

    low, high = settings.context_length, 2 * settings.context_length
    while high - low > max(1, settings.context_length // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) > steps else (low, middle)
    return high


# ---- files ----


def write_json(file: Path, value: Any, text: Callable[[Any], str] = json.dumps) -> None:
    """Writes a file as a whole or not at all."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(text(value) + "\n", encoding="utf-8")
    os.replace(unfinished, file)


def read_json(file: Path, settings: Settings, fingerprint: str | None = None) -> dict[str, Any]:
    """What an earlier call wrote.

    Args:
        file: A run's, or that of the documents.
        settings: Of this call.
        fingerprint: Of its documents, which a run must have trained.

    Raises:
        ValueError: If it cannot be read, is of another version, or was written with other settings or documents.
    """
    away = f"Remove it to begin anew, or give another --{'folder' if fingerprint else 'documents'}."
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}. {away}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{file} is not a file of this benchmark's version ({SCHEMA}). {away}")
    then, now = found.get("settings", {}), asdict(settings)
    changed = [f"{name} {then.get(name)!r} there, {now[name]!r} now" for name in now if then.get(name) != now[name]]
    if changed:
        raise ValueError(f"{file} was written with other settings: {'; '.join(changed)}. {away}")
    if fingerprint is not None and found.get("fingerprint") != fingerprint:
        raise ValueError(f"{file} is of a run that trained other documents. {away}")
    return found


# ---- processes ----


@dataclass(frozen=True)
class Job:
    """What the process of a run does.

    Attributes:
        settings: Common to all runs.
        run: This one.
        about: What is known of the documents, see ``prepare_documents``.
        documents: Their folder.
        folder: The results go there, and the trainer's own files.
        use_cpu: On the CPU.
    """

    settings: Settings
    run: Run
    about: dict[str, Any]
    documents: str
    folder: str
    use_cpu: bool = False

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
