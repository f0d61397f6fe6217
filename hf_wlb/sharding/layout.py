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
        keys: int32 ``[rows + 1]``, where each row's keys begin, and their number. Queries are a row's last keys.
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

    Keys and values of sharded documents are exchanged: every rank sends those of its chunks, padded to ``padded``
    tokens; the gathered buffer then holds ``cp_size * padded`` of them, rank by rank. One attention call reads, for
    every chunk, the prefix of its document up to the chunk's end. ``order`` picks these prefixes, those of head chunks
    before those of tail chunks: of a document cut evenly (2 cp_size + 1) / (2 cp_size) times its keys, on every rank.

    Attributes:
        rank: The rank.
        cp_size: Ranks.
        tokens: int64 ``[T]``, place in the micro-batch of every token of the shard.
        position_ids: int64 ``[T]``, position in its document of every token.
        local: Rows of local documents over the shard's own keys.
        chunks: Rows of head chunks, then of tail chunks, over the keys that ``order`` picks.
        order: int64 ``[keys of chunks]``, place of each in the gathered buffer.
        head_keys: How many of these are for head chunks.
        padded: Tokens that every rank sends.
        gathered: Tokens of all sharded documents.
    """

    rank: int
    cp_size: int
    tokens: IntArray
    position_ids: IntArray
    local: Rows
    chunks: Rows
    order: IntArray
    head_keys: int
    padded: int
    gathered: int

    @property
    def local_tokens(self) -> int:
        """Tokens of local documents."""
        return int(self.local.queries[-1])

    @property
    def exchanged_tokens(self) -> int:
        """Tokens of this rank's chunks."""
        return int(self.chunks.queries[-1])


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
        >>> layout.chunks.queries.tolist(), layout.chunks.keys.tolist()  # the head chunk reads 2 keys, the tail 6
        ([0, 2, 4], [0, 2, 8])
    """
    if not 0 <= rank < plan.cp_size:
        raise ValueError(f"rank must be from 0 to {plan.cp_size - 1} (cp_size - 1), got {rank}.")
    starts = np.cumsum(plan.lengths) - plan.lengths
    own = np.flatnonzero(plan.owner == rank)
    tokens = [_ranges(starts[own], plan.lengths[own])]
    positions = [_ranges(np.zeros_like(own), plan.lengths[own])]
    sharded = plan.sharded
    queries, keys, picked = [], [], []
    padded = int(plan.exchanged_tokens.max(initial=0))
    order = _gathered_order(plan, padded)
    for chunk in (rank, 2 * plan.cp_size - 1 - rank):
        first, stop = plan.edges[:, chunk], plan.edges[:, chunk + 1]
        held = np.flatnonzero(stop > first)
        first, stop = first[held], stop[held]
        tokens.append(_ranges(starts[sharded[held]] + first, stop - first))
        positions.append(_ranges(first, stop - first))
        queries.append(stop - first)
        keys.append(stop)
        gathered_starts = np.cumsum(plan.lengths[sharded]) - plan.lengths[sharded]
        picked.append(order[_ranges(gathered_starts[held], stop)])
    return ShardLayout(
        rank=rank,
        cp_size=plan.cp_size,
        tokens=np.concatenate(tokens),
        position_ids=np.concatenate(positions),
        local=Rows.of(plan.lengths[own], plan.lengths[own]),
        chunks=Rows.of(np.concatenate(queries), np.concatenate(keys)),
        order=np.concatenate(picked),
        head_keys=len(picked[0]),
        padded=padded,
        gathered=len(order),
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


def _gathered_order(plan: ShardPlan, padded: int) -> IntArray:
    """Place in the gathered buffer of every token of sharded documents, in document order."""
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
