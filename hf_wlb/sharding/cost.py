"""What a plan costs: the slowest rank's attention, linear work and exchange of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_wlb.sharding.types import SHARDED, FloatArray, IntArray, ShardPlan
from hf_wlb.workload import WorkloadModel

HIDDEN = 0.4
"""Share of the exchange that runs while kernels do: the gathers, but not copies and the last reduction.

Measured on four H100 with NVLink, 64K tokens of 8 KV heads: gathers 1.3 ms of 3.4 ms in all.
"""

WAITING = 0.25
"""What waiting for others' chunks costs, of the time waited: a collective that has begun keeps processors busy.

So ranks should come to their exchanges together. Measured on four H100: a rank with a long document whole and chunks
that take 8 ms less than the others' lost 2 ms of attention.
"""


@dataclass(frozen=True, eq=False)
class RankCosts:
    """What the ranks do under a plan, each ``[cp_size]``.

    Attributes:
        local: Attention of local documents.
        chunks: Attention of chunks.
        linear: Work that goes by tokens.
        waiting: The exchange, but for what local documents hide of it, and for ranks with more to do on chunks.
    """

    local: FloatArray
    chunks: FloatArray
    linear: FloatArray
    waiting: FloatArray

    @property
    def total(self) -> FloatArray:
        """All of it."""
        return self.local + self.chunks + self.waiting + self.linear


@dataclass(frozen=True)
class ShardCosts:
    """Prices of one micro-batch, computed once for all plans that are compared.

    Attributes:
        workload: What prices them.
        cp_size: Ranks.
        lengths: Tokens of every document.
        whole: Attention of every document where it is whole, shape ``[documents]``.
        linear: Linear work of a token.
        hidden: What to take for ``HIDDEN``; None for itself.
        unlike: What to take for ``WAITING``; None for itself.
    """

    workload: WorkloadModel
    cp_size: int
    lengths: IntArray
    whole: FloatArray
    linear: float
    hidden: float | None = None
    unlike: float | None = None

    @classmethod
    def of(
        cls,
        lengths: IntArray,
        workload: WorkloadModel,
        cp_size: int,
        *,
        hidden: float | None = None,
        unlike: float | None = None,
    ) -> ShardCosts:
        """Prices documents."""
        whole, linear = workload.segment(lengths, lengths), float(workload.linear(1))
        return cls(workload, cp_size, lengths, whole, linear, hidden, unlike)

    @cached_property
    def ideal(self) -> float:
        """Workload of every rank if the documents were whole and their work came out even."""
        return float(self.whole.sum() + self.linear * self.lengths.sum()) / self.cp_size

    @property
    def hidden_share(self) -> float:
        """Of the exchange, what attention on local documents hides where it lasts as long."""
        return HIDDEN if self.hidden is None else self.hidden

    def chunks(self, edges: IntArray) -> FloatArray:
        """Attention of chunks, ``[documents, 2 cp_size]``; nothing for empty ones."""
        queries = np.diff(edges, axis=1)
        priced: FloatArray = self.workload.segment(queries, edges[:, 1:])
        return np.where(queries > 0, priced, 0.0)

    def exchange(self, tokens: int) -> float:
        """Gathering the keys and values of so many tokens and reducing their gradients."""
        return float(self.workload.exchange(tokens, self.cp_size))

    def parts(self, plans: Sequence[ShardPlan]) -> list[RankCosts]:
        """What every rank does under every plan."""
        if not plans:
            return []
        hidden = self.hidden_share
        unlike = WAITING if self.unlike is None else self.unlike
        chunks = self.chunks(np.concatenate([plan.edges for plan in plans]))
        found, first = [], 0
        for plan in plans:
            last = first + len(plan.edges)
            by_chunk = chunks[first:last].sum(axis=0)
            first = last
            own: FloatArray = by_chunk[: self.cp_size] + by_chunk[: self.cp_size - 1 : -1]
            local = plan.owner != SHARDED
            whole = np.bincount(plan.owner[local], self.whole[local], self.cp_size).astype(np.float64)
            exchange = self.exchange(int(plan.exchanged_tokens.max()) * self.cp_size) if len(plan.edges) else 0.0
            waiting = exchange - np.minimum(whole, hidden * exchange) + unlike * (own.max() - own)
            found.append(RankCosts(whole, own, np.multiply(self.linear, plan.tokens, dtype=np.float64), waiting))
        return found

    def predict(self, plans: Sequence[ShardPlan]) -> FloatArray:
        """Workload of every rank under every plan, ``[plans, cp_size]``.

        Attention on local documents hides the gathers, as far as it lasts; the rest of the exchange comes on top.
        """
        return np.array([parts.total for parts in self.parts(plans)]).reshape(-1, self.cp_size)

    def price(self, plans: Sequence[ShardPlan]) -> list[ShardPlan]:
        """The plans, each with its prediction."""
        return [replace(plan, predicted=times) for plan, times in zip(plans, self.predict(plans), strict=True)]
