"""Conversations for supervised fine-tuning: to documents whose labels are the assistant's words only."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import datasets
import numpy as np

from hf_wlb.data.chat_spans import ASSISTANT, Answers, ChatFormat, MarkedTokens, Message
from hf_wlb.data.given import as_table
from hf_wlb.data.stdlib_chats import standard_library_chats
from hf_wlb.data.text import load_rows
from hf_wlb.sharding import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Oversize = Literal["error", "truncate", "skip"]
Unanswered = Literal["error", "skip"]

_COLUMNS = ("messages", "prompt", "completion", "tools")
_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"
#: ChatML; what the assistant writes, its end of turn included, is in a generation block.
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_KEPT, _TRUNCATED, _TOO_LONG, _UNANSWERED = range(4)
_COUNTED = ("length", "trained", "fate")
_FEATURES = datasets.Features(
    {
        **{name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels")},
        **{name: datasets.Value("int64") for name in _COUNTED},
    }
)


@dataclass(frozen=True)
class ChatCounts:
    """What became of conversations.

    Attributes:
        conversations: That were given.
        documents: That are left.
        tokens: In these documents.
        trained_tokens: Of them, those with a label.
        truncated: Documents cut to ``max_tokens``.
        too_long: Conversations skipped because they are longer than that.
        unanswered: Conversations skipped because nothing in them would be trained.
    """

    conversations: int
    documents: int
    tokens: int
    trained_tokens: int
    truncated: int
    too_long: int
    unanswered: int

    def __str__(self) -> str:
        """Such as ``"90 of 100 conversations, 5,000 tokens, 61% of them trained; 3 cut, 7 too long"``."""
        share = self.trained_tokens / max(1, self.tokens)
        rest = {"cut": self.truncated, "too long": self.too_long, "without an answer": self.unanswered}
        parts = ", ".join(f"{count:,} {what}" for what, count in rest.items() if count)
        return (
            f"{self.documents:,} of {self.conversations:,} conversations, {self.tokens:,} tokens, {share:.0%} of them "
            f"trained{'; ' if parts else ''}{parts}"
        )


class TokenizedChats(NamedTuple):
    """What ``tokenize_chats`` returns: train on its ``documents``.

    Attributes:
        documents: With ``input_ids``, ``labels`` and ``length``: a ``train_dataset``.
        counts: What was counted on the way.

    Example:
        >>> from hf_wlb.data.text import train_byte_level_bpe
        >>> tokenizer = add_chat_format(train_byte_level_bpe(["abc"], 258))  # a token a byte, and those of ChatML
        >>> asked, answered = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
        >>> chats = tokenize_chats([{"messages": [asked, answered]}], tokenizer)
        >>> row = chats.documents[0]  # for train_dataset: chats.documents
        >>> tokenizer.decode([token for token in row["labels"] if token != -100])
        '4<|im_end|>'
        >>> print(chats.counts)
        1 of 1 conversations, 28 tokens, 7% of them trained
    """

    documents: datasets.Dataset
    counts: ChatCounts


def load_chats(
    source: str | os.PathLike[str] | None, *, split: str = "train", config_name: str | None = None
) -> datasets.Dataset:
    """Load conversations, one a row, with the columns that ``tokenize_chats`` reads.

    Args:
        source: As for ``hf_wlb.data.text.load_documents``: a .json, .jsonl or .parquet file, a folder of such files
            or of a saved dataset, or a dataset's name. None: conversations made up from the Python standard library.
        split: The split to read.
        config_name: Configuration (subset) of a named dataset.

    Raises:
        FileNotFoundError: If there is no such file, folder or dataset.
        ValueError: If it cannot be read, or has neither ``messages`` nor ``prompt`` and ``completion``.
    """
    if source is None:
        if split != "train":
            raise ValueError(f"The built-in conversations have only the split 'train'; split={split!r} was given.")
        return datasets.Dataset.from_dict({"messages": standard_library_chats()})
    rows: datasets.Dataset = load_rows(source, split=split, config_name=config_name)
    _check_columns(rows.column_names, os.fspath(source), "messages")
    return rows.select_columns([name for name in _COLUMNS if name in rows.column_names])


def add_chat_format(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a base model's tokenizer the ChatML format: two special tokens, a template, and the end of turn as EOS.

    Its model may have to grow: ``model.resize_token_embeddings(len(tokenizer))``.

    Args:
        tokenizer: Without a chat template.

    Returns:
        The same tokenizer.

    Raises:
        ValueError: If it has a template already.
    """
    if tokenizer.chat_template is not None:
        raise ValueError("This tokenizer has a chat template already; train with that one.")
    special: Any = {"eos_token": _TURN_END, "additional_special_tokens": [_TURN_START, _TURN_END]}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def tokenize_chats(
    dataset: datasets.Dataset | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    messages_column: str = "messages",
    answers: Answers = "all",
    max_tokens: int | None = None,
    oversize: Oversize = "error",
    unanswered: Unanswered = "error",
    num_proc: int | None = None,
) -> TokenizedChats:
    """Turn conversations into documents whose labels are -100 everywhere but on the assistant's words.

    The words of an answer and the end of its turn are trained; the header before it, which the template gives at
    inference, and all other messages are not. A template's ``{% generation %}`` blocks say what the assistant wrote;
    without them that is found out by rendering every beginning of the conversation, see ``ChatFormat``.

    Rows hold one of

    - ``messages``: ``[{"role": "user", "content": "..."}, ...]``, any number of turns;
    - ``prompt`` and ``completion``, both such lists: answers in the completion are trained;
    - ``prompt`` and ``completion``, both text: no template; the completion and a final ``eos_token`` are trained.

    A column ``tools`` (lists, or their JSON text) is passed on to the template. Where a row has ``messages``, a
    ``prompt`` beside them is not read. The result is cached by ``datasets``.

    Args:
        dataset: One conversation a row: a ``datasets.Dataset`` (of a ``DatasetDict`` one split), or a list of mappings.
        tokenizer: Fast, with a chat template unless all rows are text.
        messages_column: The column with the messages.
        answers: ``"all"``, or only the ``"last"`` one of every conversation. Templates that drop earlier turns'
            reasoning allow ``"last"`` only.
        max_tokens: Longest document; None for any.
        oversize: What happens to longer ones: ``"error"``, ``"truncate"`` (the end is cut off) or ``"skip"``.
        unanswered: What happens to conversations in which nothing would be trained, perhaps because that was cut
            off: ``"error"`` or ``"skip"``.
        num_proc: Processes to tokenise with.

    Returns:
        ``documents`` to train on, in the order of ``dataset``: ``input_ids`` and ``labels`` (lists of int32, not
        shifted) and ``length`` (int64, tokens); and ``counts`` of what was cut and skipped, which are logged, too.

    Raises:
        ValueError: If there are no rows, such as of a stream, a column or a template is missing, the template refuses a
            conversation or does not tell what the assistant wrote, or by ``oversize`` and ``unanswered``; with the row.
    """
    dataset = as_table(dataset, "tokenize_chats", {messages_column: [{"role": "user", "content": "..."}]})
    _check_choices(answers, max_tokens, oversize, unanswered)
    _check_columns(dataset.column_names, "The dataset", messages_column)
    if not len(dataset):
        raise ValueError("The dataset is empty: it holds no conversations.")
    tokenizer("")  # settles the state of a fast tokenizer, which would otherwise change the cache key
    tokenized = dataset.map(
        _tokenize_rows,
        batched=True,
        with_indices=True,
        fn_kwargs={
            "tokenizer": tokenizer,
            "column": messages_column,
            "answers": answers,
            "max_tokens": max_tokens,
            "truncate": oversize == "truncate",
        },
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        features=_FEATURES,
        desc="Tokenising conversations",
    )
    return _settle(tokenized, max_tokens, oversize, unanswered)


def _settle(
    tokenized: datasets.Dataset, max_tokens: int | None, oversize: Oversize, unanswered: Unanswered
) -> TokenizedChats:
    """Refuse or leave out what is not to be trained, and count."""
    figures = {name: np.asarray(tokenized.with_format("numpy")[name][:], dtype=np.int64) for name in _COUNTED}
    if oversize == "error":
        _refuse(figures, _TOO_LONG, f"have more than max_tokens={max_tokens}", "oversize='truncate' or 'skip'")
    if unanswered == "error":
        _refuse(figures, _UNANSWERED, "have nothing to train: no words of the assistant", "unanswered='skip'")
    kept = np.flatnonzero(figures["fate"] <= _TRUNCATED)
    counts = ChatCounts(
        conversations=len(tokenized),
        documents=len(kept),
        tokens=int(figures["length"][kept].sum()),
        trained_tokens=int(figures["trained"][kept].sum()),
        truncated=int((figures["fate"] == _TRUNCATED).sum()),
        too_long=int((figures["fate"] == _TOO_LONG).sum()),
        unanswered=int((figures["fate"] == _UNANSWERED).sum()),
    )
    if not len(kept):
        raise ValueError(f"No conversation is left to train on: {counts}.")
    complete = len(kept) == len(tokenized)
    logger.log(logging.INFO if complete and not counts.truncated else logging.WARNING, "%s", counts)
    documents = tokenized.remove_columns(["trained", "fate"])
    return TokenizedChats(documents if complete else documents.select(kept), counts)


def _check_choices(answers: str, max_tokens: int | None, oversize: str, unanswered: str) -> None:
    for name, value, allowed in (
        ("answers", answers, get_args(Answers)),
        ("oversize", oversize, get_args(Oversize)),
        ("unanswered", unanswered, get_args(Unanswered)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2 or None, got {max_tokens}.")


def _check_columns(names: list[str], what: str, messages_column: str) -> None:
    if messages_column not in names and not {"prompt", "completion"} <= set(names):
        raise ValueError(
            f"{what} has neither a column {messages_column!r} nor prompt and completion; its columns are "
            f"{sorted(names)}. Name the column of the conversations: messages_column=... of tokenize_chats; each is a "
            f"list of {{'role': ..., 'content': ...}}."
        )


def _refuse(figures: Mapping[str, Any], fate: int, what: str, instead: str) -> None:
    rows = np.flatnonzero(figures["fate"] == fate)
    if len(rows):
        raise ValueError(
            f"{len(rows)} of {len(figures['fate'])} conversations {what}; the first is row {rows[0]}, "
            f"{figures['length'][rows[0]]:,} tokens. Remove them, or pass {instead}, which counts them."
        )


def _tokenize_rows(
    rows: dict[str, list[Any]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    answers: Answers,
    max_tokens: int | None,
    truncate: bool,
) -> dict[str, list[Any]]:
    chat = ChatFormat(tokenizer)
    result: dict[str, list[Any]] = {name: [] for name in ("input_ids", "labels", "length", "trained", "fate")}
    for place, index in enumerate(indices):
        row = {name: values[place] for name, values in rows.items()}
        input_ids, trained = _tokenize_row(row, f"Row {index}", chat, tokenizer, column, answers)
        length, fate = len(input_ids), _KEPT
        if max_tokens is not None and length > max_tokens:
            fate = _TRUNCATED if truncate else _TOO_LONG
            input_ids, trained = input_ids[:max_tokens], trained[:max_tokens]
        if fate != _TOO_LONG and not any(trained[1:]):  # nothing predicts the first token
            fate = _UNANSWERED
        result["input_ids"].append(input_ids)
        result["labels"].append([t if own else IGNORE_INDEX for t, own in zip(input_ids, trained, strict=True)])
        result["length"].append(length if fate == _TOO_LONG else len(input_ids))
        result["trained"].append(sum(trained))
        result["fate"].append(fate)
    return result


def _tokenize_row(
    row: Mapping[str, Any],
    name: str,
    chat: ChatFormat,
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    answers: Answers,
) -> MarkedTokens:
    if row.get(column) is not None:
        messages, after = _messages(row[column], f"{name}: {column}"), 0
    else:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return chat.mark_completion(prompt, completion)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ValueError(f"{name}: prompt and completion must be of one kind, both text or both lists of messages.")
        messages = [*_messages(prompt, f"{name}: prompt"), *_messages(completion, f"{name}: completion")]
        after = len(prompt or ())
    if tokenizer.chat_template is None:
        raise ValueError(
            "This tokenizer has no chat template. Set tokenizer.chat_template to the one that the model is meant for, "
            "or give a base model one with hf_wlb.data.chat.add_chat_format(tokenizer)."
        )
    if not any(message["role"] == ASSISTANT for message in messages[after:]):
        return MarkedTokens([], [])
    return chat.mark(messages, after=after, answers=answers, tools=row.get("tools"), name=name)


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is a {type(value).__name__}, not a list of {{'role': ..., 'content': ...}}.")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{name}: message {place} is {message!r:.60}, not {{'role': ..., 'content': ...}}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{name}: message {place}, of the {message['role']}, has no content.")
    return value
