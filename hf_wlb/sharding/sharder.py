"""Choosing how to share a micro-batch out: one call from lengths to a plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from hf_wlb.sharding.balance import EVEN
from hf_wlb.sharding.cost import ShardCosts
from hf_wlb.sharding.placed import Placement, TokenBounds
from hf_wlb.sharding.strategies import check_micro_batch, per_document, per_sequence
from hf_wlb.sharding.types import IntArray, ShardPlan
from hf_wlb.workload import WorkloadModel
from hf_wlb.workload.base import is_whole_number

ShardingStrategy = Literal["per_sequence", "per_document", "placed", "adaptive"]
SHARDING_STRATEGIES: tuple[str, ...] = get_args(ShardingStrategy)

_CLOSE = 0.001  # so close to ideal, relative to it, no more is tried


@dataclass(frozen=True)
class ShardingConfig:
    """How micro-batches are shared out over context-parallel ranks.

    Args:
        cp_size: Context-parallel ranks.
        strategy: ``per_sequence`` and ``per_document`` as in the paper, ``placed`` (short documents whole on one rank,
            long ones sharded), or ``adaptive``: whichever is predicted to be fastest, for every micro-batch anew.
        threshold: For ``placed``, the longest document left whole; None finds the best one for every micro-batch.
        max_tokens_per_shard: Most tokens that a rank can hold; None for no bound besides the skew.
        max_token_skew: How far a rank's tokens may be from an even share, relative to it, under ``placed``.

    Raises:
        ValueError: For values out of range, or a threshold where none is used.
    """

    cp_size: int
    strategy: ShardingStrategy = "adaptive"
    threshold: int | None = None
    max_tokens_per_shard: int | None = None
    max_token_skew: float = 0.05

    def __post_init__(self) -> None:
        for name, least in (("cp_size", 1), ("threshold", 0), ("max_tokens_per_shard", 1)):
            value = getattr(self, name)
            if value is None and name != "cp_size":
                continue
            if not is_whole_number(value) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.strategy not in SHARDING_STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(SHARDING_STRATEGIES)}, got {self.strategy!r}.")
        if self.threshold is not None and self.strategy != "placed":
            raise ValueError(f"threshold is for strategy='placed', but the strategy is {self.strategy!r}.")
        if not 0 <= self.max_token_skew < 1:
            raise ValueError(f"max_token_skew must be at least 0 and below 1, got {self.max_token_skew!r}.")


class Sharder:
    """Shares micro-batches out; a pure function of lengths, so that every rank plans for itself.

    Args:
        config: What to do.
        workload: What attention, linear work and the exchange cost.

    >>> from hf_wlb.workload import AnalyticWorkload
    >>> sharder = Sharder(ShardingConfig(cp_size=2), AnalyticWorkload.from_crossover(1000))
    >>> plan = sharder.plan([5000, 300, 200, 100])
    >>> plan.strategy, plan.owner.tolist(), plan.tokens.tolist()
    ('placed', [-1, 0, 1, 1], [2798, 2802])
    """

    def __init__(self, config: ShardingConfig, workload: WorkloadModel) -> None:
        self.config = config
        self.workload = workload

    @property
    def fingerprint(self) -> int:
        """A 63-bit number that is the same on ranks that would share micro-batches out alike."""
        text = f"{self.config!r} {self.workload.fingerprint}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def plan(self, lengths: Sequence[int] | NDArray[Any]) -> ShardPlan:
        """The plan of a micro-batch whose documents have these lengths, in layout order.

        Raises:
            ValueError: For lengths below 1, fewer tokens than ranks, or more than ``max_tokens_per_shard`` allows.
        """
        config = self.config
        checked = check_micro_batch(lengths, config.cp_size)
        bounds = TokenBounds.of(int(checked.sum()), config.cp_size, config.max_token_skew, config.max_tokens_per_shard)
        costs = ShardCosts.of(checked, self.workload, config.cp_size)
        return min(self._candidates(checked, costs, bounds), key=lambda plan: plan.slowest)

    def _candidates(self, lengths: IntArray, costs: ShardCosts, bounds: TokenBounds) -> list[ShardPlan]:
        config = self.config
        if config.cp_size == 1 or config.strategy == "per_document":
            return costs.price([per_document(lengths, config.cp_size)])
        if config.strategy == "per_sequence":
            return costs.price([per_sequence(lengths, config.cp_size)])
        placement = Placement(costs, bounds)
        if config.threshold is not None:
            return costs.price([placement.place_up_to(config.threshold)])
        plans = placements(placement, costs, len(lengths))
        best = min((plan.slowest for plan in plans), default=float("inf"))
        if config.strategy == "adaptive" and best > costs.ideal * (1 + _CLOSE):
            others = [per_sequence(lengths, config.cp_size)]
            if placement.at_least([len(lengths)])[0] < best:
                others.append(per_document(lengths, config.cp_size))
            plans += costs.price(others)
        return plans


def placements(placement: Placement, costs: ShardCosts, documents: int) -> list[ShardPlan]:
    """Priced plans with 0, 1, 2, 3, 4, 6, 8, 12, ... of the longest documents sharded, while others could be better.

    Those that could be best come first. Everything whole is tried in earnest last, if it could bring something: it is
    either even at once, or takes longest to be made so. A plan that is close to ideal ends the search, so that no
    exchange is taken for a gain that no clock would show.
    """
    plans: list[ShardPlan] = []
    best, enough = float("inf"), costs.ideal * (1 + _CLOSE)

    def keep(plan: ShardPlan | None) -> float:
        plans.extend([] if plan is None else costs.price([plan]))
        return best if plan is None else min(best, plans[-1].slowest)

    counts = _counts(documents, placement.fewest)
    if counts[0] == 0:
        best = keep(placement.place_at_once())
        if best <= enough:
            return plans
    least = dict(zip(counts, placement.at_least(counts), strict=True))
    for count in sorted(counts, key=lambda count: (count == 0, least[count])):
        if least[count] * (1 + _CLOSE if count else EVEN) < best:
            best = keep(placement.place(count, best / (1 + _CLOSE)))
            if best <= enough:
                break
    return plans


def _counts(documents: int, fewest: int) -> list[int]:
    counts, step = [0, 1, 2, 3], 4
    while step <= documents:
        counts += [step, step * 3 // 2]
        step *= 2
    return sorted({fewest, documents, *(count for count in counts if fewest < count < documents)})
