"""The step-time model by hand, and how micro-batches are dealt and ordered, against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.packing import StepTimeModel
from hf_wlb.packing.step_time import lightest_at_both_ends
from tests.unit.packing.checks import micro

WORKLOADS = st.floats(0, 1e6, allow_nan=False)


def times(replicas):
    return [[m.workload for m in replica] for replica in replicas]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (StepTimeModel(), 6.0),  # max(1 + 2 + 3, 1 + 1 + 1)
        (StepTimeModel(pp_size=4), 15.0),  # 6 + 3 * 3 against 3 + 3
        (StepTimeModel(sharded_parameters=True), 6.0),  # the first rank is the slower one at every micro-step
        (StepTimeModel(pp_size=4, sharded_parameters=True), 15.0),  # stages keep their parameters
    ],
)
def test_step_time_by_hand(model, expected):
    assert model.step_time([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]) == expected


def test_the_slowest_rank_of_every_micro_step_counts():
    workloads = [[1.0, 5.0], [4.0, 2.0]]
    assert StepTimeModel(sharded_parameters=True).step_time(workloads) == 9.0
    assert StepTimeModel().step_time(workloads) == 6.0
    assert StepTimeModel(pp_size=2).step_time(workloads) == 11.0
    assert StepTimeModel(pp_size=2).lower_bound(workloads) == 3.0 * 3
    assert StepTimeModel().lower_bound(workloads) == 6.0
    assert StepTimeModel().replica_time([]) == 0.0


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_lower_bound_is_one_and_arrange_keeps_every_micro_batch(data, dp_size, size, pp_size, sharded):
    workloads = data.draw(st.lists(WORKLOADS, min_size=dp_size * size, max_size=dp_size * size))
    model = StepTimeModel(pp_size, sharded)
    as_given = [workloads[r * size : (r + 1) * size] for r in range(dp_size)]
    arranged = times(model.arrange(micro(*workloads), dp_size))
    assert [len(replica) for replica in arranged] == [size] * dp_size
    assert sorted(w for replica in arranged for w in replica) == sorted(workloads)
    for replicas in (as_given, arranged):
        assert model.lower_bound(replicas) <= model.step_time(replicas) * (1 + 1e-9)
    assert model.lower_bound(arranged) == pytest.approx(model.lower_bound(as_given))
    assert arranged == times(model.arrange(micro(*workloads), dp_size))
    for replica in arranged if model.pp_size > 1 else []:
        peak = replica.index(max(replica))
        assert replica[: peak + 1] == sorted(replica[: peak + 1])
        assert replica[peak:] == sorted(replica[peak:], reverse=True)
        assert sorted(replica)[: min(2, size)] == sorted([replica[0], replica[-1]])[: min(2, size)]


def all_deals(items, dp_size, size):
    if dp_size == 1:
        yield [items]
        return
    for rest in combinations(items[1:], size - 1):  # the first item's group, so that no deal comes twice
        group = (items[0], *rest)
        others = list(items)
        for item in group:
            others.remove(item)
        for deal in all_deals(tuple(others), dp_size - 1, size):
            yield [list(group), *deal]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]), st.sampled_from([1, 2, 4]))
def test_arrange_is_close_to_the_best_of_all_deals(data, layout, pp_size):
    dp_size, size = layout
    kinds = st.sampled_from([1.0, 1.1, 1.3, 2.0, 4.0]) | st.floats(0.5, 5)
    workloads = data.draw(st.lists(kinds, min_size=dp_size * size, max_size=dp_size * size))
    model = StepTimeModel(pp_size)
    best = min(model.step_time(deal) for deal in all_deals(tuple(workloads), dp_size, size))
    time = model.step_time(times(model.arrange(micro(*workloads), dp_size)))
    assert best * (1 - 1e-9) <= time <= best * 1.15


def test_arrange_is_within_a_percent_or_two_on_average():
    rng = np.random.default_rng(0)
    for pp_size in (1, 4):
        model, ratios = StepTimeModel(pp_size), []
        for _ in range(30):
            workloads = np.round(1 + rng.pareto(2, 8), 3).tolist()
            best = min(model.step_time(deal) for deal in all_deals(tuple(workloads), 2, 4))
            ratios.append(model.step_time(times(model.arrange(micro(*workloads), 2))) / best)
        assert np.mean(ratios) <= 1.015


def test_the_lightest_run_first_and_last():
    assert lightest_at_both_ends([0, 1, 2, 3, 4, 5]) == [5, 3, 1, 0, 2, 4]
    assert lightest_at_both_ends([0]) == [0] and lightest_at_both_ends([]) == []
    arranged = times(StepTimeModel(pp_size=2).arrange(micro(3, 9, 1, 2, 7, 5), 1))
    assert arranged == [[1, 3, 7, 9, 5, 2]]
    assert times(StepTimeModel().arrange(micro(3, 9, 1), 1)) == [[9, 3, 1]]


def test_lockstep_puts_equals_into_the_same_micro_step():
    model = StepTimeModel(sharded_parameters=True)
    arranged = times(model.arrange(micro(1, 9, 2, 8, 3, 7), 2))
    assert arranged == [[9, 7, 2], [8, 3, 1]]
    assert model.step_time(arranged) == 9 + 7 + 2
    # The best there is: the heaviest, third and fifth heaviest can never be hidden behind others.
    best = min(model.step_time([sorted(g, reverse=True) for g in d]) for d in all_deals((1, 9, 2, 8, 3, 7), 2, 3))
    assert best == 18
