"""``hf-wlb plan``: its tables, the files it writes, what it refuses, and its picture."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from matplotlib.text import Text
from rich.console import Console
from typer.testing import CliRunner

from hf_wlb.analysis.inputs import LengthSource, read_lengths
from hf_wlb.analysis.launch_files import RunFiles, yaml_value
from hf_wlb.analysis.plan_tables import plan_tables
from hf_wlb.cli import app
from hf_wlb.cli.text import TextOptions
from hf_wlb.lengths import sample_lengths
from hf_wlb.plots import PlanPoint, plot_plan
from hf_wlb.plots import plan as picture
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.paper import shape_of
from hf_wlb.simulator.plan_result import PlanResult
from hf_wlb.simulator.planner import QUICK, search
from hf_wlb.workload import AnalyticWorkload, load_workload
from tests.support.source_tree import REPOSITORY

SMALL = ["--quick", "--model", "tiny", "--gpus", "2", "--context", "1024", "--micro-batches", "4"]
LENGTHS = np.maximum(sample_lengths(3000) // 128, 1)


@pytest.fixture(scope="module")
def lengths_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lengths.json"
    path.write_text(json.dumps(LENGTHS.tolist()))
    return path


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return search(shape_of("7B"), 16, sample_lengths(2000), 32_768, CLUSTERS["h100"], micro_batches=16, effort=QUICK)


def run(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def text_of(found) -> str:
    return " ".join(found.stdout.split())


def files_of(result: PlanResult, **options: Any) -> RunFiles:
    given = {"model": "7B", "vocab_size": 32_000, "gpus_per_node": 8, "made_by": "hf-wlb plan", **options}
    return RunFiles(result.best, **given)


# ---- the command ----


def test_it_plans_and_writes_what_starts_the_run(lengths_file, tmp_path) -> None:
    folder, written = tmp_path / "my plan", tmp_path / "plan.json"
    found = run(*SMALL, "--data", lengths_file, "--output", folder, "--json", written, "--png", tmp_path / "plan.png")
    assert found.exit_code == 0, found.output
    text = text_of(found)
    for part in ("Best: TP", "over Plain-4D", "4 micro-batches, 4,096 tokens", "Searched: 12 ways", "lengths.json"):
        assert part in text
    content = json.loads(written.read_text())
    assert content["schema"] == "hf_wlb.plan/1" and content["tokens_per_step"] == 4096
    best = content["choices"][0]
    launch, settings = (yaml.safe_load((folder / name).read_text()) for name in ("launch.yaml", "train.yaml"))
    assert (launch["num_processes"], launch["num_machines"], launch["mixed_precision"]) == (2, 1, "bf16")
    for name in ("context_length", "max_tokens_per_micro_batch", "outlier_tokens", "max_time_gap"):
        assert settings[name] == best["training"][name]
    for name in ("tp_size", "cp_size", "pp_size", "fsdp", "gradient_checkpointing"):
        assert settings[name] == best["training"][name]
    assert settings["gradient_accumulation_steps"] * best["training"]["dp_size"] == 4
    assert settings["learning_rate"] == 2e-5 and settings["model"] == "tiny"
    assert settings["workload_profile"] == (folder / "workload.json").as_posix()
    assert isinstance(load_workload(folder / "workload.json"), AnalyticWorkload)
    command = next(line for line in found.stdout.splitlines() if "accelerate launch" in line)
    words = shlex.split(command)
    assert words[:3] == ["accelerate", "launch", "--config_file"] and Path(words[3]) == folder / "launch.yaml"
    assert words[4:6] == ["recipes/llama_long_context.py", "--config"] and Path(words[6]) == folder / "train.yaml"
    assert (REPOSITORY / words[4]).is_file() and words[7:] == ["--dataset", "./my-documents.jsonl"]
    assert imread(tmp_path / "plan.png").shape[0] > 300


def test_files_that_are_there_stay(lengths_file, tmp_path) -> None:
    kept = tmp_path / "train.yaml"
    kept.write_text("mine: 1\n")
    given = [*SMALL, "--data", lengths_file, "--output", tmp_path]
    found = run(*given)
    assert found.exit_code == 2 and "train.yaml is in" in found.stderr and "--overwrite" in found.stderr
    assert kept.read_text() == "mine: 1\n" and not (tmp_path / "launch.yaml").exists()
    assert run(*given, "--overwrite").exit_code == 0
    assert "context_length: 1024" in kept.read_text()
    found = run(*SMALL, "--output", kept)
    assert found.exit_code == 2 and "is a file" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "abacus"], "--cluster must be one of h100, h100-flash-attn-4, got 'abacus'"),
        (["--gpus", "12"], "12 GPUs do not make whole nodes of 8"),
        (["--gpus", "4", "--gpus-per-node", "3"], "do not make whole nodes of 3"),
        (["--memory-gb", "5"], "Nothing fits: on 2 GPUs"),
        (["--memory-gb", "-1"], "memory_bytes of 'h100' must be above 0"),
        (["--context", "0"], "context_length must be a whole number"),
        (["--data", "./nowhere.json"], "no file or folder"),
        (["--profile", "./nowhere.json"], "nowhere.json"),
        (["--json", "no/such/folder/a.json"], "there is no folder"),
        (["--png", "no/such/folder/a.png"], "there is no folder"),
        (["--png", "."], ". cannot be written: it is a folder"),
    ],
)
def test_what_is_wrong_gets_one_sentence(arguments, sentence, tmp_path, lengths_file) -> None:
    given = [] if "--data" in arguments else ["--data", lengths_file]
    found = run(*SMALL, *given, "--output", tmp_path / "out", *arguments)
    assert found.exit_code == 2 and sentence in found.stderr, found.output
    assert "Traceback" not in found.output and len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_folders_in_the_place_of_files_are_noticed_before_the_work(monkeypatch, tmp_path) -> None:
    begun: list[object] = []
    monkeypatch.setattr(TextOptions, "read", lambda *given: begun.append(given) or read_lengths(None))
    for option in ("--png", "--json"):
        assert run(*SMALL, option, tmp_path, "--output", tmp_path / "out").exit_code == 2
    assert not begun
    given = [*SMALL, "--png", tmp_path / "a.png", "--output", tmp_path / "out"]
    assert run(*given).exit_code == 0 and begun  # negative control


def test_documents_above_the_context_are_said(tmp_path) -> None:
    data, written = tmp_path / "lengths.json", tmp_path / "plan.json"
    data.write_text(json.dumps([*LENGTHS.tolist(), 1024, 1025, 4000]))
    found = run(*SMALL, "--data", data, "--output", tmp_path / "out", "--json", written)
    longer = (LENGTHS > 1024).sum() + 2
    pieces = (-(-LENGTHS[LENGTHS > 1024] // 1024)).sum() + 2 + 4
    assert (
        f"{longer} of 3,003 documents are longer than the context and are split at every 1,024 tokens into {pieces} "
        "pieces in all"
    ) in text_of(found)
    said = json.loads(written.read_text())["longer_documents"]
    counts = {"limit": 1024, "documents": 3003, "longer": longer, "pieces": pieces}
    assert said == {**counts, "given": 3003, "repeated": False}
    settings = yaml.safe_load((tmp_path / "out" / "train.yaml").read_text())
    assert settings["max_document_tokens"] == 1024  # and so the trainer does


def test_a_saved_workload_is_no_profile(tmp_path) -> None:
    AnalyticWorkload.from_crossover(1000).save(tmp_path / "w.json")
    found = run(*SMALL, "--profile", tmp_path / "w.json", "--output", tmp_path / "out")
    assert found.exit_code == 2 and "is a saved workload model and no measured profile" in found.stderr


# ---- tables ----


def test_tables_fit_a_terminal(result: PlanResult) -> None:
    console = Console(width=80, record=True)
    for part in plan_tables(result, "7B", "made up", "h100"):
        console.print(part)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut off
    flat = " ".join(text.split())
    for choice in result.choices:
        assert choice.prediction.training.split.label in flat
        assert f"{choice.prediction.tokens_per_second:,.0f}" in flat
        assert f"{result.gain_over_best_plain(choice):.2f}x" in flat
    assert f"{result.plain.tokens_per_second:,.0f}" in flat and "left out: more memory than a GPU has" in flat


# ---- files ----


def test_several_machines_get_a_launch_file_and_commands_of_their_own(result: PlanResult, tmp_path) -> None:
    files = files_of(result)
    launch = yaml.safe_load(files.launch_text())
    example = yaml.safe_load((REPOSITORY / "recipes" / "launch" / "several_nodes.yaml").read_text())
    assert set(launch) == set(example)
    assert (launch["num_machines"], launch["num_processes"]) == (2, 16)
    first, last = files.commands(Path("plan"))
    assert "--machine_rank 0 --main_process_ip ADDRESS_OF_MACHINE_0" in first and "--machine_rank 1 " in last
    slurm = shlex.split(files.slurm_command(Path("plan")))
    assert slurm[:5] == ["sbatch", "--nodes", "2", "--gpus-per-node", "8"]
    assert slurm[5] == "recipes/slurm/train.sbatch" and (REPOSITORY / slurm[5]).is_file()
    one = files_of(result, gpus_per_node=16)
    assert one.nodes == 1 and len(one.commands(tmp_path)) == 1
    single = yaml.safe_load((REPOSITORY / "recipes" / "launch" / "one_node_8_gpus.yaml").read_text())
    assert {**yaml.safe_load(one.launch_text()), "num_processes": 8} == single


def test_arguments_hold_the_whole_plan(result: PlanResult) -> None:
    training = result.best.prediction.training
    text = files_of(result, text={"tokenizer": "./tok", "max_documents": 9}, vocab_size=None).arguments_text(Path("p"))
    settings = yaml.safe_load(text)
    assert text.startswith("# Written by: hf-wlb plan\n") and "Predicted, not measured" in text
    assert settings["tokenizer"] == "./tok" and settings["max_documents"] == 9 and "vocab_size" not in settings
    assert settings.get("pp_stage_layers") == (list(training.stage_layers) if training.split.pp_size > 1 else None)
    assert settings["torch_compile"] is result.best.model.compiled is True


def test_files_and_commands_hold_no_relative_paths(result: PlanResult, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    files, folder = files_of(result, gpus_per_node=16), Path("plan2")
    files.write(folder)
    settings = yaml.safe_load((folder / "train.yaml").read_text())
    words = [shlex.split(command) for command in (*files.commands(folder), files.slurm_command(folder))]
    monkeypatch.chdir(REPOSITORY)  # from where it is run
    assert settings["workload_profile"] == str(tmp_path / "plan2" / "workload.json")
    assert Path(settings["workload_profile"]).is_file()
    assert [Path(each[each.index("--config") + 1]).is_file() for each in words] == [True, True]
    assert Path(words[0][words[0].index("--config_file") + 1]).is_file()
    assert not Path("plan2/train.yaml").exists()  # negative control: what was written before is not found


def test_what_was_given_is_found_from_another_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text("")
    Path("model").mkdir()
    Path("tok").mkdir()
    monkeypatch.setattr(TextOptions, "read", lambda *given: LengthSource(LENGTHS, "made up", has_documents=True))
    monkeypatch.setattr("hf_wlb.cli.plan.shape_or_config", lambda name: shape_of("tiny"))
    own = ["--model", "model", "--data", "docs.jsonl", "--tokenizer", "tok", "--output", "plan2"]
    found = run(*SMALL, *own)
    assert found.exit_code == 0, found.output
    settings = yaml.safe_load(Path("plan2/train.yaml").read_text())
    assert (settings["model"], settings["tokenizer"]) == (str(tmp_path / "model"), str(tmp_path / "tok"))
    words = shlex.split(next(line for line in found.stdout.splitlines() if "accelerate launch" in line))
    assert words[words.index("--dataset") + 1] == str(tmp_path / "docs.jsonl")
    # Names stay as they are.
    named = ["--model", "tiny", "--data", "some/data", "--tokenizer", "some/tokenizer", "--output", "plan3"]
    found = run(*SMALL, *named)
    settings = yaml.safe_load(Path("plan3/train.yaml").read_text())
    assert (settings["model"], settings["tokenizer"]) == ("tiny", "some/tokenizer")
    assert "--dataset some/data" in found.stdout


VALUES = [True, False, 0, 7, 2e-5, 1e22, 0.95, 1.0, [9, 8], ["a", "true"]]
WORDS = ["none", "no", "on", "1e5", "12", "a: b", "it's", "a#b", "", "./x y", "-a"]


@pytest.mark.parametrize("value", [*VALUES, *WORDS])
def test_values_come_back_from_yaml(value: Any) -> None:
    found = yaml.safe_load(f"name: {yaml_value(value)}")["name"]
    assert found == value and type(found) is type(value)


# ---- the picture ----


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures as they are saved."""
    found: list[Any] = []
    save = picture.save
    monkeypatch.setattr(picture, "save", lambda figure, path: found.append(figure) or save(figure, path))
    return found


BOUNDS = [PlanPoint(10.0 * place, 1e5 * place) for place in range(1, 30)]
OURS = [(PlanPoint(60, 4e5, "TP1 CP8"), PlanPoint(50, 2e5)), (PlanPoint(30, 3e5), PlanPoint(29, 1e5))]


def test_the_picture_says_what_is_best_and_where_memory_ends(tmp_path, figures) -> None:
    path = plot_plan(BOUNDS, OURS, PlanPoint(40, 2.5e5, "TP4"), tmp_path / "a" / "plan.png", limit_gb=72, title="T")
    assert imread(path).shape[1] > 600
    words = "\n".join(each.get_text() for each in figures[0].findobj(Text))
    for part in ("TP1 CP8\n400K tokens/s, 1.60x", "Plain-4D: TP4\n250K tokens/s", "above 72 GB"):
        assert part in words
    assert "(18 more ways further to the right)" in words  # 120 to 290 GB
    first = path.read_bytes()
    again = plot_plan(BOUNDS, OURS, PlanPoint(40, 2.5e5, "TP4"), tmp_path / "b.png", limit_gb=72, title="T")
    assert again.read_bytes() == first


def test_what_cannot_be_drawn_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no plan to draw"):
        plot_plan(BOUNDS, [], PlanPoint(1, 1), tmp_path / "x.png", limit_gb=72)
    with pytest.raises(ValueError, match="above 0 GB, got 0"):
        plot_plan(BOUNDS, OURS, PlanPoint(1, 1), tmp_path / "x.png", limit_gb=0)
