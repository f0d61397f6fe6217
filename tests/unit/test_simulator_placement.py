"""Ways of sharing out that are no strategies of ours: the paper's choice, whole documents, and the bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.sharding import SHARDED, Sharder, ShardingConfig
from hf_wlb.simulator.placement import BalancedAttention, StaticChoice, WholeDocuments
from hf_wlb.simulator.systems import SHARDINGS, SYSTEMS, System, sharder_of
from hf_wlb.workload import AnalyticWorkload

from .sharding.checks import WORKLOAD, check_plan, make_plan, micro_batches, predict_by_hand

LINEAR = AnalyticWorkload(0.0, 1.0)


def ranks_of(plan, document: int) -> int:
    """So many ranks hold a part of the document."""
    if plan.owner[document] != SHARDED:
        return 1
    widths = np.diff(plan.edges[plan.sharded.tolist().index(document)])
    return int((widths + widths[::-1] > 0)[: plan.cp_size].sum())


# ---- the paper's choice ----


@settings(deadline=None)
@given(micro_batches())
def test_the_static_choice_is_the_better_of_the_two(case) -> None:
    lengths, cp_size = case
    both = [make_plan(lengths, cp_size, name) for name in ("per_sequence", "per_document")]
    found = StaticChoice(cp_size, WORKLOAD).plan(lengths)
    assert found.slowest == min(plan.slowest for plan in both)
    assert found.digest() in [plan.digest() for plan in both]


def test_the_static_choice_takes_either() -> None:
    plans = [StaticChoice(2, WORKLOAD).plan(lengths) for lengths in ([4000, 200], [1000] * 4)]
    assert [plan.strategy for plan in plans] == ["per_document", "per_sequence"]


# ---- whole documents ----


@settings(deadline=None)
@given(micro_batches(), st.integers(1, 400))
def test_whole_documents_place_every_token_and_keep_to_the_room(case, room) -> None:
    lengths, cp_size = case
    plan = WholeDocuments(cp_size, WORKLOAD, room).plan(lengths)
    check_plan(plan)
    assert plan.tokens.max() <= max(room, math.ceil(sum(lengths) / cp_size))
    assert plan.predicted == pytest.approx(predict_by_hand(plan, WORKLOAD))
    assert plan.strategy == "whole"


@settings(deadline=None)
@given(micro_batches())
def test_with_room_for_all_every_document_is_whole_and_nothing_is_exchanged(case) -> None:
    lengths, cp_size = case
    plan = WholeDocuments(cp_size, WORKLOAD, sum(lengths)).plan(lengths)
    assert (plan.owner != SHARDED).all() and plan.exchanged_tokens.sum() == 0


def test_documents_with_most_work_come_first_each_to_the_rank_with_least() -> None:
    # 50 to rank 0, 40 to rank 1; 30 to rank 1, 20 to rank 0; both have 70, so 10 to rank 0, and 5 to rank 1.
    plan = WholeDocuments(2, LINEAR, 100).plan([10, 50, 30, 40, 5, 20])
    assert plan.owner.tolist() == [0, 0, 1, 1, 1, 0] and plan.tokens.tolist() == [80, 75]


def test_a_long_document_takes_as_few_ranks_as_hold_it() -> None:
    plan = WholeDocuments(4, LINEAR, 100).plan([250, 60, 40])
    assert ranks_of(plan, 0) == 3 and plan.owner[1:].tolist() == [3, 3]
    assert plan.tokens.tolist() == [84, 83, 83, 100]
    assert plan.edges.tolist() == [[0, 42, 84, 126, 126, 126, 167, 208, 250]]  # rank 3 has neither head nor tail


def test_a_document_that_no_rank_has_room_for_is_cut_over_more() -> None:
    # Two documents of 60 fill two ranks of 100 so far that the third goes over both, 30 each.
    plan = WholeDocuments(2, LINEAR, 100).plan([60, 60, 60])
    assert [ranks_of(plan, document) for document in range(3)] == [1, 1, 2]
    assert plan.tokens.tolist() == [90, 90]


def test_what_no_even_parts_fit_goes_by_the_room_left() -> None:
    # Ranks have 20 and 60 free of 100, 70 tokens come: not 35 each, but 18 and 52.
    plan = WholeDocuments(2, AnalyticWorkload(1.0, 0.0), 100).plan([80, 70, 40])
    assert sum(ranks_of(plan, document) == 2 for document in range(3)) == 1
    assert plan.tokens.sum() == 190 and plan.tokens.max() <= 100
    check_plan(plan)


def test_a_micro_batch_above_all_rooms_is_placed_all_the_same() -> None:
    plan = WholeDocuments(4, WORKLOAD, 10).plan([70, 20, 9, 1])
    assert plan.tokens.tolist() == [25, 25, 25, 25]
    check_plan(plan)


def test_a_room_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_shard must be a whole number of at least 1, got 0"):
        WholeDocuments(2, WORKLOAD, 0)


# ---- the bound ----


@settings(deadline=None)
@given(micro_batches())
def test_no_sharding_is_faster_than_the_bound(case) -> None:
    lengths, cp_size = case
    bound = BalancedAttention(cp_size, WORKLOAD).plan(lengths)
    check_plan(bound)
    assert np.ptp(bound.predicted) == 0 and np.ptp(bound.tokens) <= 2
    room = math.ceil(1.25 * sum(lengths) / cp_size)
    for name in set(SHARDINGS) - {"fixed", "balanced"}:
        assert sharder_of(name, cp_size, WORKLOAD, room * cp_size).plan(lengths).slowest >= bound.slowest * (1 - 1e-9)


# ---- by name ----


def test_kinds_of_sharders_have_fingerprints_of_their_own() -> None:
    sharders = [
        Sharder(ShardingConfig(4, "per_document"), WORKLOAD),
        StaticChoice(4, WORKLOAD),
        WholeDocuments(4, WORKLOAD, 10),
        WholeDocuments(4, WORKLOAD, 11),
        BalancedAttention(4, WORKLOAD),
        BalancedAttention(2, WORKLOAD),
    ]
    assert len({sharder.fingerprint for sharder in sharders}) == len(sharders)


def test_systems_share_out_as_they_say() -> None:
    assert {system.sharding for system in SYSTEMS.values()} <= set(SHARDINGS)
    kinds = {name: [type(s) for s in system.sharders(2, WORKLOAD, 4096)] for name, system in SYSTEMS.items()}
    assert kinds["fixed-4d"] == [Sharder, Sharder] and kinds["paper"] == [StaticChoice]
    assert len(SYSTEMS["fixed-4d"].sharders(1, WORKLOAD, 4096)) == 1
    whole = SYSTEMS["whole"].sharders(3, WORKLOAD, 4096)[0]
    assert isinstance(whole, WholeDocuments) and whole.room == 1366  # 4096 / 3, rounded up


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: System("x", "best-fit", "placed"), "packer of system 'x' must be one of steady, .*, got 'best-fit'"),
        (lambda: System("x", "steady", "best"), "sharding of system 'x' must be one of per_sequence, .*, got 'best'"),
        (lambda: System("x", "wlb", "static", {"dp_size": 2}), "'x' cannot set dp_size of packing for itself; it may"),
        (lambda: sharder_of("fixed", 2, WORKLOAD), "sharding must be one of per_sequence, .*, got 'fixed'"),
        (lambda: sharder_of("whole", 2, WORKLOAD), "whole documents needs max_tokens_per_micro_batch"),
    ],
)
def test_what_there_is_not_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
