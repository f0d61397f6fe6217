"""Launches in which one rank fails: all of it ends soon, with one message that names rank and step, and resumes."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_training import (
    CASES,
    DECIDED,
    RANKS,
    SLOWNESS_S,
    STEP,
    STEPS,
    WITH_AGENT,
    fault_time,
)
from tests.support.source_tree import REPOSITORY

_ENDS_WITHIN_S = 60.0
_MARK = "HF_WLB_TEST_LAUNCH"
_MODULE = "tests.support.faulty_training"


class Finished:
    """A command that ended, when (by the clock that all processes share), and the processes that it left."""

    def __init__(self, *command: str, timeout_s: float = 240) -> None:
        mark = uuid.uuid4().hex
        environment = {**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=REPOSITORY, env=environment, text=True, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.code, self.output, self.seconds = done.returncode, done.stdout, time.monotonic()
        self.left = _processes_with(mark)


def _processes_with(mark: str) -> list[str]:
    """Commands of the processes that were started with this mark in their environment, and still run after a while."""
    until = time.monotonic() + 10  # data loader workers look for their parent every few seconds
    while found := [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, mark)]:
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    return [(path.parent / "cmdline").read_text().replace("\0", " ") for path in found]


def _has(path: Path, mark: str) -> bool:
    try:
        return f"{_MARK}={mark}".encode() in path.read_bytes()
    except OSError:  # it ended, or is not ours
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def killed(folder: Path) -> Finished:
    found = Finished(
        "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint",
        "127.0.0.1:0", "-m", _MODULE, "killed", str(folder),
    )  # fmt: skip
    found.seconds -= fault_time("killed", folder)
    return found


@pytest.fixture(scope="module")
def launches(folder: Path, killed: Finished) -> dict[str, Any]:
    """Every case, launched without torchrun; rank by rank, exit codes and output."""
    cases = [case for case in CASES if case != "killed"]
    found = Finished("-m", _MODULE, "--launch", str(folder), *cases, "killed")  # after it was resumed from
    assert found.code == 0 and found.left == [], found.output
    outcomes: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


def result_of(case: str, folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"{case}_{rank}.json").read_text())


def test_a_rank_is_killed_under_torchrun(killed: Finished) -> None:
    assert killed.code != 0 and killed.seconds < _ENDS_WITHIN_S and killed.left == []
    cause = f"Rank 1 was killed or ended without a word in step {STEP}."
    # The agent ends rank 0 in its collective, if that has not broken by then.
    endings = ("stops for that reason", "was waiting and is ended")
    (said,) = said_in(killed.output)
    assert said in [f"hf_wlb: {cause} (This is rank 0 in step {STEP}, which {ending}.)" for ending in endings]


def said_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("hf_wlb: ")]


@pytest.mark.parametrize("case", WITH_AGENT)
def test_a_rank_raises_under_an_agent(case: str, launches: dict[str, Any]) -> None:
    found = launches[case]
    assert found["codes"] == [1] and found["seconds"] < _ENDS_WITHIN_S
    (output,) = found["outputs"]
    (said,) = said_in(output)
    assert said.startswith(f"hf_wlb: Rank 1 failed in step {STEP}: OSError: the disk is full (This is rank 0 in step")
    assert "OSError: the disk is full\n" in output
    assert f"This is rank 1 in step {STEP}; the other ranks are told and stop." in output


#: What rank 0 says by which failure of rank 1, as a pattern, and their exit codes.
SAID: dict[str, tuple[str, list[int]]] = {
    "memory": (rf"Rank 1 failed in step {STEP}: OutOfMemoryError: CUDA out of memory\. Tried to allocate", [1, 1]),
    "killed": (rf"Rank 1 was killed or ended without a word in step {STEP}\.", [1, -9]),
    "token": (rf"Rank 1 failed in step {STEP}: ValueError: the input_ids hold 128, but the model's vocabulary", [1, 1]),
    # Noticed at once, or when its next micro-batch is asked for.
    "worker": (rf"Rank 1 failed in step [{STEP}{STEP + 1}]: RuntimeError: DataLoader worker \(pid", [1, 1]),
    "plans": (r"RuntimeError: The ranks do not agree on the plan of step 0 \(compared by its digest\): rank 0", [1, 1]),
    "nan stops": (rf"RuntimeError: The loss of step {STEP} is not finite: nan in micro-batch 1 of rank 1\.", [1, 1]),
    "left alone": (rf"hf_wlb: Rank 1 failed in step {STEP}: KeyError: 'a column' \(This is rank 0 in", [1, 1]),
    "terminated": (rf"hf_wlb: Rank 1 failed in step {STEP}: KeyError: 'a column' \(This is rank 0 in", [143, 1]),
}


@pytest.mark.parametrize("case", SAID)
def test_without_an_agent(case: str, launches: dict[str, Any]) -> None:
    sentence, codes = SAID[case]
    found = launches[case]
    assert found["codes"] == codes, found["outputs"]
    assert found["seconds"] < _ENDS_WITHIN_S
    assert re.search(sentence, found["outputs"][0]), found["outputs"][0]


@pytest.mark.parametrize("case", ["plans", "nan stops"])
def test_what_all_ranks_notice_they_all_say(case: str, launches: dict[str, Any]) -> None:
    for rank, output in enumerate(launches[case]["outputs"]):
        assert re.search(SAID[case][0], output)
        assert f"This is rank {rank} in step " in output
        assert "Rank 1 failed" not in output


#: What rank 1 alone decides to do next, and what rank 0 does, by what was decided and where; else see the test.
MEETS = {
    "stops after a step, no logs": ("the plan of step 3 (compared by its digest)", "the end of training after step 3"),
    "stops after a log": ("the plan of step 3 (compared by its digest)", "the end of training after step 3"),
    "stops after an epoch": ("the end of the epoch after step 4", "the end of training after step 4"),
    "saves": ("a log after step 3", "a log and a checkpoint after step 3"),
    "saves after a log": ("the plan of step 3 (compared by its digest)", "a checkpoint after step 3"),
    "evaluates": ("a log after step 3", "a log and an evaluation after step 3"),
    "logs": ("the plan of step 3 (compared by its digest)", "a log after step 3"),
    "stops in a step": ("a log after step 4", "a log and the end of training after step 4"),
}


@pytest.mark.parametrize("case", DECIDED)
def test_what_one_rank_alone_decides_is_told_by_all(case: str, launches: dict[str, Any], folder: Path) -> None:
    assert launches[case]["codes"] == [0] * RANKS, launches[case]["outputs"]
    runs = [result_of(case, folder, rank) for rank in range(RANKS)]
    assert runs[0] == runs[1] and len(runs[0]) == len(DECIDED[case][0]) * len(DECIDED[case][1])
    for name, (steps, said) in runs[0].items():
        split, decision = name.split(": ")
        assert said.startswith("The ranks do not agree on what comes next: rank 0"), (name, said)
        assert "A callback that stops, saves or evaluates must do so on every rank." in said
        assert STEP - 1 <= steps <= STEP + 1, name  # those of an epoch's beginning or end come a step later
        first, second = MEETS.get(decision, ("", "the end of "))
        stages = [f" (stage {rank})" if split == "pp" else "" for rank in range(RANKS)]
        assert f"rank 0{stages[0]} has {first}" in said and f"; rank 1{stages[1]} has " in said, (name, said)
        assert second in said.split("; rank 1")[1], (name, said)


def test_resuming_gives_the_uninterrupted_losses(launches: dict[str, Any], folder: Path) -> None:
    assert launches["whole"]["codes"] == launches["resumed"]["codes"] == [0, 0]
    whole, resumed = result_of("whole", folder)["losses"], result_of("resumed", folder)["losses"]
    assert len(whole) == STEPS and len(set(whole)) == STEPS
    # killed in step 4: what step 3 saved is there
    assert resumed == pytest.approx(whole[STEP - 1 :], rel=1e-6)


def test_steps_that_are_not_finite_are_left_out_on_both_ranks(launches: dict[str, Any], folder: Path) -> None:
    found = launches["nan skipped"]
    assert found["codes"] == [0, 0]
    warning = f"The loss of step {STEP} is not finite: nan in micro-batch 1 of rank 1. It is left out; 1 so far."
    assert [warning in output for output in found["outputs"]] == [True, False]  # once
    runs = [result_of("nan skipped", folder, rank) for rank in range(2)]
    counts = [[log["nonfinite_steps"] for log in run["logs"] if "loss" in log] for run in runs]
    assert counts == [[0] * (STEP - 1) + [1] * (STEPS - STEP + 1)] * 2
    state = json.loads((folder / "output_nan skipped" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["NonFiniteSteps"]["attributes"]["nonfinite_steps"] == 1
    whole = result_of("whole", folder)["losses"]
    for run in runs:
        assert run["losses"][: STEP - 1] == pytest.approx(whole[: STEP - 1], rel=1e-6)
        assert all(loss == loss for place, loss in enumerate(run["losses"]) if place != STEP - 1)
    assert runs[0]["losses"][STEP:] == pytest.approx(runs[1]["losses"][STEP:], rel=1e-6)


def test_the_logs_tell_which_rank_is_slow(launches: dict[str, Any], folder: Path) -> None:
    runs = [result_of("whole", folder, rank)["logs"] for rank in range(2)]
    names = [
        f"rank_{name}" for name in ("seconds_max", "seconds_mean", "imbalance", "seconds_rank_0", "seconds_rank_1")
    ]
    logs, others = ([[log[name] for name in names] for log in run if "loss" in log] for run in runs)
    assert logs == others  # measured on every rank, logged alike by all
    for slowest, mean, imbalance, first, second in logs:
        assert slowest == max(first, second) and mean == pytest.approx((first + second) / 2)
        assert imbalance == pytest.approx(slowest / mean)
        assert second >= 2 * SLOWNESS_S
    # Rank 0 waits for it in every step; waiting is not counted. Typical steps, for the machine may have others.
    assert sorted(second - first for _, _, _, first, second in logs)[len(logs) // 2] > SLOWNESS_S
