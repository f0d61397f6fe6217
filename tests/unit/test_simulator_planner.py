"""The planner: against brute force on a small space, its limits, and what it hands over to a trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_wlb.lengths import sample_lengths
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.estimates import Estimator, evened_out
from hf_wlb.simulator.handover import trainer_workload
from hf_wlb.simulator.memory import stage_memory
from hf_wlb.simulator.plan_result import PlanResult
from hf_wlb.simulator.plan_trials import Documents, Stretch, Trials
from hf_wlb.simulator.planner import SLACK, Effort, search
from hf_wlb.simulator.search_space import (
    MEMORY,
    PROFILE,
    REPLICAS,
    TENSOR,
    Bounded,
    Bounder,
    Candidate,
    Sample,
    cut_at,
    default_micro_batches,
    enumerate_candidates,
    splits,
)
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.stream import SharderCache
from hf_wlb.workload import AnalyticWorkload, load_workload
from tests.support.simulated import config as shape
from tests.support.simulated import profile

CONTEXT, MICRO_BATCHES, GPUS = 4096, 8, 4
LENGTHS = np.maximum(sample_lengths(4000, seed=1) // 32, 1)
#: Nodes of two, so that some groups span them.
CLUSTER = replace(CLUSTERS["h100"], gpus_per_node=2)
MODEL = shape(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=32_000,
)
STRETCH = Stretch(64, 16, 8, 2)
FEW = Effort(most_simulated=4, most_plain=2, short=Stretch(16, 8, 2, 1), long=Stretch(32, 8, 4, 1))
#: As much first as later, and everything: what is found is what brute force finds.
WHOLE = Effort(most_simulated=1000, most_plain=1000, short=STRETCH, long=STRETCH)


def planned(effort: Effort = WHOLE, keep: int = 3, gpus: int = GPUS, **options) -> PlanResult:
    given = {"micro_batches": MICRO_BATCHES, **options}
    return search(MODEL, gpus, LENGTHS, CONTEXT, CLUSTER, keep=keep, effort=effort, **given)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return planned()


@pytest.fixture(scope="module")
def everything() -> tuple[list[Bounded], Trials, Documents]:
    """Every candidate's bound, and what simulates it, put together anew."""
    documents = Documents.of(LENGTHS, STRETCH, CONTEXT, MICRO_BATCHES, 0)
    numbers = {"context_length": CONTEXT, "micro_batches": MICRO_BATCHES}
    candidates, _ = enumerate_candidates(MODEL, GPUS, CLUSTER, **numbers)
    bounder = Bounder(MODEL, CLUSTER, Sample.of(documents.lengths, CONTEXT), **numbers)
    return [bounder.bound(candidate) for candidate in candidates], Trials(CONTEXT, MICRO_BATCHES, 72e9), documents


# ---- what is looked at ----


def test_all_splits_are_there_once() -> None:
    found = list(splits(16, 8, 131_072, 32))
    assert len(set(found)) == len(found) and all(split.gpus == 16 for split in found)
    by_hand = {
        (tp, cp, pp, 16 // (tp * cp * pp))
        for tp in (1, 2, 4, 8)
        for cp in (1, 2, 4, 8, 16)
        for pp in (1, 2, 4, 8, 16)
        if tp * cp * pp <= 16
    }
    assert {(s.tp_size, s.cp_size, s.pp_size, s.dp_size) for s in found} == by_hand
    assert {s.fsdp for s in found if s.cp_size * s.dp_size > 1} == {False, True}
    assert {s.pp_size for s in splits(16, 8, 131_072, 4)} == {1, 2, 4}  # no more stages than layers
    assert {s.cp_size for s in splits(16, 8, 1024, 4)} == {1, 2, 4}  # tiles of 128 queries
    assert {s.pp_size for s in splits(24, 8, 131_072, 32)} >= {3, 6, 12}
    # No group across the edge of a node of 8; where there is one node only, there is no edge.
    assert {s.tp_size * s.cp_size for s in splits(24, 8, 131_072, 32)} == {1, 2, 4, 8, 24}
    assert {s.tp_size * s.cp_size for s in splits(6, 8, 131_072, 32)} == {1, 2, 3, 6}


def test_ways_that_cannot_be_run_are_counted() -> None:
    numbers = {"context_length": CONTEXT, "micro_batches": 2}
    found, dropped = enumerate_candidates(MODEL, 4, CLUSTER, **numbers)
    everything = 2 * len(list(splits(4, 2, CONTEXT, 6)))
    assert len(found) + dropped.total() == everything
    assert set(dropped) == {REPLICAS} and all(candidate.split.dp_size <= 2 for candidate in found)
    odd = shape(**{**vars(MODEL), "intermediate_size": 4095})
    found, dropped = enumerate_candidates(odd, 4, CLUSTER, **numbers)
    assert {candidate.split.tp_size for candidate in found} == {1} and dropped[TENSOR] > 0
    found, dropped = enumerate_candidates(MODEL, 4, CLUSTER, profile=profile(), **numbers)  # of tp_size 1
    assert {candidate.split.tp_size for candidate in found} == {1} and dropped[PROFILE] > 0


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 24, 64, 72, 1000, 8192, 16_384])
@pytest.mark.parametrize("context", [8192, 131_072])
def test_default_steps_can_be_shared_out(gpus: int, context: int) -> None:
    micro_batches = default_micro_batches(gpus, context)
    assert 1 <= micro_batches <= 16 * gpus
    assert micro_batches >= gpus / 128
    if gpus >= 32:
        assert micro_batches * context >= 2**21
    if gpus not in (1000,):
        odd = gpus // (gpus & -gpus)
        assert micro_batches % odd == 0


def test_documents_are_cut_as_packers_cut_them() -> None:
    lengths = np.array([5, 12, 4, 9])
    assert cut_at(lengths, 4).tolist() == [4, 1, 4, 4, 4, 4, 4, 4, 1]
    sample = Sample.of(lengths, 10)  # 5 | 10 | 2 4 | 9
    assert sample.lengths.tolist() == [5, 10, 2, 4, 9] and sample.starts.tolist() == [0, 1, 2, 4]
    assert sample.means.tokens == 30


# ---- bounds and estimates ----


def test_nothing_simulated_beats_its_bound(everything) -> None:
    bounded, trials, documents = everything
    closest = 0.0
    for found in bounded:
        best = MICRO_BATCHES * CONTEXT / found.seconds
        ours, plain = trials.first(found, documents), trials.plain(found, documents)
        assert ours is not None
        assert ours.tokens_per_second <= best * SLACK
        assert plain.tokens_per_second <= best * SLACK
        assert ours.memory_bytes >= found.memory_bytes * (1 - 1e-9)
        closest = max(closest, ours.tokens_per_second / best)
    assert closest > 0.9  # control: a bound that is a tenth lower is beaten


def test_memory_has_room_for_a_full_micro_batch(everything) -> None:
    bounded, trials, _ = everything
    alone = next(found for found in bounded if found.candidate == Candidate(Split(dp_size=4), False))
    assert trials.memory(alone, 1.25) == stage_memory(alone.model, 0, 1.25 * CONTEXT, 1.25 * CONTEXT).total
    shared = next(found for found in bounded if found.candidate == Candidate(Split(cp_size=4), False))
    tokens = 1.25 * CONTEXT / 4 * 1.05  # the fullest rank
    assert trials.memory(shared, 1.25) == pytest.approx(stage_memory(shared.model, 0, tokens, tokens).total)
    piped = next(found for found in bounded if found.candidate == Candidate(Split(pp_size=4), False))
    full = 1.25 * CONTEXT
    stages = [stage_memory(piped.model, stage, (3 - stage) * CONTEXT + full, full).total for stage in range(4)]
    assert trials.memory(piped, 1.25) == max(stages) > piped.memory_bytes


def test_estimates_are_above_bounds(everything) -> None:
    bounded, _, documents = everything
    estimator = Estimator.of(Sample.of(documents.lengths, CONTEXT), MICRO_BATCHES)
    for found in bounded:
        assert estimator.plain(found) > found.seconds * 0.99
        assert estimator.ours(found) > found.seconds * 0.99
    two = [found for found in bounded if found.candidate.split.dp_size == 4]
    assert all(estimator.plain(found) > estimator.ours(found) for found in two)


def test_heavy_documents_stand_alone() -> None:
    assert evened_out(np.array([5.0, 1.0, 1.0, 1.0]), 2).tolist() == [5.0, 3.0]
    assert evened_out(np.ones(8), 4).tolist() == [2.0] * 4
    assert evened_out(np.array([2.0]), 3).tolist() == [2.0, 0.0, 0.0]


# ---- the search ----


def test_it_finds_what_brute_force_finds(result: PlanResult, everything) -> None:
    bounded, trials, documents = everything
    by_hand = {found.candidate.label: trials.first(found, documents) for found in bounded}
    speeds = sorted((own.tokens_per_second for own in by_hand.values() if own is not None), reverse=True)
    assert result.searched.all_bounded and result.searched.ways == len(bounded)
    assert result.trials[0].tokens_per_second == speeds[0]
    for choice, speed in zip(result.choices, speeds, strict=False):
        assert choice.prediction.tokens_per_second >= speed  # settings were tried on top
    assert {choice.prediction.training.label for choice in result.choices} <= set(by_hand)
    plain = {found.candidate.label: trials.plain(found, documents).tokens_per_second for found in bounded}
    assert result.plain.tokens_per_second == max(plain.values())
    for choice in result.choices:
        assert choice.plain.tokens_per_second == plain[choice.prediction.training.label]
        assert choice.gain >= result.gain_over_best_plain(choice) > 0
    assert result.best.gain > 1.02


def test_bounds_save_simulations(result: PlanResult) -> None:
    assert result.searched.simulated < result.searched.ways
    # Control: a search that is cut short says so.
    assert not planned(replace(WHOLE, most_simulated=2), keep=2).searched.all_bounded


def test_every_way_trains_the_same_tokens(result: PlanResult) -> None:
    for found in (*(choice.prediction for choice in result.choices), result.plain, *result.trials, *result.schedules):
        training = found.training
        assert training.micro_batches_per_replica * training.split.dp_size == MICRO_BATCHES
        assert training.context_length == CONTEXT and training.split.gpus == GPUS
        assert sum(training.stage_layers) == 6 and len(training.stage_layers) == training.split.pp_size


def test_the_fastest_come_first_and_settings_only_help(result: PlanResult) -> None:
    speeds = [choice.prediction.tokens_per_second for choice in result.choices]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 3
    first = result.trials[0]
    assert first.training.max_time_gap == 0.03 and first.training.outlier_tokens == CONTEXT // 8
    tuned = next(c.prediction for c in result.choices if c.prediction.training.label == first.training.label)
    assert tuned.tokens_per_second >= first.tokens_per_second and tuned in result.trials
    tried = {trial.training.max_tokens_per_micro_batch for trial in result.trials}
    assert tried == {int(factor * CONTEXT) for factor in (1.0, 1.125, 1.25, 1.5)}


def test_it_is_deterministic() -> None:
    first, again, other = (planned(FEW, seed=seed).to_dict() for seed in (0, 0, 1))
    assert first == again
    assert first["choices"][0]["tokens_per_second"] != other["choices"][0]["tokens_per_second"]  # control


def test_other_schedules_are_predicted(result: PlanResult) -> None:
    piped = planned(FEW, keep=100)
    assert {found.training.schedule.name for found in piped.schedules} == {"interleaved", "seq1f1b"}
    base = next(c.prediction for c in piped.choices if c.prediction.training.split.pp_size > 1)
    for found in piped.schedules:
        assert found.training.candidate == base.training.candidate
        assert found.tokens_per_second > 0.9 * base.tokens_per_second
    assert {choice.prediction.training.schedule.name for choice in result.choices} == {"1f1b"}
    odd = planned(FEW, keep=100, gpus=6, micro_batches=9)
    assert any("interleaved" in note for note in odd.schedule_notes)


def test_a_measured_profile_takes_the_place_of_counted_costs() -> None:
    given = {"micro_batches": 4, "effort": FEW, "keep": 2}
    lengths = np.minimum(LENGTHS, 1024)
    slow = search(shape(), 2, lengths, 1024, CLUSTER, profile=profile(), **given)
    fast = search(shape(), 2, lengths, 1024, CLUSTER, **given)
    assert {choice.prediction.training.split.tp_size for choice in slow.choices} == {1}
    assert slow.searched.dropped == {PROFILE: 2}  # TP2, with and without recomputation
    assert slow.best.prediction.tokens_per_second < fast.best.prediction.tokens_per_second / 1000  # seconds a token


# ---- limits ----


def test_the_memory_limit_is_kept(result: PlanResult) -> None:
    needed = [choice.prediction.memory_bytes for choice in result.choices]
    memory = 0.95 * max(needed) / 0.9
    tight = planned(FEW, memory_bytes=memory)
    assert tight.memory_limit == pytest.approx(0.9 * memory)
    for found in (*(choice.prediction for choice in tight.choices), tight.plain):
        assert found.memory_bytes <= tight.memory_limit < max(needed)
    assert tight.searched.dropped[MEMORY] > 0 and MEMORY not in result.searched.dropped
    assert {point.fits for point in tight.points} == {True, False}
    assert sum(not point.fits for point in tight.points) <= tight.searched.dropped[MEMORY]


def test_where_nothing_fits_it_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"Nothing fits: on 4 GPUs .* It would fit with .* GPUs") as refused:
        planned(memory_bytes=7e9)
    assert "a tenth of the memory stays free" in str(refused.value)
    more = int(str(refused.value).split("fit with ")[1].split(" GPUs")[0].replace(",", ""))
    assert planned(FEW, memory_bytes=7e9, gpus=more).choices  # as it says


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": 0}, "gpus must be a whole number of at least 1, got 0"),
        ({"gpus": 5}, "5 GPUs do not make whole nodes of 2; give 4 or 6"),
        ({"micro_batches": 0}, "micro_batches must be"),
        ({"keep": 0}, "keep must be"),
        ({"profile": profile(), "micro_batches": 8}, "profile was measured with hidden_size=8"),
    ],
)
def test_what_cannot_be_planned_gets_a_sentence(options, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        planned(**options)


def test_a_step_of_too_few_micro_batches_leaves_no_replicas() -> None:
    only = planned(FEW, micro_batches=1)
    assert {choice.prediction.training.split.dp_size for choice in only.choices} == {1}
    assert only.searched.dropped[REPLICAS] > 0


def test_simulations_of_a_plan_share_micro_batches_out_once(monkeypatch) -> None:
    usual = planned(FEW).to_dict()
    monkeypatch.setattr(SharderCache, "remembering", lambda self, sharder: sharder)
    assert planned(FEW).to_dict() == usual


# ---- what the trainer goes by ----


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_trainer_prices_documents_as_the_plan_did(again: bool, measured: bool, ranks: int, tmp_path) -> None:
    given = profile(collectives=None) if measured else None
    model = StepModel.of(
        shape(), Split(cp_size=ranks), CLUSTER, context_length=4096, gradient_checkpointing=again, profile=given
    )
    trainer_workload(model).save(tmp_path / "workload.json")
    found, planned_by = load_workload(tmp_path / "workload.json"), model.workload
    assert isinstance(found, AnalyticWorkload) is not measured
    lengths = np.array([100, 700, 4000])
    assert found.document(lengths) == pytest.approx(planned_by.document(lengths))
    queries, keys = np.array([50, 300]), np.array([700, 4000])
    assert found.segment(queries, keys) == pytest.approx(planned_by.segment(queries, keys))
    assert found.exchange(4096, ranks) == pytest.approx(planned_by.exchange(4096, ranks), rel=1e-3)
    if measured:
        assert found.exchange(3000, ranks) == pytest.approx(planned_by.exchange(3000, ranks), rel=0.05)
    # Control: another split is priced otherwise.
    other = StepModel.of(shape(), Split(cp_size=8), CLUSTER, context_length=4096, gradient_checkpointing=not again)
    assert trainer_workload(other).document(lengths) != pytest.approx(planned_by.document(lengths), rel=1e-3)


def test_labels() -> None:
    assert Candidate(Split(2, 4, 1, 2, fsdp=True), True).label == "TP2 CP4 PP1 FSDP2, recomputed"
    assert Candidate(Split(2), False).label == "TP2 CP1 PP1 DP1"
