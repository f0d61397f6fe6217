"""Placed sharding, our step beyond the paper: short documents whole on one rank, long ones filling the gaps.

A short document cut into 2 cp_size chunks costs an exchange and makes chunks too short for attention kernels to be
fast. Left whole on some rank it costs neither, but then ranks differ. The long documents even that out: with chunk
widths ``w_r`` (head and tail of rank r alike) a document of L tokens gives rank r ``2 w_r`` tokens and ``w_r L`` causal
pairs, wherever the chunks lie, so both grow in proportion to the rank's share and shares can be poured onto the ranks
that have least to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_wlb.sharding.balance import EVEN, Dealt, deal_evenly, longest_first
from hf_wlb.sharding.cost import ShardCosts
from hf_wlb.sharding.strategies import chunk_edges, deal
from hf_wlb.sharding.types import SHARDED, FloatArray, IntArray, ShardPlan

_TOO_MUCH = 1.02  # of an even share of the workload
# If nothing else is faster than this many times the ideal time, everything whole is looked for thoroughly.
_MUCH_TO_GAIN = 1.02


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
        even = chunk_edges(deal(lengths[self.longest_first], np.full(2 * self._cp, 0.5 / self._cp)))
        # Cumulative over the k longest: what they cost in all when they are sharded evenly, and their tokens.
        sharded = costs.chunks(even).sum(axis=1) + costs.linear * lengths[self.longest_first]
        self._sharded_cost = np.concatenate([[0.0], np.cumsum(sharded)]).tolist()
        self._sharded_tokens = np.concatenate([[0], np.cumsum(lengths[self.longest_first])]).tolist()
        self._whole = costs.whole + costs.linear * lengths
        # Of what is left whole: all that it costs, and its attention alone, which hides the exchange.
        self._left = _sums_behind(self._whole[self.longest_first])
        self._left_attention = _sums_behind(costs.whole[self.longest_first])

    @property
    def fewest(self) -> int:
        """How many documents must be sharded at least, for the longest one left not to be too much for any rank."""
        even = float(self._whole.sum()) / self._cp
        return int((self._whole > _TOO_MUCH * even).sum())

    def at_least(self, counts: Sequence[int]) -> list[float]:
        """What the slowest rank takes at least when every rank has a share of so many of the longest documents.

        Two bounds, of which the higher counts: the mean over ranks with what is not hidden of the exchange; and what
        the rank with the longest document left whole takes, filled up with the cheapest tokens to as many as it must
        hold.
        """
        costs, found = self._costs, list[float]()
        for count in counts:
            mean = (self._left[count] + self._sharded_cost[count]) / self._cp
            exchange = costs.exchange(self._sharded_tokens[count]) if count else 0.0
            hidden = min(self._left_attention[count] / self._cp, costs.hidden_share * exchange)
            found.append(max(mean + exchange - hidden, self._with_longest_left(count)))
        return found

    def _with_longest_left(self, count: int) -> float:
        """Of its rank; the shortest documents cost least a token, and those that are sharded most."""
        if count == len(self.longest_first):
            return 0.0
        longest = self.longest_first[count]
        missing = max(self._bounds.least - float(self._costs.lengths[longest]), 0.0)
        tokens, cost = self._cheapest
        return float(self._whole[longest]) + float(np.interp(missing, tokens, cost))

    @cached_property
    def _cheapest(self) -> tuple[FloatArray, FloatArray]:
        """Tokens of the shortest documents together, for 0, 1, 2, ... of them, and what those cost."""
        shortest = self.longest_first[::-1]
        tokens = np.concatenate([[0.0], np.cumsum(self._costs.lengths[shortest], dtype=np.float64)])
        return tokens, np.concatenate([[0.0], np.cumsum(self._whole[shortest])])

    def place_at_once(self) -> ShardPlan | None:
        """Everything whole, the longest first to the rank with least to do; None if the bounds forbid that."""
        dealt = self._deal(0, self._whole)
        return None if dealt is None or min(dealt.tokens) < self._bounds.least else self._whole_plan(dealt)

    def _whole_plan(self, dealt: Dealt) -> ShardPlan:
        edges = np.zeros((0, 2 * self._cp + 1), dtype=np.int64)
        return ShardPlan(self._costs.lengths, self._cp, dealt.owner, edges, "placed", self._threshold(0))

    def place(self, count: int, below: float = math.inf) -> ShardPlan | None:
        """Shards the ``count`` longest documents and places the others whole; None if the bounds forbid it.

        Or if it can be seen not to take less than ``below`` before it is worked out to the token.
        """
        lengths = self._costs.lengths
        if not count:
            least, most = self._bounds.least, self._bounds.most
            thorough = below > _MUCH_TO_GAIN * self._costs.ideal
            dealt = deal_evenly(self._whole, lengths, self._cp, least, most, thorough)
            return None if dealt is None else self._whole_plan(dealt)
        poured = self._fill(count)
        if poured is None:
            return None
        slowest, dealt, shares = poured
        exchange = self._costs.exchange(self._sharded_tokens[count])
        if slowest + (1 - self._costs.hidden_share) * exchange >= below:
            return None
        plan = ShardPlan(lengths, self._cp, dealt.owner, self._cut(count, shares), "placed", self._threshold(count))
        if not self._bounds.hold(plan.tokens):  # rounding to whole tokens passed a narrow bound
            if count < len(lengths):
                return None
            plan = replace(plan, edges=self._cut(count, np.full(self._cp, 1 / self._cp)))
        return _normalised(plan)

    def place_up_to(self, threshold: int) -> ShardPlan:
        """Places documents up to ``threshold`` tokens whole, or as many of the shortest as the bounds allow."""
        count = int((self._costs.lengths > threshold).sum())
        while (plan := self.place(count)) is None:
            count += 1
            assert count <= len(self._costs.lengths), "with everything sharded every rank gets an even share"
        return plan

    def _cut(self, count: int, shares: FloatArray) -> IntArray:
        """Edges of the ``count`` longest documents, so that ranks hold these shares of them."""
        sharded = np.sort(self.longest_first[:count])
        return chunk_edges(deal(self._costs.lengths[sharded], np.concatenate([shares, shares[::-1]]) / 2))

    def _threshold(self, count: int) -> int:
        lengths = self._costs.lengths
        return int(lengths[self.longest_first[count]]) if count < len(lengths) else 0

    def _fill(self, count: int) -> tuple[float, Dealt, FloatArray] | None:
        """The other documents whole, and shares in the ``count`` longest that even the ranks out.

        With what the slowest rank takes, but for the exchange.

        Where tokens forbid that, the others are dealt anew, by how much more the sharded documents cost than they do
        for as many tokens: if that is even, ranks filled up to as many tokens have as much workload.
        """
        cost, total = self._sharded_cost[count], self._sharded_tokens[count]
        best: tuple[float, Dealt, FloatArray] | None = None
        beyond = cost / total * self._costs.lengths - self._whole
        for weights in (self._whole, beyond):
            dealt = self._deal(count, weights)
            shares = None if dealt is None else self._pour(dealt, count)
            if dealt is None or shares is None:
                continue
            loads = np.array(dealt.load) + shares * cost
            slowest = float(loads.max())
            if best is None or slowest < best[0]:
                best = (slowest, dealt, shares)
            if best[0] <= EVEN * float(loads.mean()):
                break
        return best

    def _deal(self, count: int, weights: FloatArray) -> Dealt | None:
        """Documents but the ``count`` longest by weight, the heaviest first; with their true load."""
        others = self.longest_first[count:]
        others = others[np.argsort(-weights[others], kind="stable")]
        lengths = self._costs.lengths
        dealt = longest_first(others.tolist(), weights.tolist(), lengths.tolist(), self._cp, self._bounds.most)
        if dealt is None:
            return None
        whole = dealt.owner != SHARDED
        return replace(dealt, load=np.bincount(dealt.owner[whole], self._whole[whole], self._cp).tolist())

    def _pour(self, dealt: Dealt, count: int) -> FloatArray | None:
        """Share of every rank in the sharded documents, so that the ranks come out alike; None if impossible."""
        cost, total = self._sharded_cost[count], self._sharded_tokens[count]
        margin = min(count, 8)  # what rounding may move
        most, least = self._bounds.most - margin, self._bounds.least + margin
        if most < least:
            most = least = (self._bounds.most + self._bounds.least) / 2
        high = [max(0.0, (most - t) / total) for t in dealt.tokens]
        low = [max(0.0, (least - t) / total) for t in dealt.tokens]
        if sum(low) > 1 or sum(high) < 1:
            if count < len(self._costs.lengths):
                return None
            return np.full(self._cp, 1 / self._cp)
        return _level([load / cost for load in dealt.load], low, high)


def _sums_behind(costs: FloatArray) -> list[float]:
    """Of all but the first 0, 1, 2, ... of them.

    >>> _sums_behind(np.array([3.0, 2.0, 1.0]))
    [6.0, 3.0, 1.0, 0.0]
    """
    sums: list[float] = [*np.cumsum(costs[::-1])[::-1].tolist(), 0.0]
    return sums


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
