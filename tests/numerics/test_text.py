import gzip
import inspect
import json
import logging
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hf_wlb.data import stdlib_documents
from hf_wlb.data.text import (
    load_documents,
    standard_library_documents,
    tokenize_documents,
    train_byte_level_bpe,
)
from hf_wlb.lengths import length_summary
from tests.support.scripts import quiet_environment, run_script


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def library() -> list[str]:
    return standard_library_documents()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_byte_level_bpe(["def f(x):\n    return x + 1\n"] * 20, vocab_size=270)


def texts(source: Any, **options: Any) -> list[str]:
    """Load a source twice, whole and streamed, check that both are the same, and return the texts."""
    whole = load_documents(source, **options)
    assert whole.column_names == ["text"]
    streamed = load_documents(source, streaming=True, **options)
    assert isinstance(streamed, datasets.IterableDataset)
    assert list(streamed) == whole.to_list()
    return list(whole["text"])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def plain(rows: Sequence[str | None]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": list(rows)})


# Files and folders


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\n\ntwo\nthree ü\n".encode())
    assert texts(tmp_path / "a.txt") == ["one\n\ntwo\nthree ü\n"]
    assert texts(str(tmp_path / "a.txt")) == ["one\n\ntwo\nthree ü\n"]


def test_json_jsonl_and_parquet_hold_one_document_a_row(tmp_path: Path) -> None:
    rows = [{"text": "x\ny", "n": 1}, {"text": "z", "n": 2}]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as stream:
        stream.write((tmp_path / "a.jsonl").read_text())
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet"):
        assert texts(tmp_path / name) == ["x\ny", "z"], name
    assert list(load_documents(tmp_path / "a.jsonl", split="train[:1]")["text"]) == ["x\ny"]


def test_another_column_becomes_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"body": "b", "text": "t"}])
    assert texts(path, text_column="body") == ["b"]
    assert texts(path) == ["t"]


def test_a_missing_column_is_answered_with_those_there_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"body": "b", "n": 1}])
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"has no column 'text'; its columns are 'body', 'n'\. Name the"):
            load_documents(path, streaming=streaming)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"has no column 'boby'; its columns are 'body', 'n'"):
        load_documents(path, text_column="boby")
    with pytest.raises(ValueError, match=r"column 'n' of .* holds Value\('int64'\), not text"):
        load_documents(path, text_column="n")


def test_folder_of_text_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "B\nB"), ("a.txt", "A"), ("sub/0.txt", "S"), (".hidden.txt", "H")):
        (tmp_path / name).write_text(text)
    (tmp_path / "README.md").write_text("# About these files")
    assert texts(tmp_path) == ["A", "B\nB", "S"]


def test_folder_with_splits(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"text": "tr"}])
    write_rows(tmp_path / "test.jsonl", [{"text": "te"}])
    assert texts(tmp_path) == ["tr"]
    assert texts(tmp_path, split="test") == ["te"]
    with pytest.raises(ValueError, match='split "dev"'):
        load_documents(tmp_path, split="dev")


def test_folder_that_configures_itself_as_on_the_hub(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", [{"text": "xx"}])
    write_rows(tmp_path / "y.jsonl", [{"text": "yy"}])
    configs = "".join(f"- config_name: {c}\n  data_files: {c}.jsonl\n" for c in "xy")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# A data set\n")
    assert texts(tmp_path, config_name="y") == ["yy"]
    with pytest.raises(ValueError, match="'x', 'y'"):
        load_documents(tmp_path)


def test_folders_saved_to_disk(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": ["p", "q"], "n": [1, 2]})
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, dev=saved.select([1])).save_to_disk(tmp_path / "many")
    assert texts(tmp_path / "one") == ["p", "q"]
    assert texts(tmp_path / "many", split="dev") == ["q"]
    with pytest.raises(ValueError, match=r"no split 'test'; its splits are 'train', 'dev'"):
        load_documents(tmp_path / "many", split="test")
    with pytest.raises(ValueError, match=r"one dataset without splits, so split='test'"):
        load_documents(tmp_path / "one", split="test")


def test_no_file_of_a_folder_is_left_out_silently(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("N")
    (tmp_path / "unit-test.txt").write_text("T")
    with pytest.raises(ValueError, match=r"names of 1 of 2 files mark a split \('test'\)"):
        load_documents(tmp_path)
    (tmp_path / "unit-test.txt").rename(tmp_path / "unit.txt")
    assert texts(tmp_path) == ["N", "T"]
    write_rows(tmp_path / "rows.jsonl", [{"text": "R"}])
    with pytest.raises(ValueError, match=r"several kinds \(1 json, 2 text\)"):
        load_documents(tmp_path)


def test_unusable_sources_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ')
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    for name, sentence in (
        ("empty", r"holds no documents; put in files of the kind \.txt"),
        ("a.csv", r"unknown kind; give \.txt .* \.json, \.jsonl or \.parquet"),
        ("a.jsonl", "is empty: it holds no documents"),
        ("b.jsonl", r"b\.jsonl could not be read: JSON parse error"),
        ("c.txt", r"c\.txt could not be read: 'utf-8' codec can't decode"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_documents(tmp_path / name)
    with pytest.raises(ValueError, match="source of the documents is empty"):
        load_documents(" ")
    for name in ("./nothing", "nothing.jsonl", str(tmp_path / "nothing")):
        with pytest.raises(FileNotFoundError, match="There is no file or folder"):
            load_documents(name)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="'no-such-data' is no file or folder here, and no dataset of"):
        load_documents("no-such-data")


# The built-in documents


def test_library_documents_are_many_and_long_tailed(library: list[str]) -> None:
    assert 4_000 < len(library) < 8_000
    sizes = length_summary(np.array([len(text) for text in library]))
    assert sizes.empty == 0
    assert 6e6 < sizes.tokens < 12e6
    assert sizes.maximum > 60 * sizes.percentiles[50.0]


def test_the_library_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_wlb.data.text.standard_library_documents", lambda: ["def f(): ...", "class C: ..."])
    assert texts(None) == ["def f(): ...", "class C: ..."]
    with pytest.raises(ValueError, match="only the split 'train'; split='test' was given"):
        load_documents(None, split="test")


def test_library_documents_are_whole_definitions(library: list[str]) -> None:
    from argparse import ArgumentParser
    from functools import lru_cache

    for thing in (ArgumentParser, lru_cache, textwrap.dedent):
        assert inspect.getsource(thing).rstrip("\n") in library
    assert inspect.getsource(ArgumentParser.parse_args) not in library
    assert library == standard_library_documents()


def test_definitions_of_an_awkward_file(tmp_path: Path) -> None:
    source = (
        "# -*- coding: latin-1 -*-\n"
        "import os\f\n"
        "x = '\\d'\n"
        "@decorator(\n    1)\n"
        "def först():\n"
        "    def inner(): pass\n"
        "    return inner\n"
        "if x:\n"
        "    def hidden(): pass\n"
        "async def second(): pass\n"
        "class Third:\n"
        "    y = 1\n"
    )
    (tmp_path / "a.py").write_bytes(source.encode("latin-1"))
    assert [text for _, text in stdlib_documents._top_level_definitions(str(tmp_path / "a.py"))] == [
        "@decorator(\n    1)\ndef först():\n    def inner(): pass\n    return inner",
        "async def second(): pass",
        "class Third:\n    y = 1",
    ]
    (tmp_path / "b.py").write_text("def broken(:\n")
    assert list(stdlib_documents._top_level_definitions(str(tmp_path / "b.py"))) == []


def test_skipped_folders_and_a_library_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match="no standard library source files"):
        standard_library_documents()
    for folder in ("b", "a", "test", "site-packages", "config-3.11-x86_64"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(f"class C:\n    folder = {folder!r}")
    assert standard_library_documents() == [f"class C:\n    folder = {folder!r}" for folder in "ab"]


# Tokens


def test_bpe_on_the_library(library: list[str]) -> None:
    tokenizer = train_byte_level_bpe(library)
    assert len(tokenizer) == 2048
    some = [*library[::40], max(library, key=len)]
    tokenized = tokenize_documents(plain(some), tokenizer)
    lengths = np.array(tokenized["length"])
    assert 2.5 < sum(map(len, some)) / lengths.sum() < 4.5
    assert lengths.max() > 8192
    for row in (0, 17, int(lengths.argmax())):
        ids = tokenized[row]["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[:-1]) == some[row]


def test_bpe_is_the_same_each_time(library: list[str]) -> None:
    once, again = (train_byte_level_bpe(iter(library[::20])) for _ in range(2))
    other = train_byte_level_bpe(library[1::20])
    assert once.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert once.backend_tokenizer.to_str() != other.backend_tokenizer.to_str()


def test_bpe_round_trips_what_it_never_saw(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("", " a  b", "\t\n\r\n", "naïve 文字 🙂\x00", "<|endoftext|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.model_max_length > 10**9
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)


def test_bpe_vocabulary_must_hold_the_bytes() -> None:
    assert len(train_byte_level_bpe(["ab"] * 9, vocab_size=258)) == 258
    with pytest.raises(ValueError, match=r"vocab_size=257 is too small .* need 258 or more"):
        train_byte_level_bpe(["ab"], vocab_size=257)


def test_lengths_count_the_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = plain(["return x", "y" * 50_000])
    tokenized = tokenize_documents(dataset, tokenizer)
    assert tokenized.column_names == ["input_ids", "length"]
    assert [len(ids) for ids in tokenized["input_ids"]] == list(tokenized["length"])
    assert tokenized[1]["length"] > 10_000  # nothing is cut
    bare = tokenize_documents(dataset, tokenizer, append_eos=False)
    assert [*bare[0]["input_ids"], tokenizer.eos_token_id] == tokenized[0]["input_ids"]
    assert tokenized.features["input_ids"].feature.dtype == "int32"


def test_an_eos_is_not_doubled(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenize_documents(plain(["x<|endoftext|>"]), tokenizer)[0]["input_ids"]
    assert ids == tokenizer("x<|endoftext|>")["input_ids"]


@pytest.fixture
def bos_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Iterator[PreTrainedTokenizerFast]:
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)])
    yield tokenizer
    backend.post_processor = before


def test_a_leading_bos_is_kept_but_makes_no_document(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenize_documents(plain(["x"]), bos_tokenizer)[0]["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (1, 0, 3)
    with pytest.raises(ValueError, match="1 of 2 documents have no tokens, the first in row 1"):
        tokenize_documents(plain(["x", ""]), bos_tokenizer)


@pytest.mark.parametrize("append_eos", [True, False])
def test_empty_documents_are_counted_and_refused_or_dropped(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, append_eos: bool
) -> None:
    dataset = plain(["a", "", "b", "", "c"])
    with pytest.raises(ValueError, match=r"2 of 5 documents have no tokens, the first in row 1.*drop_empty"):
        tokenize_documents(dataset, tokenizer, append_eos=append_eos)
    with caplog.at_level(logging.WARNING):
        kept = tokenize_documents(dataset, tokenizer, append_eos=append_eos, drop_empty=True)
    assert "Dropped 2 of 5 documents" in caplog.text
    assert [tokenizer.decode(ids[:1]) for ids in kept["input_ids"]] == ["a", "b", "c"]


def test_an_empty_dataset_gives_an_empty_dataset(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = plain([]).cast(datasets.Features({"text": datasets.Value("string")}))
    tokenized = tokenize_documents(dataset, tokenizer)
    assert len(tokenized) == 0
    assert tokenized.column_names == ["input_ids", "length"]


def test_bad_rows_columns_and_tokenizers_get_a_sentence(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="Row 1 of the column 'text' holds None, not text"):
        tokenize_documents(plain(["a", None]), tokenizer)
    with pytest.raises(ValueError, match=r"no column 'body'; its columns are 'text'\. .*text_column=.*--text-column"):
        tokenize_documents(plain(["a"]), tokenizer, text_column="body")
    no_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no eos_token to append"):
        tokenize_documents(plain(["a"]), no_eos)
    assert tokenize_documents(plain(["a"]), no_eos, append_eos=False)[0]["length"] == 1


def test_several_processes_give_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = plain([f"x = {i}" for i in range(40)])
    one, two = (tokenize_documents(dataset, tokenizer, num_proc=num_proc) for num_proc in (None, 2))
    assert one.to_list() == two.to_list()


CACHE_PROBE = """
import sys, datasets, transformers
from hf_wlb.data.text import load_documents, tokenize_documents
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(sys.argv[3])
if sys.argv[4] == "used":
    tokenizer(["a", "b c"], truncation=True, max_length=1, padding=True)
tokenized = tokenize_documents(load_documents(sys.argv[1]), tokenizer)
print(tokenized.cache_files[0]["filename"])
"""


def test_a_second_run_finds_the_first_ones_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": f"x = {i}"} for i in range(20)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    other = train_byte_level_bpe(["xyz"] * 9, vocab_size=260)
    other.save_pretrained(tmp_path / "other")
    probe = tmp_path / "probe.py"
    probe.write_text(CACHE_PROBE)

    def words(folder: str, state: str) -> list[str]:
        return [str(source), str(tmp_path / "cache"), str(tmp_path / folder), state]

    def run(folder: str, state: str) -> str:
        done = run_script(probe, *words(folder, state))
        assert done.returncode == 0, done.stderr
        return done.stdout

    # A Python of its own: forked ones have the same seed of hashes, and would hide an order that follows it.
    command = [sys.executable, str(probe), *words("tokenizer", "fresh")]
    first = subprocess.run(command, env=quiet_environment(), check=True, capture_output=True, text=True).stdout
    written = Path(first.strip()).stat().st_mtime_ns
    assert run("tokenizer", "used") == first
    assert Path(first.strip()).stat().st_mtime_ns == written
    assert run("other", "fresh") != first


def test_next_fit_on_the_library_is_unbalanced(library: list[str]) -> None:
    """The default data set is worth balancing: W(d) = d + d^2 / 4K over 4 micro-batches of 4K tokens."""
    sizes = np.minimum([math.ceil(len(text) / 3.4) for text in library], 4096)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(sizes))
    loads, load, tokens = [], 0.0, 0
    for size in sizes[order].tolist():
        if tokens + size > 4096:
            loads.append(load)
            load, tokens = 0.0, 0
        load, tokens = load + size + size**2 / 4096, tokens + size
    steps = np.array(loads[: len(loads) // 4 * 4]).reshape(-1, 4)
    assert (steps.max(axis=1) / steps.mean(axis=1)).mean() > 1.15
