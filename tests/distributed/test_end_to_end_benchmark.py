"""The end-to-end benchmark's whole way through, tiny, on two gloo processes."""

import io
import json
import math
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from hf_wlb.presets import MODEL_PRESETS
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.measured import read_measured
from hf_wlb.simulator.validation import check_launch, step_model
from tests.support.scripts import quiet_environment, run_script
from tests.support.source_tree import REPOSITORY
from tests.support.training import arguments

FOLDER = REPOSITORY / "recipes" / "benchmarks"
VARIANTS = {"pp2": ("plain-4d", "wlb"), "cp2": ("plain-4d", "wlb", "wlb, not placed")}
SPLITS = {"pp2": ("2", "1"), "cp2": ("1", "2")}
ON_CPU = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}


def words(split: str, output: Path, pictures: Path, *more: str) -> list[str]:
    """The command line of a launch with a round; options given in ``more`` count instead of others."""
    pp_size, cp_size = SPLITS[split]
    command = ["end_to_end.py", "--quick", "--use-cpu", "--pp_size", pp_size, "--cp_size", cp_size]
    command += ["--rounds", "1", "--warmups", "1", "--output", str(output), "--pictures", str(pictures)]
    return [*command, "--only", *VARIANTS[split], *more]


def started(split: str, output: Path, pictures: Path) -> str:
    """What a launch printed that Python and torchrun started."""
    environment = {**quiet_environment(), **ON_CPU, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *words(split, output, pictures)]
    done = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def benchmark(split: str, output: Path, pictures: Path, *more: str) -> str:
    """What a launch printed; its processes are forked, and all around them is done here."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(str(FOLDER))
        import end_to_end

        def launch(job: Any, folder: Path) -> int:
            file = folder / "job.json"
            job.save(file)
            done = run_script(end_to_end.RUN, file, processes=job.processes, environment=ON_CPU, timeout_s=400)
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
            return done.returncode

        patch.setattr(end_to_end, "launch", launch)
        patch.setattr(sys, "argv", words(split, output, pictures, *more))
        assert end_to_end.main() == 0
    return printed.getvalue()


def rows_of(output: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return [row for row in rows if row["kind"] == "launch"], [row for row in rows if row["kind"] == "step"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Two launches of a pipeline into one file: (what the second printed, the file, the pictures)."""
    folder = tmp_path_factory.mktemp("end_to_end")
    benchmark("pp2", folder / "results.jsonl", folder)
    return benchmark("pp2", folder / "results.jsonl", folder), folder / "results.jsonl", folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A launch of two context-parallel ranks, by torchrun: (what it printed, the file)."""
    folder = tmp_path_factory.mktemp("end_to_end_shards")
    return started("cp2", folder / "results.jsonl", folder), folder / "results.jsonl"


def check_steps(steps: list[dict[str, Any]], spans: int) -> None:
    entropy = math.log(MODEL_PRESETS["tiny"].vocab_size)
    for step in steps:
        assert step["loss"] == pytest.approx(entropy, rel=0.05)  # of random tokens and random weights
        lengths = [length for replica in step["micro_batch_lengths"] for row in replica for length in row]
        assert (step["tokens"], step["documents"], step["longest"]) == (sum(lengths), len(lengths), max(lengths))
        assert len(step["spans"]) == 2
        for moments in step["spans"]:
            assert len(moments) == spans and moments == sorted(moments)
            assert moments[0] >= 0 and moments[-1] <= step["seconds"] + 1e-4


def test_launches_go_on_with_other_steps(pipeline: tuple[str, Path, Path]) -> None:
    launches, steps = rows_of(pipeline[1])
    assert [launch["first_round"] for launch in launches] == [0, 1]
    assert launches[0]["stage_of_rank"] == [0, 1] and launches[0]["stage_layers"] == [1, 1]
    counted = [step for step in steps if step["round"] >= 0]
    assert Counter(step["variant"] for step in counted) == {"plain-4d": 2, "wlb": 2}
    assert len({(step["variant"], step["step"]) for step in counted}) == 4
    assert sum(step["round"] < 0 for step in steps) == 2
    check_steps(steps, spans=4 * 2 * 2)


def test_a_pipeline_s_figures_and_picture_are_there(pipeline: tuple[str, Path, Path]) -> None:
    printed, _, folder = pipeline
    result = json.loads(printed.rstrip().splitlines()[-1].removeprefix("RESULT "))
    label = "pp2_0.5k_reference_m4"
    assert result[f"speedup_{label}"] > 0 and 0 < result["planning_share"] < 1
    assert (folder / f"end_to_end_{label}.png").stat().st_size > 5_000


def test_the_simulator_predicts_what_is_written(pipeline: tuple[str, Path, Path], shards: tuple[str, Path]) -> None:
    for file, split, steps in ((pipeline[1], "TP1 CP1 PP2 DP1", 2), (shards[1], "TP1 CP2 PP1 DP1", 1)):
        rows = [row for row in rows_of(file)[1] if row["round"] >= 0]
        launches = read_measured(file.read_text())
        assert [launch.split.label for launch in launches] == [split] * steps
        for launch in launches:
            check = check_launch(launch, step_model(launch, CLUSTERS["h100"]))
            for variant in check.variants:
                assert variant.measured in [row["seconds"] for row in rows if row["variant"] == variant.name]
                assert 0 < variant.predicted < variant.measured  # on an H100


def test_context_parallel_ranks_share_micro_batches_as_their_variant_says(shards: tuple[str, Path]) -> None:
    _, steps = rows_of(shards[1])
    check_steps(steps, spans=4 * 2)
    counted = {step["variant"]: step for step in steps if step["round"] >= 0}
    assert set(counted) == set(VARIANTS["cp2"])
    assert counted["plain-4d"]["cp_per_sequence"] == 1.0
    assert counted["wlb"]["cp_placed"] > 0 == counted["wlb, not placed"]["cp_placed"]
    assert counted["wlb"]["step"] == counted["wlb, not placed"]["step"]
    assert counted["wlb"]["loss"] == pytest.approx(counted["wlb, not placed"]["loss"], rel=1e-2)
    assert min(step["shard_seconds"] for step in counted.values()) > 0


@pytest.mark.parametrize("system", ["plain-4d", "fixed-4d", "wlb"])
def test_systems_are_what_the_trainer_makes_of_their_names(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from end_to_end_cases import VARIANTS as KNOWN

    found = next(variant for variant in KNOWN if variant.name == system)
    args = arguments(tmp_path, system=system)
    assert (args.packer, args.cp_strategy) == (found.packer, found.sharding)


@pytest.mark.parametrize(("micro_batches", "pp_size"), [(1, 2), (4, 4), (8, 4), (3, 2)])
def test_spans_come_in_the_order_of_the_schedule(
    micro_batches: int, pp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.pipe import schedule

    monkeypatch.syspath_prepend(str(FOLDER))
    from end_to_end_report import order_of

    for stage in range(pp_size):
        counts = {True: 0, False: 0}
        expected = []
        for instructions in schedule.TrainSchedule(micro_batches, pp_size, stage).steps():
            for instruction in instructions:
                forward = type(instruction) is schedule.ForwardPass
                if forward or type(instruction) is schedule.BackwardPass:
                    expected.append((counts[forward], forward))
                    counts[forward] += 1
        assert order_of(micro_batches, pp_size, stage) == expected


def test_a_profile_without_an_exchange_gets_the_simulator_s_price(tmp_path: Path) -> None:
    """Of one GPU, which could measure none: ranks that share micro-batches are to be planned for all the same."""
    profile = str(FOLDER / "results" / "profile_7B_flash-attn-4.json")
    benchmark("cp2", tmp_path / "results.jsonl", tmp_path, "--only", "wlb", "--profile", profile)
    (launch,), steps = rows_of(tmp_path / "results.jsonl")
    workload = launch["workload"]
    assert workload["metadata"]["exchange"] == "simulated, h100"
    assert {entry["operation"] for entry in workload["collectives"]} == {"all_gather", "key_value_exchange"}
    assert launch["settings"]["profile"] == "profile_7B_flash-attn-4"
    check_steps(steps, spans=4 * 2)
