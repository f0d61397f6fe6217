"""Dealing whole documents to ranks so that workload comes out even and tokens nearly so.

Long documents bring more workload a token than short ones, so a rank with a long one has either more workload or fewer
tokens than others. Dealing longest first therefore has a second form, and swaps between ranks mend what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hf_wlb.sharding.types import SHARDED, FloatArray, IntArray

_GAIN = 0.0005  # of the mean load; exchanges that bring less are not worth the search
_PENALTY = 10.0
_TRIES, _TRIED_DOCUMENTS = 16, 800  # swaps tried, fewer with more documents, whose deal is finer from the start
_MINE, _OTHERS = 12, 48  # documents that are looked at in one try, of the rank that stands out and of the others
_SHORT_SHARES = (0.2, 0.1, 0.3)  # of all tokens: what counts as short documents when they are to even tokens out
_DOCUMENTS_FOR_A_START_LESS = 64  # where time counts more than the last percent
EVEN = 1.005  # heaviest rank over the mean that needs no further attempt


@dataclass(frozen=True)
class Dealt:
    """Whole documents on ranks.

    Attributes:
        owner: Rank of every document, ``SHARDED`` for those that were not to be dealt, shape ``[documents]``.
        load: Workload of every rank.
        tokens: Tokens of every rank.
    """

    owner: IntArray
    load: list[float]
    tokens: list[int]

    @property
    def imbalance(self) -> float:
        """Heaviest rank over the mean."""
        mean = sum(self.load) / len(self.load)
        return max(self.load) / mean if mean else 1.0

    def within(self, least: float, most: float) -> bool:
        """Whether every rank's tokens are in a range."""
        return min(self.tokens) >= least and max(self.tokens) <= most


def deal_evenly(
    costs: FloatArray, lengths: IntArray, cp_size: int, least: float, most: float, thorough: bool = True
) -> Dealt | None:
    """All documents, whole, to ranks of ``least`` to ``most`` tokens, as even in workload as is found; None if none is.

    If not ``thorough``, many documents are dealt in two ways only, from which they mostly come out even or not at all.

    >>> dealt = deal_evenly(np.array([9.0, 4.0, 4.0, 1.0]), np.array([3, 2, 2, 1]), cp_size=2, least=3, most=5)
    >>> dealt.load, dealt.tokens
    ([9.0, 9.0], [3, 5])
    """
    if lengths.max() > most:
        return None  # one document is too much for any rank
    best: Dealt | None = None
    fewer = 0 if thorough else len(lengths) // _DOCUMENTS_FOR_A_START_LESS
    for owner in _starts(costs, lengths, cp_size, most, max(len(_SHORT_SHARES) - fewer, 1)):
        loads = np.bincount(owner, costs, cp_size).tolist()
        tokens = np.bincount(owner, lengths, cp_size).astype(np.int64).tolist()
        dealt = Dealt(owner, loads, tokens)
        if not (dealt.within(least, most) and dealt.imbalance <= EVEN):
            dealt = exchange_documents(dealt, costs, lengths, least, most)
        if dealt.within(least, most) and (best is None or dealt.imbalance < best.imbalance):
            best = dealt
        if best is not None and best.imbalance <= EVEN:
            break
    return best


def _starts(costs: FloatArray, lengths: IntArray, cp_size: int, most: float, others: int) -> Iterator[IntArray]:
    order = np.argsort(-lengths, kind="stable")
    dealt = longest_first(order.tolist(), costs.tolist(), lengths.tolist(), cp_size, most)
    if dealt is not None:
        yield dealt.owner
    shorter = np.cumsum(lengths[order][::-1])[::-1]  # tokens of a document and all shorter ones
    for share in _SHORT_SHARES[:others]:
        long = min(max(int((shorter >= share * shorter[0]).sum()), 1), len(order) - 1)
        if long < 1:
            return
        yield _workload_then_tokens(order, long, costs, lengths, cp_size)


def _workload_then_tokens(order: IntArray, long: int, costs: FloatArray, lengths: IntArray, cp_size: int) -> IntArray:
    """The first ``long`` documents by what they cost beyond short ones of as many tokens, the others by tokens.

    If every rank ends with as many tokens, and the excess is even, so is the workload.
    """
    short = order[long:]
    excess = (costs - costs[short].sum() / lengths[short].sum() * lengths).tolist()
    owner = np.empty(len(order), dtype=np.int64)
    load, tokens = [0.0] * cp_size, [0] * cp_size
    for place, document in enumerate(order.tolist()):
        by = load if place < long else tokens
        rank = min(range(cp_size), key=by.__getitem__)
        owner[document] = rank
        load[rank] += excess[document]
        tokens[rank] += int(lengths[document])
    return owner


def longest_first(
    documents: Sequence[int], costs: Sequence[float], lengths: Sequence[int], cp_size: int, most: float
) -> Dealt | None:
    """Every document to the rank with least to do that has room; None if there is none with room.

    Args:
        documents: Which ones to deal, the longest first.
        costs: Workload of every document of the micro-batch.
        lengths: Tokens of every document of the micro-batch.
        cp_size: Ranks.
        most: Most tokens of a rank.

    >>> longest_first([0, 1, 2, 3], [5.0, 4.0, 3.0, 3.0], [5, 4, 3, 3], cp_size=2, most=10).owner.tolist()
    [0, 1, 1, 0]
    """
    owner = np.full(len(lengths), SHARDED, dtype=np.int64)
    load, tokens = [0.0] * cp_size, [0] * cp_size
    waiting = [(0.0, rank) for rank in range(cp_size)]
    for document in documents:
        length = lengths[document]
        full = []
        while waiting and tokens[waiting[0][1]] + length > most:
            full.append(heapq.heappop(waiting))
        if not waiting:
            return None
        rank = waiting[0][1]
        owner[document] = rank
        load[rank] += costs[document]
        tokens[rank] += length
        heapq.heapreplace(waiting, (load[rank], rank))
        for entry in full:
            heapq.heappush(waiting, entry)
    return Dealt(owner, load, tokens)


def exchange_documents(dealt: Dealt, costs: FloatArray, lengths: IntArray, least: float, most: float) -> Dealt:
    """Moves and swaps documents between a rank that stands out and others, as long as the ranks come nearer together.

    What is lowered is the sum over ranks of squared deviations: of workload from the mean, and of tokens from the
    range ``least`` to ``most`` (times ``_PENALTY``, so that ranks get into the range and stay there).

    >>> costs = np.array([5.0, 4.0, 3.0, 3.0, 3.0])  # longest first ends with 8 and 10
    >>> start = Dealt(np.array([0, 1, 1, 0, 1]), [8.0, 10.0], [8, 10])
    >>> exchange_documents(start, costs, costs.astype(np.int64), 8, 10).load
    [9.0, 9.0]
    """
    owner = dealt.owner.copy()
    load, tokens = np.array(dealt.load), np.array(dealt.tokens, dtype=np.float64)
    cp_size, mean, even = len(load), load.mean(), tokens.mean()
    # Besides documents, a move to each rank swaps with nothing.
    partner_rank = np.concatenate([owner, np.arange(cp_size)])
    partner_cost = np.concatenate([costs, np.zeros(cp_size)])
    partner_length = np.concatenate([lengths, np.zeros(cp_size, dtype=np.int64)])

    moves = np.arange(len(owner), len(owner) + cp_size)

    def deviation(loads: FloatArray, held: FloatArray) -> FloatArray:
        outside = held - np.clip(held, least, most)
        squares: FloatArray = (loads / mean - 1) ** 2 + _PENALTY * (outside / even) ** 2
        return squares

    for _ in range(min(_TRIES, 2 + _TRIED_DOCUMENTS // len(owner))):
        each = deviation(load, tokens)
        worst = int(each.argmax())
        mine = _some(np.flatnonzero(owner == worst), _MINE)
        others = _some(np.flatnonzero((owner != worst) & (owner != SHARDED)), _OTHERS)
        others = np.concatenate([others, np.delete(moves, worst)])
        rank = partner_rank[others]
        shift = costs[mine][:, None] - partner_cost[others][None, :]
        moved = lengths[mine][:, None] - partner_length[others][None, :]
        change = deviation(load[worst] - shift, tokens[worst] - moved)
        change += deviation(load[rank] + shift, tokens[rank] + moved)
        change -= each[worst] + each[rank]
        if not change.size or not change.min() < -(_GAIN**2):
            break
        row, column = divmod(int(change.argmin()), len(others))
        document, partner, other = int(mine[row]), int(others[column]), int(rank[column])
        load[worst] -= shift[row, column]
        load[other] += shift[row, column]
        tokens[worst] -= moved[row, column]
        tokens[other] += moved[row, column]
        owner[document] = partner_rank[document] = other
        if partner < len(owner):
            owner[partner] = partner_rank[partner] = worst
    return Dealt(owner, load.tolist(), tokens.astype(np.int64).tolist())


def _some(documents: IntArray, most: int) -> IntArray:
    """Not more than so many of them, at even distances."""
    return documents[:: -(-len(documents) // most)] if len(documents) > most else documents
