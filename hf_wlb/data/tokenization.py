"""Documents to tokens: a tokenizer trained on the spot, and tokenising without truncation."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from hf_wlb.data.given import as_table, missing_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"


def train_byte_level_bpe(documents: Iterable[str], vocab_size: int = 2048) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer, so that a demonstration needs no download.

    Any text round-trips, because all 256 bytes are in the vocabulary. Takes about 2 s on the built-in
    documents; the same documents give the same tokenizer.

    Args:
        documents: Text to learn the merges from.
        vocab_size: Entries, including 256 bytes and the two special tokens (ids 0 and 1).

    Returns:
        A fast tokenizer with ``eos_token`` ``<|endoftext|>`` and ``pad_token`` ``<|pad|>``. It adds neither
        by itself and has no length limit. With little text the vocabulary may come out smaller.

    Raises:
        ValueError: If ``vocab_size`` is below 258.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [EOS_TOKEN, PAD_TOKEN]
    least = len(alphabet) + len(special)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for a byte-level vocabulary: 256 bytes and "
            f"{len(special)} special tokens need {least} or more."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)


def tokenize_documents(
    dataset: datasets.Dataset | Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_column: str = "text",
    append_eos: bool = True,
    num_proc: int | None = None,
    drop_empty: bool = False,
) -> datasets.Dataset:
    """Tokenise documents without truncation, and note their lengths.

    The result is cached by ``datasets`` like that of any ``map``: the same documents and tokenizer are not
    tokenised twice.

    Args:
        dataset: One document a row: a ``datasets.Dataset`` (of a ``DatasetDict`` one split), or a list of mappings.
        tokenizer: Any Transformers tokenizer. What it adds by itself (such as a leading BOS) is kept.
        text_column: The column holding the text.
        append_eos: Put ``eos_token_id`` at the end of every document that does not already end in it.
        num_proc: Processes to tokenise with.
        drop_empty: Drop documents without any token of their own (special tokens do not count) and log
            how many, instead of refusing them.

    Returns:
        Columns ``input_ids`` (list of int32) and ``length`` (int64, tokens, special ones included), in the
        order of ``dataset``, all lengths 1 or more.

    Raises:
        ValueError: If there are no rows, such as of a stream; if the column is missing or holds something other than
            text, if ``append_eos`` is asked of a tokenizer without one, or if documents are empty and ``drop_empty``
            is False; the message says how many and which is the first.
    """
    dataset = as_table(dataset, "tokenize_documents", {text_column: "..."})
    if text_column not in dataset.column_names:
        raise missing_text("The dataset", text_column, dataset.column_names)
    eos_id = tokenizer.eos_token_id if append_eos else None
    if append_eos and eos_id is None:
        raise ValueError("This tokenizer has no eos_token to append; give it one or pass append_eos=False.")
    # Also settles the padding and truncation state of a fast tokenizer, which the first call changes and
    # which would otherwise change the cache key from one run to the next.
    added = len(tokenizer("")["input_ids"])
    features = datasets.Features(
        {"input_ids": datasets.Sequence(datasets.Value("int32")), "length": datasets.Value("int64")}
    )
    if not len(dataset):  # map would keep the columns of a dataset without rows
        return datasets.Dataset.from_dict({"input_ids": [], "length": []}, features=features)
    tokenized = dataset.map(
        _tokenize_rows,
        batched=True,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "column": text_column, "eos_id": eos_id, "added": added},
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        features=features,
        desc="Tokenising",
    )
    lengths = np.asarray(tokenized.with_format("numpy")["length"][:], dtype=np.int64)
    empty = int((lengths == 0).sum())
    if empty and not drop_empty:
        raise ValueError(
            f"{empty} of {len(lengths)} documents have no tokens, the first in row {int(lengths.argmin())}. "
            "Remove them, or drop them with drop_empty=True."
        )
    if empty:
        logger.warning("Dropped %d of %d documents because they have no tokens.", empty, len(lengths))
        tokenized = tokenized.select(np.flatnonzero(lengths))
    return tokenized


def _tokenize_rows(
    rows: dict[str, list[Any]],
    indices: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    column: str,
    eos_id: int | None,
    added: int,
) -> dict[str, list[Any]]:
    """Tokenise a few rows; documents without tokens of their own come out as empty lists of length 0."""
    texts = rows[column]
    for index, text in zip(indices, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"Row {index} of the column {column!r} holds {text!r}, not text.")
    encoded: list[list[int]] = tokenizer(
        texts, truncation=False, padding=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    documents = [ids if len(ids) > added else [] for ids in encoded]
    if eos_id is not None:
        documents = [[*ids, eos_id] if ids and ids[-1] != eos_id else ids for ids in documents]
    return {"input_ids": documents, "length": [len(ids) for ids in documents]}
