"""Where the lengths to analyse come from, and which workload model prices them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_wlb.lengths import HOW_TO_MAKE_LENGTHS, LengthArray, holds_lengths, load_lengths, sample_lengths
from hf_wlb.presets import MODEL_PRESETS, preset_config
from hf_wlb.workload import AnalyticWorkload, WorkloadModel, load_workload

#: Documents that the built-in sampler draws.
SAMPLED_DOCUMENTS = 100_000
#: Attention = linear work at this many tokens where nothing is said about the model: what fits the paper's Table 2.
DEFAULT_CROSSOVER = 24 * 1024
#: Data name of the functions and classes of the Python standard library.
STANDARD_LIBRARY = "stdlib"
_SAY_WHAT_ROWS_ARE = ("input_ids", "attention_mask", "document_lengths", "seq_lengths")


@dataclass(frozen=True)
class LengthSource:
    """Lengths and where they are from.

    Attributes:
        lengths: Tokens per document, shape [documents].
        description: A phrase for the reader.
        has_documents: Whether the documents themselves are there, to be trained on, and not their lengths alone.
    """

    lengths: LengthArray
    description: str
    has_documents: bool = field(default=False, repr=False)


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
    """Lengths from a file of lengths, a tokenised data set, text, or the built-in sampler.

    Args:
        data: One of

            - None for the sampler;
            - a file of lengths, see ``hf_wlb.lengths.load_lengths``;
            - a data set as ``hf_wlb.data.text.load_rows`` understands it (a JSON lines or parquet file, a folder
              written by ``save_to_disk``, a name, ...) whose rows have ``input_ids``, or no text but a ``length``;
              the lengths are what the trainer takes, see ``hf_wlb.data.document_lengths``;
            - text as ``hf_wlb.data.text.load_documents`` understands it, or ``stdlib`` for the Python standard library.
        tokenizer: Name or folder of a tokenizer for text. Without one a byte-level BPE with 2,048 entries is trained on
            the text; documents come out longer than with a usual vocabulary.
        text_column: Column that holds the text, which is then read even where there are ``input_ids``.
        split: Split of the data set.
        max_documents: Take only the first so many documents of a data set or of text.
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
    path = Path(data)
    if holds_lengths(path) or path.suffix.lower() in (".npy", ".csv"):  # the latter may not be there
        return LengthSource(load_lengths(data), f"lengths in {Path(data).name}")
    return _from_rows(data, tokenizer, text_column, split, max_documents, num_proc)


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


def _from_rows(
    data: str,
    tokenizer: str | None,
    text_column: str | None,
    split: str,
    max_documents: int | None,
    num_proc: int | None,
) -> LengthSource:
    """Lengths of a data set's documents, be they tokenised or text."""
    from hf_wlb.data.text import load_documents, load_rows, only_text

    if data == STANDARD_LIBRARY:
        rows, name = load_documents(None, split=split), "the Python standard library"
    else:
        rows, name = load_rows(data, split=split), Path(data).name or data
    if max_documents is not None and max_documents < len(rows):
        rows = rows.select(range(max_documents))
    columns = rows.column_names
    if text_column is None and ("input_ids" in columns or ("length" in columns and "text" not in columns)):
        return _of_tokenised(rows, name, unused_tokenizer=tokenizer is not None)
    if text_column is None and "text" not in columns:
        raise ValueError(
            f"{data} has no column 'text', 'input_ids' or 'length'; its columns are {', '.join(map(repr, columns))}. "
            "Of text, name the column (--text-column); of tokenised documents, rename the one that holds the tokens to "
            f"input_ids: dataset.rename_column(..., 'input_ids'). {HOW_TO_MAKE_LENGTHS}."
        )
    return _of_text(only_text(rows, data, text_column), name, tokenizer, num_proc)


def _of_tokenised(rows: Any, name: str, *, unused_tokenizer: bool) -> LengthSource:
    from hf_wlb.data.documents import document_lengths, read_tokens

    has_tokens = "input_ids" in rows.column_names
    if has_tokens and len(rows):  # padded or packed rows are no documents
        kept = [column for column in _SAY_WHAT_ROWS_ARE if column in rows.column_names]
        read_tokens(rows.select_columns(kept)[0], f"Row 0 of {name}")
    column = "length" if "length" in rows.column_names else "input_ids"
    unused = "; the tokenizer is not used" if unused_tokenizer else ""
    what = "tokenised documents of" if has_tokens else "lengths in"
    return LengthSource(document_lengths(rows), f"{what} {name} (column {column}{unused})", has_documents=has_tokens)


def _of_text(documents: Any, name: str, tokenizer: str | None, num_proc: int | None) -> LengthSource:
    from hf_wlb.data.text import tokenize_documents, train_byte_level_bpe

    encoder: Any
    if tokenizer is None:
        encoder = train_byte_level_bpe(iter(documents["text"]))
        how = f"a byte-level BPE of {len(encoder):,} entries trained on it"
    else:
        encoder = load_tokenizer(tokenizer)
        how = f"the tokenizer {Path(tokenizer).name}"
    tokenized = tokenize_documents(documents, encoder, num_proc=num_proc, drop_empty=True)
    lengths = np.asarray(tokenized.with_format("numpy")["length"][:], dtype=np.int64)
    return LengthSource(lengths, f"text of {name}, tokenised with {how}", has_documents=True)


def load_tokenizer(name: str) -> Any:
    """The Transformers tokenizer of a folder, or of a name on the hub.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: There is no tokenizer in the folder, or none of that name could be loaded.
    """
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~", "\\")) or name.count("/") > 1
    if looks_local and not path.is_dir():
        raise FileNotFoundError(
            f"There is no folder {name!r} to read a tokenizer from. Give one that tokenizer.save_pretrained wrote, "
            "or a name on the Hugging Face Hub."
        )
    try:
        return AutoTokenizer.from_pretrained(path if path.is_dir() else name)
    except (OSError, ValueError) as error:
        where = (
            f"The folder {name!r} holds no tokenizer that Transformers can read"
            if path.is_dir()
            else f"{name!r} is no folder here, and no tokenizer of that name could be loaded from the Hugging Face Hub"
        )
        raise ValueError(
            f"{where}. Give a folder that tokenizer.save_pretrained wrote, or a name on the hub. "
            f"({str(error).splitlines()[0]})"
        ) from error


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
