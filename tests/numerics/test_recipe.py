"""The main recipe as a user runs it: in processes of its own, to the end, killed and resumed, and with bad input.

One run is started by Python itself, the others are forked (see tests/support/scripts.py).
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_wlb.data.tokenization import train_byte_level_bpe
from hf_wlb.presets import preset_config
from tests.support.oracle import worst_error
from tests.support.recipes import load_recipe
from tests.support.scripts import Script, quiet_environment, run_script
from tests.support.source_tree import REPOSITORY
from tests.support.tolerances import TRAINER_AFTER_STEPS

RECIPE = "recipes/llama_long_context.py"
SMALL = {
    "max_documents": 150,
    "vocab_size": 512,
    "context_length": 1024,
    "max_document_tokens": 1024,
    "max_steps": 8,
    "save_steps": 3,
    "warmup_steps": 2,
    "plan_pp_size": 2,
    "preprocessing_workers": 1,
    "disable_tqdm": True,
    "use_cpu": True,
}


def arguments(folder: Path, **changes: Any) -> list[str]:
    options = {"output_dir": folder, **SMALL, **changes}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def run(folder: Path, processes: int | None = None, **changes: Any) -> subprocess.CompletedProcess[str]:
    return run_script(RECIPE, *arguments(folder, **changes), processes=processes)


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """The last line of what a run says that ends before it trains; here and not in a process of its own."""
    recipe = load_recipe("llama_long_context")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [RECIPE, *arguments(folder, **changes)])
        recipe.main()
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def losses(folder: Path) -> dict[int, float]:
    """Loss of every step; each step is there once, also after a resume."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert len(steps) == len(set(steps))
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("recipe") / "run"
    command = [sys.executable, RECIPE, *arguments(folder)]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, result.stdout


def test_it_trains_and_leaves_model_metrics_and_picture(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, output = finished
    found = losses(folder)
    assert sorted(found) == list(range(1, 9))
    assert abs(found[1] - math.log(512)) < 0.2
    assert found[8] < found[1] - 0.3
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert {"imbalance", "delay", "tokens_per_second", "time_gap", "seconds"} <= set(row)
    assert (folder / "micro_batch_workloads.png").stat().st_size > 5_000
    assert "next-fit" in output and "steady" in output and "Loss:" in output
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder)) == 512


def test_two_context_parallel_processes_give_the_same_losses(finished: tuple[Path, str], tmp_path: Path) -> None:
    result = run(tmp_path, processes=2, cp_size=2, save_strategy="no")
    assert result.returncode == 0, result.stderr[-3000:]
    expected, found = losses(finished[0]), losses(tmp_path)
    assert sorted(found) == sorted(expected)
    assert max(abs(found[step] - expected[step]) for step in found) <= 1e-5
    assert "dp 1 x cp 2, sharding: adaptive" in result.stdout
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {"cp_imbalance", "cp_attention_imbalance", "cp_attention_ms_rank_1"} <= set(row)


def test_two_pipeline_stages_give_the_same_losses(finished: tuple[Path, str], tmp_path: Path) -> None:
    """And leave the same model, as a whole."""
    from transformers import AutoModelForCausalLM

    result = run(tmp_path, processes=2, pp_size=2, gradient_accumulation_steps=4, save_strategy="no")
    assert result.returncode == 0, result.stderr[-3000:]
    expected, found = losses(finished[0]), losses(tmp_path)
    assert sorted(found) == sorted(expected)
    assert max(abs(found[step] - expected[step]) for step in found) <= 1e-5
    assert "dp 1 x pp 2" in result.stdout and "layers 0 | 1" in result.stdout
    weights, reference = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path, finished[0])
    )
    assert weights.keys() == reference.keys()
    assert worst_error(weights, reference) <= TRAINER_AFTER_STEPS


def test_killed_and_resumed_it_gives_the_same_losses(finished: tuple[Path, str], tmp_path: Path) -> None:
    uninterrupted = losses(finished[0])
    process = Script(RECIPE, *arguments(tmp_path))
    deadline = time.monotonic() + 240
    while not (tmp_path / "checkpoint-3" / "trainer_state.json").is_file():
        assert process.runs() and time.monotonic() < deadline, process.wait().stderr
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (tmp_path / "model.safetensors").exists()  # it was killed before its end
    result = run(tmp_path, resume_from_checkpoint="last")
    assert result.returncode == 0, result.stderr[-3000:]
    resumed = losses(tmp_path)
    assert sorted(resumed) == sorted(uninterrupted)
    assert max(abs(resumed[step] - uninterrupted[step]) for step in resumed) <= 1e-6


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path) -> None:
    last_complete_checkpoint = load_recipe("recipe_parts").last_complete_checkpoint
    (tmp_path / "checkpoint-9").mkdir()
    complete = tmp_path / "checkpoint-3"
    complete.mkdir()
    (complete / "trainer_state.json").write_text("{}")
    assert last_complete_checkpoint(tmp_path) == complete
    (complete / "trainer_state.json").unlink()
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        last_complete_checkpoint(tmp_path)


def test_yaml_and_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse_arguments = load_recipe("llama_long_context").parse_arguments
    config = tmp_path / "run.yaml"
    config.write_text("model: 550M\ncontext_length: 100\nlearning_rate: 1.0e-4\n")
    recipe, training = parse_arguments(["--config", str(config), "--context_length", "200"])
    assert (recipe.model, training.context_length, training.learning_rate) == ("550M", 200, 1e-4)
    recipe, training = parse_arguments([])
    assert (recipe.model, training.context_length, training.gradient_accumulation_steps) == ("tiny", 4096, 4)

    _, training = parse_arguments(["--pp_size", "2"])  # the demonstration plans for 4 stages where there is no pipeline
    assert training.packing_config(1).pp_size == 2
    _, training = parse_arguments(["--pp_size", "1"])
    assert training.packing_config(1).pp_size == 4

    def refused(argv: list[str]) -> str:
        with pytest.raises(SystemExit):
            parse_arguments(argv)
        return capsys.readouterr().err

    for broken, sentence in (("a: [", "is not valid YAML"), ("only words", "must hold settings")):
        config.write_text(broken)
        assert sentence in refused(["--config", str(config)])
    config.write_text("contxt_length: 100\n")
    assert "unknown settings: contxt_length" in refused(["--config", str(config)])
    assert "there is no file" in refused(["--config", str(tmp_path / "absent.yaml")])
    assert "needs a file" in refused(["--config"])
    assert "below context_length" in refused(["--max_tokens_per_micro_batch", "10"])
    assert "thresholds must ascend" in refused(["--packer", "wlb", "--outlier_thresholds", "9", "5"])
    assert "plans for fewer stages than there are" in refused(["--pp_size", "4", "--plan_pp_size", "2"])
    assert "contradicts system='plain-4d'" in refused(["--system", "plain-4d", "--packer", "steady"])


def test_wrong_input_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path / "out", cp_size=2)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    sentence = "cp_size=2 does not divide the 1 process that runs; start 2 of them"
    assert sentence in result.stderr.strip().splitlines()[-1]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "a"}\n')
    absent = tmp_path / "absent.jsonl"
    assert "There is no file or folder" in refusal(tmp_path / "out", capsys, dataset=absent)
    assert "body" in refusal(tmp_path / "out", capsys, dataset=rows)


def test_a_model_without_a_tokenizer_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    preset_config("tiny").save_pretrained(model)
    rows.write_text(json.dumps({"text": "one two three"}) + "\n")
    sentence = f"There is no tokenizer in {model}; give the folder or name of one as --tokenizer."
    assert refusal(tmp_path / "out", capsys, model=model, dataset=rows) == f"error: {sentence}"
    # Negative control: with one in its place it is read.
    train_byte_level_bpe(["one two three"] * 9, vocab_size=300).save_pretrained(model)
    found = load_recipe("recipe_parts").load_tokenizer(str(model))
    assert found.decode(found("one two three")["input_ids"], skip_special_tokens=True) == "one two three"


def test_empty_documents_are_skipped_and_a_run_without_logs_ends(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *["one two three " * 40] * 12]))
    result = run(tmp_path / "out", dataset=rows, empty_documents="skip", max_steps=1, logging_steps=9, warmup_steps=0)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "out" / "micro_batch_workloads.png").is_file()
