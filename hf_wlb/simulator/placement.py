"""Ways to share micro-batches out that this library does not train with, for comparison: as others do it, and a bound.

Each is called like ``hf_wlb.sharding.Sharder`` and returns the same kind of plan, which is priced alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.sharding import ShardCosts, Sharder, ShardingConfig, ShardPlan, per_document
from hf_wlb.sharding.strategies import check_micro_batch, chunk_edges
from hf_wlb.sharding.types import FloatArray, IntArray
from hf_wlb.workload import WorkloadModel


class _NamedSharder(Sharder):
    """A sharder whose fingerprint holds its kind, since its ``ShardingConfig`` does not say it."""

    @property
    def fingerprint(self) -> int:
        """A 63-bit number that is the same on ranks that would share micro-batches out alike."""
        text = f"{type(self).__name__} {self.config!r} {self.workload.fingerprint}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class StaticChoice(_NamedSharder):
    """Per-sequence or per-document sharding, whichever is predicted to be faster: the paper's adaptive sharding.

    Args:
        cp_size: Context-parallel ranks.
        workload: What attention, linear work and the exchange cost.

    >>> from hf_wlb.workload import AnalyticWorkload
    >>> sharder = StaticChoice(2, AnalyticWorkload.from_crossover(1000))
    >>> sharder.plan([4000, 200]).strategy, sharder.plan([1000] * 4).strategy
    ('per_document', 'per_sequence')
    """

    def __init__(self, cp_size: int, workload: WorkloadModel) -> None:
        super().__init__(ShardingConfig(cp_size, "per_document"), workload)
        self._both = [Sharder(ShardingConfig(cp_size, name), workload) for name in ("per_sequence", "per_document")]

    def plan(self, lengths: Sequence[int] | NDArray[Any]) -> ShardPlan:
        """The faster of the two plans; see ``Sharder.plan``."""
        return min((sharder.plan(lengths) for sharder in self._both), key=lambda plan: plan.slowest)


class WholeDocuments(_NamedSharder):
    """Every document whole on one rank, or on as few as hold it, longest processing time first.

    That is how ByteScale's hybrid data parallelism deals documents out, as far as its publication says: a document that
    fits one GPU is never communicated. Token counts of ranks differ up to ``room``, which is all that bounds them.
    Exchanges are priced as ours, a gather among all ranks padded to the fullest, where theirs go around the ranks of
    one document.

    The documents with most work come first. Each goes to the rank with least to do among those with room for all of
    it. A document longer than ``room``, or one that no rank has room left for, is cut evenly over the fewest ranks
    that have room for their parts, the least loaded of them; if no number of even parts fits, over all ranks in
    proportion to the room that they have left. Where the whole micro-batch is more than all rooms together, every room
    is an even share of it instead. So every document is placed, whatever comes.

    Args:
        cp_size: Context-parallel ranks.
        workload: What attention, linear work and the exchange cost.
        room: Most tokens of a rank, at least 1.

    Raises:
        ValueError: For a size below 1.

    >>> from hf_wlb.workload import AnalyticWorkload
    >>> plan = WholeDocuments(4, AnalyticWorkload.from_crossover(1000), room=600).plan([1000, 300, 250, 250])
    >>> plan.owner.tolist(), plan.tokens.tolist()  # the first is longer than a room: over two ranks
    ([-1, 2, 3, 3], [500, 500, 300, 500])
    """

    def __init__(self, cp_size: int, workload: WorkloadModel, room: int) -> None:
        super().__init__(ShardingConfig(cp_size, "per_document", max_tokens_per_shard=room), workload)
        self.room = room

    def plan(self, lengths: Sequence[int] | NDArray[Any]) -> ShardPlan:
        """The plan of a micro-batch; see ``Sharder.plan``.

        Raises:
            ValueError: For lengths below 1, or fewer tokens than ranks.
        """
        cp_size = self.config.cp_size
        checked = check_micro_batch(lengths, cp_size)
        costs = ShardCosts.of(checked, self.workload, cp_size)
        work = costs.whole + costs.linear * checked
        free = np.full(cp_size, max(self.room, math.ceil(int(checked.sum()) / cp_size)), dtype=np.int64)
        load = np.zeros(cp_size)
        held = np.zeros((len(checked), cp_size), dtype=np.int64)
        for document in np.argsort(-work, kind="stable").tolist():
            length = int(checked[document])
            held[document] = _parts(length, self.room, free, load)
            free -= held[document]
            # A rank's part of the chunks brings that part of the pairs, wherever they lie (``hf_wlb.sharding.placed``).
            load += work[document] / length * held[document]
        head = -(-held // 2)
        edges = chunk_edges(np.concatenate([head, (held - head)[:, ::-1]], axis=1))
        return costs.price([ShardPlan.from_edges(checked, cp_size, edges, "whole")])[0]


def _parts(length: int, room: int, free: IntArray, load: FloatArray) -> IntArray:
    """Tokens of one document on every rank, ``[cp_size]``; never more than is free."""
    parts = np.zeros_like(free)
    for ranks in range(math.ceil(length / room), len(free) + 1):
        fits = np.flatnonzero(free >= math.ceil(length / ranks))
        if len(fits) >= ranks:
            chosen = np.sort(fits[np.argsort(load[fits], kind="stable")[:ranks]])
            parts[chosen] = length // ranks
            parts[chosen[: length % ranks]] += 1
            return parts
    filled = np.cumsum(free) * length // int(free.sum())
    return np.diff(filled, prepend=0)


class BalancedAttention(_NamedSharder):
    """Attention spread perfectly evenly, at no cost of moving it: a bound on what any sharding can reach.

    DistCA runs attention on a separate, balanced service; this is how fast its idea, or any other, could be at most.
    Of one micro-batch the plan predicts an even share for every rank, without exchange and with whole documents' speed
    of kernels; its cuts only say how many tokens a rank holds. ``simulate_step`` then evens attention and tokens out
    over the micro-batches and replicas of the step as well.

    Args:
        cp_size: Context-parallel ranks.
        workload: What attention and linear work cost.
    """

    def __init__(self, cp_size: int, workload: WorkloadModel) -> None:
        super().__init__(ShardingConfig(cp_size, "per_document"), workload)

    def plan(self, lengths: Sequence[int] | NDArray[Any]) -> ShardPlan:
        """An even plan of a micro-batch; see ``Sharder.plan``.

        >>> from hf_wlb.workload import AnalyticWorkload
        >>> workload = AnalyticWorkload(attention_seconds_per_pair=2.0, linear_seconds_per_token=10.0)
        >>> BalancedAttention(2, workload).plan([4, 2]).predicted.tolist()  # (20 + 6 + 60) / 2
        [43.0, 43.0]
        """
        cp_size = self.config.cp_size
        plan = per_document(lengths, cp_size)
        ideal = ShardCosts.of(plan.lengths, self.workload, cp_size).ideal
        return ShardPlan(plan.lengths, cp_size, plan.owner, plan.edges, "balanced", predicted=np.full(cp_size, ideal))
