"""What is given as a data set, looked at before it is read: errors name what was given and what to give instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
import torch.utils.data

_DICTIONARIES = (datasets.DatasetDict, datasets.IterableDatasetDict)
#: Columns that say which tokens to train, in the place of labels: of TRL, of chat templates, and of other libraries.
TARGET_COLUMNS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
#: Lists of integers that are no tokens, whatever a tokenizer or a collator calls them.
_BESIDE_TOKENS = (
    *("labels", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", *TARGET_COLUMNS),
    *("document_lengths", "document_indices", "seq_lengths"),
)


def check_kind(dataset: Any, name: str) -> None:
    """Refuses what is no data set but holds some.

    Args:
        dataset: What was given.
        name: What it was given as, for errors, such as ``"The train_dataset"``.

    Raises:
        ValueError: For the result of ``tokenize_chats``, a dictionary of splits, and a dictionary of columns.
    """
    from hf_wlb.data.chat import TokenizedChats  # it reads text, which looks at what it is given here

    if isinstance(dataset, TokenizedChats):
        raise ValueError(
            f"{name} is the result of tokenize_chats, which is the documents and their counts. Give the documents: "
            "chats = tokenize_chats(...), then chats.documents."
        )
    if not isinstance(dataset, Mapping):
        return
    kind = type(dataset).__name__
    keys = [key for key in dataset if isinstance(key, str)]
    if "input_ids" in keys and not isinstance(dataset, _DICTIONARIES):
        raise ValueError(
            f"{name} is a {kind} of columns ({listed(keys)}); documents are rows. Make rows of it with "
            "datasets.Dataset.from_dict(...)."
        )
    if keys or isinstance(dataset, _DICTIONARIES):
        such = f", such as data[{keys[0]!r}]" if keys else ""
        raise ValueError(f"{name} is a {kind} of the splits {listed(keys)}, not one data set. Give one of them{such}.")


def check_documents(dataset: Any, name: str) -> None:
    """Refuses what holds no documents with ``input_ids``, as far as that can be seen without reading it.

    Of a ``datasets`` data set or stream the columns are looked at, where they are known; of another map-style one the
    first row; of other streams nothing. Empty ones pass.

    Args:
        dataset: What was given.
        name: What it was given as, for errors, such as ``"The train_dataset"``.

    Raises:
        ValueError: As ``check_kind``; or if there are no ``input_ids``: it names the columns there are, and which of
            them may hold the tokens.

    Example:
        >>> check_documents([{"input_ids": [5, 7]}], "The train_dataset")
        >>> check_documents([{"tokens": [5, 7]}], "The train_dataset")
        Traceback (most recent call last):
        ...
        ValueError: Row 0 of the train_dataset has no input_ids; its columns are ['tokens']. If 'tokens' holds the \
tokens, rename it: dataset.rename_column('tokens', 'input_ids').
    """
    check_kind(dataset, name)
    if is_plain_table(dataset) or isinstance(dataset, datasets.IterableDataset):
        _check_columns(dataset, name)
    elif (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, torch.utils.data.IterableDataset)
        and len(dataset)
    ):
        check_row(_first_row(dataset, name), f"Row 0 of {name[0].lower()}{name[1:]}")


def check_row(row: Any, name: str) -> None:
    """Refuses a row that is no document with ``input_ids``.

    Args:
        row: What a data set gave.
        name: The document, for errors, such as ``"Document 3"``.

    Raises:
        ValueError: If it is no mapping, or has no ``input_ids``.
    """
    if not isinstance(row, Mapping):
        from hf_wlb.data.chat import ChatCounts

        of_chats = isinstance(row, datasets.Dataset | ChatCounts)  # the parts of what tokenize_chats returns
        hint = " If the result of tokenize_chats was given, give its documents: chats.documents." if of_chats else ""
        raise ValueError(
            f"{name} is a {type(row).__name__}; a document is a mapping with input_ids, such as "
            f"{{'input_ids': [5, 7, 2]}}.{hint}"
        )
    if row.get("input_ids") is None:
        columns = sorted(map(str, row))
        tokens = [str(column) for column, value in row.items() if column != "input_ids" and _are_integers(value)]
        raise ValueError(f"{name} has no input_ids; its columns are {columns}. {_what_to_do(tokens)}")


def as_table(given: Any, name: str, example: Mapping[str, Any]) -> datasets.Dataset:
    """The rows to tokenise as a ``datasets.Dataset``; a list of mappings is made one.

    Args:
        given: What was given.
        name: What is to be done with it, for errors, such as ``"tokenize_documents"``.
        example: A row of the kind wanted, for errors.

    Raises:
        ValueError: For a dictionary of splits, a stream, an empty list, and anything else that has no rows.
    """
    if isinstance(given, datasets.Dataset):
        return given
    check_kind(given, f"What {name} was given")
    takes = f"{name} takes a datasets.Dataset or a list of rows such as {dict(example)}"
    if isinstance(given, datasets.IterableDataset):
        raise ValueError(
            f"{takes}, got a stream (IterableDataset). Load it without streaming=True; or tokenise it as it is read, "
            "with stream.map, and give the stream itself to WLBTrainer or StreamingPackedDataset."
        )
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{takes}, got a {type(given).__name__}.")
    if not given:
        raise ValueError(f"{takes}, got an empty {type(given).__name__}.")
    for number, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise ValueError(f"{takes}; row {number} is a {type(row).__name__}.")
    columns = dict.fromkeys(column for row in given for column in row)  # from_list takes those of the first row only
    return datasets.Dataset.from_dict({column: [row.get(column) for row in given] for column in columns})


def _first_row(dataset: Any, name: str) -> Any:
    try:
        return dataset[0]
    except KeyError as error:  # as of a DataFrame, whose items are columns
        raise ValueError(
            f"{name} is a {type(dataset).__name__} that has no row 0 ({error!r}). Give documents as rows: a "
            "datasets.Dataset (of a DataFrame: datasets.Dataset.from_pandas), or a list of mappings with input_ids."
        ) from error


def missing_text(name: str, wanted: str, columns: Iterable[str]) -> ValueError:
    """The error for rows without the column of text that was wanted.

    Args:
        name: Where the rows are from, such as ``"The dataset"``.
        wanted: The column.
        columns: Those there are.
    """
    columns = list(columns)
    already = " There are input_ids: these documents are tokenised already." if "input_ids" in columns else ""
    return ValueError(
        f"{name} has no column {wanted!r}; its columns are {listed(columns)}. Name the column that holds the text: "
        f"text_column=..., on the command line --text-column (of the recipes: --text_column).{already}"
    )


def _check_columns(dataset: Any, name: str) -> None:
    columns = dataset.column_names
    empty = isinstance(dataset, datasets.Dataset) and not len(dataset)
    if columns is None or empty or "input_ids" in columns:
        return
    tokens = [column for column, feature in (dataset.features or {}).items() if _holds_integers(feature)]
    raise ValueError(f"{name} has no column input_ids; its columns are {sorted(columns)}. {_what_to_do(tokens)}")


def _what_to_do(tokens: Iterable[str]) -> str:
    """What to do without ``input_ids``, given the columns that are lists of integers."""
    tokens = [column for column in tokens if column not in _BESIDE_TOKENS]
    if tokens:
        which = listed(tokens) if len(tokens) == 1 else f"one of {listed(tokens)}"
        return f"If {which} holds the tokens, rename it: dataset.rename_column({tokens[0]!r}, 'input_ids')."
    return (
        "Tokenise the documents first, for example with hf_wlb.data.text.tokenize_documents, and keep the column "
        "(remove_unused_columns=False in TrainingArguments)."
    )


def is_plain_table(dataset: Any) -> bool:
    """Whether this is a ``datasets.Dataset`` whose rows are what is stored: no ``with_transform`` in between."""
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def _holds_integers(feature: Any) -> bool:
    """Whether a column's feature is a list of integers."""
    if isinstance(feature, list):
        return len(feature) == 1 and "int" in str(getattr(feature[0], "dtype", ""))
    is_list = isinstance(feature, datasets.List | datasets.LargeList)
    return is_list and "int" in str(getattr(feature.feature, "dtype", ""))


def _are_integers(value: Any) -> bool:
    """Whether a row's value is a flat list of integers."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and not value.is_floating_point()
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return all(type(item) is int for item in value)


def listed(names: Iterable[str]) -> str:
    """Names for an error, such as ``"'train', 'test'"``."""
    return ", ".join(repr(name) for name in names) or "none"
