import json

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
