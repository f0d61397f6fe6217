"""Where documents come from and how they are tokenised, before any packing.

:func:`load_documents` gives one document a row in a single ``text`` column, from a ``datasets`` name, local
files, or (by default, with nothing downloaded) the functions and classes of the Python standard library.
:func:`tokenize_documents` turns them into ``input_ids`` and ``length``. Nothing here truncates: what to do
about a document that is too long is the packer's policy.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import datasets

from hf_wlb.data.given import listed, missing_text
from hf_wlb.data.stdlib_documents import standard_library_documents
from hf_wlb.data.tokenization import EOS_TOKEN, PAD_TOKEN, tokenize_documents, train_byte_level_bpe

__all__ = [
    "EOS_TOKEN",
    "PAD_TOKEN",
    "load_documents",
    "load_rows",
    "only_text",
    "standard_library_documents",
    "tokenize_documents",
    "train_byte_level_bpe",
]

_BUILDER_OF_SUFFIX = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_FORMATS = ".txt (one document a file), .json, .jsonl or .parquet (one document a row)"


@overload
def load_documents(
    source: str | os.PathLike[str] | None,
    *,
    split: str = ...,
    text_column: str | None = ...,
    config_name: str | None = ...,
    streaming: Literal[False] = ...,
) -> datasets.Dataset: ...


@overload
def load_documents(
    source: str | os.PathLike[str] | None,
    *,
    split: str = ...,
    text_column: str | None = ...,
    config_name: str | None = ...,
    streaming: Literal[True],
) -> datasets.IterableDataset: ...


def load_documents(
    source: str | os.PathLike[str] | None,
    *,
    split: str = "train",
    text_column: str | None = None,
    config_name: str | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load documents, one a row, as a dataset with the single column ``text``.

    Args:
        source: One of

            - None: :func:`standard_library_documents`, which needs no download;
            - a ``.txt`` file, which is one document (a file with one document a line is better written as
              ``.jsonl``: ``{"text": "..."}``);
            - a ``.json``, ``.jsonl`` or ``.parquet`` file, one document a row, possibly compressed
              (``.gz``, ``.bz2``, ``.xz``, ``.zst``);
            - a folder of files of one of these kinds, each ``.txt`` file one document, or a folder
              whose README.md configures its data files the way the Hugging Face Hub expects;
            - a folder written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``;
            - the name of a dataset that ``datasets.load_dataset`` knows.
        split: The split to read; slices such as ``"train[:1%]"`` work wherever ``load_dataset`` is used.
            Files without a split in their name are ``train``.
        text_column: The column holding the text; ``text`` unless given.
        config_name: Configuration (subset) of a named dataset.
        streaming: Read lazily, as a ``datasets.IterableDataset``.

    Returns:
        The documents, in the order of the source (files in the order of their names).

    Raises:
        FileNotFoundError: If there is no such file, folder or dataset.
        ValueError: If the source is empty, of an unknown kind, lacks the split, or lacks the text column;
            the message lists what there is.
    """
    if source is None:
        if split != "train":
            raise ValueError(f"The built-in documents have only the split 'train'; split={split!r} was given.")
        built_in = datasets.Dataset.from_dict({"text": standard_library_documents()})
        return built_in.to_iterable_dataset() if streaming else built_in
    name = os.fspath(source)
    with _readable(name):
        return only_text(_load_rows(name, split, config_name, streaming), name, text_column)


def load_rows(
    source: str | os.PathLike[str], *, split: str = "train", config_name: str | None = None, streaming: bool = False
) -> Any:
    """Load the rows of a source with all their columns.

    Args:
        source: As for :func:`load_documents`.
        split: As well.
        config_name: As well.
        streaming: As well.

    Raises:
        FileNotFoundError: If there is no such file, folder or dataset.
        ValueError: If the source is empty, of an unknown kind, lacks the split, or cannot be read.
    """
    name = os.fspath(source)
    with _readable(name):
        return _load_rows(name, split, config_name, streaming)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Says in the user's words that a source is damaged."""
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"{name} could not be read: {error.__cause__ or error}") from error


def _load_rows(name: str, split: str, config_name: str | None, streaming: bool) -> Any:
    if not name.strip():
        raise ValueError(f"The source of the documents is empty; give {_FORMATS}, a folder or a dataset's name.")
    path = Path(name).expanduser()
    if path.is_file():
        return _load_file(path, split, streaming)
    if path.is_dir():
        return _load_folder(path, split, config_name, streaming)
    return _load_named(name, split, config_name, streaming)


def _builder_of(path: Path) -> str | None:
    """Name the ``datasets`` builder that reads a file, or None if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return _BUILDER_OF_SUFFIX.get(suffixes[-1]) if suffixes else None


def _load_file(file: Path, split: str, streaming: bool) -> Any:
    builder = _builder_of(file)
    if builder is None:
        raise ValueError(f"{file} is of an unknown kind; give {_FORMATS}.")
    if not file.stat().st_size:
        raise ValueError(f"{file} is empty: it holds no documents.")
    options = {"sample_by": "document"} if builder == "text" else {}
    return datasets.load_dataset(builder, data_files=str(file), split=split, streaming=streaming, **options)


def _load_folder(folder: Path, split: str, config_name: str | None, streaming: bool) -> Any:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _load_saved(folder, split, streaming)
    if _configures_itself(folder):
        return datasets.load_dataset(str(folder), name=config_name, split=split, streaming=streaming)
    kinds = _count_kinds(folder)
    if not kinds:
        raise ValueError(f"The folder {folder} holds no documents; put in files of the kind {_FORMATS}.")
    if len(kinds) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ValueError(
            f"The folder {folder} holds files of several kinds ({found}). "
            "Give a folder of one kind, or one of the files."
        )
    options = {"sample_by": "document"} if "text" in kinds else {}
    builder = datasets.load_dataset_builder(str(folder), name=config_name, **options)
    files_of_split = builder.config.data_files or {}
    used, present = sum(len(files) for files in files_of_split.values()), kinds.total()
    if used != present:  # datasets leaves out files whose name marks no split if another file's name does
        raise ValueError(
            f"In the folder {folder} the names of {used} of {present} files mark a split "
            f"({listed(map(str, files_of_split))}) and the others mark none, so those would be left out. "
            "Rename them, or move them to a folder of their own."
        )
    return datasets.load_dataset(str(folder), name=config_name, split=split, streaming=streaming, **options)


def _count_kinds(folder: Path) -> Counter[str]:
    """Count a folder's data files by the builder that reads them."""
    kinds: Counter[str] = Counter()
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        builder = _builder_of(file)
        if builder and not hidden and file.name not in _NOT_DATA and file.is_file():
            kinds[builder] += 1
    return kinds


def _configures_itself(folder: Path) -> bool:
    """Say whether a folder's README.md names its data files in its YAML header, as on the Hub."""
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace")
    header = text[3:].split("\n---", 1)[0] if text.startswith("---") else ""
    return any(line.startswith("configs:") for line in header.splitlines())


def _load_saved(folder: Path, split: str, streaming: bool) -> Any:
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"{folder} has no split {split!r}; its splits are {listed(saved)}.")
        saved = saved[split]
    elif split != "train":
        raise ValueError(
            f"{folder} holds one dataset without splits, so split={split!r} cannot be read from it. "
            "Leave split at 'train'."
        )
    return saved.to_iterable_dataset() if streaming else saved


def _load_named(name: str, split: str, config_name: str | None, streaming: bool) -> Any:
    looks_local = name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or _builder_of(Path(name))
    if looks_local or not name.strip():
        raise FileNotFoundError(
            f"There is no file or folder {name!r}. Give {_FORMATS}, a folder of such files, or the name of a dataset."
        )
    try:
        return datasets.load_dataset(name, name=config_name, split=split, streaming=streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"{name!r} is no file or folder here, and no dataset of that name could be loaded from the "
            f"Hugging Face Hub ({error})."
        ) from error


def only_text(loaded: Any, name: str, text_column: str | None) -> Any:
    """Keep the text column of loaded rows alone, under the name ``text``.

    Args:
        loaded: Rows, see :func:`load_rows`.
        name: Where they are from, for errors.
        text_column: The column holding the text; ``text`` if None.

    Raises:
        ValueError: If there is no such column, or it holds something else.
    """
    columns = loaded.column_names
    if columns is None:  # a stream whose columns are not known before its first row
        columns = [column for row in loaded.take(1) for column in row]
    wanted = "text" if text_column is None else text_column
    if wanted not in columns:
        raise missing_text(name, wanted, columns)
    feature = (loaded.features or {}).get(wanted)
    if feature is not None and getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"The column {wanted!r} of {name} holds {feature}, not text.")
    loaded = loaded.select_columns([wanted])
    return loaded if wanted == "text" else loaded.rename_column(wanted, "text")
