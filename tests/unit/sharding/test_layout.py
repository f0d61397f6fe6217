"""Layouts: token order, positions, labels and the rows of attention calls, for every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from hf_wlb.sharding import (
    SHARDED,
    Rows,
    ShardPlan,
    per_document,
    per_sequence,
    shard_layout,
    shift_labels,
    unshard_order,
)

from .checks import any_plans, check_layout, check_plan


def test_two_documents_by_hand() -> None:
    """Documents of 12 and 8 tokens, cp 2: every rank has 2 head and 2 tail chunks, 4 rows of one call."""
    plan = per_document([12, 8], cp_size=2)
    first, second = (shard_layout(plan, rank) for rank in range(2))
    assert first.tokens.tolist() == [0, 1, 2, 12, 13, 9, 10, 11, 18, 19]
    assert first.position_ids.tolist() == [0, 1, 2, 0, 1, 9, 10, 11, 6, 7]
    assert second.tokens.tolist() == [3, 4, 5, 14, 15, 6, 7, 8, 16, 17]
    assert second.position_ids.tolist() == [3, 4, 5, 2, 3, 6, 7, 8, 4, 5]
    # Rank 0's heads read 3 of 12 and 2 of 8 keys, its tails all; rank 1's heads 6 and 4, its tails 9 and 6.
    assert (first.chunks.queries.tolist(), first.chunks.keys.tolist()) == ([0, 3, 5, 8, 10], [0, 3, 5, 17, 25])
    assert (second.chunks.queries.tolist(), second.chunks.keys.tolist()) == ([0, 3, 5, 8, 10], [0, 6, 10, 19, 25])
    assert (first.chunks.longest_query, first.chunks.longest_keys, second.chunks.longest_keys) == (3, 12, 9)
    assert first.overlaps.tolist() == [[0, 5, 3], [3, 17, 2]] and second.overlaps.tolist() == [[0, 10, 6], [6, 19, 4]]
    # Every rank sends heads, then tails: rank 1's token 3 lies at place 10 of what is gathered.
    assert (first.padded, first.local_tokens, first.exchanged_tokens, first.gathered) == (10, 0, 10, 20)
    heads, tails = [0, 1, 2, 3, 4], [0, 1, 2, 10, 11, 12, 15, 16, 17, 5, 6, 7, 3, 4, 13, 14, 18, 19, 8, 9]
    assert first.order.tolist() == heads + tails
    heads, tails = [0, 1, 2, 10, 11, 12, 3, 4, 13, 14], [0, 1, 2, 10, 11, 12, 15, 16, 17, 3, 4, 13, 14, 18, 19]
    assert second.order.tolist() == heads + tails


def test_local_and_sharded_documents_by_hand() -> None:
    """Documents 0 and 2 are whole on ranks 0 and 1; document 1 is cut 1, 2, 0, 2 and sends 3 and 2 tokens."""
    edges = np.array([[0, 1, 3, 3, 5]])
    plan = ShardPlan(np.array([2, 5, 3]), 2, np.array([0, SHARDED, 1]), edges, "example")
    first, second = (shard_layout(plan, rank) for rank in range(2))
    assert first.tokens.tolist() == [0, 1, 2, 5, 6] and first.position_ids.tolist() == [0, 1, 0, 3, 4]
    assert second.tokens.tolist() == [7, 8, 9, 3, 4] and second.position_ids.tolist() == [0, 1, 2, 1, 2]
    assert (first.local.queries.tolist(), first.local.keys.tolist()) == ([0, 2], [0, 2])
    assert (first.chunks.queries.tolist(), first.chunks.keys.tolist()) == ([0, 1, 3], [0, 1, 6])
    # An empty tail chunk is no row and reads no keys.
    assert (second.chunks.queries.tolist(), second.chunks.keys.tolist()) == ([0, 2], [0, 3])
    assert (first.exchanged_tokens, second.exchanged_tokens) == (3, 2)
    # Rank 1 sends 2 tokens and 1 of padding, which nobody reads.
    assert first.padded == second.padded == 3 and first.gathered == second.gathered == 5
    assert (first.order.tolist(), first.overlaps.tolist()) == ([0, 0, 3, 4, 1, 2], [[0, 1, 1]])
    assert (second.order.tolist(), second.overlaps.tolist()) == ([0, 3, 4], [])
    # Place 0 is read by a head and a tail chunk of rank 0; what no chunk of a rank reads points past its keys.
    assert (first.inverse.tolist(), second.inverse.tolist()) == ([1, 4, 5, 2, 3, 6], [0, 3, 3, 1, 2, 3])
    assert plan.tokens.tolist() == [5, 5] and plan.token_skew == 0.0


def test_a_rank_with_only_local_documents_sends_padding_and_reads_nothing() -> None:
    plan = ShardPlan(np.array([4, 6]), 3, np.array([2, SHARDED]), np.array([[0, 1, 3, 3, 3, 4, 6]]), "example")
    layout = shard_layout(plan, 2)
    assert layout.tokens.tolist() == [0, 1, 2, 3] and (layout.local_tokens, layout.exchanged_tokens) == (4, 0)
    assert (layout.padded, layout.gathered) == (3, 6)  # it takes part in the exchange all the same
    assert layout.chunks.queries.tolist() == layout.chunks.keys.tolist() == [0]
    assert layout.chunks.longest_query == layout.chunks.longest_keys == 0
    assert layout.order.tolist() == []
    check_plan(plan)


def test_only_local_documents_need_no_exchange() -> None:
    plan = ShardPlan(np.array([4, 6]), 2, np.array([1, 0]), np.zeros((0, 5), dtype=np.int64), "example")
    layout = shard_layout(plan, 0)
    assert layout.padded == layout.gathered == 0
    assert layout.order.tolist() == [] and layout.chunks.queries.tolist() == [0]
    check_plan(plan)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("even", [True, False])
def test_documents_cut_evenly_cost_every_rank_the_same_keys(cp_size, even) -> None:
    """(2 cp + 1) / (2 cp) of each document: exactly where 2 cp divides it, else rounding moves up to cp keys."""
    lengths = np.array([240 * cp_size, 2 * cp_size] if even else [2041, 137, 71])
    for rank in range(cp_size):
        keys = np.diff(shard_layout(per_document(lengths, cp_size), rank).chunks.keys)
        of_document = keys.reshape(2, len(lengths)).sum(axis=0)  # what its head and its tail chunk read
        error = np.abs(of_document - lengths * (2 * cp_size + 1) / (2 * cp_size))
        assert error.max() <= (1e-9 if even else cp_size)


def test_control_documents_cut_unevenly_do_not() -> None:
    plan = ShardPlan(np.array([240]), 2, np.array([SHARDED]), np.array([[0, 10, 60, 200, 240]]), "example")
    keys = [int(shard_layout(plan, rank).chunks.keys[-1]) for rank in range(2)]
    assert keys == [10 + 240, 60 + 200] and 300 not in keys


@settings(deadline=None)
@given(any_plans())
def test_queries_read_their_own_document_up_to_themselves(plan) -> None:
    check_plan(plan)


@settings(deadline=None)
@given(any_plans())
def test_unsharding_is_the_inverse(plan) -> None:
    values = np.random.default_rng(0).integers(0, 1000, int(plan.lengths.sum()))
    shards = [values[shard_layout(plan, rank).tokens] for rank in range(plan.cp_size)]
    assert np.concatenate(shards)[unshard_order(plan)].tolist() == values.tolist()


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(rank) -> None:
    with pytest.raises(ValueError, match=rf"rank must be from 0 to 1 \(cp_size - 1\), got {rank}"):
        shard_layout(per_document([8], 2), rank)


def test_labels_are_shifted_before_sharding() -> None:
    plan = per_document([8], cp_size=2)
    labels = shift_labels(np.arange(8), plan.lengths)
    assert labels[shard_layout(plan, 0).tokens].tolist() == [1, 2, 7, -100]
    assert labels[shard_layout(plan, 1).tokens].tolist() == [3, 4, 5, 6]
    # Control: shifted after sharding, rank 0 would learn that 6 follows 1.
    assert np.arange(8)[shard_layout(plan, 0).tokens][1:].tolist() == [1, 6, 7]


def test_no_document_predicts_the_next_ones_first_token() -> None:
    labels = shift_labels(np.array([10, 11, 12, 20, 30, 31]), np.array([3, 1, 2]))
    assert labels.dtype == np.int64 and labels.tolist() == [11, 12, -100, -100, 31, -100]
    assert shift_labels(np.array([-100, 5, -100, 7]), np.array([4])).tolist() == [5, -100, 7, -100]
    assert shift_labels(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("labels", [np.arange(5), np.arange(7), np.zeros((1, 6), dtype=np.int64)])
def test_labels_of_another_micro_batch_get_a_sentence(labels) -> None:
    with pytest.raises(ValueError, match="6 tokens"):
        shift_labels(labels, np.array([4, 2]))


# ---- negative controls: the checks find what they are there to find ----


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a, b: replace(a, chunks=b.chunks),
        lambda a, b: replace(a, tokens=np.concatenate([a.tokens[5:], a.tokens[:5]])),
        lambda a, b: replace(a, position_ids=np.arange(len(a.tokens))),
        # Rows with the right bounds as a whole: only the chunks' own keys, one document, no queries.
        lambda a, b: replace(a, chunks=Rows.of(np.array([3, 2, 3, 2]), np.array([3, 2, 18, 2]))),
        lambda a, b: replace(a, chunks=Rows.of(np.array([3, 2, 5]), np.array([3, 2, 20]))),
        lambda a, b: replace(a, chunks=Rows.of(np.array([3, 2, 0, 3, 2]), np.array([3, 2, 3, 9, 8]))),
        lambda a, b: replace(a, chunks=replace(a.chunks, longest_keys=a.chunks.longest_keys - 1)),
        lambda a, b: replace(a, chunks=replace(a.chunks, longest_query=a.chunks.longest_query - 1)),
        lambda a, b: replace(a, order=b.order),  # another rank's
        lambda a, b: replace(a, order=np.concatenate([a.order[5:], a.order[:5]])),  # tails before heads
        lambda a, b: replace(a, order=np.concatenate([a.order[:4], a.order[3:4], a.order[5:]])),  # one key twice
        lambda a, b: replace(a, order=np.sort(a.order)),  # ranks instead of documents one after the other
        lambda a, b: replace(a, overlaps=a.overlaps[:1]),
        lambda a, b: replace(a, overlaps=np.flip(a.overlaps, 1)),
        lambda a, b: replace(a, inverse=np.roll(a.inverse, 1)),
        lambda a, b: replace(a, inverse=np.where(a.inverse == 5, 0, a.inverse)),  # a head chunk's key
        lambda a, b: replace(a, padded=a.padded + 1),
        lambda a, b: replace(a, gathered=a.gathered - 1),
        lambda a, b: replace(a, local=Rows.of(np.array([10]), np.array([10]))),
    ],
)
def test_control_a_wrong_layout_is_found(spoil) -> None:
    plan = per_document([12, 8], cp_size=2)
    layout, other = (shard_layout(plan, rank) for rank in range(2))
    check_layout(plan, layout)
    with pytest.raises(AssertionError):
        check_layout(plan, spoil(layout, other))


def test_control_padding_that_is_read_is_found() -> None:
    plan = ShardPlan(np.array([5]), 2, np.array([SHARDED]), np.array([[0, 1, 3, 3, 5]]), "example")
    layout = shard_layout(plan, 1)
    check_layout(plan, layout)
    with pytest.raises(AssertionError):  # place 5 is rank 1's padding
        check_layout(plan, replace(layout, order=np.array([0, 3, 5])))


def test_control_chunks_of_a_wrong_rank_are_found(monkeypatch) -> None:
    plan = per_sequence([13, 9], cp_size=2)
    check_plan(plan)
    same = shard_layout(plan, 0)
    monkeypatch.setattr("tests.unit.sharding.checks.shard_layout", lambda _, rank: replace(same, rank=rank))
    with pytest.raises(AssertionError):
        check_plan(plan)
