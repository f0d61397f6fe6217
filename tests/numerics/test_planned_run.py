"""What ``hf-wlb plan`` writes starts the recipe: read as arguments, and run on two processes of the CPU."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from hf_wlb.analysis.launch_files import RunFiles
from hf_wlb.lengths import sample_lengths
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.paper import shape_of
from hf_wlb.simulator.plan_result import PlanResult
from hf_wlb.simulator.plan_trials import planned_system
from hf_wlb.simulator.planner import QUICK, search
from hf_wlb.simulator.stream import packing_config
from tests.support.recipes import load_recipe
from tests.support.scripts import quiet_environment
from tests.support.source_tree import REPOSITORY

LENGTHS = np.maximum(sample_lengths(2000) // 128, 1)
STEPS = 2


def planned(gpus: int) -> PlanResult:
    return search(shape_of("tiny"), gpus, LENGTHS, 1024, CLUSTERS["h100"], micro_batches=8, keep=100, effort=QUICK)


def written(result: PlanResult, place: int, folder: Path) -> RunFiles:
    files = RunFiles(result.choices[place], "tiny", 512, gpus_per_node=8, made_by="hf-wlb plan")
    files.write(folder)
    return files


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return planned(2)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("gpus", [2, 16])
def test_files_of_every_choice_are_understood(gpus: int, result: PlanResult, tmp_path: Path) -> None:
    found = result if gpus == 2 else planned(gpus)
    recipe = load_recipe("llama_long_context")
    assert len(found.choices) >= 3
    assert gpus != 2 or {choice.prediction.training.split.fsdp for choice in found.choices} == {False, True}
    for place, choice in enumerate(found.choices):
        training, split = choice.prediction.training, choice.prediction.training.split
        files = written(found, place, tmp_path / str(place))
        words = shlex.split(files.commands(tmp_path / str(place))[0])
        launch, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert (launch.num_processes, launch.num_machines, launch.multi_gpu) == (gpus, -(-gpus // 8), True)
        own, args = recipe.parse_arguments([*launch.training_script_args, "--use_cpu"])
        sizes, sharding = args.parallel_sizes(gpus), args.sharding_config()
        packing = args.packing_config(sizes.dp)
        predicted = packing_config(
            planned_system(training),
            choice.model,
            training.micro_batches_per_replica,
            training.max_tokens_per_micro_batch,
        )
        assert packing == predicted and packing.sharded_parameters is split.fsdp
        assert packing.step_time.lockstep is (split.fsdp and split.pp_size == 1 and split.dp_size > 1)
        assert (sizes.tp, sizes.cp, sizes.pp, sizes.dp) == (
            split.tp_size,
            split.cp_size,
            split.pp_size,
            split.dp_size,
        )
        assert args.shard_parameters is split.fsdp
        assert packing.tokens_per_step == 8 * 1024 and packing.packer == "steady"
        assert packing.s_max == training.max_tokens_per_micro_batch
        assert (packing.least_outlier, packing.max_time_gap) == (training.outlier_tokens, training.max_time_gap)
        assert sharding.strategy == training.sharding and own.dataset == "./my-documents.jsonl"
        workload = args.workload_model(None)
        assert workload.document(700) == pytest.approx(choice.model.workload.document(700))


def test_two_processes_train_as_planned(result: PlanResult, tmp_path: Path) -> None:
    shared = next(place for place, choice in enumerate(result.choices) if choice.prediction.training.split.cp_size == 2)
    files = written(result, shared, tmp_path)
    words = shlex.split(files.commands(tmp_path)[0])
    words = words[: words.index("--dataset")]  # the standard library's
    options = {
        "max_steps": STEPS,
        "max_documents": 40,
        "preprocessing_workers": 1,
        "warmup_steps": 0,
        "save_strategy": "no",
        "torch_compile": False,
        "disable_tqdm": True,
        "output_dir": tmp_path / "run",
    }
    words += ["--use_cpu", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
    environment = {**quiet_environment(), "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words[1:]]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dp 1 x cp 2, sharding: adaptive" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == STEPS and all(5.5 < loss < 7.0 for loss in losses)  # about ln 512
    assert all(row["tokens"] <= 1.25 * 8 * 1024 for row in rows if "tokens" in row)
