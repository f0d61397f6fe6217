"""The static strategies, and what holds for every strategy: each token once, contiguous chunks, even shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.sharding import SHARDED, ShardPlan, chunk_ranks, per_document, per_sequence
from hf_wlb.sharding.strategies import deal

from .checks import CP_SIZES, STRATEGIES, check_plan, deal_by_hand, make_plan, micro_batches, odd_lengths


def widths_of(plan: ShardPlan) -> list[list[int]]:
    return np.diff(plan.edges, axis=1).tolist()


def test_chunks_go_out_and_back() -> None:
    assert chunk_ranks(1).tolist() == [0, 0]
    assert chunk_ranks(3).tolist() == [0, 1, 2, 2, 1, 0]


def test_per_document_by_hand() -> None:
    plan = per_document([9, 6, 4, 7], cp_size=2)
    assert plan.owner.tolist() == [SHARDED] * 4 and plan.strategy == "per_document"
    # 1 token left over, then 2, 0 and 3: chunks 0 | 1, 2 | - | 3, 0, 1.
    assert widths_of(plan) == [[3, 2, 2, 2], [1, 2, 2, 1], [1, 1, 1, 1], [2, 2, 1, 2]]
    assert plan.edges.tolist() == [[0, 3, 5, 7, 9], [0, 1, 3, 5, 6], [0, 1, 2, 3, 4], [0, 2, 4, 5, 7]]
    assert plan.tokens.tolist() == [13, 13] and plan.exchanged_tokens.tolist() == [13, 13]


def test_per_document_of_documents_below_a_chunk_each() -> None:
    plan = per_document([1, 1, 2, 1, 3], cp_size=2)
    # Chunks 0 | 1 | 2, 3 | 0 | 1, 2, 3 in turn: the documents of one token are whole on one rank.
    assert plan.owner.tolist() == [0, 1, SHARDED, 0, SHARDED]
    assert plan.edges.tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3]]
    assert plan.tokens.tolist() == [4, 4]


def test_per_sequence_by_hand() -> None:
    # 22 tokens in chunks of 6, 6, 5, 5: 0-5 | 6-11 | 12-16 | 17-21; ranks 0, 1, 1, 0.
    plan = per_sequence([7, 1, 8, 6], cp_size=2)
    assert plan.owner.tolist() == [SHARDED, 1, 1, SHARDED] and plan.strategy == "per_sequence"
    assert plan.edges.tolist() == [[0, 6, 7, 7, 7], [0, 0, 0, 1, 6]]
    assert plan.tokens.tolist() == [11, 11]
    assert plan.local_tokens.tolist() == [0, 9] and plan.exchanged_tokens.tolist() == [11, 2]


def test_per_sequence_of_one_document_is_per_document() -> None:
    for length in (8, 9, 137):
        assert per_sequence([length], 4).edges.tolist() == per_document([length], 4).edges.tolist()


@settings(deadline=None)
@given(micro_batches())
def test_per_document_is_the_papers_rule(given_) -> None:
    lengths, cp_size = given_
    widths = deal(np.array(lengths), np.full(2 * cp_size, 0.5 / cp_size))
    assert widths.tolist() == deal_by_hand(lengths, cp_size)
    plan = per_document(lengths, cp_size)
    assert widths_of(plan) == widths[plan.owner == SHARDED].tolist()


@settings(deadline=None)
@given(micro_batches())
def test_per_sequence_cuts_the_whole_as_one_document(given_) -> None:
    lengths, cp_size = given_
    plan = per_sequence(lengths, cp_size)
    chunk_of = np.repeat(np.arange(2 * cp_size), deal_by_hand([sum(lengths)], cp_size)[0])
    start, row = 0, 0
    for length, owner in zip(lengths, plan.owner.tolist(), strict=True):
        chunks = chunk_of[start : start + length]
        if owner == SHARDED:
            assert widths_of(plan)[row] == np.bincount(chunks, minlength=2 * cp_size).tolist()
            row += 1
        else:
            assert set(chunk_ranks(cp_size)[chunks].tolist()) == {owner}
        start += length


@settings(deadline=None)
@given(micro_batches(most=60, documents=40), st.sampled_from([per_sequence, per_document]))
def test_ranks_of_static_strategies_differ_by_a_token_at_most(given_, strategy) -> None:
    lengths, cp_size = given_
    tokens = strategy(lengths, cp_size).tokens
    assert tokens.sum() == sum(lengths)
    assert tokens.max() - tokens.min() <= 1
    assert tokens.min() >= 1


def test_the_bound_of_a_token_is_reached() -> None:
    assert per_document([9], 2).tokens.tolist() == [5, 4]
    assert per_sequence([5, 2], 3).tokens.tolist() == [3, 2, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_every_token_lies_on_one_rank(strategy, cp_size) -> None:
    odd = odd_lengths(cp_size)
    for lengths in (odd, odd[::-1], odd + [1] * 30, *([length] for length in odd if length >= cp_size)):
        plan = make_plan(lengths, cp_size, strategy)
        check_plan(plan)
        assert plan.tokens.min() >= 1
        assert plan.lengths.tolist() == lengths
        if cp_size == 1:
            assert plan.owner.tolist() == [0] * len(lengths) and plan.edges.shape == (0, 3)


@settings(deadline=None, max_examples=60)
@given(micro_batches(), st.sampled_from(STRATEGIES), st.sampled_from([0.0, 0.05, 0.9]))
def test_every_token_lies_on_one_rank_of_any_plan(given_, strategy, skew) -> None:
    plan = make_plan(*given_, strategy, max_token_skew=skew)
    check_plan(plan)
    assert plan.tokens.min() >= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_as_many_tokens_as_ranks_give_each_rank_one(strategy, cp_size) -> None:
    for lengths in ([cp_size], [1] * cp_size):
        assert make_plan(lengths, cp_size, strategy).tokens.tolist() == [1] * cp_size


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=60),
    st.lists(st.floats(0.001, 1), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_uneven_shares_are_kept_to_a_few_tokens_however_many_documents(lengths, weights, nothing) -> None:
    half = np.array([*weights, *[0.0] * nothing])
    shares = np.concatenate([half, half[::-1]]) / (2 * half.sum())
    widths = deal(np.array(lengths), shares)
    assert widths.min() >= 0 and widths.sum(axis=1).tolist() == lengths
    assert not widths[:, shares == 0].any()
    assert np.abs(widths.sum(axis=0) - sum(lengths) * shares).max() < 4


def test_equal_documents_do_not_round_one_rank_away() -> None:
    """Rank 0 is to have a little less than 1 token of each document: rounding down alone would leave it nothing."""
    shares = np.array([0.12, 0.13, 0.125, 0.125, 0.125, 0.125, 0.13, 0.12])
    totals = deal(np.full(100, 8), shares).sum(axis=0)
    assert np.abs(totals - 800 * shares).max() < 2


@pytest.mark.parametrize("strategy", [per_sequence, per_document])
@pytest.mark.parametrize(
    ("lengths", "cp_size", "message"),
    [
        ([2, 1], 4, "A micro-batch of 3 tokens cannot be shared by 4 context-parallel ranks: every rank needs at lea"),
        ([], 2, "A micro-batch of 0 tokens cannot be shared by 2"),
        ([4, 0], 2, "every document of a micro-batch has at least 1 token, but one of 0 came"),
        ([4, -3], 2, "but one of -3 came"),
        ([4.0], 2, "lengths must be a flat list of whole numbers"),
        ([[4, 4]], 2, "lengths must be a flat list of whole numbers"),
        ([True], 1, "lengths must be a flat list of whole numbers"),
        ([4], 0, "cp_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_shared_gets_a_sentence(strategy, lengths, cp_size, message) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(lengths, cp_size)
