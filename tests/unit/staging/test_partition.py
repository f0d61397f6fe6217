"""Cuts into stages against brute force over all of them, and what a user's own cut may be."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.staging import StageLayout, balance_stages

# Whole numbers tie often; tenths tie only where nothing is rounded.
COSTS = st.lists(st.integers(0, 4) | st.sampled_from([0.1, 0.2, 0.3]) | st.floats(0, 10), min_size=1, max_size=9)
ENDS = st.just(0.0) | st.sampled_from([0.1, 1.0, 3.0]) | st.floats(0, 20)


def stage_sums(bounds, costs, before, after):
    exact = [Fraction(cost) for cost in costs]
    sums = [sum(exact[low:high]) for low, high in pairwise(bounds)]
    sums[0] += Fraction(before)
    sums[-1] += Fraction(after)
    return sums


def rank(bounds, costs, before, after):
    sums = stage_sums(bounds, costs, before, after)
    return max(sums), sum(each * each for each in sums), bounds


@settings(deadline=None, max_examples=200)
@given(st.data(), COSTS, ENDS, ENDS)
def test_no_cut_is_better(data, costs, before, after):
    pp_size = data.draw(st.integers(1, len(costs)))
    layout = balance_stages(costs, pp_size, before=before, after=after)
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), pp_size - 1)]
    assert layout.bounds == min(cuts, key=lambda bounds: rank(bounds, costs, before, after))


def test_control_equal_numbers_of_layers_are_not_the_best_cut():
    costs = [1.0] * 8
    assert balance_stages(costs, 2, after=4.0).bounds == (0, 6, 8)
    assert rank((0, 4, 8), costs, 0.0, 4.0) > rank((0, 6, 8), costs, 0.0, 4.0)


def test_equal_layers_tie_without_rounding_and_the_first_stages_get_fewer():
    assert balance_stages([0.1] * 10, 4).sizes == (2, 2, 3, 3)
    assert balance_stages([0.1] * 32, 4).sizes == (8, 8, 8, 8)
    assert balance_stages([0.0] * 5, 2).sizes == (1, 4)


def test_embedding_and_head_count_on_the_ends():
    assert balance_stages([1.0] * 6, 3).sizes == (2, 2, 2)
    assert balance_stages([1.0] * 6, 3, before=1.0).sizes == (1, 2, 3)
    assert balance_stages([1.0] * 6, 3, after=2.0).sizes == (2, 3, 1)
    assert balance_stages([1.0] * 6, 1, before=1.0, after=2.0).sizes == (6,)
    assert balance_stages([1.0] * 6, 6, after=100.0).sizes == (1,) * 6


def test_the_most_even_of_equal_maxima():
    # The costliest stage has the layer of 10; (0, 1, 4, 5) would leave 1 and 3 for (2, 2).
    assert balance_stages([1, 1, 1, 1, 10], 3).bounds == (0, 2, 4, 5)


def test_large_models_are_quick():
    costs = [1.0 + (layer * 37 % 11) / 10 for layer in range(200)]
    start = time.process_time()
    for pp_size in (2, 8, 64):
        balance_stages(costs, pp_size, after=3.0)
    balance_stages([0.0] * 200, 64)
    assert time.process_time() - start < 5  # it takes 0.2 s


@pytest.mark.parametrize(
    ("costs", "pp_size", "more", "words"),
    [
        ([1.0] * 4, 8, {}, r"pp_size=8 is more than the model's 4 layers; .* set pp_size to at most 4"),
        ([], 1, {}, r"pp_size=1 is more than the model's 0 layers"),
        ([1.0], 0, {}, "pp_size must be a whole number of at least 1, got 0"),
        ([1.0], True, {}, "pp_size must be a whole number of at least 1, got True"),
        ([1.0, -1.0], 1, {}, "The cost of layer 1 must be a finite number of at least 0, but -1.0"),
        ([float("nan")], 1, {}, "The cost of layer 0 must be a finite number"),
        ([1.0, "2"], 1, {}, "The cost of layer 1 must be a finite number .* '2'"),
        ([1.0], 1, {"before": -2.0}, "The cost of what comes before the layers .* -2.0"),
        ([1.0], 1, {"after": float("inf")}, "The cost of what comes after the layers .* inf"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs, pp_size, more, words):
    with pytest.raises(ValueError, match=words):
        balance_stages(costs, pp_size, **more)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_layout_answers_alike_from_all_sides(sizes):
    layout = StageLayout.from_sizes(sizes, sum(sizes), len(sizes))
    assert layout.sizes == tuple(sizes)
    assert (layout.pp_size, layout.layers) == (len(sizes), sum(sizes))
    held = [layer for stage in range(layout.pp_size) for layer in layout.range_of(stage)]
    assert held == list(range(layout.layers))
    assert all(layer in layout.range_of(layout.stage_of(layer)) for layer in held)
    assert layout == StageLayout(layout.bounds)


def test_layouts_in_words():
    assert str(StageLayout((0, 9, 17, 25, 32))) == "layers 0-8 | 9-16 | 17-24 | 25-31"
    assert str(StageLayout((0, 1, 4))) == "layers 0 | 1-3"


@pytest.mark.parametrize(
    ("sizes", "pp_size", "words"),
    [
        ([9, 8, 8], 4, r"pp_stage_layers=\[9, 8, 8\] names 3 stages, but pp_size=4"),
        ([32], 4, r"pp_stage_layers=\[32\] names 1 stage, but pp_size=4"),
        ([], 4, r"pp_stage_layers=\[\] names 0 stages, but pp_size=4"),
        ([9, 8, 0, 15], 4, r"pp_stage_layers=\[9, 8, 0, 15\] leaves stage 2 empty"),
        ([9, 8, 8, 6], 4, r"pp_stage_layers=\[9, 8, 8, 6\] adds up to 31 layers, but the model has 32"),
        ([9, 8, 8, 8], 4, "adds up to 33 layers, but the model has 32"),
        ([33, -1], 2, "must hold whole numbers of at least 1, but stage 1 has -1"),
        ([16.0, 16], 2, "must hold whole numbers of at least 1, but stage 0 has 16.0"),
        ([1] * 40, 40, "pp_size=40 is more than the model's 32 layers"),
    ],
)
def test_an_own_cut_that_does_not_fit_is_refused(sizes, pp_size, words):
    with pytest.raises(ValueError, match=words):
        StageLayout.from_sizes(sizes, 32, pp_size)


@pytest.mark.parametrize("bounds", [(), (0,), (1, 4), (0, 4, 4), (0, 4, 3), (0, 2.5, 4)])
def test_bounds_that_are_none_are_refused(bounds):
    with pytest.raises(ValueError, match="The bounds of a stage layout must be whole numbers that rise from 0"):
        StageLayout(bounds)


def test_there_is_no_stage_or_layer_outside():
    layout = StageLayout((0, 2, 4))
    for stage in (-1, 2):
        with pytest.raises(IndexError, match=f"There is no stage {stage}; the layout has stages 0 to 1"):
            layout.range_of(stage)
    for layer in (-1, 4):
        with pytest.raises(IndexError, match=f"There is no layer {layer}; the layout has layers 0 to 3"):
            layout.stage_of(layer)
