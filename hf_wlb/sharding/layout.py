"""Where every token of a micro-batch lies on a rank, and which rows its attention calls have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.sharding.types import IntArray, ShardPlan

IGNORE_INDEX = -100
Int32Array = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows (segments) of one variable-length attention call.

    Attributes:
        queries: int32 ``[rows + 1]``, where each row's queries begin, and their number.
        keys: int32 ``[rows + 1]``, where each row's keys begin, and their number. A row without queries steps over
            keys that this call does not read.
        longest_query: Most queries of a row.
        longest_keys: Most keys of a row.
    """

    queries: Int32Array
    keys: Int32Array
    longest_query: int
    longest_keys: int

    @classmethod
    def of(cls, queries: IntArray, keys: IntArray) -> Rows:
        """From the numbers of queries and keys of every row."""
        return cls(_bounds(queries), _bounds(keys), int(queries.max(initial=0)), int(keys.max(initial=0)))


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """One rank's share: its local documents, then head chunks, then tail chunks, each in document order.

    Keys and values of sharded documents are exchanged: every rank sends its ``exchanged`` tokens, padded to
    ``padded``; the gathered buffer then holds ``cp_size * padded`` tokens, rank by rank.

    Attributes:
        rank: The rank.
        cp_size: Ranks.
        tokens: int64 ``[T]``, place in the micro-batch of every token of the shard.
        position_ids: int64 ``[T]``, position in its document of every token.
        local: Rows of local documents over the shard's own keys.
        head: Rows of head chunks over the keys of all sharded documents in document order.
        tail: Rows of tail chunks, likewise.
        padded: Tokens that every rank sends.
        order: int64 ``[keys of sharded documents]``, place in the gathered buffer of each, in document order.
    """

    rank: int
    cp_size: int
    tokens: IntArray
    position_ids: IntArray
    local: Rows
    head: Rows
    tail: Rows
    padded: int
    order: IntArray

    @property
    def exchanged(self) -> int:
        """Tokens of this rank that belong to sharded documents."""
        return int(self.head.queries[-1]) + int(self.tail.queries[-1])


def shard_layout(plan: ShardPlan, rank: int) -> ShardLayout:
    """The layout of one rank of a plan.

    Raises:
        ValueError: If there is no such rank.

    Documents of 6 and 2 tokens, the first sharded and the second on rank 0, which holds tokens 6 and 7 (local),
    0 and 1 (head) and 4 and 5 (tail):
        >>> from hf_wlb.sharding import per_sequence
        >>> edges = np.array([[0, 2, 3, 4, 6], [0, 2, 2, 2, 2]])
        >>> layout = shard_layout(ShardPlan.from_edges(np.array([6, 2]), 2, edges, "example"), rank=0)
        >>> layout.tokens.tolist(), layout.position_ids.tolist()
        ([6, 7, 0, 1, 4, 5], [0, 1, 0, 1, 4, 5])
        >>> layout.head.keys.tolist(), layout.tail.keys.tolist()  # the head chunk reads 2 keys and steps over 4
        ([0, 2, 6], [0, 6])
    """
    if not 0 <= rank < plan.cp_size:
        raise ValueError(f"rank must be from 0 to {plan.cp_size - 1} (cp_size - 1), got {rank}.")
    starts = np.cumsum(plan.lengths) - plan.lengths
    own = np.flatnonzero(plan.owner == rank)
    tokens = [_ranges(starts[own], plan.lengths[own])]
    positions = [_ranges(np.zeros_like(own), plan.lengths[own])]
    sharded = plan.sharded
    for chunk in (rank, 2 * plan.cp_size - 1 - rank):
        first, width = plan.edges[:, chunk], plan.edges[:, chunk + 1] - plan.edges[:, chunk]
        tokens.append(_ranges(starts[sharded] + first, width))
        positions.append(_ranges(first, width))
    padded = int(plan.exchanged_tokens.max(initial=0))
    return ShardLayout(
        rank=rank,
        cp_size=plan.cp_size,
        tokens=np.concatenate(tokens),
        position_ids=np.concatenate(positions),
        local=Rows.of(plan.lengths[own], plan.lengths[own]),
        head=_chunk_rows(plan, rank),
        tail=_chunk_rows(plan, 2 * plan.cp_size - 1 - rank),
        padded=padded,
        order=_gathered_order(plan, padded),
    )


def unshard_order(plan: ShardPlan) -> IntArray:
    """Where each token of the micro-batch lies in all shards one after the other: ``whole = shards[order]``.

    >>> from hf_wlb.sharding import per_document
    >>> plan = per_document([8], cp_size=2)
    >>> shards = np.concatenate([shard_layout(plan, rank).tokens for rank in range(2)])
    >>> shards.tolist(), shards[unshard_order(plan)].tolist()
    ([0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    tokens = np.concatenate([shard_layout(plan, rank).tokens for rank in range(plan.cp_size)])
    order = np.empty_like(tokens)
    order[tokens] = np.arange(len(tokens))
    return order


def shift_labels(labels: NDArray[Any], lengths: IntArray) -> IntArray:
    """Every token's target: the label of the next one, and -100 at each document's last.

    Shifted before sharding, because the next token may lie on another rank.

    Raises:
        ValueError: If there is not one label a token.

    >>> shift_labels(np.array([5, 6, 7, 8, 9]), np.array([3, 2])).tolist()
    [6, 7, -100, 9, -100]
    """
    if labels.shape != (total := int(lengths.sum()),):
        raise ValueError(f"labels must be one for each of the {total:,} tokens, got an array of shape {labels.shape}.")
    shifted = np.full(total, IGNORE_INDEX, dtype=np.int64)
    shifted[:-1] = labels[1:]
    shifted[np.cumsum(lengths) - 1] = IGNORE_INDEX
    return shifted


def _chunk_rows(plan: ShardPlan, chunk: int) -> Rows:
    """A row for each document's chunk, from the document's first key on, and rows between that step over keys."""
    lengths = plan.lengths[plan.sharded]
    starts = np.cumsum(lengths) - lengths
    queries = plan.edges[:, chunk + 1] - plan.edges[:, chunk]
    read = np.flatnonzero(queries > 0)
    stops = starts[read] + plan.edges[read, chunk + 1]
    before = np.concatenate([[0], stops])  # where the row before ended
    after = np.concatenate([starts[read], [lengths.sum()]])
    row_queries = np.zeros(2 * len(read) + 1, dtype=np.int64)
    row_keys = np.zeros_like(row_queries)
    row_queries[1::2] = queries[read]
    row_keys[1::2] = plan.edges[read, chunk + 1]
    row_keys[0::2] = after - before
    kept = row_keys > 0
    return Rows.of(row_queries[kept], row_keys[kept])


def _gathered_order(plan: ShardPlan, padded: int) -> IntArray:
    lengths = plan.lengths[plan.sharded]
    starts = np.cumsum(lengths) - lengths
    order = np.empty(int(lengths.sum()), dtype=np.int64)
    for rank in range(plan.cp_size):
        held = []
        for chunk in (rank, 2 * plan.cp_size - 1 - rank):
            first = plan.edges[:, chunk]
            held.append(_ranges(starts + first, plan.edges[:, chunk + 1] - first))
        keys = np.concatenate(held)
        order[keys] = rank * padded + np.arange(len(keys))
    return order


def _bounds(counts: IntArray) -> Int32Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _ranges(first: IntArray, count: IntArray) -> IntArray:
    """Concatenated ``range(first[i], first[i] + count[i])``.

    >>> _ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    total = int(count.sum())
    if not total:
        return np.zeros(0, dtype=np.int64)
    offsets = first - (np.cumsum(count) - count)
    ranges: IntArray = np.arange(total) + np.repeat(offsets, count)
    return ranges
