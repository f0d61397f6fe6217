"""next-fit, concat-and-cut, greedy and solver: by hand, and against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.packing import Document, PackingConfig, solver
from hf_wlb.packing.solver import solve_packing
from hf_wlb.packing.windowed import pack_greedily
from tests.unit.packing.checks import WORKLOAD, make_planner, observed, run_and_save, shape


def documents(lengths):
    return [
        Document(i, 0, n, WORKLOAD.document(n), 0) for i, n in sorted(enumerate(lengths), key=lambda d: (-d[1], d[0]))
    ]


def heaviest(micro_batches):
    return max(sum(d.workload for d in m) for m in micro_batches)


def lengths_of(micro_batches):
    return [[d.length for d in m] for m in micro_batches]


# ---- next-fit ----


def test_next_fit_by_hand():
    config = PackingConfig(10, 2, dp_size=2, packer="next-fit")
    plans = list(make_planner([4, 5, 3, 10, 1, 23, 6, 5], config))
    # Layout within a micro-batch is longest first; 23 is split into 10, 10 and 3.
    assert [shape(plan) for plan in plans] == [
        [[[5, 4], [3]], [[10], [1]]],
        [[[10], [10]], [[6, 3], [5]]],
    ]
    assert [plan.flush for plan in plans] == [False, True]


def test_next_fit_pads_the_last_step():
    plans = list(make_planner([4, 5], PackingConfig(10, 2, dp_size=2, packer="next-fit")))
    assert [shape(plan) for plan in plans] == [[[[5, 4], []], [[], []]]]


# ---- concat-and-cut ----


def test_concat_and_cut_by_hand():
    config = PackingConfig(10, 2, packer="concat-and-cut")
    planner = make_planner([4, 9, 25, 2], config)
    plans, metrics = observed(planner)
    pieces = [[sorted((d.index, d.start, d.length) for d in m.documents) for m in plan.micro_batches] for plan in plans]
    assert pieces == [
        [[(0, 0, 4), (1, 0, 6)], [(1, 6, 3), (2, 0, 7)]],
        [[(2, 7, 10)], [(2, 17, 8), (3, 0, 2)]],
    ]
    # 3 + 10 + 8 of 40 tokens run without their document's beginning.
    assert metrics.report(planner).context_lost == 21 / 40
    assert metrics.report(planner).delay == 0


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_concat_and_cut_fills_every_micro_batch(lengths, context, size, dp_size):
    plans = list(make_planner(lengths, PackingConfig(context, size, dp_size=dp_size, packer="concat-and-cut")))
    tokens = [m.tokens for plan in plans for m in plan.micro_batches]
    full, rest = divmod(sum(lengths), context)
    assert tokens[:full] == [context] * full
    assert tokens[full:] == ([rest] if rest else []) + [0] * (len(tokens) - full - bool(rest))


# ---- greedy ----


def test_greedy_by_hand():
    # 64, 49, 36 to the least loaded with room; 4 fits only where 6 is; then 3 and 2 where they have room.
    packed, left_over = pack_greedily(documents([8, 7, 6, 4, 3, 2]), PackingConfig(10, 3, packer="greedy"))
    assert lengths_of(packed) == [[8, 2], [7, 3], [6, 4]]
    assert left_over == []
    packed, left_over = pack_greedily(documents([6, 6, 6, 5, 4]), PackingConfig(10, 3, packer="greedy"))
    assert lengths_of(packed) == [[6, 4], [6], [6]]
    assert lengths_of([left_over]) == [[5]]


def slow_greedy(items, bins, capacity):
    packed, left_over = [[] for _ in range(bins)], []
    for item in items:
        open_bins = [i for i in range(bins) if sum(d.length for d in packed[i]) + item.length <= capacity]
        if not open_bins:
            left_over.append(item)
            continue
        packed[min(open_bins, key=lambda i: (sum(d.length**2 for d in packed[i]), i))].append(item)
    return packed, left_over


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.lists(st.integers(1, 20), max_size=5), st.integers(1, 6))
def test_greedy_is_the_plain_search(lengths, left_before, bins):
    items = documents(left_before)[::-1] + documents(lengths)  # left-overs come first, in any order
    config = PackingConfig(20, bins, packer="greedy")
    assert pack_greedily(items, config) == slow_greedy(items, bins, 20)


def test_a_window_gives_its_steps_one_by_one():
    config = PackingConfig(10, 2, packer="greedy", window_steps=2)
    planner = make_planner([9, 1, 8, 2, 5, 5, 6, 4], config)
    first = next(planner)
    assert len(planner.waiting) == 4  # the second step of the window
    second = next(planner)
    # Alike go together: [9, 1] with [8, 2], [5, 5] with [6, 4].
    assert sorted(map(sorted, shape(first)[0])) == [[1, 9], [2, 8]]
    assert sorted(map(sorted, shape(second)[0])) == [[4, 6], [5, 5]]
    assert [d.arrived for d in second.documents] == [0] * 4
    assert next(planner, None) is None


def test_data_that_packs_badly_does_not_pile_up():
    planner = make_planner([70] * 1000, PackingConfig(100, 4, packer="greedy"))
    _, metrics = observed(planner)
    assert metrics.report(planner).waiting_peak_contexts <= 8


# ---- solver ----


def brute_force(items, bins, capacity):
    best = float("inf")
    for places in product(range(bins), repeat=len(items)):
        packed = [[d for d, place in zip(items, places, strict=True) if place == i] for i in range(bins)]
        if all(sum(d.length for d in m) <= capacity for m in packed):
            best = min(best, heaviest(packed))
    return best


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_solver_is_as_good_as_brute_force_and_never_worse_than_greedy(lengths, bins):
    config = PackingConfig(24, bins, packer="solver", solver_seconds=5)
    greedy, _ = pack_greedily(documents(lengths), config)
    items = [d for m in greedy for d in m]
    packed = solve_packing(items, config, heaviest(greedy)) or greedy
    assert sorted(d for m in packed for d in m) == sorted(items)
    assert all(sum(d.length for d in m) <= 24 for m in packed)
    assert heaviest(packed) <= heaviest(greedy) * (1 + 1e-9)
    assert heaviest(packed) <= brute_force(items, bins, 24) * 1.0051  # HiGHS may stop at a gap of 0.5%


def test_solver_beats_greedy_where_there_is_something_to_win():
    lengths = [3, 3, 2, 2, 2]
    solved = next(make_planner(lengths, PackingConfig(8, 2, packer="solver")))
    greedy = next(make_planner(lengths, PackingConfig(8, 2, packer="greedy")))
    assert sorted(shape(greedy)[0]) == [[3, 2], [3, 2, 2]]
    assert sorted(shape(solved)[0]) == [[2, 2, 2], [3, 3]]


def test_solver_over_a_window_is_never_worse_than_greedy():
    lengths = np.random.default_rng(3).integers(1, 16, 24).tolist()
    totals = {}
    for packer in ("greedy", "solver"):
        config = PackingConfig(16, 3, packer=packer, window_steps=2, solver_seconds=2)
        plans, _, _ = run_and_save(lengths, config)
        totals[packer] = [max(m.workload for m in plan.micro_batches) for plan in plans][:2]
    assert sum(totals["solver"]) <= sum(totals["greedy"]) * (1 + 1e-9)


def test_solver_counts_where_greedy_stands(monkeypatch):
    monkeypatch.setattr(solver, "solve_packing", lambda *_: None)
    planner = make_planner([7, 6, 5, 5, 4, 3], PackingConfig(16, 2, packer="solver"))
    greedy = next(make_planner([7, 6, 5, 5, 4, 3], PackingConfig(16, 2, packer="greedy")))
    assert next(planner) == greedy
    assert (planner._packer.windows, planner._packer.timeouts) == (1, 1)


def test_a_solution_beyond_the_context_is_refused(monkeypatch):
    """HiGHS keeps to constraints within tolerances; a plan must keep to them exactly."""
    items = documents([9, 8])

    class Result:
        x = np.array([1.0, 0.0, 1.0, 0.0, 0.0])  # both in the first micro-batch
        fun = 0.0

    monkeypatch.setattr(solver, "milp", lambda *_, **__: Result)
    config = PackingConfig(10, 2, packer="solver")
    assert solve_packing(items, config, upper_bound=1e9) is None
    Result.x = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    assert solve_packing(items, config, upper_bound=1e9) == [[items[0]], [items[1]]]


@pytest.mark.parametrize("packer", ["greedy", "solver", "next-fit", "concat-and-cut"])
def test_fixed_length_packers_never_exceed_the_context(packer):
    config = PackingConfig(10, 2, packer=packer, max_tokens_per_micro_batch=40)
    plans = list(make_planner([10, 11, 25, 9, 9, 9, 1, 1, 1], config))
    assert max(m.tokens for plan in plans for m in plan.micro_batches) <= 10
