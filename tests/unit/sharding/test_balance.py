"""Whole documents dealt to ranks: even in workload, within their tokens, near the best that there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.sharding.balance import Dealt, deal_evenly, exchange_documents, longest_first


def quadratic(lengths: list[int]) -> np.ndarray:
    return np.array([n * (n + 200) for n in lengths], dtype=np.float64)


def best_possible(costs: np.ndarray, lengths: list[int], cp: int, least: float, most: float) -> float | None:
    """The least heaviest rank of all ways to deal, or None if none keeps the bounds."""
    found = None
    for owner in itertools.product(range(cp), repeat=len(lengths)):
        tokens = np.bincount(owner, lengths, cp)
        if tokens.min() >= least and tokens.max() <= most:
            heaviest = np.bincount(owner, costs, cp).max()
            found = heaviest if found is None else min(found, heaviest)
    return found


def check(dealt: Dealt, costs: np.ndarray, lengths: list[int], cp: int) -> None:
    assert dealt.owner.min() >= 0 and dealt.owner.max() < cp and len(dealt.owner) == len(lengths)
    assert np.allclose(np.bincount(dealt.owner, costs, cp), dealt.load)
    assert np.bincount(dealt.owner, lengths, cp).tolist() == dealt.tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=3, max_size=8), st.integers(2, 3), st.sampled_from([0.1, 0.3, 0.8]))
def test_near_the_best_and_within_bounds(lengths: list[int], cp: int, skew: float) -> None:
    costs, even = quadratic(lengths), sum(lengths) / cp
    least, most = even * (1 - skew), even * (1 + skew)
    dealt = deal_evenly(costs, np.array(lengths), cp, least, most)
    best = best_possible(costs, lengths, cp, least, most)
    if dealt is None:
        return  # the search is no proof; the documents are then sharded
    check(dealt, costs, lengths, cp)
    assert dealt.within(least, most) and best is not None
    assert max(dealt.load) <= 1.5 * best + 1e-6


def test_mixes_are_dealt_evenly_where_longest_first_alone_breaks_the_bounds() -> None:
    """Long documents bring more work a token, so even work means uneven tokens unless short ones make up for it."""
    failed = even_ones = 0
    for seed in range(20):
        made = np.random.default_rng(seed)
        lengths = [10_000, 9_000, *made.integers(3_000, 6_000, 18).tolist(), *made.integers(100, 1_500, 25).tolist()]
        costs, even = quadratic(lengths), sum(lengths) / 4
        order = np.argsort(-np.array(lengths)).tolist()
        alone = longest_first(order, costs.tolist(), lengths, 4, float("inf"))
        assert alone is not None
        failed += not alone.within(even * 0.95, even * 1.05) or alone.imbalance > 1.02
        dealt = deal_evenly(costs, np.array(lengths), 4, even * 0.95, even * 1.05)
        if dealt is not None:
            assert dealt.within(even * 0.95, even * 1.05)
            even_ones += dealt.imbalance <= 1.02
    assert failed >= 15 and even_ones >= 15, (failed, even_ones)


def test_exchanges_never_make_it_worse_and_keep_documents() -> None:
    made = np.random.default_rng(0)
    for _ in range(30):
        lengths = made.integers(1, 5_000, 25).tolist()
        costs, cp = quadratic(lengths), 4
        owner = made.integers(0, cp, len(lengths))
        tokens = np.bincount(owner, lengths, cp).astype(int).tolist()
        start = Dealt(owner, np.bincount(owner, costs, cp).tolist(), tokens)
        after = exchange_documents(start, costs, np.array(lengths), 0, float("inf"))
        check(after, costs, lengths, cp)
        assert np.var(after.load) <= np.var(start.load)
        assert np.array_equal(start.owner, owner)  # the start is not changed


@pytest.mark.parametrize("most", [3, 4])
def test_no_room_is_said(most: int) -> None:
    found = longest_first([0, 1, 2], [1.0] * 3, [2, 2, 2], cp_size=2, most=most)
    assert (found is None) == (most < 4)


def test_one_document_for_two_ranks_cannot_be_dealt() -> None:
    assert deal_evenly(np.array([5.0]), np.array([5]), 2, 2, 3) is None
