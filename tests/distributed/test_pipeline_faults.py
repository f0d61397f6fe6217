"""Pipelines in which something goes wrong on one rank: all ranks end soon, and say which rank and stage it was."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_faults import Finished, said_in
from tests.support.faulty_pipeline import CASES, POISONED, RANKS, SPLITS, STEP, STEPS, STEPS_TO_RUN, WITH_AGENT

_ENDS_WITHIN_S = 60.0
_MODULE = "tests.support.faulty_pipeline"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("pipeline_faults"))


@pytest.fixture(scope="module")
def launches(folder: Path) -> dict[str, Any]:
    """Every case; rank by rank, exit codes and output."""
    found = Finished("-m", _MODULE, str(folder), *CASES, timeout_s=500)
    assert found.code == 0 and found.left == [], found.output
    outcomes: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


def name_of(rank: int) -> str:
    return f"rank {rank} (stage {rank % 2})"


#: What the other ranks say by which failure of one, and that one's exit code.
FAILURES = {
    "killed": (f"Rank 3 (stage 1) was killed or ended without a word in step {STEP}.", -9),
    "between": (f"Rank 2 (stage 0) failed in step {STEP}: OSError: the disk is full", 1),
    "memory": (f"Rank 0 (stage 0) failed in step {STEP}: OutOfMemoryError: CUDA out of memory.", 1),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_others_say_who_failed(case: str, launches: dict[str, Any]) -> None:
    sentence, code = FAILURES[case]
    found, failed = launches[case], CASES[case]
    assert found["codes"] == [code if rank == failed else 1 for rank in range(RANKS)], found["outputs"]
    assert found["seconds"] < _ENDS_WITHIN_S
    for rank, output in enumerate(found["outputs"]):
        if rank != failed:
            (said,) = said_in(output)
            assert said.startswith(f"hf_wlb: {sentence} (This is {name_of(rank)} in step {STEP}, which ")
        elif code == 1:
            assert f"This is {name_of(rank)} in step {STEP}; the other ranks are told and stop." in output


@pytest.mark.parametrize("case", WITH_AGENT)
def test_a_stage_raises_under_an_agent(case: str, launches: dict[str, Any]) -> None:
    found = launches[case]
    assert found["codes"] == [1] and found["seconds"] < _ENDS_WITHIN_S
    (output,) = found["outputs"]
    assert "OSError: the disk is full\n" in output
    assert f"This is {name_of(CASES[case])} in step {STEP}; the other ranks are told and stop." in output
    said = said_in(output)
    assert said and len(said) < RANKS
    for line in said:
        assert line.startswith(f"hf_wlb: Rank 1 (stage 1) failed in step {STEP}: OSError: the disk is full (This is ")


#: What all ranks notice, and all say, as a pattern.
DISAGREEMENTS = {
    "count": r"gradient_accumulation_steps \(ranks 0 \(stage 0\) and 1, 3 \(stage 1\) have 4; "
    r"rank 2 \(stage 0\) has 3\)",
    "plans": r"the plan of step 0 \(compared by its digest\): ranks 0, 2 \(stage 0\) and 1 \(stage 1\) have \d+; "
    r"rank 3 \(stage 1\) has \d+\.",
    "tokens": rf"the micro-batches of step {STEP}: in replica 0, rank 0 \(stage 0\) has (\d+) tokens in micro-batch 2"
    r"; rank 1 \(stage 1\) has (\d+) tokens in micro-batch 2\.",
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_all_say_so(case: str, launches: dict[str, Any]) -> None:
    found = launches[case]
    assert found["codes"] == [1] * RANKS, found["outputs"]
    assert found["seconds"] < _ENDS_WITHIN_S
    for output in found["outputs"]:
        said = re.findall(f"RuntimeError: The ranks do not agree on {DISAGREEMENTS[case]}", output)
        assert len(said) == 1, output
        assert " failed in step" not in output
        if case == "tokens":
            (first, second) = said[0]
            assert int(first) - int(second) == 1


# ---- losses that are not finite: only the last stage has them ----


def poisoned(case: str) -> str:
    """The sentence about the micro-batch that was."""
    return f"The loss of step {STEP} is not finite: nan in micro-batch {POISONED} of {name_of(CASES[case])}."


def test_all_stages_stop_at_a_loss_that_is_not_finite(launches: dict[str, Any]) -> None:
    found, sentence = launches["nan stops"], poisoned("nan stops")
    assert found["codes"] == [1] * RANKS and found["seconds"] < _ENDS_WITHIN_S
    for rank, output in enumerate(found["outputs"]):
        assert f"RuntimeError: {sentence} Training stops before this step changes the weights" in output
        assert f"This is {name_of(rank)} in step {STEP}; " in output


def test_all_stages_leave_the_step_out(launches: dict[str, Any], folder: Path) -> None:
    for case in ("whole", "without", "nan skipped"):
        assert launches[case]["codes"] == [0] * RANKS, launches[case]["outputs"]
    warning = f"{poisoned('nan skipped')} It is left out; 1 so far."
    assert [warning in output for output in launches["nan skipped"]["outputs"]] == [True, False, False, False]  # once
    for rank in range(RANKS):
        whole, without, skipped = (
            json.loads((folder / f"{case}_{rank}.json").read_text()) for case in ("whole", "without", "nan skipped")
        )
        assert skipped["weights"] == without["weights"] != whole["weights"]
        assert skipped["losses"][STEP:] == without["losses"][STEP:] != whole["losses"][STEP:]
        assert len(skipped["losses"]) == STEPS and skipped["losses"][STEP - 1] != skipped["losses"][STEP - 1]
        counts = [log["nonfinite_steps"] for log in skipped["logs"] if "loss" in log]
        assert counts == [0] * (STEP - 1) + [1] * (STEPS - STEP + 1)


def test_replicas_stay_equal(launches: dict[str, Any], folder: Path) -> None:
    assert launches["nan skipped"]["codes"] == [0] * RANKS
    first, second, third, fourth = (
        json.loads((folder / f"nan skipped_{rank}.json").read_text())["weights"] for rank in range(RANKS)
    )
    assert first == third and second == fourth and first != second


# ---- what is compared before a step ----

_ZERO = "in micro-batch 0"
#: What all ranks say, by what they are about to run, see ``STEPS_TO_RUN``.
SAID = {
    "the same": "",
    "other shards": "",
    "number": "in replica 0, rank 0 (stage 0) has 3 micro-batches; rank 2 (stage 1) has 2 micro-batches. ",
    "order": "rank 1 (stage 0) has 12 tokens in micro-batch 1; rank 3 (stage 1) has 16 tokens in micro-batch 1. ",
    "all": f"in replica 0, rank 0 (stage 0) has 0 tokens {_ZERO}; rank 2 (stage 1) has 2 tokens {_ZERO}; in replica ",
}


@pytest.mark.parametrize("split", SPLITS)
def test_what_stages_are_about_to_run_is_compared(split: str, launches: dict[str, Any], folder: Path) -> None:
    assert launches["compared"]["codes"] == [0] * RANKS, launches["compared"]["outputs"]
    ranks = [json.loads((folder / f"compared_{rank}.json").read_text())[split] for rank in range(RANKS)]
    assert ranks == [ranks[0]] * RANKS and ranks[0].keys() == STEPS_TO_RUN.keys() == SAID.keys()
    for case, said in ranks[0].items():
        assert bool(said) == bool(SAID[case]), said
        if said:
            assert said.startswith("The ranks do not agree on the micro-batches of step 3: in replica "), said
            assert SAID[case] in said, said
    second = int(split == "dp")  # a replica of its own, or the first one's second shard
    assert f"; in replica {second}, rank 1 (stage 0) has 1 tokens {_ZERO}; rank 3" in ranks[0]["all"]
