"""``hf-wlb stages``: what it prints and writes, and what it refuses. Costs come from files here."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_wlb.analysis.stages import analyze_stages
from hf_wlb.cli import app
from hf_wlb.staging import StageCosts, pipeline_seconds
from tests.unit.test_cli_sharding import rows_of

COSTS = StageCosts((0.002,) * 8, before=0.001, after=0.005, source="by hand")


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.to_dict()))
    return path


def run(*arguments: object, columns: int = 80):
    return CliRunner().invoke(app, ["stages", *map(str, arguments)], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize("columns", [80, 120])
def test_every_stage_has_a_row(costs_file, columns) -> None:
    result = run("--costs", costs_file, "--pp", 2, "--layers", "6,2", columns=columns)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "Costs: by hand" in result.stdout
    assert "8 layers of 2 ms, embedding 1 ms, head and loss 5 ms" in " ".join(result.stdout.split())
    # Balanced, 11 ms each: the embedding and five layers, three layers and the head.
    assert rows_of(result.stdout, "Stages, balanced") == [
        ["0", "0-4", "5", "11.0", "50.0%", "1.000", "9.1%"],
        ["1", "5-7", "3", "11.0", "50.0%", "1.000", "45.5%"],
    ]
    assert rows_of(result.stdout, "Stages, given") == [
        ["0", "0-5", "6", "13.0", "59.1%", "1.182", "7.7%"],
        ["1", "6-7", "2", "9", "40.9%", "0.818", "55.6%"],
    ]
    assert "Balanced: --pp_stage_layers 5 3; " in result.stdout


def test_layouts_are_compared_by_the_time_of_a_step(costs_file) -> None:
    result = run("--costs", costs_file, "--pp", 2, "--layers", "6,2", "--micro-batches", 10)
    balanced, equal, given = rows_of(result.stdout, "A step of 10 micro-batches")
    assert balanced == ["balanced", "5,3", "1.000", "121.0", "9.1%"]  # (10 + 2 - 1) x 11 ms, of which 1 / 11
    assert equal == ["equal", "layers", "4,4", "1.182", "139.0", "20.9%"]  # 9 ms to fill and drain, 10 x 13
    # 10 x 13 ms, 4 2/3 for the first backward to come and 1/3 for the last: stage 1 needs 9 from a forward's end to it.
    assert given == ["given", "6,2", "1.182", "135.0", "18.5%"]
    assert "1.15x over equal layers" in result.stdout
    one = run("--costs", costs_file, "--pp", 2, "--micro-batches", 1).stdout
    assert rows_of(one, "A step of 1 micro-batch")[0] == ["balanced", "5,3", "1.000", "22.0", "50.0%"]
    assert "A step of 8 micro-batches" in run("--costs", costs_file, "--pp", 2).stdout


def test_stages_of_equal_cost_take_what_a_pipeline_takes() -> None:
    even = StageCosts((1.0,) * 6, 0.0, 0.0, "by hand")
    for checkpointing, ratio in ((False, 2.0), (True, 3.0)):
        found = analyze_stages(even, 3, 5, gradient_checkpointing=checkpointing).balanced
        assert found.step_seconds == pytest.approx(pipeline_seconds([2.0] * 5, 3, ratio))
        assert found.waiting == pytest.approx(2 / 7) and found.imbalance == 1.0


def test_the_file_is_read_back(costs_file, tmp_path) -> None:
    written = tmp_path / "written.json"
    assert run("--costs", costs_file, "--pp", 2, "--layers", "6,2", "--json", written).exit_code == 0
    assert StageCosts.load(written) == COSTS
    content = json.loads(written.read_text())
    assert content["schema"] == "hf_wlb.stage_costs/1"
    found = content["analysis"]
    assert (found["pp_size"], found["micro_batches"]) == (2, 8)
    assert [entry["name"] for entry in found["layouts"]] == ["balanced", "equal layers", "given"]
    assert found["layouts"][0]["pp_stage_layers"] == [5, 3]
    assert found["layouts"][2]["seconds"] == pytest.approx([0.013, 0.009])
    again = run("--costs", written, "--pp", 2, "--layers", "6,2")
    assert again.stdout == run("--costs", costs_file, "--pp", 2, "--layers", "6,2").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give either --model, whose costs are counted or measured, or --costs"),
        (["--model", "7B", "--costs", "FILE"], "Give either --model, whose costs are counted or measured, or --costs"),
        (["--costs", "FILE", "--measure"], "--costs says what the parts cost; leave --measure and --hardware out"),
        (["--costs", "FILE", "--hardware", "h100"], "--costs says what the parts cost; leave"),
        (["--model", "7B", "--hardware", "h100", "--measure"], "give one of them"),
        (["--model", "7B", "--dtype", "float32"], "say how to measure; give --measure, too"),
        (["--costs", "nowhere.json"], "There is no stage costs file nowhere.json"),
        (["--costs", "FILE", "--pp", "9"], "pp_size=9 is more than the model's 8 layers"),
        (["--costs", "FILE", "--pp", "0"], "pp_size must be a whole number of at least 1, got 0"),
        (["--costs", "FILE", "--pp", "2", "--layers", "5,x"], "--layers must be one whole number a stage"),
        (["--costs", "FILE", "--pp", "2", "--layers", "5,4"], "adds up to 9 layers, but the model has 8"),
        (["--costs", "FILE", "--pp", "2", "--layers", "8"], "names 1 stage, but pp_size=2"),
        (["--costs", "FILE", "--json", "no/such/folder/a.json"], "there is no folder"),
    ],
)
def test_errors_are_one_sentence(costs_file, arguments, sentence) -> None:
    result = run(*(costs_file if argument == "FILE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert sentence in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_step_has_micro_batches() -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="A step must have at least 1 micro-batch"):
            analyze_stages(COSTS, 2, wrong)
