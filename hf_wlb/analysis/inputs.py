"""Where the lengths to analyse come from, and which workload model prices them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_wlb.lengths import LengthArray, load_lengths, sample_lengths
from hf_wlb.presets import MODEL_PRESETS, preset_config
from hf_wlb.workload import AnalyticWorkload, WorkloadModel, load_workload

#: Documents that the built-in sampler draws.
SAMPLED_DOCUMENTS = 100_000
#: Attention = linear work at this many tokens where nothing is said about the model: what fits the paper's Table 2.
DEFAULT_CROSSOVER = 24 * 1024
#: Data name of the functions and classes of the Python standard library.
STANDARD_LIBRARY = "stdlib"


@dataclass(frozen=True)
class LengthSource:
    """Lengths and where they are from.

    Attributes:
        lengths: Tokens per document, shape [documents].
        description: A phrase for the reader.
    """

    lengths: LengthArray
    description: str


def read_lengths(
    data: str | None,
    *,
    tokenizer: str | None = None,
    text_column: str | None = None,
    split: str = "train",
    max_documents: int | None = None,
    num_proc: int | None = None,
    seed: int = 0,
) -> LengthSource:
    """Lengths from a file of lengths, from text, or from the built-in sampler.

    Args:
        data: None for the sampler; a file of lengths (``.npy``, a JSON list of integers, one integer a line); else text
            as ``hf_wlb.data.text.load_documents`` understands it, or ``stdlib`` for the Python standard library.
        tokenizer: Name or folder of a tokenizer for text. Without one a byte-level BPE with 2,048 entries is trained on
            the text; documents come out longer than with a usual vocabulary.
        text_column: Column that holds the text.
        split: Split of the data set.
        max_documents: Take only the first so many documents of text.
        num_proc: Processes to tokenise with.
        seed: Of the sampler.

    Raises:
        FileNotFoundError: There is no such file, folder or data set.
        ValueError: The content is not what it should be.
    """
    if data is None:
        return LengthSource(
            sample_lengths(SAMPLED_DOCUMENTS, seed),
            f"built-in sampler of a long-tailed 128K mix ({SAMPLED_DOCUMENTS:,} documents, seed {seed}); no data given",
        )
    if holds_lengths(Path(data)):
        return LengthSource(load_lengths(data), f"lengths in {Path(data).name}")
    return _from_text(data, tokenizer, text_column, split, max_documents, num_proc)


@dataclass(frozen=True)
class LongerDocuments:
    """Documents longer than what stays whole, and what becomes of them.

    Attributes:
        limit: Tokens that stay whole.
        documents: All documents with tokens that are used, each as often as it is used.
        longer: Those above the limit.
        pieces: What these are split into, each of ``limit`` tokens, the last one of a document shorter.
        given: Documents with tokens in the data.
        repeated: Whether some are used more than once, as the data have too few.
    """

    limit: int
    documents: int
    longer: int
    pieces: int
    given: int
    repeated: bool

    def __str__(self) -> str:
        return self._used() + self._split()

    def _used(self) -> str:
        """Nothing where all of the data are used once."""
        if self.documents == self.given:
            return ""
        repeated = ", repeated as often as needed" if self.repeated else ""
        return f"{self.documents:,} used of {self.given:,} given{repeated}; "

    def _split(self) -> str:
        if not self.longer:
            return f"none of {self.documents:,} documents is longer than the context of {self.limit:,} tokens"
        return (
            f"{self.longer:,} of {self.documents:,} documents are longer than the context and are split at every "
            f"{self.limit:,} tokens into {self.pieces:,} pieces in all, which do not attend to one another"
        )


def longer_documents(lengths: LengthArray, limit: int, *, drawn_from: LengthArray | None = None) -> LongerDocuments:
    """Counts documents that the packers' reader splits at ``limit`` tokens.

    Args:
        lengths: Tokens per document, shape ``(documents,)``.
        limit: Tokens that stay whole, at least 1.
        drawn_from: Tokens of each of the data's documents, shape ``(documents,)``, where ``lengths`` are drawn from
            them in whole passes, as by ``documents_for``; None if ``lengths`` are the data.

    >>> longer_documents(np.array([4, 10, 25, 0]), 10)
    LongerDocuments(limit=10, documents=3, longer=1, pieces=3, given=3, repeated=False)
    >>> print(longer_documents(np.array([4, 5, 5, 4]), 10, drawn_from=np.array([4, 5])))
    4 used of 2 given, repeated as often as needed; none of 4 documents is longer than the context of 10 tokens
    """
    longer = lengths[lengths > limit]
    used = int((lengths > 0).sum())
    given = used if drawn_from is None else int((drawn_from > 0).sum())
    return LongerDocuments(
        int(limit), used, len(longer), int((-(-longer // limit)).sum()), given=given, repeated=used > given
    )


def holds_lengths(path: Path) -> bool:
    """Whether a file looks like a list of lengths: a .npy array, a JSON list of numbers, or a number a line."""
    if not path.is_file():
        return False
    if path.suffix == ".npy":
        return True
    with path.open("rb") as file:
        head = file.read(4096).decode("utf-8", errors="replace").strip()
    if path.suffix == ".json" and not head.startswith("["):
        return False
    first = head[1:].lstrip()[:1] if head.startswith("[") else (head.split() or [""])[0]
    return first == "]" or first.lstrip("-").isdigit()


def _from_text(
    data: str,
    tokenizer: str | None,
    text_column: str | None,
    split: str,
    max_documents: int | None,
    num_proc: int | None,
) -> LengthSource:
    from hf_wlb.data.text import load_documents, tokenize_documents, train_byte_level_bpe

    source = None if data == STANDARD_LIBRARY else data
    documents = load_documents(source, split=split, text_column=text_column)
    if max_documents is not None and max_documents < len(documents):
        documents = documents.select(range(max_documents))
    encoder: Any
    if tokenizer is None:
        encoder = train_byte_level_bpe(iter(documents["text"]))
        how = f"a byte-level BPE of {len(encoder):,} entries trained on it"
    else:
        from transformers import AutoTokenizer

        encoder = AutoTokenizer.from_pretrained(tokenizer)
        how = f"the tokenizer {Path(tokenizer).name}"
    tokenized = tokenize_documents(documents, encoder, num_proc=num_proc, drop_empty=True)
    lengths = np.asarray(tokenized.with_format("numpy")["length"][:], dtype=np.int64)
    name = "the Python standard library" if source is None else Path(data).name or data
    return LengthSource(lengths, f"text of {name}, tokenised with {how}")


def choose_workload(
    *,
    model: str | None = None,
    crossover: float | None = None,
    profile: str | None = None,
    hardware: str = "h100",
    gradient_checkpointing: bool = False,
) -> tuple[WorkloadModel, str]:
    """The workload model and a phrase that describes it.

    Args:
        model: Preset, or folder or name of a Transformers config; priced by its FLOPs on ``hardware``.
        crossover: Tokens at which attention equals linear work.
        profile: A measured profile, or any saved workload model (JSON).
        hardware: Preset of ``HARDWARE_PRESETS``, for ``model``.
        gradient_checkpointing: For ``model``.

    Raises:
        FileNotFoundError: There is no such profile.
        ValueError: More than one was given, or what was given is not usable.
    """
    given = [
        name for name, value in (("model", model), ("crossover", crossover), ("profile", profile)) if value is not None
    ]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} were given, but each of them says on its own what a document costs; give one"
        )
    if profile is not None:
        return load_workload(profile), f"profile {Path(profile).name}"
    if model is not None:
        workload = AnalyticWorkload.from_config(
            model_config(model), hardware, gradient_checkpointing=gradient_checkpointing
        )
        return workload, f"{Path(model).name} on {hardware}, by FLOPs"
    if crossover is not None:
        return AnalyticWorkload.from_crossover(crossover), f"attention = linear work at {crossover:,.0f} tokens"
    return (
        AnalyticWorkload.from_crossover(DEFAULT_CROSSOVER),
        f"attention = linear work at {DEFAULT_CROSSOVER:,} tokens, an assumption (--model or --profile say better)",
    )


def model_config(model: str) -> Any:
    """The Transformers config of a preset, or of a folder or name.

    Raises:
        ValueError: If there is none.
    """
    if model.lower() in {name.lower() for name in MODEL_PRESETS}:
        return preset_config(model)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model configuration could be read from {model!r}. Give one of {', '.join(MODEL_PRESETS)}, a folder "
            f"with a config.json, or a name on the Hugging Face Hub. ({str(error).splitlines()[0]})"
        ) from error
