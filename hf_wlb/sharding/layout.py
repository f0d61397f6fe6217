"""Where every token of a micro-batch lies on a rank, and which rows its attention calls have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.sharding.types import IntArray, ShardPlan

IGNORE_INDEX = -100
"""The label of a position that is no target, as everywhere in Transformers."""

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
        inverse: int64 ``[cp_size * padded]``, for every place in the gathered buffer which of these keys it is (that of
            a tail chunk, if head and tail chunks read it), or their number where no chunk of this rank reads it.
        overlaps: int64 ``[documents, 3]``, where head and tail chunks read the same keys: first of them for the head
            chunk and for the tail chunk, in the order of ``order``, and how many.
        padded: Tokens that every rank sends.
        gathered: Tokens of all sharded documents.
        digest: Of the plan, the same on every rank.
    """

    rank: int
    cp_size: int
    tokens: IntArray
    position_ids: IntArray
    local: Rows
    chunks: Rows
    order: IntArray
    inverse: IntArray
    overlaps: IntArray
    padded: int
    gathered: int
    digest: int

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
        ValueError: If there is no such rank, or the plan would lose tokens.

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
    plan.check()
    starts = np.cumsum(plan.lengths) - plan.lengths
    own = np.flatnonzero(plan.owner == rank)
    tokens = [_ranges(starts[own], plan.lengths[own])]
    positions = [_ranges(np.zeros_like(own), plan.lengths[own])]
    sharded = plan.sharded
    padded = int(plan.exchanged_tokens.max(initial=0))
    place = _gathered_places(plan, padded)
    gathered_starts = np.cumsum(plan.lengths[sharded]) - plan.lengths[sharded]
    queries, keys, picked = [], [], []
    for chunk in (rank, 2 * plan.cp_size - 1 - rank):
        first, stop = plan.edges[:, chunk], plan.edges[:, chunk + 1]
        read = np.where(stop > first, stop, 0)
        tokens.append(_ranges(starts[sharded] + first, stop - first))
        positions.append(_ranges(first, stop - first))
        queries.append(stop - first)
        keys.append(read)
        picked.append(place[_ranges(gathered_starts, read)])
    order = np.concatenate(picked)
    inverse = np.full(plan.cp_size * padded, len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))  # the later one stays where two are for one place
    return ShardLayout(
        rank=rank,
        cp_size=plan.cp_size,
        tokens=np.concatenate(tokens),
        position_ids=np.concatenate(positions),
        local=Rows.of(plan.lengths[own], plan.lengths[own]),
        chunks=Rows.of(*(np.concatenate(counts)[np.concatenate(queries) > 0] for counts in (queries, keys))),
        order=order,
        inverse=inverse,
        overlaps=_overlaps(*keys),
        padded=padded,
        gathered=len(place),
        digest=plan.digest(),
    )


def _overlaps(head_keys: IntArray, tail_keys: IntArray) -> IntArray:
    """See ``ShardLayout``; a document's head chunk lies before its tail chunk, so its keys are among that one's."""
    both = (head_keys > 0) & (tail_keys > 0)
    heads = np.cumsum(head_keys) - head_keys
    tails = head_keys.sum() + np.cumsum(tail_keys) - tail_keys
    return np.stack([heads, tails, head_keys], axis=1)[both]


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


def _gathered_places(plan: ShardPlan, padded: int) -> IntArray:
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
