"""Whole passes: the same documents for every system, planned once, their figures by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hf_wlb.lengths import sample_lengths
from hf_wlb.packing import ArraySource, StepPlanner, measure
from hf_wlb.sharding import Sharder
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.step import simulate_step
from hf_wlb.simulator.stream import PlanCache, SharderCache, documents_for, packing_config, simulate_stream
from hf_wlb.simulator.systems import SYSTEMS, System, sharder_of

SEVEN_B = SimpleNamespace(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32_000,
    tie_word_embeddings=False,
)
CONTEXT = 65_536
MICRO_BATCHES = 4
LENGTHS = sample_lengths(20_000)


def model_of(split: Split) -> StepModel:
    return StepModel.of(SEVEN_B, split, CLUSTERS["h100"], context_length=CONTEXT, gradient_checkpointing=True)


MODEL = model_of(Split(tp_size=2, cp_size=2, pp_size=2, dp_size=2))


def documents(steps: int, micro_batches: int = 2 * MICRO_BATCHES):
    return documents_for(LENGTHS, steps, context_length=CONTEXT, micro_batches=micro_batches)


def simulate(system: System | str, given, model: StepModel = MODEL, **options):
    system = SYSTEMS[system] if isinstance(system, str) else system
    return simulate_stream(given, system, model, micro_batches_per_replica=MICRO_BATCHES, **options)


@pytest.fixture(scope="module")
def given():
    return documents(12)


@pytest.fixture(scope="module")
def passes(given):
    """Every system's pass over the same documents, and the cache that their plans are in."""
    cache = PlanCache()
    return {name: simulate(name, given, cache=cache) for name in SYSTEMS}


# ---- systems compared ----


def test_all_systems_train_the_same_documents(given, passes) -> None:
    tokens = int(given.sum())
    for result in passes.values():
        assert result.tokens == sum(step.tokens for step in result.steps) == tokens
        # Documents above the context length are split at it by all; only one system cuts others as well.
        longest = max(document.length for plan in result.passes.plans for document in plan.documents)
        assert longest <= CONTEXT
        pieces = sum(1 for plan in result.passes.plans for _ in plan.documents)
        if result.system.packer != "concat-and-cut":
            assert pieces == int(np.ceil(given / CONTEXT).sum())
        else:
            assert pieces > int(np.ceil(given / CONTEXT).sum())


def test_ours_is_faster_than_both_baselines(passes) -> None:
    seconds = {name: result.seconds for name, result in passes.items()}
    assert max(seconds["wlb"], seconds["paper"]) < seconds["fixed-4d"] < seconds["plain-4d"]
    assert passes["wlb"].regular_tokens_per_second > passes["paper"].regular_tokens_per_second
    assert passes["wlb"].speedup_over(passes["plain-4d"]) == seconds["plain-4d"] / seconds["wlb"] > 1.15
    assert passes["wlb"].gpu_imbalance < passes["plain-4d"].gpu_imbalance
    assert passes["wlb"].mfu > passes["plain-4d"].mfu


def test_ours_is_never_slower_than_parts_of_it(passes) -> None:
    for part in ("placed", "whole"):
        assert passes["wlb"].seconds <= passes[part].seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("split", "schedule"),
    [
        (Split(tp_size=2, pp_size=4), ScheduleConfig()),
        (Split(cp_size=4), ScheduleConfig()),
        (Split(cp_size=2, dp_size=2, fsdp=True), ScheduleConfig()),
        (Split(cp_size=2, pp_size=2), ScheduleConfig("interleaved", model_chunks=2)),
        (Split(cp_size=2, pp_size=2), ScheduleConfig("seq1f1b", pieces=2)),
    ],
    ids=lambda value: value.label if isinstance(value, Split) else value.name,
)
def test_nothing_is_faster_than_the_bound(split, schedule) -> None:
    model, cache = model_of(split), PlanCache()
    given = documents(6, MICRO_BATCHES * split.dp_size)
    found = {name: simulate(name, given, model, schedule=schedule, cache=cache).seconds for name in SYSTEMS}
    assert min(found.values()) == pytest.approx(found["balanced"], rel=1e-9)
    assert found["wlb"] < found["plain-4d"]


def test_nothing_is_faster_than_the_bound_with_all_axes(passes) -> None:
    assert min(passes.values(), key=lambda result: result.seconds) is passes["balanced"]


def test_fixed_sharding_is_the_better_of_the_two_for_the_whole_run(given, passes) -> None:
    both = {
        name: simulate(System(name, "greedy", name), given).seconds  # type: ignore[arg-type]
        for name in ("per_sequence", "per_document")
    }
    assert passes["fixed-4d"].seconds == min(both.values())
    assert passes["fixed-4d"].sharding == min(both, key=lambda name: both[name])
    assert passes["wlb"].sharding == "adaptive"


def test_passes_over_other_documents_do_not_compare(given, passes) -> None:
    other = simulate("plain-4d", given[:-1])
    with pytest.raises(ValueError, match=r"wlb trained .* tokens and plain-4d .*: times compare only of passes over"):
        passes["wlb"].speedup_over(other)


# ---- one system's figures ----


def test_figures_are_those_of_the_steps(given, passes) -> None:
    result = passes["wlb"]
    planner = StepPlanner(ArraySource(given), MODEL.workload, packing_config(SYSTEMS["wlb"], MODEL, MICRO_BATCHES))
    plans = list(planner)
    sharder = sharder_of("adaptive", 2, MODEL.workload)
    steps = [simulate_step(plan, MODEL, sharder) for plan in plans]
    assert result.step_seconds == tuple(step.seconds for step in steps)
    assert result.seconds == pytest.approx(sum(result.step_seconds))
    assert result.mean_step_seconds == pytest.approx(result.seconds / len(plans))
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)
    assert result.tokens_per_second_per_gpu == pytest.approx(result.tokens / result.seconds / 16)
    regular = [step for step, plan in zip(steps, plans, strict=True) if not plan.flush]
    assert 0 < len(regular) < len(steps)
    assert result.imbalance == pytest.approx(np.mean([step.imbalance for step in regular]))
    assert result.gpu_imbalance == pytest.approx(np.mean([step.gpu_imbalance for step in regular]))
    tokens, seconds = sum(step.tokens for step in regular), sum(step.seconds for step in regular)
    assert result.regular_tokens_per_second == pytest.approx(tokens / seconds)
    flops = sum(step.mfu * step.seconds for step in steps)
    assert result.mfu == pytest.approx(flops / sum(step.seconds for step in steps))
    work = [sum(step.busy[stage] * step.pipeline_seconds for step in steps) for stage in range(2)]
    assert result.busy == pytest.approx([own / sum(step.pipeline_seconds for step in steps) for own in work])
    assert result.peak_memory_bytes == max(use.total for step in steps for use in step.memory)
    assert len(result.memory) == 2 and not any(step.timelines for step in result.steps)


def test_delay_and_variation_are_the_packer_s(given, passes) -> None:
    for name in ("plain-4d", "paper", "wlb"):
        config = packing_config(SYSTEMS[name], MODEL, MICRO_BATCHES)
        report = measure(StepPlanner(ArraySource(given), MODEL.workload, config))
        assert (passes[name].delay, passes[name].token_variation) == (report.delay, report.token_variation)
    assert passes["plain-4d"].delay == 0.0 < passes["wlb"].delay
    assert passes["wlb"].token_variation < passes["paper"].token_variation


def test_systems_of_one_packer_share_its_plans(passes) -> None:
    for name in ("placed", "whole", "balanced"):
        assert passes[name].passes is passes["wlb"].passes
    assert passes["paper"].passes is not passes["wlb"].passes


def test_a_cache_tells_documents_settings_and_models_apart() -> None:
    cache, given = PlanCache(), documents(1)
    config = packing_config(SYSTEMS["wlb"], MODEL, MICRO_BATCHES)
    first = cache.plan(given, MODEL.workload, config)
    assert cache.plan(given.copy(), MODEL.workload, config) is first
    others = [
        cache.plan(given[::-1].copy(), MODEL.workload, config),
        cache.plan(given, model_of(Split(pp_size=2, dp_size=2)).workload, config),
        cache.plan(given, MODEL.workload, packing_config(SYSTEMS["wlb"], MODEL, MICRO_BATCHES, 2 * CONTEXT)),
    ]
    assert all(other is not first for other in others)


def test_micro_batches_that_come_again_are_shared_out_once(given, passes, monkeypatch) -> None:
    calls, plan = [], Sharder.plan
    monkeypatch.setattr(Sharder, "plan", lambda self, lengths: calls.append(self) or plan(self, lengths))
    sharders, cache = SharderCache(), PlanCache()
    schedules = (ScheduleConfig(), ScheduleConfig("interleaved", model_chunks=2))
    found = [simulate("wlb", given, schedule=own, cache=cache, sharders=sharders) for own in schedules]
    once = len(calls)
    # As without the cache.
    again = [simulate("wlb", given, schedule=own, cache=cache) for own in schedules]
    assert 0 < once <= (len(calls) - once) / 2
    assert [own.step_seconds for own in found] == [own.step_seconds for own in again]
    assert [own.memory for own in found] == [own.memory for own in again]
    assert found[0].step_seconds == passes["wlb"].step_seconds


def test_control_shared_out_otherwise_is_told_apart() -> None:
    sharders, lengths = SharderCache(), [30_000, 2000, 500, 70]
    workload, other = MODEL.workload, model_of(Split(tp_size=2, cp_size=2, pp_size=2, dp_size=4)).workload
    kept = sharders.remembering(sharder_of("adaptive", 2, workload))
    assert sharders.remembering(sharder_of("adaptive", 2, workload)) is kept
    assert sharders.remembering(sharder_of("adaptive", 2, other)) is kept  # as much is exchanged, as near
    cheap = model_of(Split(tp_size=4, cp_size=2)).workload
    for own in (sharder_of("placed", 2, workload), sharder_of("adaptive", 2, cheap)):
        assert sharders.remembering(own) is not kept
        assert sharders.remembering(own).plan(lengths).predicted.tolist() == own.plan(lengths).predicted.tolist()
    assert kept.plan(lengths) is kept.plan(np.array(lengths)) is not kept.plan(lengths[::-1])
    for name in ("static", "balanced", "whole"):
        own = sharder_of(name, 2, workload, CONTEXT)
        assert sharders.remembering(own) is own


def test_the_same_call_gives_the_same_result(given, passes) -> None:
    again = simulate("wlb", documents(12))
    assert again.step_seconds == passes["wlb"].step_seconds and again.memory == passes["wlb"].memory


def test_s_max_and_packing_options_reach_the_packer(given) -> None:
    thresholds = {"thresholds": (20_000, 40_000)}
    result = simulate("paper", given[:200], max_tokens_per_micro_batch=2 * CONTEXT, packing_options=thresholds)
    assert (result.passes.config.s_max, result.passes.config.thresholds) == (2 * CONTEXT, (20_000, 40_000))
    whole = simulate("whole", given[:200], max_tokens_per_micro_batch=2 * CONTEXT)
    assert whole.memory != simulate("whole", given[:200]).memory  # ranks have more room
    with pytest.raises(ValueError, match="'paper' cannot set dp_size of packing for itself"):
        simulate("paper", given, packing_options={"dp_size": 4})


# ---- some steps of many ----


def test_few_steps_tell_the_time_of_all(given, passes) -> None:
    for name, error in (("plain-4d", 0.1), ("wlb", 0.02), ("balanced", 0.02)):
        sampled, whole = simulate(name, given, steps=5), passes[name]
        assert len(sampled.steps) == 5 and sampled.tokens == whole.tokens
        assert sampled.step_seconds == tuple(whole.step_seconds[at] for at in sampled.simulated)
        model = sampled.passes.config.step_time
        predicted = [model.step_time(plan.workloads()) for plan in sampled.passes.plans]
        scale = sum(sampled.step_seconds) / sum(predicted[at] for at in sampled.simulated)
        assert sampled.seconds == pytest.approx(scale * sum(predicted))
        assert sampled.seconds == pytest.approx(whole.seconds, rel=error)


def test_sampled_steps_lie_at_even_distances(given, passes) -> None:
    count = len(passes["plain-4d"].passes.plans)
    assert simulate("plain-4d", given, steps=3).simulated == tuple(int((k + 0.5) * count / 3) for k in range(3))
    assert simulate("plain-4d", given, steps=10_000).simulated == tuple(range(count))
    for steps in (0, 1.5, True):
        with pytest.raises(ValueError, match="steps must be a whole number of at least 1, or None"):
            simulate("plain-4d", given, steps=steps)


# ---- documents ----


def test_documents_suffice_and_hang_on_the_seed_only() -> None:
    first, again, other = (
        documents_for(LENGTHS, 3, context_length=CONTEXT, micro_batches=8, seed=seed) for seed in (0, 0, 1)
    )
    wanted = 3 * 8 * CONTEXT
    assert wanted <= first.sum() < wanted + LENGTHS.max()
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_numbers_of_documents_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches must be a whole number of at least 1, got 0"):
        documents_for(LENGTHS, 1, context_length=CONTEXT, micro_batches=0)
    with pytest.raises(ValueError, match="no document with tokens"):
        documents_for([0, 0], 1, context_length=CONTEXT, micro_batches=1)
    with pytest.raises(ValueError, match="There are no documents to simulate"):
        simulate("wlb", np.array([], dtype=np.int64))


def test_fewer_documents_than_a_step_takes_are_simulated() -> None:
    for name in SYSTEMS:
        result = simulate(name, np.array([30, 2, 1]))
        assert result.tokens == 33 and len(result.steps) == 1 and result.seconds > 0
