"""The order of a replica's micro-batches in a pipeline: its shape, and the evidence for it."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.packing import StepTimeModel
from hf_wlb.packing.step_time import lightest_at_both_ends
from hf_wlb.staging import pipeline_seconds

WORKLOADS = st.lists(st.sampled_from([1.0, 2.0, 3.0]) | st.floats(0, 100), max_size=12)


def ordered(workloads):
    descending = sorted(workloads, reverse=True)
    return [descending[i] for i in lightest_at_both_ends(range(len(descending)))]


@settings(deadline=None)
@given(WORKLOADS)
def test_it_rises_and_falls_with_the_lightest_at_both_ends(workloads):
    times = ordered(workloads)
    assert sorted(times) == sorted(workloads)
    peak = times.index(max(times)) if times else 0
    assert times[: peak + 1] == sorted(times[: peak + 1])
    assert times[peak:] == sorted(times[peak:], reverse=True)
    assert sorted([*times[:1], *times[1:][-1:]]) == sorted(times)[:2]


@settings(deadline=None)
@given(WORKLOADS, st.integers(1, 5), st.sampled_from([0.5, 1.0, 2.0, 3.0]))
def test_it_takes_no_longer_than_the_step_time_model_says(workloads, pp_size, ratio):
    most = StepTimeModel(pp_size).replica_time(workloads)
    assert pipeline_seconds(ordered(workloads), pp_size, ratio) <= most * (1 + 1e-9)


def zigzag(workloads, up, down):
    rising, falling = [], []
    for place, workload in enumerate(sorted(workloads)):
        (rising if place % (up + down) < up else falling).append(workload)
    return rising + falling[::-1]


OTHERS = {
    "as they come": list,
    "rising": sorted,
    "falling": lambda w: sorted(w, reverse=True),
    "twice as many rising": lambda w: zigzag(w, 2, 1),
    "twice as many falling": lambda w: zigzag(w, 1, 2),
    "lightest at both ends, rising between": lambda w: [*sorted(w)[:1], *sorted(w)[2:], sorted(w)[1]],
    "lightest at both ends, falling between": lambda w: [*sorted(w)[:1], *sorted(w)[:1:-1], sorted(w)[1]],
    "heaviest at both ends": lambda w: [-each for each in ordered([-each for each in w])],
}


@pytest.mark.parametrize("ratio", [2.0, 3.0])
def test_it_is_the_fastest_on_average(ratio):
    """The docstring's comparison with fewer steps; the mirrored order, which ties, is left out."""
    random = np.random.default_rng(0)
    seconds = {name: [] for name in ["this", *OTHERS]}
    for sigma in (0.3, 0.6, 1.0):
        for micro_batches in (4, 8, 16):
            for pp_size in (2, 4):
                for _ in range(40):
                    drawn = random.lognormal(0, sigma, micro_batches)
                    even = drawn.sum() + (pp_size - 1) * drawn.mean()
                    drawn = drawn.tolist()
                    seconds["this"].append(pipeline_seconds(ordered(drawn), pp_size, ratio) / even)
                    for name, order in OTHERS.items():
                        assert sorted(order(drawn)) == sorted(drawn)
                        seconds[name].append(pipeline_seconds(order(drawn), pp_size, ratio) / even)
    means = {name: float(np.mean(values)) for name, values in seconds.items()}
    assert min(means, key=means.__getitem__) == "this"
    assert means["this"] < 1.14 and means["rising"] > means["this"] + 0.02
    assert means["heaviest at both ends"] > means["this"] + 0.15


@pytest.mark.parametrize(("micro_batches", "pp_size"), [(4, 2), (4, 4), (5, 3)])
def test_the_best_of_all_orders_is_little_better(micro_batches, pp_size):
    random = np.random.default_rng(1)
    over = []
    for _ in range(40):
        drawn = random.lognormal(0, 0.6, micro_batches).tolist()
        best = min(pipeline_seconds(order, pp_size) for order in permutations(drawn))
        over.append(pipeline_seconds(ordered(drawn), pp_size) / best)
    assert np.mean(over) < 1.03 and max(over) < 1.1
