"""Placed sharding: bounds on tokens, longest processing time, and level loads by pouring the long documents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.sharding import SHARDED, ShardCosts, per_document
from hf_wlb.sharding.placed import Placement, TokenBounds, _level
from hf_wlb.workload import AnalyticWorkload

from .checks import CP_SIZES, WORKLOAD, bounds_of, check_plan, make_plan, micro_batches

LOOSE = 0.99  # a skew that never binds, but for a rank needing a token


def placement(lengths, cp_size, skew=LOOSE, max_tokens=None, workload=WORKLOAD) -> Placement:
    array = np.array(lengths)
    costs = ShardCosts.of(array, workload, cp_size)
    return Placement(costs, TokenBounds.of(int(array.sum()), cp_size, skew, max_tokens))


def test_short_documents_are_dealt_longest_first() -> None:
    # Each to the rank with least to do: 50 | 40 | then 30 to rank 1, 20 to rank 0, 10 and 5 to the lighter.
    plan = placement([10, 50, 30, 40, 5, 20], 2, workload=AnalyticWorkload(0.0, 1.0)).place(0)
    assert plan.owner.tolist() == [0, 0, 1, 1, 1, 0] and plan.tokens.tolist() == [80, 75]
    assert plan.strategy == "placed" and plan.threshold == 50 and len(plan.edges) == 0


def test_a_long_document_fills_what_the_short_ones_left() -> None:
    # Linear work only: 60 tokens lie on rank 0, so that 100 more bring both ranks to 80 with shares 0.2 and 0.8.
    plan = placement([100, 60], 2, workload=AnalyticWorkload(0.0, 1.0)).place(1)
    assert plan.owner.tolist() == [SHARDED, 0]
    assert plan.edges.tolist() == [[0, 10, 50, 90, 100]]
    assert plan.tokens.tolist() == [80, 80] and plan.threshold == 60


def test_a_rank_full_of_short_documents_gets_nothing_of_the_long_one() -> None:
    plan = placement([60, 59, 40], 3, workload=AnalyticWorkload(0.0, 1.0)).place(1)
    assert plan.owner.tolist() == [SHARDED, 0, 1]
    # 59, 40 and 60 to pour: rank 0 stays, ranks 1 and 2 come to 50 each.
    assert plan.exchanged_tokens.tolist() == [0, 10, 50] and plan.tokens.tolist() == [59, 50, 50]


def test_documents_of_equal_length_may_be_told_apart() -> None:
    plan = placement([40, 40, 40], 2).place(1)
    assert plan.owner.tolist() == [SHARDED, 0, 1] and plan.threshold == 40


def test_nothing_left_whole_is_per_document() -> None:
    lengths = [30, 17, 9, 100]
    plan = placement(lengths, 4).place(4)
    assert plan.edges.tolist() == per_document(lengths, 4).edges.tolist() and plan.threshold == 0


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 3000), min_size=2, max_size=7), st.integers(2, 3))
def test_longest_processing_time_is_within_a_third_of_the_optimum(lengths, cp_size) -> None:
    plan = placement(lengths, cp_size).place(0)
    if plan is None:  # a rank would have nothing, or a document is too long for any
        least, most = bounds_of(lengths, cp_size, LOOSE, None)
        assert len(lengths) < cp_size or least > 1 or max(lengths) > most
        return
    costs = ShardCosts.of(np.array(lengths), WORKLOAD, cp_size)
    whole = costs.whole + costs.linear * np.array(lengths)
    best = min(
        np.bincount(owner, whole, cp_size).max() for owner in itertools.product(range(cp_size), repeat=len(lengths))
    )
    assert costs.predict([plan]).max() <= best * (4 / 3) * (1 + 1e-9)


@settings(deadline=None, max_examples=100)
@given(
    micro_batches(most=400, documents=25),
    st.sampled_from([0.0, 0.01, 0.05, 0.5]),
    st.none() | st.integers(0, 20),
    st.integers(0, 25),
)
def test_bounds_on_tokens_hold(given_, skew, spare, count) -> None:
    lengths, cp_size = given_
    max_tokens = None if spare is None else -(-sum(lengths) // cp_size) + spare
    least, most = bounds_of(lengths, cp_size, skew, max_tokens)
    plan = placement(lengths, cp_size, skew, max_tokens).place(min(count, len(lengths)))
    if plan is None:
        assert count < len(lengths), "everything sharded always fits"
        return
    check_plan(plan)
    assert least - 1e-9 <= plan.tokens.min() and plan.tokens.max() <= most + 1e-9


def test_bounds_hold_for_many_equal_documents() -> None:
    """Rounding each of a hundred alike used to move one rank by dozens of tokens."""
    lengths = [8] * 100 + [13]
    for count in range(102):
        for skew, max_tokens in ((0.01, None), (0.05, None), (0.3, 210)):
            plan = placement(lengths, 4, skew, max_tokens).place(count)
            least, most = bounds_of(lengths, 4, skew, max_tokens)
            assert plan is None or (least <= plan.tokens.min() and plan.tokens.max() <= most)


def test_no_rank_is_rounded_down_to_nothing() -> None:
    plan = make_plan([1, 1, 1, 3], 4, "placed", max_tokens_per_shard=2)
    assert plan.tokens.min() >= 1 and plan.tokens.max() <= 2


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_documents_up_to_the_threshold_stay_whole(cp_size) -> None:
    rng = np.random.default_rng(cp_size)
    lengths = np.concatenate([rng.integers(10, 500, 60), [20_000, 9_000]])
    for threshold in (500, 9_000):
        plan = make_plan(lengths, cp_size, "placed", threshold=threshold, max_token_skew=LOOSE)
        assert (plan.owner[lengths <= threshold] != SHARDED).all()
        assert (plan.owner[lengths > threshold] == SHARDED).all()
        assert plan.threshold == lengths[lengths <= threshold].max()
    everything = make_plan(lengths, cp_size, "placed", threshold=0)
    assert everything.edges.tolist() == per_document(lengths, cp_size).edges.tolist()


def test_bounds_force_the_longest_of_the_short_to_be_sharded() -> None:
    # 3 documents of 100 whole on 2 ranks: 200 and 100 tokens; a skew of 5% allows 142 to 158.
    lengths = [100, 99, 98]
    plan = make_plan(lengths, 2, "placed", threshold=100, max_token_skew=0.05)
    assert plan.owner.tolist() == [SHARDED, 0, 1]
    assert plan.token_skew <= 0.05
    # Control: where the skew allows it, nothing is sharded.
    loose = make_plan(lengths, 2, "placed", threshold=100, max_token_skew=0.5)
    assert (loose.owner != SHARDED).all() and sorted(loose.tokens.tolist()) == [100, 197]


def test_memory_forces_it_too() -> None:
    plan = make_plan([100, 99, 98], 2, "placed", threshold=100, max_token_skew=0.9, max_tokens_per_shard=150)
    assert plan.owner.tolist() == [SHARDED, 0, 1] and plan.tokens.max() <= 150


@settings(deadline=None, max_examples=60)
@given(micro_batches(most=400, documents=25), st.integers(0, 400))
def test_what_the_bounds_force_are_the_longest(given_, threshold) -> None:
    lengths, cp_size = given_
    plan = make_plan(lengths, cp_size, "placed", threshold=threshold)
    # A sharded document may still have come to lie on one rank; a whole one of at most the threshold was placed so.
    sharded = plan.lengths[plan.owner == SHARDED]
    if cp_size > 1 and len(sharded):
        assert sharded.min() >= plan.threshold
        assert plan.threshold <= threshold


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_loads_come_out_level_where_they_can(cp_size, monkeypatch) -> None:
    monkeypatch.setattr("hf_wlb.sharding.cost.WAITING", 0.0)  # loads themselves, not what unlike chunks cost
    lengths = np.array([4000, 700, 2500, 60_000])
    workload = AnalyticWorkload.from_crossover(24_576, exchange_per_token=0.0)
    plan = make_plan(lengths, cp_size, "placed", workload, threshold=4000, max_token_skew=0.5)
    assert plan.owner[-1] == SHARDED and len(plan.edges) == 1
    assert plan.imbalance < 1.02
    # Control: the long document cut evenly on top of the same placement leaves ranks apart.
    even = per_document(lengths[-1:], cp_size).edges
    other = type(plan)(plan.lengths, cp_size, plan.owner, even, "even")
    loads = ShardCosts.of(plan.lengths, workload, cp_size).predict([other])[0]
    assert loads.max() / loads.mean() > plan.imbalance


@settings(deadline=None)
@given(st.sampled_from(CP_SIZES), st.data())
def test_pouring_is_level_within_bounds(ranks, data) -> None:
    amount = st.floats(0, 1)
    load = data.draw(st.lists(st.floats(0, 3), min_size=ranks, max_size=ranks))
    low = data.draw(st.lists(amount, min_size=ranks, max_size=ranks))
    low = [a / max(1.0, sum(low)) for a in low]
    high = [a + data.draw(amount) for a in low]
    if sum(high) < 1:
        high = [b + 1 for b in high]
    shares = _level(load, low, high)
    assert shares.sum() == pytest.approx(1.0)
    assert (shares >= np.array(low) - 1e-9).all() and (shares <= np.array(high) + 1e-9).all()
    after = np.array(load) + shares
    free_to_give = [a for a, s, lo in zip(after, shares, low, strict=True) if s > lo + 1e-9]
    free_to_take = [a for a, s, hi in zip(after, shares, high, strict=True) if s < hi - 1e-9]
    if free_to_give and free_to_take:  # nobody could take from one that has more
        assert max(free_to_give) <= min(free_to_take) + 1e-6


@pytest.mark.parametrize("ranks", [2, 3])
def test_pouring_by_hand(ranks) -> None:
    assert _level([0.0] * ranks, [0.0] * ranks, [1.0] * ranks).tolist() == pytest.approx([1 / ranks] * ranks)
    assert _level([0.0, 0.4], [0.0] * 2, [1.0] * 2).tolist() == pytest.approx([0.7, 0.3])
    assert _level([0.0, 0.4], [0.0] * 2, [0.6, 1.0]).tolist() == pytest.approx([0.6, 0.4])
    assert _level([0.0, 5.0], [0.0, 0.1], [1.0] * 2).tolist() == pytest.approx([0.9, 0.1])


def test_too_little_memory_gets_a_sentence() -> None:
    message = "A micro-batch of 1,000 tokens does not fit 4 ranks of at most 249 tokens each. Raise max_tokens_per_sha"
    for strategy in ("per_sequence", "per_document", "placed", "adaptive"):
        with pytest.raises(ValueError, match=message):
            make_plan([900, 100], 4, strategy, max_tokens_per_shard=249)
        assert make_plan([900, 100], 4, strategy, max_tokens_per_shard=250).tokens.max() == 250
