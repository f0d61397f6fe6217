"""What is given as a data set and is none: every way in says so at once, and what to give instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch.utils.data
from transformers import Trainer, TrainingArguments

from hf_wlb import WLBDataCollator, WLBTrainer, WLBTrainingArguments, pack_dataset
from hf_wlb.data import StreamingPackedDataset, WLBDataLoader, document_lengths
from hf_wlb.data.chat import TokenizedChats, add_chat_format, tokenize_chats
from hf_wlb.data.tokenization import tokenize_documents, train_byte_level_bpe
from tests.support.documents import WORKLOAD, packing
from tests.support.tiny_llama import tiny_llama

TOKENS = {"tokens": [[5, 6, 7], [8, 9]], "name": ["a", "b"], "attention_mask": [[1, 1, 1], [1, 1]]}
MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
TABLE = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]]})
SPLITS = datasets.DatasetDict({"train": TABLE, "test": TABLE})


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return add_chat_format(train_byte_level_bpe(["a"], 258))


@pytest.fixture
def chats(tokenizer: Any) -> TokenizedChats:
    return tokenize_chats([{"messages": MESSAGES}] * 2, tokenizer)


@pytest.fixture
def construct(tmp_path: Path) -> Callable[..., WLBTrainer]:
    """A trainer of a tiny model, made and not trained."""

    def made(train_dataset: Any = TABLE, eval_dataset: Any = None, planned: bool = True) -> WLBTrainer:
        if planned:
            options: dict[str, Any] = {"context_length": 16, "max_steps": 1, "use_cpu": True, "report_to": "none"}
            args: Any = WLBTrainingArguments(str(tmp_path), **options)
        else:
            args = TrainingArguments(str(tmp_path), use_cpu=True)
        return WLBTrainer(tiny_llama(), args, train_dataset=train_dataset, eval_dataset=eval_dataset)

    return made


# ---- the trainer ----


class Shown(torch.utils.data.Dataset[dict[str, Any]]):
    """Map-style, of rows."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._row


REFUSED: dict[str, tuple[Any, str]] = {
    "splits": (SPLITS, r"is a DatasetDict of the splits 'train', 'test', .*such as data\['train'\]"),
    "splits of a dict": ({"train": TABLE}, r"is a dict of the splits 'train', not one data set"),
    "streams": (
        datasets.IterableDatasetDict({"train": TABLE.to_iterable_dataset()}),
        r"is a IterableDatasetDict of the splits 'train'",
    ),
    "columns": ({"input_ids": [[1, 2]]}, r"is a dict of columns \('input_ids'\); .*datasets\.Dataset\.from_dict"),
    "other column": (
        datasets.Dataset.from_dict(TOKENS),
        r"no column input_ids; its columns are \['attention_mask', 'name', 'tokens'\]\. If 'tokens' holds the tokens, "
        r"rename it: dataset\.rename_column\('tokens', 'input_ids'\)",
    ),
    "other column of a stream": (
        datasets.Dataset.from_dict(TOKENS).to_iterable_dataset(),
        r"no column input_ids; .*rename_column\('tokens', 'input_ids'\)",
    ),
    "two columns": (datasets.Dataset.from_dict({"a": [[1]], "b": [[2]]}), r"If one of 'a', 'b' holds the tokens"),
    "text": (datasets.Dataset.from_dict({"text": ["a"]}), r"its columns are \['text'\]\. Tokenise the documents first"),
    "rows": ([{"tokens": [1, 2]}], r"Row 0 of the \w+_dataset has no input_ids; .*rename_column\('tokens'"),
    "rows of tensors": (Shown({"tokens": torch.tensor([1, 2])}), r"rename_column\('tokens', 'input_ids'\)"),
    "lists": ([[1, 2]], r"Row 0 of the \w+_dataset is a list; a document is a mapping"),
    "frame": (pandas.DataFrame({"input_ids": [[1]]}), r"is a DataFrame that has no row 0 .*from_pandas"),
}


@pytest.mark.parametrize("planned", [True, False], ids=["WLBTrainingArguments", "TrainingArguments"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_trainer_refuses_it_when_it_is_made(case: str, planned: bool, construct: Callable[..., WLBTrainer]) -> None:
    given, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"train_dataset .*{sentence}" if "Row 0" not in sentence else sentence):
        construct(given, planned=planned)


@pytest.mark.parametrize(
    "case", [name for name in REFUSED if "splits" not in name and name not in ("streams", "columns")]
)
def test_what_is_to_be_evaluated_on_is_looked_at_as_well(case: str, construct: Callable[..., WLBTrainer]) -> None:
    given, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        construct(eval_dataset=given)
    if "Row 0" not in sentence:
        with pytest.raises(ValueError, match=rf"[tT]he eval_dataset 'mine' .*{sentence}"):
            construct(eval_dataset={"good": TABLE, "mine": given})


def test_what_a_trainer_can_train_on_passes(construct: Callable[..., WLBTrainer]) -> None:
    shown = datasets.Dataset.from_dict({"text": ["a"]}).with_transform(lambda rows: {"input_ids": [[1, 2]]})
    empty = datasets.Dataset.from_dict({})
    for given in (TABLE, TABLE.to_iterable_dataset(), shown, Shown({"input_ids": [1]}), [], empty, None):
        construct(given)
    for given in (SPLITS, {"a": TABLE, "b": None}, TABLE, None):
        construct(eval_dataset=given)


# ---- the result of tokenize_chats ----


def test_chats_are_named_wherever_they_are_given(
    chats: TokenizedChats, construct: Callable[..., WLBTrainer], tmp_path: Path
) -> None:
    sentence = r"result of tokenize_chats, which is the documents and their counts\. .*chats\.documents"
    for refused in (
        lambda: construct(chats),
        lambda: construct(eval_dataset=chats),
        lambda: WLBDataLoader(chats, packing(), WORKLOAD),
        lambda: StreamingPackedDataset(chats, packing(), WORKLOAD),
        lambda: pack_dataset(chats, packing(), WORKLOAD),
        lambda: document_lengths(chats),
    ):
        with pytest.raises(ValueError, match=sentence):
            refused()
    with pytest.raises(ValueError, match=r"micro-batch is a Dataset; .*chats\.documents"):
        WLBDataCollator()(chats)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=2)
    with pytest.raises(ValueError, match=r"micro-batch is a (Dataset|ChatCounts); .*chats\.documents"):
        Trainer(tiny_llama(), args, train_dataset=chats, data_collator=WLBDataCollator()).train()
    construct(chats.documents)  # negative control


@pytest.mark.parametrize("data", [SPLITS, {"input_ids": [[1]]}], ids=["splits", "columns"])
def test_loaders_and_packers_refuse_dictionaries(data: Any) -> None:
    for refused in (WLBDataLoader, StreamingPackedDataset, pack_dataset):
        with pytest.raises(ValueError, match=r"is a \w+ of (the splits|columns)"):
            refused(data, packing(), WORKLOAD)


# ---- what is tokenised ----


def test_a_list_of_rows_is_tokenised_like_a_table(tokenizer: Any) -> None:
    rows = [{"text": "one"}, {"text": "two", "other": 1}]
    table = datasets.Dataset.from_dict({"text": ["one", "two"]})
    assert tokenize_documents(rows, tokenizer).to_list() == tokenize_documents(table, tokenizer).to_list()
    assert tokenize_documents(tuple(rows), tokenizer)["length"][:] == tokenize_documents(table, tokenizer)["length"][:]


def test_rows_of_chats_may_have_different_columns(tokenizer: Any) -> None:
    rows = [{"messages": MESSAGES}, {"prompt": "2 + 2?", "completion": "4"}]
    found = tokenize_chats(rows, tokenizer)
    assert found.counts.conversations == found.counts.documents == 2
    alone = [tokenize_chats([row], tokenizer).documents[0] for row in rows]
    assert found.documents.to_list() == alone


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (datasets.DatasetDict({"train": TABLE}), r"What {} was given is a DatasetDict of the splits 'train'"),
        (TABLE.to_iterable_dataset(), r"{} takes a datasets.Dataset or a list of rows such as .* got a stream"),
        (["one"], r"{} takes .*; row 0 is a str\."),
        ("one", r"{} takes .*, got a str\."),
        (7, r"{} takes .*, got a int\."),
        ([], r"{} takes .*, got an empty list\."),
    ],
)
def test_what_has_no_rows_is_refused(given: Any, sentence: str, tokenizer: Any) -> None:
    for tokenize in (tokenize_documents, tokenize_chats):
        with pytest.raises(ValueError, match=sentence.format(tokenize.__name__)):
            tokenize(given, tokenizer)


def test_a_missing_column_names_those_there_are_and_the_argument(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"no column 'text'; its columns are 'body'\. .*text_column=.*--text-column"):
        tokenize_documents([{"body": "one"}], tokenizer)
    with pytest.raises(ValueError, match="There are input_ids: these documents are tokenised already"):
        tokenize_documents(TABLE, tokenizer)
    with pytest.raises(ValueError, match=r"its columns are \['chat'\]\. .*messages_column="):
        tokenize_chats([{"chat": MESSAGES}], tokenizer)
