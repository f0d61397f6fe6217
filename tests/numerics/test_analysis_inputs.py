import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_wlb.analysis import choose_workload, read_lengths
from hf_wlb.cli import app
from hf_wlb.data.text import train_byte_level_bpe


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.jsonl"
    words = "one two three four five six seven eight nine ten "
    path.write_text("".join(json.dumps({"text": words * n}) + "\n" for n in (1, 2, 30)))
    return path


def test_text_is_tokenised_and_said_so(text_file) -> None:
    source = read_lengths(str(text_file))
    assert len(source.lengths) == 3 and source.lengths[0] < source.lengths[1] < source.lengths[2]
    assert "text of text.jsonl" in source.description and "byte-level BPE" in source.description
    assert len(read_lengths(str(text_file), max_documents=2).lengths) == 2


def test_a_missing_column_is_one_sentence(text_file) -> None:
    result = CliRunner().invoke(app, ["analyze", str(text_file), "--text-column", "body", "--no-recommend"])
    assert result.exit_code == 2 and "no column 'body'" in result.stderr and "Traceback" not in result.output


def test_text_is_analysed(text_file) -> None:
    given = ["--context", "64", "--crossover", "16", "--steps", "3", "--no-recommend", "--solver-windows", "0"]
    result = CliRunner().invoke(app, ["analyze", str(text_file), *given])
    assert result.exit_code == 0, result.output
    assert "text of text.jsonl" in result.stdout and "they were read" in result.stdout


def test_a_preset_and_a_folder_price_documents(tmp_path) -> None:
    preset, description = choose_workload(model="7b")
    assert description == "7b on h100, by FLOPs" and 10_000 < preset.crossover_length < 60_000
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    folder, _ = choose_workload(model=str(tmp_path), hardware="cpu")
    assert folder.crossover_length < preset.crossover_length


def test_a_model_that_is_none_is_one_sentence(tmp_path) -> None:
    with pytest.raises(ValueError, match="no model configuration could be read"):
        choose_workload(model=str(tmp_path))
    with pytest.raises(ValueError, match="no hardware figures called 'abacus'"):
        choose_workload(model="tiny", hardware="abacus")


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_commands_about_clusters_read_text_with_a_given_tokenizer(command: str, tmp_path) -> None:
    words = "one two three four five six seven eight nine ten "
    data, written = tmp_path / "text.jsonl", tmp_path / "out.json"
    rows = [{"body": words * n, "other": "one"} for n in (20, 40, 60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_byte_level_bpe([words]).save_pretrained(tmp_path / "tokens")
    given = [command, "--data", str(data), "--context", "256", "--json", str(written)]
    size = ["--model", "tiny", "--micro-batches", "2"]
    if command == "plan":
        size += ["--gpus", "1", "--quick", "--output", str(tmp_path / "plan")]
    else:
        size += ["--system", "wlb", "--steps", "2"]
    text = ["--tokenizer", str(tmp_path / "tokens"), "--text-column", "body", "--max-documents", "2"]
    result = CliRunner().invoke(app, [*given, *size, *text])
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    assert found["source"] == "text of text.jsonl, tokenised with the tokenizer tokens"
    assert found["longer_documents"]["limit"] == 256
    refused = CliRunner().invoke(app, [*given, *size, *(["--overwrite"] if command == "plan" else [])])
    assert refused.exit_code == 2 and "column" in refused.stderr  # negative control: two columns, and none is "text"


# ---- tokenised data sets ----

ROWS = [{"input_ids": [7] * n, "text": "a"} for n in (3, 40, 500)]


def saved_as(kind: str, rows: list[dict[str, Any]], folder: Path) -> str:
    """Writes rows as one of the kinds that are read; gives the path."""
    table, path = datasets.Dataset.from_list(rows), folder / f"data.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "jsonl":
        table.to_json(path)
    elif kind == "saved":
        table.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(path)
    return str(path)


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "splits"])
def test_a_tokenised_data_set_gives_its_lengths(kind: str, tmp_path, own_cache) -> None:
    data = saved_as(kind, ROWS, tmp_path)
    source = read_lengths(data)
    assert source.lengths.tolist() == [3, 40, 500] and source.has_documents
    assert source.description == f"tokenised documents of data.{kind} (column input_ids)"
    assert read_lengths(data, max_documents=2).lengths.tolist() == [3, 40]
    assert "the tokenizer is not used" in read_lengths(data, tokenizer="mine").description
    if kind == "splits":
        assert read_lengths(data, split="test").lengths.tolist() == [3]
    text = read_lengths(data, text_column="text")
    assert "byte-level BPE" in text.description and text.lengths.tolist() == [2, 2, 2]  # negative control


@pytest.mark.parametrize("column", ["length", "input_ids"])
def test_a_column_of_lengths_is_enough(column: str, tmp_path, own_cache) -> None:
    rows = [{"length": n, **({"input_ids": [7] * n} if column == "input_ids" else {})} for n in (3, 40)]
    source = read_lengths(saved_as("jsonl", rows, tmp_path))
    assert source.lengths.tolist() == [3, 40] and source.has_documents is (column == "input_ids")
    assert source.description.endswith("data.jsonl (column length)")


def test_text_with_a_length_of_its_own_is_text(tmp_path, own_cache) -> None:
    source = read_lengths(saved_as("jsonl", [{"text": "one two", "length": 900}], tmp_path))
    assert "text of data.jsonl" in source.description and source.lengths[0] < 900


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [{"tokens": [1, 2]}],
            r"no column 'text', 'input_ids' or 'length'; its columns are 'tokens'\. .*rename_column",
        ),
        ([{"length": 1.5}], r"column length holds Value\('float64'\).*whole number"),
        ([{"length": 1}, {"length": None}], r"column length holds .*empty in places"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "Row 0 of data.jsonl is padded"),
        ([{"input_ids": [1, 2], "document_lengths": [1, 1]}], "is a row of pack_dataset"),
    ],
)
def test_rows_that_are_no_documents_are_refused(rows, sentence: str, tmp_path, own_cache) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_lengths(saved_as("jsonl", rows, tmp_path))


@pytest.mark.parametrize("command", ["analyze", "tune", "shard"])
def test_commands_take_a_tokenised_data_set(command: str, tmp_path, own_cache) -> None:
    data = saved_as("saved", ROWS * 3, tmp_path)
    given = ["--context", "512", "--crossover", "100"]
    given += {
        "analyze": [data, "--steps", "2", "--no-recommend", "--solver-windows", "0"],
        "tune": [data, "--steps", "2", "--packer", "wlb", "--workers", "1"],
        "shard": ["--lengths", data, "--cp", "2"],
    }[command]
    result = CliRunner().invoke(app, [command, *given], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "tokenised documents of data.saved (column input_ids)" in " ".join(result.stdout.split())


def test_a_plan_trains_on_the_tokenised_documents_it_was_made_for(tmp_path, own_cache) -> None:
    written, size = tmp_path / "plan", ["--model", "tiny", "--gpus", "1", "--micro-batches", "2", "--quick"]
    data = saved_as("saved", ROWS, tmp_path)
    given = ["plan", "--data", data, "--context", "512", *size, "--output", str(written)]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert data in result.stdout and "my-documents" not in result.stdout
    lengths = saved_as("jsonl", [{"length": 100}, {"length": 300}], tmp_path)
    result = CliRunner().invoke(app, [*given, "--data", lengths, "--overwrite"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "my-documents" in result.stdout, result.output  # nothing there to train on


@pytest.mark.parametrize("name", ["./nomodel", "empty"])
def test_a_tokenizer_that_is_not_there_is_one_sentence(name: str, text_file, tmp_path, own_cache, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["analyze", str(text_file), "--tokenizer", name, "--no-recommend"])
    assert result.exit_code == 2 and "Traceback" not in result.output
    expected = {
        "./nomodel": "There is no folder './nomodel' to read a",
        "empty": "The folder 'empty' holds no tokenizer",
    }
    assert f"Error: {expected[name]}" in result.stderr and "save_pretrained" in result.stderr


def test_a_csv_or_npy_file_that_is_not_there_is_no_name_on_the_hub() -> None:
    for name in ("nowhere.csv", "nowhere.npy"):
        result = CliRunner().invoke(app, ["analyze", name, "--no-recommend"])
        assert result.exit_code == 2 and f"There is no file '{name}' to read document lengths" in result.stderr
