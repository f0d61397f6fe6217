"""Placed sharding, our step beyond the paper: short documents whole on one rank, long ones filling the gaps.

A short document cut into 2 cp_size chunks costs an exchange and makes chunks too short for attention kernels to be
fast. Left whole on some rank it costs neither, but then ranks differ. The long documents even that out: with chunk
widths ``w_r`` (head and tail of rank r alike) a document of L tokens gives rank r ``2 w_r`` tokens and ``w_r L`` causal
pairs, wherever the chunks lie, so both grow in proportion to the rank's share and shares can be poured onto the ranks
that have least to do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_wlb.sharding.cost import ShardCosts
from hf_wlb.sharding.strategies import _edges, deal
from hf_wlb.sharding.types import SHARDED, FloatArray, IntArray, ShardPlan


@dataclass(frozen=True)
class TokenBounds:
    """Fewest and most tokens that a rank may hold."""

    least: float
    most: float

    @classmethod
    def of(cls, total: int, cp_size: int, max_skew: float, max_tokens: int | None) -> TokenBounds:
        """An even share and what it may deviate by, which is always a token or two, within the memory's bound.

        Raises:
            ValueError: If an even share is more than ``max_tokens``.
        """
        even = total / cp_size
        slack = max(max_skew * even, 1.0)
        if max_tokens is None:
            return cls(max(1.0, even - slack), even + slack)
        if math.ceil(even) > max_tokens:
            raise ValueError(
                f"A micro-batch of {total:,} tokens does not fit {cp_size} ranks of at most {max_tokens:,} tokens "
                "each. Raise max_tokens_per_shard or cp_size, or lower max_tokens_per_micro_batch."
            )
        return cls(max(1.0, even - slack), min(even + slack, max_tokens))

    def hold(self, tokens: IntArray) -> bool:
        """Whether no rank has too few or too many."""
        return bool(tokens.min() >= self.least and tokens.max() <= self.most)


class Placement:
    """Places one micro-batch for any number of documents to be sharded.

    Args:
        costs: Prices of the micro-batch.
        bounds: Tokens that a rank may hold.
    """

    def __init__(self, costs: ShardCosts, bounds: TokenBounds) -> None:
        self._costs = costs
        self._bounds = bounds
        self._cp = costs.cp_size
        lengths = costs.lengths
        self.longest_first: IntArray = np.argsort(-lengths, kind="stable")
        even = _edges(deal(lengths[self.longest_first], np.full(2 * self._cp, 0.5 / self._cp)))
        # Cumulative over the k longest: what they cost in all when they are sharded evenly, and their tokens.
        sharded = costs.chunks(even).sum(axis=1) + costs.linear * lengths[self.longest_first]
        self._sharded_cost = np.concatenate([[0.0], np.cumsum(sharded)])
        self._sharded_tokens = np.concatenate([[0], np.cumsum(lengths[self.longest_first])])
        whole = costs.whole + costs.linear * lengths
        self._items = list(zip(self.longest_first.tolist(), whole[self.longest_first].tolist(), strict=True))
        self._lengths: list[int] = lengths.tolist()

    def place(self, count: int) -> ShardPlan | None:
        """Shards the ``count`` longest documents and places the others whole; None if the bounds forbid it."""
        placed = self._deal_whole(count)
        if placed is None:
            return None
        owner, load, tokens = placed
        if not count:
            if min(tokens) < self._bounds.least:
                return None
            edges = np.zeros((0, 2 * self._cp + 1), dtype=np.int64)
        else:
            shares = self._pour(load, tokens, count)
            if shares is None:
                return None
            edges = self._cut(count, shares)
        plan = ShardPlan(self._costs.lengths, self._cp, owner, edges, "placed", self._threshold(count))
        if not self._bounds.hold(plan.tokens):  # rounding to whole tokens passed a narrow bound
            if count < len(self._lengths):
                return None
            plan = replace(plan, edges=self._cut(count, np.full(self._cp, 1 / self._cp)))
        return _normalised(plan)

    def _cut(self, count: int, shares: FloatArray) -> IntArray:
        """Edges of the ``count`` longest documents, so that ranks hold these shares of them."""
        sharded = np.sort(self.longest_first[:count])
        return _edges(deal(self._costs.lengths[sharded], np.concatenate([shares, shares[::-1]]) / 2))

    def place_up_to(self, threshold: int) -> ShardPlan:
        """Places documents up to ``threshold`` tokens whole, or as many of the shortest as the bounds allow."""
        count = int((self._costs.lengths > threshold).sum())
        while (plan := self.place(count)) is None:
            count += 1
            assert count <= len(self._lengths), "with everything sharded every rank gets an even share"
        return plan

    def _threshold(self, count: int) -> int:
        return self._lengths[self.longest_first[count]] if count < len(self._lengths) else 0

    def _deal_whole(self, count: int) -> tuple[IntArray, list[float], list[int]] | None:
        """Longest processing time first: every document to the rank with least to do that has room."""
        owner = np.full(len(self._lengths), SHARDED, dtype=np.int64)
        load, tokens = [0.0] * self._cp, [0] * self._cp
        waiting = [(0.0, rank) for rank in range(self._cp)]
        most, lengths = self._bounds.most, self._lengths
        for document, cost in self._items[count:]:
            length = lengths[document]
            full = []
            while waiting and tokens[waiting[0][1]] + length > most:
                full.append(heapq.heappop(waiting))
            if not waiting:
                return None
            rank = waiting[0][1]
            owner[document] = rank
            load[rank] += cost
            tokens[rank] += length
            heapq.heapreplace(waiting, (load[rank], rank))
            for entry in full:
                heapq.heappush(waiting, entry)
        return owner, load, tokens

    def _pour(self, load: list[float], tokens: list[int], count: int) -> FloatArray | None:
        """Share of every rank in the sharded documents, so that the ranks come out alike; None if impossible."""
        cost, total = float(self._sharded_cost[count]), float(self._sharded_tokens[count])
        margin = min(count, 8)  # what rounding may move
        most, least = self._bounds.most - margin, self._bounds.least + margin
        if most < least:
            most = least = (self._bounds.most + self._bounds.least) / 2
        high = [max(0.0, (most - t) / total) for t in tokens]
        low = [max(0.0, (least - t) / total) for t in tokens]
        if sum(low) > 1 or sum(high) < 1:
            if count < len(self._lengths):
                return None
            return np.full(self._cp, 1 / self._cp)
        return _level([a / cost for a in load], low, high)


def _level(load: Sequence[float], low: Sequence[float], high: Sequence[float]) -> FloatArray:
    """Shares that sum to 1, within bounds, and bring ``load + share`` to one level where the bounds let them.

    >>> _level([0.0, 0.5, 2.0], [0.0] * 3, [1.0] * 3).tolist()
    [0.75, 0.25, 0.0]
    """
    corners = sorted([a + b for a, b in zip(load, low, strict=True)] + [a + b for a, b in zip(load, high, strict=True)])

    def poured(level: float) -> list[float]:
        return [min(max(level - a, lo), hi) for a, lo, hi in zip(load, low, high, strict=True)]

    first, last = 0, len(corners) - 1
    while last - first > 1:  # the sum of shares is linear in the level between neighbouring corners
        middle = (first + last) // 2
        if sum(poured(corners[middle])) <= 1:
            first = middle
        else:
            last = middle
    below, above = np.array(poured(corners[first])), np.array(poured(corners[last]))
    gap = above.sum() - below.sum()
    shares: FloatArray = below + (above - below) * ((1 - below.sum()) / gap if gap > 0 else 0.0)
    shares /= shares.sum()
    return shares


def _normalised(plan: ShardPlan) -> ShardPlan:
    """Documents whose chunks all fell to one rank become local."""
    if not len(plan.edges):
        return plan
    inner = ShardPlan.from_edges(plan.lengths[plan.sharded], plan.cp_size, plan.edges, plan.strategy)
    owner = plan.owner.copy()
    owner[plan.sharded] = inner.owner
    return replace(plan, owner=owner, edges=inner.edges)
