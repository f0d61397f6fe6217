"""Simulated steps by hand, under every schedule, against the bound, and at the scale of 8,192 GPUs."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.packing import Document, MicroBatch, StepPlan
from hf_wlb.sharding import Sharder, ShardingConfig
from hf_wlb.simulator.cluster import CLUSTERS, Link
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.memory import stage_memory
from hf_wlb.simulator.operations import Pricing, piece_shares, virtual_layout
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.step import StepSimulator, simulate_step
from hf_wlb.simulator.systems import SHARDINGS, sharder_of
from hf_wlb.simulator.timeline import OpTimes, run_schedule
from hf_wlb.staging import StageLayout, schedule_seconds
from hf_wlb.workload import AnalyticWorkload

LLAMA = SimpleNamespace(
    model_type="llama",
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=8192,
    tie_word_embeddings=False,
)
CONTEXT = 4096
H100 = CLUSTERS["h100"]
INTERLEAVED, SEQ1F1B = ScheduleConfig("interleaved", model_chunks=2), ScheduleConfig("seq1f1b", pieces=3)
SCHEDULES = {config.name: config for config in (ScheduleConfig(), INTERLEAVED, SEQ1F1B)}
HEAVY, LIGHT = [4000], [100, 50]


def step_of(*replicas) -> StepPlan:
    """A step of micro-batches with documents of these lengths, in this order."""
    return StepPlan(
        0,
        tuple(
            tuple(MicroBatch(tuple(Document(0, 0, n, 0.0, 0) for n in m), sum(m), 0.0) for m in replica)
            for replica in replicas
        ),
    )


def model_of(split: Split, cluster=H100, **options) -> StepModel:
    return StepModel.of(LLAMA, split, cluster, context_length=CONTEXT, **options)


def one_rank_of(model: StepModel) -> StepModel:
    """The same without context parallelism, linear work as fast as with it: at as many tokens a rank."""
    split, tokens = replace(model.split, cp_size=1, dp_size=1), CONTEXT // model.split.cp_size
    return StepModel.of(LLAMA, split, model.cluster, context_length=tokens, layout=model.layout)


def sharder_for(model: StepModel, name: str = "adaptive") -> Sharder:
    return sharder_of(name, model.split.cp_size, model.workload, int(1.25 * CONTEXT))


def simulate(plan: StepPlan, model: StepModel, name: str = "adaptive", schedule=SCHEDULES["1f1b"]):
    return simulate_step(plan, model, sharder_for(model, name), schedule)


# ---- by hand ----


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_gpu_takes_the_sum_of_the_workload(checkpointing) -> None:
    cluster = replace(H100, segment_overhead_tokens=0.0)
    model = model_of(Split(), cluster, gradient_checkpointing=checkpointing)
    result = simulate(step_of([[3000, 90], [4000], [7] * 20]), model)
    by_hand = sum(model.workload.micro_batch(lengths) for lengths in ([3000, 90], [4000], [7] * 20))
    assert result.pipeline_seconds == pytest.approx(by_hand, rel=1e-9)
    assert result.seconds == result.pipeline_seconds + model.end_of_step().seconds
    assert result.tokens == 3090 + 4000 + 140
    assert result.tokens_per_second_per_gpu == pytest.approx(7230 / result.seconds)
    assert result.busy == (pytest.approx(1.0),)


def test_short_rows_come_on_top_of_it() -> None:
    model = model_of(Split())
    lengths = np.array([7] * 20)
    by_hand = float((model.workload.segment(lengths, lengths) + model.workload.linear(lengths)).sum())
    result = simulate(step_of([[7] * 20]), model)
    assert result.pipeline_seconds == pytest.approx(by_hand, rel=1e-9)
    assert by_hand > model.workload.micro_batch(lengths)


def test_a_pipeline_takes_what_its_schedule_says_for_the_costs_of_its_micro_batches() -> None:
    model = model_of(Split(cp_size=2, pp_size=4))
    micro_batches = [[900, 30], [4000], [2000, 2000], [600] * 5]
    sharder = sharder_for(model)
    costs = [model.micro_batch(sharder.plan(lengths)) for lengths in micro_batches]
    forward, backward = (
        np.array([getattr(cost, name) for cost in costs]).T[:, :, None] for name in ("forward", "backward")
    )
    times = OpTimes(forward, backward, np.array([[cost.send] for cost in costs]))
    result = simulate_step(step_of(micro_batches), model, sharder)
    assert result.pipeline_seconds == pytest.approx(run_schedule(SCHEDULES["1f1b"], 4, times).seconds, rel=1e-12)
    work = [sum(cost.forward) + sum(cost.backward) for cost in costs]
    assert result.imbalance == pytest.approx(max(work) * 4 / sum(work))
    at_work = (forward + backward).sum(axis=(1, 2)) / result.pipeline_seconds
    assert result.busy == pytest.approx(at_work.tolist())
    # The same with the stages' own 1F1B, where sending takes no time.
    instant = Link(1e30, 0.0)
    quick = model_of(Split(pp_size=4), replace(H100, inside=instant, between=instant))
    costs = [quick.micro_batch(sharder_for(quick).plan(lengths)) for lengths in micro_batches]
    by_hand = schedule_seconds(
        np.array([cost.forward for cost in costs]).T.tolist(), np.array([cost.backward for cost in costs]).T.tolist()
    )
    assert simulate(step_of(micro_batches), quick).pipeline_seconds == pytest.approx(by_hand)


def test_the_step_waits_for_the_slowest_replica() -> None:
    model, alone = (model_of(Split(pp_size=2, dp_size=size)) for size in (2, 1))
    result = simulate(step_of([HEAVY, LIGHT], [LIGHT, LIGHT]), model)
    seconds = [simulate(step_of(replica), alone).pipeline_seconds for replica in ([HEAVY, LIGHT], [LIGHT, LIGHT])]
    assert result.pipeline_seconds == pytest.approx(max(seconds)) and seconds[0] > seconds[1]
    assert [timeline.seconds for timeline in result.timelines] == pytest.approx(seconds)


def test_under_fsdp_without_a_pipeline_replicas_meet_at_every_micro_batch() -> None:
    crossed = step_of([HEAVY, LIGHT], [LIGHT, HEAVY])
    apart, together = (model_of(Split(dp_size=2, fsdp=fsdp)) for fsdp in (False, True))
    heavy, light = (simulate(step_of([m]), model_of(Split())).pipeline_seconds for m in (HEAVY, LIGHT))
    assert simulate(crossed, apart).pipeline_seconds == pytest.approx(heavy + light)
    assert simulate(crossed, together).pipeline_seconds >= 2 * heavy
    # With stages they meet at the end of the step only.
    staged = model_of(Split(pp_size=2, dp_size=2, fsdp=True))
    result = simulate(crossed, staged)
    assert result.timelines[0].spans != result.timelines[1].spans


def test_the_mfu_is_that_of_its_definition() -> None:
    model = model_of(Split(cp_size=2))
    result = simulate_step(step_of([[3000, 90]]), model, sharder_for(model), peak_flops=1e15)
    weights = 8 * (4 * 1024**2 + 3 * 1024 * 2816) + 1024 * 8192
    pairs = 3000 * 3001 // 2 + 90 * 91 // 2
    flops = 6 * weights * 3090 + 3 * 4 * 1024 * 8 * pairs
    assert result.mfu == pytest.approx(flops / (result.seconds * 2 * 1e15))


def test_the_busiest_gpu_is_looked_for_in_all_replicas() -> None:
    model = model_of(Split(cp_size=2, dp_size=2))
    result = simulate(step_of([[4000, 4]], [[40, 4]]), model, "per_document")
    workload, ranks = one_rank_of(model).workload, []
    for lengths in ([4000, 4], [40, 4]):  # quarters: the first and the last on rank 0
        for quarters in ((1, 4), (2, 3)):
            rows = [(n // 4, n // 4 * quarter) for n in lengths for quarter in quarters]
            attention = workload.segment(*np.array(rows).T).sum()
            ranks.append(float(attention + workload.linear(sum(lengths) // 2)))
    assert result.gpu_imbalance == pytest.approx(max(ranks) * 4 / sum(ranks)) and result.gpu_imbalance > 1.5


def test_memory_is_that_of_the_micro_batches_in_flight() -> None:
    model = model_of(Split(pp_size=2, dp_size=2), gradient_checkpointing=True)
    result = simulate(step_of([HEAVY, LIGHT, LIGHT], [LIGHT] * 3), model)
    assert result.memory == (stage_memory(model, 0, 4150, 4000), stage_memory(model, 1, 4000, 4000))


# ---- micro-batches that hold nothing, or nearly ----


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("sharding", sorted(set(SHARDINGS) - {"fixed"}))
def test_empty_micro_batches_cost_nothing(sharding, schedule) -> None:
    model = model_of(Split(cp_size=4, pp_size=2, dp_size=2))
    full = simulate(step_of([HEAVY, LIGHT, [], [1, 2]], [LIGHT, [], [], []]), model, sharding, schedule)
    assert full.tokens == 4000 + 2 * 150 + 3 and np.isfinite(full.seconds)
    assert all(use.total > 0 for use in full.memory)
    empty = simulate(step_of([[], []], [[], []]), model, sharding, schedule)
    assert empty.pipeline_seconds == 0.0 and empty.seconds == model.end_of_step().seconds
    assert (empty.imbalance, empty.gpu_imbalance, empty.busy) == (1.0, 1.0, (0.0, 0.0)) and empty.mfu == 0.0


def test_an_empty_micro_batch_at_the_end_changes_no_time() -> None:
    model = model_of(Split(cp_size=2, pp_size=2))
    with_it, without = (simulate(step_of([HEAVY, LIGHT, *more]), model) for more in ([[]], []))
    assert with_it.seconds == pytest.approx(without.seconds)


# ---- schedules ----


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 6), st.sampled_from([0.0, 1.0, 500.0]))
def test_pieces_are_cut_at_the_token_that_reaches_their_share(lengths, pieces, linear) -> None:
    workload = AnalyticWorkload(1.0, linear)
    tokens, work = piece_shares(np.array(lengths), pieces, workload)
    # Token by token: token t of a document sees t keys.
    each = np.concatenate([np.arange(1, n + 1) + linear for n in lengths])
    passed = np.concatenate([[0.0], np.cumsum(each)])
    cuts = [int(np.searchsorted(passed, passed[-1] * j / pieces * (1 - 1e-12))) for j in range(1, pieces)]
    counts = np.diff([0, *cuts, len(each)])
    assert (tokens * len(each)).round(6).tolist() == counts.tolist()
    by_hand = np.diff(passed[[0, *cuts, len(each)]]) / passed[-1]
    assert work == pytest.approx(by_hand, abs=1e-9)
    assert np.abs(work - 1 / pieces).max() <= each.max() / passed[-1] + 1e-9


def test_control_pieces_of_as_many_tokens_have_other_work() -> None:
    tokens, _ = piece_shares(np.array([300]), 2, AnalyticWorkload(1.0, 0.0))
    assert tokens[0] > 0.7


def test_pieces_add_up_to_the_micro_batch() -> None:
    model = model_of(Split(cp_size=2, pp_size=2))
    plan = step_of([HEAVY, [700, 800], LIGHT])
    whole, cut = (simulate(plan, model, schedule=schedule) for schedule in (SCHEDULES["1f1b"], SEQ1F1B))
    busy = [np.multiply(result.busy, result.pipeline_seconds) for result in (whole, cut)]
    assert busy[1] == pytest.approx(busy[0])
    assert cut.imbalance == pytest.approx(whole.imbalance)
    assert cut.seconds < whole.seconds  # shorter to fill and to drain
    assert cut.memory[0].activations < whole.memory[0].activations


def test_pieces_are_sent_by_their_tokens_and_computed_by_their_work() -> None:
    model = model_of(Split(pp_size=2))
    sharder = sharder_for(model)
    found = Pricing(model, sharder, SEQ1F1B).replica(step_of([HEAVY]).replicas[0])
    cost = model.micro_batch(sharder.plan(HEAVY))
    tokens, work = piece_shares(np.array(HEAVY), 3, model.workload)
    assert tokens[0] > 1.2 * work[0]
    assert found.times.send[0] == pytest.approx(cost.send * tokens)
    assert found.tokens[0] == pytest.approx(4000 * tokens)
    for times, whole in ((found.times.forward, cost.forward), (found.times.backward, cost.backward)):
        assert times[:, 0] == pytest.approx(np.outer(whole, work))


def test_virtual_stages_have_the_layers_of_their_stages() -> None:
    assert virtual_layout(StageLayout((0, 4, 8)), 2).sizes == (2, 2, 2, 2)
    assert virtual_layout(StageLayout((0, 5, 8)), 3).sizes == (2, 1, 2, 1, 1, 1)  # 5 and 3, the first ones first
    with pytest.raises(ValueError, match="model_chunks=3, but stage 1 has 2: take fewer model_chunks"):
        virtual_layout(StageLayout((0, 6, 8)), 3)


def test_interleaved_stages_do_the_same_work_in_less_time() -> None:
    model = model_of(Split(pp_size=2), layout=StageLayout((0, 4, 8)))
    plan = step_of([[2000, 2000]] * 4)
    whole, cut = (simulate(plan, model, schedule=schedule) for schedule in (SCHEDULES["1f1b"], INTERLEAVED))
    busy = [np.multiply(result.busy, result.pipeline_seconds) for result in (whole, cut)]
    assert busy[1] == pytest.approx(busy[0])  # embedding on the first, head on the last of all virtual stages
    # Filling and draining go through half of a stage's layers at a time; the head is on one of the halves.
    bubbles = [result.pipeline_seconds - max(own) for result, own in zip((whole, cut), busy, strict=True)]
    assert bubbles[1] == pytest.approx(bubbles[0] / 2, rel=0.35)


def test_schedules_that_do_not_fit_are_refused() -> None:
    model = model_of(Split(pp_size=2))
    with pytest.raises(ValueError, match="groups of pp_size=2, but 3 a step"):
        simulate(step_of([LIGHT] * 3), model, schedule=INTERLEAVED)
    with pytest.raises(ValueError, match="cuts every stage's layers into model_chunks=5"):
        simulate(step_of([LIGHT] * 2), model, schedule=ScheduleConfig("interleaved", model_chunks=5))


# ---- the bound ----


@st.composite
def steps(draw) -> tuple[Split, StepPlan]:
    split = draw(
        st.sampled_from(
            [
                Split(cp_size=2, pp_size=2, dp_size=2),
                Split(cp_size=4),
                Split(cp_size=2, dp_size=2, fsdp=True),
                Split(tp_size=2, pp_size=4),
            ]
        )
    )
    lengths = st.lists(st.sampled_from([1, 5, 60, 300, 1500, 4096]), max_size=4)
    replica = st.lists(lengths, min_size=4, max_size=4)
    return split, step_of(*draw(st.lists(replica, min_size=split.dp_size, max_size=split.dp_size)))


@settings(deadline=None, max_examples=40)
@given(steps(), st.sampled_from(sorted(SCHEDULES)))
def test_no_sharding_of_a_plan_is_faster_than_the_bound(case, schedule) -> None:
    split, plan = case
    if schedule == "interleaved" and 4 % split.pp_size:
        return
    model = model_of(split)
    bound = simulate(plan, model, "balanced", SCHEDULES[schedule])
    for name in sorted(set(SHARDINGS) - {"fixed", "balanced"}):
        assert simulate(plan, model, name, SCHEDULES[schedule]).seconds >= bound.seconds * (1 - 1e-9)
    assert bound.gpu_imbalance == pytest.approx(1.0)


def test_the_bound_evens_replicas_and_micro_batches_out() -> None:
    model = model_of(Split(cp_size=2, pp_size=2, dp_size=2))
    bound = simulate(step_of([HEAVY, LIGHT], [LIGHT, LIGHT]), model, "balanced")
    assert bound.imbalance == pytest.approx(1.0)
    times = [span.end - span.begin for row in bound.timelines[1].spans for span in row if span.stage == 0]
    assert len({round(t, 12) for t in times}) == 2  # forwards and backwards, all of one length
    # Of four micro-batches, each of two replicas' two ranks has a fourth.
    alone = one_rank_of(model)
    costs = [alone.micro_batch(Sharder(ShardingConfig(1), alone.workload).plan(m)) for m in (HEAVY, *[LIGHT] * 3)]
    work = sum(cost.forward[0] + cost.backward[0] for cost in costs)
    assert bound.busy[0] * bound.pipeline_seconds == pytest.approx(work / 4)


def test_where_lighter_ends_are_faster_the_bound_keeps_them() -> None:
    # Lighter micro-batches at both ends fill and drain a pipeline in less time than micro-batches that are all alike.
    model = model_of(Split(pp_size=2))
    plan = step_of([[2800], [4000], [4000], [2800]])
    bound, own = (simulate(plan, model, name) for name in ("balanced", "adaptive"))
    assert bound.seconds == pytest.approx(own.seconds) and bound.imbalance > 1.1
    alike = simulate(step_of([[4000], [2800], [2800], [4000]]), model, "balanced")
    assert alike.imbalance == pytest.approx(1.0) and alike.seconds > bound.seconds


def test_the_bound_still_waits_for_parameters_under_fsdp() -> None:
    slow = replace(H100, inside=Link(1e9, 0.0))
    for split in (Split(cp_size=4, fsdp=True), Split(cp_size=2, dp_size=2, fsdp=True)):
        model = model_of(split, slow)
        plan = step_of(*[[LIGHT, LIGHT]] * split.dp_size)
        bound, own = (simulate(plan, model, name).pipeline_seconds for name in ("balanced", "adaptive"))
        assert bound == pytest.approx(own)
        assert simulate(plan, model_of(replace(split, fsdp=False), slow), "balanced").pipeline_seconds < own / 10


def test_control_even_sharding_of_uneven_replicas_is_slower_than_the_bound() -> None:
    model = model_of(Split(cp_size=2, dp_size=2))
    plan = step_of([HEAVY], [LIGHT])
    found = {name: simulate(plan, model, name).pipeline_seconds for name in ("adaptive", "balanced")}
    assert found["adaptive"] > 1.5 * found["balanced"]


# ---- the whole ----


def test_plans_and_sharders_for_others_are_refused() -> None:
    model = model_of(Split(cp_size=2, dp_size=2))
    with pytest.raises(ValueError, match="planned for 1 replicas, but the split has dp_size=2"):
        simulate(step_of([LIGHT]), model)
    with pytest.raises(ValueError, match="over 4 ranks, but the split has cp_size=2"):
        simulate_step(step_of([LIGHT], [LIGHT]), model, Sharder(ShardingConfig(4), AnalyticWorkload(1.0, 1.0)))
    with pytest.raises(ValueError, match="peak must be above 0"):
        StepSimulator(model, sharder_for(model), peak_flops=0.0)


def test_plans_without_micro_batches_are_refused() -> None:
    model = model_of(Split(cp_size=2, dp_size=2))
    for plan in (step_of([], []), step_of([LIGHT], [])):
        with pytest.raises(ValueError, match=r"Replica [01] of step 0 has no micro-batch"):
            simulate(plan, model)
    assert simulate(step_of([LIGHT], [LIGHT]), model).seconds > 0


def test_replicas_that_meet_have_as_many_micro_batches() -> None:
    uneven = step_of([LIGHT], [LIGHT, HEAVY])
    apart, together = (model_of(Split(cp_size=2, dp_size=2, fsdp=fsdp)) for fsdp in (False, True))
    sentence = "have 1, 2 micro-batches, but here they go through them together"
    with pytest.raises(ValueError, match=sentence):
        simulate(uneven, together)
    with pytest.raises(ValueError, match=sentence):
        simulate_step(uneven, apart, sharder_of("balanced", 2, apart.workload))
    assert simulate(uneven, apart).seconds > 0  # others meet at the end alone


def test_the_same_step_takes_the_same_time() -> None:
    plan = step_of([HEAVY, [700, 800], LIGHT, LIGHT])
    first, second = (simulate(plan, model_of(Split(cp_size=4, pp_size=2))) for _ in range(2))
    assert (first.seconds, first.memory, first.mfu) == (second.seconds, second.memory, second.mfu)
    assert [timeline.spans for timeline in first.timelines] == [timeline.spans for timeline in second.timelines]


def test_a_step_of_8192_gpus_is_simulated_in_a_second() -> None:
    random = np.random.default_rng(0)
    seven_b = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "vocab_size": 32_000}
    shape = SimpleNamespace(**{**vars(LLAMA), **seven_b, "num_attention_heads": 32, "num_key_value_heads": 32})
    model = StepModel.of(shape, Split(8, 16, 16, 4), H100, context_length=131_072)
    micro_batches = [np.minimum(random.lognormal(8, 1, 30), 60_000).astype(int).tolist() for _ in range(64)]
    plan = step_of(*(micro_batches[r::4] for r in range(4)))
    assert model.split.gpus == 8192 and plan.tokens > 64 * 100_000
    simulator = StepSimulator(model, sharder_of("adaptive", 16, model.workload))
    taken = []
    for _ in range(2):
        begin = time.process_time()
        simulator.step(plan)
        taken.append(time.process_time() - begin)
    assert min(taken) < 1.0
