"""What micro-batches cost: by hand, summed over stages, and on faster hardware."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hf_wlb.sharding import ShardCosts, Sharder, ShardingConfig, per_document, per_sequence
from hf_wlb.sharding.cost import HIDDEN, WAITING
from hf_wlb.simulator.cluster import (
    ASSUMED,
    CLUSTERS,
    Cluster,
    Group,
    Link,
    all_gather_seconds,
    changed,
    reduce_scatter_seconds,
)
from hf_wlb.simulator.costs import MicroBatchCost, StepModel
from hf_wlb.simulator.rank_workload import RankWorkload
from hf_wlb.simulator.split import Split
from hf_wlb.staging import StageLayout, schedule_seconds
from tests.support.simulated import LENGTHS, SLIDING, SLOW, SPARSE, K, config, llama_7b, model, profile
from tests.support.source_tree import REPOSITORY

RESULTS = REPOSITORY / "recipes" / "benchmarks" / "results" / "context_parallel.json"


def whole(cost: MicroBatchCost) -> float:
    return sum(cost.forward) + sum(cost.backward)


# ---- micro-batches ----


@pytest.mark.parametrize("changes", [{}, SLIDING, SPARSE], ids=["llama", "sliding", "sparse"])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_stages_add_up_to_the_workload(changes, pp_size: int, checkpointing: bool) -> None:
    found = model(Split(pp_size=pp_size), changes=changes, gradient_checkpointing=checkpointing)
    cost = found.micro_batch(per_document(LENGTHS, 1))
    workload = found.workload
    assert len(cost.forward) == len(cost.backward) == len(cost.attention) == pp_size
    assert cost.tokens == LENGTHS.sum()
    assert whole(cost) == pytest.approx(workload.micro_batch(LENGTHS), rel=1e-12)  # short rows lose nothing here
    assert sum(cost.attention) == pytest.approx(float(workload.attention(LENGTHS).sum()), rel=1e-12)
    # Negative control: the embedding's cost is part of it.
    less = replace(workload, linear_seconds_per_token=workload.linear_seconds_per_token - found.linear.embedding.total)
    assert whole(cost) != pytest.approx(less.micro_batch(LENGTHS), rel=1e-6)


def test_every_layer_has_its_own_windows_attention() -> None:
    found = model(Split(pp_size=4), changes=SLIDING, layout=StageLayout((0, 1, 2, 3, 4)))
    first, full, third, last = found.micro_batch(per_document([3000], 1)).attention
    assert first == third == last
    pairs = (3000 * 3001 / 2, 100 * 101 / 2 + 2900 * 100)
    assert full / first == pytest.approx(pairs[0] / pairs[1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_backward_by_hand(checkpointing: bool) -> None:
    found = model(gradient_checkpointing=checkpointing)
    cost = found.micro_batch(per_document([100], 1))
    flops = 4 * 2 * (8 + 8) * 100 * 101 / 2  # 4 layers, two products of 8 wide queries and values
    forward, backward = flops / 400, 2.5 * flops / 200 + checkpointing * flops / 400
    linear = found.linear
    assert cost.forward[0] == pytest.approx(
        forward + 100 * (4 * linear.layers[0].forward + linear.embedding.forward + linear.head.forward)
    )
    assert cost.backward[0] == pytest.approx(
        backward + 100 * (4 * linear.layers[0].backward + linear.embedding.backward + linear.head.backward)
    )


def test_one_rank_exchanges_nothing() -> None:
    alone = model(Split())
    assert alone.workload.exchange(1000, 1) == 0
    fast, slow = (
        model(Split(), replace(SLOW, inside=Link(rate, 0.0))).micro_batch(per_document(LENGTHS, 1))
        for rate in (1e-3, 1e6)
    )
    assert fast == slow


@pytest.mark.parametrize("strategy", [per_document, per_sequence])
def test_the_slowest_rank_is_the_one_that_sharding_predicts(strategy) -> None:
    found = model(Split(cp_size=4))
    plan = strategy(LENGTHS, 4)
    predicted = ShardCosts.of(plan.lengths, found.workload, 4).price([plan])[0]
    cost = found.micro_batch(plan)
    # Where one rank is slowest in forward and another in backward, they wait for both.
    assert predicted.slowest * (1 - 1e-12) <= whole(cost) < predicted.slowest * 1.02
    assert cost.tokens == plan.tokens.max()
    # Negative control: that is not the mean rank.
    assert strategy is per_document or predicted.imbalance > 1.01


def test_the_exchange_by_hand() -> None:
    """Of 4 layers: keys and values of 4 numbers each, 16 bytes a token, on 2 of 4 GPUs of a node, twice in forward."""
    split, group = Split(cp_size=2), Group(2, 1)
    tokens = 500
    size = 16 * tokens
    gather = all_gather_seconds(SLOW, group, size) + 2.5 * size / 100
    reduce = reduce_scatter_seconds(SLOW, group, size) + (3 * 3 / 8 + 2 + 1.5) * size / 100
    once, twice = (model(split, gradient_checkpointing=again).workload for again in (False, True))
    assert once.exchange(tokens, 2) == pytest.approx(4 * (gather + reduce))
    assert twice.exchange(tokens, 2) == pytest.approx(4 * (2 * gather + reduce))
    assert twice.exchange_costs.parts(tokens) == pytest.approx((4 * gather, 4 * (gather + reduce)))
    assert once.exchange(0, 2) == 0
    late = model(split, replace(SLOW, inside=Link(50.0, 7.0))).workload
    # Keys and values travel apart: two messages each way and layer.
    assert late.exchange(tokens, 2) - once.exchange(tokens, 2) == pytest.approx(4 * 4 * 7)


def test_the_exchange_goes_over_the_links_that_the_group_has() -> None:
    near, far = model(Split(cp_size=2)), model(Split(cp_size=2, tp_size=2))
    assert near.workload.exchange(500, 2) > 0
    apart = StepModel.of(config(), Split(cp_size=2), replace(SLOW, gpus_per_node=1), context_length=4000)
    assert apart.workload.exchange(500, 2) > near.workload.exchange(500, 2)
    # Two tensor-parallel ranks still have the one KV head each.
    assert far.workload.exchange(500, 2) == pytest.approx(near.workload.exchange(500, 2))


def test_the_exchange_is_what_was_measured_on_four_gpus() -> None:
    measured = json.loads(RESULTS.read_text())["kv_heads"]

    def worst(cluster: Cluster) -> float:
        errors = []
        for kv_heads, part in measured.items():
            shape = llama_7b(1)
            shape.num_key_value_heads = int(kv_heads)
            workload = StepModel.of(shape, Split(cp_size=4), cluster, context_length=64 * K).workload
            for sample in part["profile"]["collectives"]:
                tokens = sample["bytes"] // (2 * 2 * 128 * int(kv_heads))
                if sample["operation"] == "key_value_exchange" and tokens >= 4 * K:
                    errors.append(workload.exchange(tokens, 4) / sample["seconds"] - 1)
        assert len(errors) == 8
        return max(map(abs, errors))

    assert worst(CLUSTERS["h100"]) < 0.10
    # Negative controls: copies count, and so do links.
    assert worst(changed(CLUSTERS["h100"], "element-wise", 1e6)) > 0.2
    assert worst(changed(CLUSTERS["h100"], "NVLink", 0.8)) > 0.10


def test_hidden_states_are_sent_over_the_slowest_hop() -> None:
    plan = per_document(LENGTHS, 1)
    size = LENGTHS.sum() * 8 * 4  # float32
    assert model(Split()).micro_batch(plan).send == 0
    assert model(Split(pp_size=4)).micro_batch(plan).send == pytest.approx(size / 50)
    wide = Split(pp_size=4, tp_size=2)  # the second and the third stage are in different nodes
    assert model(wide).micro_batch(plan).send == pytest.approx(size / 10)
    shared = Split(pp_size=2, dp_size=2, fsdp=True)  # bf16
    assert model(shared).micro_batch(plan).send == pytest.approx(size / 2 / 50)


@pytest.mark.parametrize("constant", ASSUMED)
@pytest.mark.parametrize(
    "split",
    [Split(), Split(2, 2, 2, 2), Split(8, 4, 4, 2), Split(16, 4, 2, 1), Split(2, 4, 1, 4, fsdp=True)],
    ids=lambda split: split.label,
)
def test_better_hardware_never_slows(split: Split, constant: str) -> None:
    better = 0.5 if constant in ("latency", "short rows", "unlike chunks") else 2.0
    options = {"context_length": 64 * K, "gradient_checkpointing": True, "layout": None}
    old = StepModel.of(llama_7b(8), split, CLUSTERS["h100"], **options)
    new = StepModel.of(
        llama_7b(8), split, changed(CLUSTERS["h100"], constant, better), **{**options, "layout": old.layout}
    )
    plan = Sharder(ShardingConfig(split.cp_size), old.workload).plan([40_000, 20_000, 3000, 1000])
    before, after = old.micro_batch(plan), new.micro_batch(plan)
    rounding = 1 + 1e-12
    both_before, both_after = (np.add(cost.forward, cost.backward) for cost in (before, after))
    assert (both_after <= both_before * rounding).all()
    if constant in ("NVLink", "network", "latency"):
        assert (np.array(after.forward) <= np.array(before.forward) * rounding).all()
        assert (np.array(after.backward) <= np.array(before.backward) * rounding).all()
    assert after.send <= before.send
    assert new.end_of_step().seconds <= old.end_of_step().seconds
    relevant = {"NVLink": split.gpus > 1, "network": split.gpus > 8, "latency": split.gpus > 1}
    is_faster = whole(after) + after.send + new.end_of_step().seconds < whole(before) + before.send + (
        old.end_of_step().seconds
    )
    if constant in ("hidden exchange", "unlike chunks"):  # the slowest rank need not be the one that they concern
        assert not is_faster or split.cp_size > 1
    else:
        assert is_faster == relevant.get(constant, True)


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["one window", "two windows"])
@pytest.mark.parametrize("profiled", [False, True])
def test_costs_that_are_known_are_not_priced_again(changes, profiled: bool, monkeypatch) -> None:
    layers = [{"count": 3, "window": 100}, {"count": 1, "window": None}] if changes else [{"count": 4, "window": None}]
    given = profile(layers=layers) if profiled else None
    found = model(Split(cp_size=2, pp_size=2), changes=changes, profile=given)
    plan = Sharder(ShardingConfig(2), found.workload).plan(LENGTHS)
    calls, priced = [], ShardCosts.of
    monkeypatch.setattr(ShardCosts, "of", lambda *given, **more: calls.append(given) or priced(*given, **more))
    fresh = found.micro_batch(plan)
    first = len(calls)
    assert found.micro_batch(plan, found.rank_costs(plan)) == fresh
    again = len(calls) - first
    assert again == (first if not changes else first + 1)  # those of one window take the place of its own
    # Negative control: what is handed over counts where layers have one window.
    other = replace(found.rank_costs(plan), chunks=2 * found.rank_costs(plan).chunks)
    assert (found.micro_batch(plan, other) != fresh) == (not changes)


def test_what_exchanges_hide_and_waiting_cost_are_the_clusters() -> None:
    split = Split(cp_size=2)
    plan = Sharder(ShardingConfig(2, "placed", 800), model(split).workload).plan(LENGTHS)
    usual = model(split).rank_costs(plan)
    bare = model(split, replace(SLOW, hidden_exchange=0.0, unlike_chunks=0.0)).rank_costs(plan)
    exchange = model(split).workload.exchange(int(plan.exchanged_tokens.max()) * 2, 2)
    assert bare.waiting == pytest.approx([exchange] * 2)
    hidden = np.minimum(usual.local, HIDDEN * exchange)
    expected = exchange - hidden + WAITING * (usual.chunks.max() - usual.chunks)
    assert hidden.max() > 0 and usual.waiting == pytest.approx(expected)
    assert (usual.local == bare.local).all() and (usual.chunks == bare.chunks).all()


def test_sharded_parameters_show_where_links_are_slower_than_computing() -> None:
    plan = per_document([40], 1)
    whole_parameters = model(Split(dp_size=2)).micro_batch(plan)
    assert model(Split(dp_size=2, fsdp=True)).micro_batch(plan) == whole_parameters
    lame = replace(SLOW, inside=Link(0.1, 0.0))
    shown = model(Split(dp_size=2, fsdp=True), lame).micro_batch(plan)
    parameters = 4 * 480 + 2 * 128
    assert shown.forward[0] == pytest.approx(2 * parameters / 2 / 0.1)  # half of it comes from the other rank
    assert shown.backward[0] == pytest.approx((2 + 4) * parameters / 2 / 0.1)


# ---- the end of a step ----


def test_the_end_of_a_step_by_hand() -> None:
    parameters = 4 * 480 + 2 * 128
    alone = model(Split()).end_of_step()
    assert (alone.reduce, alone.gather) == (0, 0)
    assert alone.norm == pytest.approx(12 * parameters / 100)
    assert alone.optimizer == pytest.approx(28 * parameters / 100)
    assert alone.seconds == alone.norm + alone.optimizer
    both = model(Split(cp_size=2, dp_size=2)).end_of_step()  # four GPUs of one node
    assert both.reduce == pytest.approx(2 * 3 / 4 * 4 * parameters / 50 + 24 * parameters / 100)
    assert both.optimizer == alone.optimizer
    sharded = model(Split(cp_size=2, dp_size=2, fsdp=True)).end_of_step()
    assert sharded.optimizer == pytest.approx(alone.optimizer / 4)
    assert sharded.reduce == pytest.approx(3 / 4 * 4 * 480 / 50)  # of one layer, the others' are hidden
    assert sharded.gather == pytest.approx(3 / 4 * 2 * 480 / 50)


def test_replicas_apart_sum_what_their_context_ranks_have_summed() -> None:
    found = model(Split(cp_size=2, pp_size=2, dp_size=2), layout=StageLayout((0, 2, 4))).end_of_step()
    held = 2 * 480 + 128  # of either stage; replicas lie in different nodes of four
    inside = 2 * 1 / 2 * 4 * held / 50
    between = 2 * 1 / 2 * (4 * held / 2) / 10
    assert found.reduce == pytest.approx(inside + between + 24 * held / 100)


def test_tied_embeddings_are_summed_over_both_ends() -> None:
    split, layout = Split(pp_size=2), StageLayout((0, 2, 4))
    apart = model(split, layout=layout).end_of_step()
    tied = model(split, layout=layout, changes={"tie_word_embeddings": True}).end_of_step()
    assert tied.reduce - apart.reduce == pytest.approx(2 * 1 / 2 * 4 * 128 / 50)


# ---- layouts ----


def test_the_layout_is_balanced_by_these_costs() -> None:
    found = model(Split(pp_size=2), changes={"num_hidden_layers": 8, "vocab_size": 16_000})
    assert found.layout == found.stage_costs.layout(2)
    assert found.layout.sizes[0] > found.layout.sizes[1]  # the head is heavy
    total = sum(found.stage_costs.layers) + found.stage_costs.before + found.stage_costs.after
    assert total == pytest.approx(found.workload.micro_batch([1000] * 4))
    given = StageLayout((0, 1, 8))
    own = model(Split(pp_size=2), changes={"num_hidden_layers": 8}, layout=given)
    assert own.layout is given
    cost = own.micro_batch(per_document(LENGTHS, 1))
    assert cost.attention[1] == pytest.approx(7 * cost.attention[0])


# ---- the workload ----


def test_the_workload_can_be_written_and_read() -> None:
    for found in (model(Split(cp_size=2)), model(Split(cp_size=2), profile=profile())):
        again = RankWorkload.from_dict(json.loads(json.dumps(found.workload.to_dict())))
        assert again.fingerprint == found.workload.fingerprint
        assert again.micro_batch(LENGTHS) == found.workload.micro_batch(LENGTHS)
        assert again.exchange(500, 2) == found.workload.exchange(500, 2)
    with pytest.raises(ValueError, match=r"must be of schema 'hf_wlb.rank_workload/1', but it is of 'x'"):
        RankWorkload.from_dict({"schema": "x"})


def test_the_crossover_is_where_attention_outweighs_linear_work() -> None:
    workload = model().workload
    length = int(workload.crossover_length)
    assert workload.attention(length) >= workload.linear(length)
    assert workload.attention(length - 1) < workload.linear(length - 1)
    assert workload.chunk(30, 70) == pytest.approx(workload.document(70) - workload.document(40))


def test_refusals() -> None:
    two = model(Split(cp_size=2))
    with pytest.raises(ValueError, match="over 1 ranks, but the split has 2"):
        two.micro_batch(per_document(LENGTHS, 1))
    with pytest.raises(ValueError, match="among 2 context-parallel ranks, but cp_size=4 was asked for"):
        two.workload.exchange(100, 4)
    with pytest.raises(ValueError, match="The layout has 3 layers on 1 stages, but the model has 4 layers and pp_size"):
        model(layout=StageLayout((0, 3)))
    with pytest.raises(ValueError, match="context_length must be a whole number of at least cp_size=8"):
        model(Split(cp_size=8), context_length=4)
    with pytest.raises(ValueError, match="pp_size=5 is more than the model's 4 layers"):
        model(Split(pp_size=5))


# ---- what was seen on GPUs ----


@pytest.mark.parametrize(("mix", "within"), [("short", 0.15), ("reference", 0.40)])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_takes_about_what_it_took_on_four_gpus(mix: str, within: float, compiled: bool) -> None:
    """6.1 s on H200: 8 layers of 7B on 4 stages, 4 micro-batches of 128K, flash-attn 4, recomputed.

    A check of the order of magnitude, no validation: the step's documents were not recorded. With 39 documents of up to
    10K the model is 8% below (compiled) to 12% above (eager); with documents of the reference mix's mean square, 17% to
    37% above.
    """
    short = next(
        case["lengths"]
        for case in json.loads(RESULTS.read_text())["kv_heads"]["32"]["cases"]
        if case["name"] == "128K mix, short, seed 1"
    )
    found = StepModel.of(
        llama_7b(8),
        Split(pp_size=4),
        CLUSTERS["h100-flash-attn-4"],
        context_length=128 * K,
        gradient_checkpointing=True,
        compiled=compiled,
    )
    cost = found.micro_batch(per_document(short if mix == "short" else [18_725] * 7, 1))
    seconds = schedule_seconds([[time] * 4 for time in cost.forward], [[time] * 4 for time in cost.backward])
    assert abs((seconds + found.end_of_step().seconds) / 6.1 - 1) < within
    # Negative control: without attention and checkpointing, it would be far less.
    assert 7 * found.linear.layers[0].forward * 2 * 128 * K < 6.1 * (1 - within)
