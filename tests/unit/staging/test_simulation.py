"""Pipeline times by hand, and against the textbook's dependencies followed one by one."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.staging import pipeline_seconds, schedule_seconds
from hf_wlb.staging.simulation import slot

TIMES = st.integers(0, 9)


def passes(stage, pp_size, micro_batches):
    """1F1B of one stage as papers tell it: forwards to warm up, then forward and backward in turn, then backwards."""
    warm_up = min(pp_size - stage - 1, micro_batches)
    order = [(i, "F") for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        order += [(warm_up + i, "F"), (i, "B")]
    return order + [(i, "B") for i in range(micro_batches - warm_up, micro_batches)]


def longest_path(forward, backward, schedule=passes):
    """When the last pass ends if each starts after the one before it on its stage, and after what it is fed by."""
    pp_size, micro_batches = len(forward), len(forward[0])
    orders = [schedule(stage, pp_size, micro_batches) for stage in range(pp_size)]

    @cache
    def end(stage, micro_batch, kind):
        place = orders[stage].index((micro_batch, kind))
        before = [(stage, *orders[stage][place - 1])] if place else []
        source = stage - 1 if kind == "F" else stage + 1
        if 0 <= source < pp_size:
            before.append((source, micro_batch, kind))
        own = (forward if kind == "F" else backward)[stage][micro_batch]
        return max((end(*each) for each in before), default=0) + own

    return max(end(stage, *orders[stage][-1]) for stage in range(pp_size))


def table(data, pp_size, micro_batches):
    row = st.lists(TIMES, min_size=micro_batches, max_size=micro_batches)
    return data.draw(st.lists(row, min_size=pp_size, max_size=pp_size))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 5), st.integers(1, 7))
def test_times_are_those_of_the_dependencies(data, pp_size, micro_batches):
    forward, backward = (table(data, pp_size, micro_batches) for _ in range(2))
    assert schedule_seconds(forward, backward) == longest_path(forward, backward)


def test_control_another_schedule_takes_another_time():
    def forwards_first(stage, pp_size, micro_batches):
        return [(i, kind) for kind in "FB" for i in range(micro_batches)]

    forward, backward = [[1, 8, 1]] * 2, [[2, 2, 2]] * 2
    assert longest_path(forward, backward, forwards_first) != longest_path(forward, backward)
    assert schedule_seconds(forward, backward) == longest_path(forward, backward)


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.0, 3.0])
def test_equal_micro_batches(pp_size, micro_batches, ratio):
    forward, backward = 1.5, 1.5 * ratio
    seconds = pipeline_seconds([forward + backward] * micro_batches, pp_size, ratio)
    assert seconds == pytest.approx((micro_batches + pp_size - 1) * (forward + backward), rel=1e-12)


def test_two_stages_by_hand():
    # Forwards 1, 2, 3, 1. Stage 0 ends forwards at 1, 3, 9, 15, stage 1 backwards at 4, 10, 19, 22; the end at 27.
    assert pipeline_seconds([3.0, 6.0, 9.0, 3.0], 2) == 27.0
    assert pipeline_seconds([3.0, 6.0, 9.0, 3.0], 1) == 21.0
    assert pipeline_seconds([], 4) == 0.0


def test_heavy_and_light_in_turn_take_longer_than_the_step_time_model_says():
    workloads = [9.0, 0.0, 9.0, 0.0]
    assert pipeline_seconds(workloads, 2) == 4 * 9 > sum(workloads) + max(workloads)
    assert pipeline_seconds(sorted(workloads), 2) == sum(workloads) + max(workloads)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([1.0, 2.0, 3.0]))
def test_bounds_and_scale(workloads, pp_size, ratio):
    seconds = pipeline_seconds(workloads, pp_size, ratio)
    assert seconds >= (sum(workloads) + (pp_size - 1) * min(workloads)) * (1 - 1e-9)
    assert seconds >= pp_size * max(workloads) * (1 - 1e-9)
    assert seconds <= (len(workloads) + pp_size - 1) * max(workloads) * (1 + 1e-9)
    assert pipeline_seconds([2 * w for w in workloads], pp_size, ratio) == pytest.approx(2 * seconds)


@pytest.mark.parametrize("pp_size", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_slots_are_those_of_1f1b(pp_size, micro_batches):
    for stage in range(pp_size):
        slots = [slot(stage, step, pp_size) for step in range(2 * (micro_batches + pp_size - 1))]
        order = [(i, "F" if is_forward else "B") for i, is_forward in slots if 0 <= i < micro_batches]
        assert order == passes(stage, pp_size, micro_batches)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pipeline_seconds([1.0], 0), "pp_size must be a whole number of at least 1, got 0"),
        (lambda: pipeline_seconds([1.0], 2, -1.0), "backward_ratio must be a finite number of at least 0, got -1.0"),
        (lambda: pipeline_seconds([-1.0], 2), "must be finite and at least 0, but -"),
        (lambda: pipeline_seconds([float("nan")], 2), "must be finite and at least 0, but nan"),
        (lambda: schedule_seconds([], []), "one shape with one stage at least"),
        (lambda: schedule_seconds([[1.0]], [[1.0], [1.0]]), r"have \[1\] and \[1, 1\] micro-batches"),
        (lambda: schedule_seconds([[1.0], [1.0, 2.0]], [[1.0], [1.0]]), r"have \[1, 2\] and \[1, 1\] micro-batches"),
    ],
)
def test_what_cannot_run_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
