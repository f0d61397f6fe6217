"""What each sharding strategy makes of one micro-batch: who holds what, and how long the slowest rank works."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_wlb.analysis.inputs import SAMPLED_DOCUMENTS, LengthSource, read_lengths
from hf_wlb.lengths import MOST_TOKENS, IntArray, LengthArray, RandomOrder, parse_length, sample_lengths
from hf_wlb.sharding import (
    SHARDING_STRATEGIES,
    ShardCosts,
    Sharder,
    ShardingConfig,
    ShardPlan,
)
from hf_wlb.sharding.strategies import check_micro_batch
from hf_wlb.workload import WorkloadModel

SCHEMA = "hf_wlb.shards/1"
#: Preset and device that price a micro-batch where nothing is said about the model.
DEFAULT_MODEL, DEFAULT_HARDWARE = "7B", "h100-flash-attn-4"
_BLOCK = 4096


@dataclass(frozen=True)
class RankShare:
    """What one rank holds and does under a plan; work in the workload model's units.

    Attributes:
        local_documents: Documents that are whole on the rank.
        local_tokens: Tokens of these.
        head_tokens: Tokens of the chunks from the front of sharded documents.
        tail_tokens: Tokens of the chunks from their back.
        local_attention: Attention over whole documents.
        sharded_attention: Attention of the chunks.
        linear: What goes by tokens.
        waiting: Exchange of keys and values, but for the gathers that attention over whole documents hides.
    """

    local_documents: int
    local_tokens: int
    head_tokens: int
    tail_tokens: int
    local_attention: float
    sharded_attention: float
    linear: float
    waiting: float

    @property
    def tokens(self) -> int:
        """All its tokens."""
        return self.local_tokens + self.head_tokens + self.tail_tokens

    @property
    def workload(self) -> float:
        """All its work."""
        return self.local_attention + self.sharded_attention + self.linear + self.waiting


@dataclass(frozen=True)
class StrategyResult:
    """A strategy's plan and what it comes to.

    Attributes:
        strategy: The strategy asked for; ``plan.strategy`` is what ``adaptive`` chose.
        plan: The plan.
        share_of_ideal: Even work of all ranks without any loss, over the slowest rank's.
        ranks: What every rank holds and does.
    """

    strategy: str
    plan: ShardPlan
    share_of_ideal: float
    ranks: tuple[RankShare, ...]

    @property
    def exchanged_tokens(self) -> int:
        """Tokens whose keys and values every rank receives, padding included."""
        return int(self.plan.exchanged_tokens.max(initial=0)) * self.plan.cp_size

    @property
    def label(self) -> str:
        """The strategy, with what ``adaptive`` chose."""
        return f"{self.strategy}: {self.plan.strategy}" if self.strategy == "adaptive" else self.strategy

    @property
    def choice(self) -> str:
        """What becomes of the documents, in words."""
        sharded = len(self.plan.edges)
        documents = len(self.plan.lengths)
        if self.plan.cp_size == 1:
            return "one rank holds everything"
        if sharded == documents:
            return f"all {documents:,} documents cut" if documents > 1 else "its one document cut"
        if not sharded:
            return f"all {documents:,} documents whole on some rank"
        return f"{sharded:,} of {documents:,} documents cut, the others whole on some rank"

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable figures, and who holds what."""
        plan = self.plan
        return {
            "strategy": self.strategy,
            "chosen": plan.strategy,
            "threshold": plan.threshold,
            "share_of_ideal": self.share_of_ideal,
            "slowest": plan.slowest,
            "imbalance": plan.imbalance,
            "token_skew": plan.token_skew,
            "exchanged_tokens": self.exchanged_tokens,
            "owner": plan.owner.tolist(),
            "edges": plan.edges.tolist(),
            "ranks": [{**vars(rank), "tokens": rank.tokens, "workload": rank.workload} for rank in self.ranks],
        }


@dataclass(frozen=True)
class ShardAnalysis:
    """Every strategy's plan of one micro-batch.

    Attributes:
        lengths: Tokens of every document.
        cp_size: Ranks.
        ideal: Work of a rank if one GPU's work on the micro-batch were shared out evenly and nothing was lost.
        unit: ``seconds`` or ``relative``.
        results: By strategy.
    """

    lengths: IntArray
    cp_size: int
    ideal: float
    unit: str
    results: Mapping[str, StrategyResult]

    @property
    def chosen(self) -> StrategyResult:
        """What ``adaptive`` chose."""
        return self.results["adaptive"]

    @property
    def summary(self) -> str:
        """What was shared out, in words."""
        ranks = f"{self.cp_size} rank{'s' if self.cp_size > 1 else ''}"
        return f"{_documents(self.lengths)}, {ranks}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable content, schema ``hf_wlb.shards/1``."""
        return {
            "schema": SCHEMA,
            "cp_size": self.cp_size,
            "lengths": self.lengths.tolist(),
            "ideal": self.ideal,
            "unit": self.unit,
            "strategies": [result.to_dict() for result in self.results.values()],
        }


def analyze_shards(
    lengths: Sequence[int] | LengthArray,
    workload: WorkloadModel,
    cp_size: int,
    *,
    max_tokens_per_shard: int | None = None,
    max_token_skew: float = 0.05,
) -> ShardAnalysis:
    """Share one micro-batch out by every strategy.

    Args:
        lengths: Tokens of every document, in layout order.
        workload: What attention, linear work and the exchange cost.
        cp_size: Context-parallel ranks.
        max_tokens_per_shard: Most tokens that a rank can hold; None for no bound besides the skew.
        max_token_skew: See ``ShardingConfig``.

    Raises:
        ValueError: For lengths or bounds that no plan can keep; see ``Sharder.plan``.

    >>> from hf_wlb.workload import AnalyticWorkload
    >>> analysis = analyze_shards([5000, 300, 200, 100], AnalyticWorkload.from_crossover(1000), cp_size=2)
    >>> analysis.chosen.label, analysis.chosen.choice
    ('adaptive: placed', '1 of 4 documents cut, the others whole on some rank')
    """
    results: dict[str, StrategyResult] = {}
    bounds: Any = {"max_tokens_per_shard": max_tokens_per_shard, "max_token_skew": max_token_skew}
    configs: list[Any] = [{"cp_size": cp_size, "strategy": strategy, **bounds} for strategy in SHARDING_STRATEGIES]
    sharders = [Sharder(ShardingConfig(**config), workload) for config in configs]
    checked = check_micro_batch(lengths, cp_size)
    ideal = ShardCosts.of(checked, workload, cp_size).ideal
    for sharder in sharders:
        plan = sharder.plan(checked)
        share = ideal / plan.slowest if plan.slowest else 1.0
        results[sharder.config.strategy] = StrategyResult(
            sharder.config.strategy, plan, share, rank_shares(plan, workload)
        )
    return ShardAnalysis(checked, cp_size, ideal, getattr(workload, "unit", "seconds"), results)


def rank_shares(plan: ShardPlan, workload: WorkloadModel) -> tuple[RankShare, ...]:
    """What every rank holds and does."""
    chunk_tokens = np.diff(plan.edges, axis=1).sum(axis=0).tolist()
    (costs,) = ShardCosts.of(plan.lengths, workload, plan.cp_size).parts([plan])
    return tuple(
        RankShare(
            local_documents=int((plan.owner == rank).sum()),
            local_tokens=int(plan.local_tokens[rank]),
            head_tokens=chunk_tokens[rank],
            tail_tokens=chunk_tokens[2 * plan.cp_size - 1 - rank],
            local_attention=float(costs.local[rank]),
            sharded_attention=float(costs.chunks[rank]),
            linear=float(costs.linear[rank]),
            waiting=float(costs.waiting[rank]),
        )
        for rank in range(plan.cp_size)
    )


def work_in_unit(result: StrategyResult, scale: float) -> dict[str, list[float]]:
    """Every rank's work by part, multiplied by ``scale``, as ``hf_wlb.plots.plot_shard_plans`` takes it."""
    return {
        "linear work": [rank.linear * scale for rank in result.ranks],
        "local attention": [rank.local_attention * scale for rank in result.ranks],
        "sharded attention": [rank.sharded_attention * scale for rank in result.ranks],
        "waiting": [rank.waiting * scale for rank in result.ranks],
    }


def read_micro_batch(lengths: str | None, context_length: int, seed: int = 0) -> LengthSource:
    """The documents of one micro-batch.

    Args:
        lengths: Whole numbers separated by commas; a file of lengths, a tokenised data set or text, see
            ``read_lengths``; None for the built-in sampler.
        context_length: Tokens to fill from a file or the sampler.
        seed: Of the drawing.

    Raises:
        ValueError: For what is none of these, or lengths out of range.

    >>> read_micro_batch("90000, 12000", 131072)
    LengthSource(lengths=array([90000, 12000]), description='2 documents of 102,000 tokens, as given')
    """
    if context_length < 1:
        raise ValueError(f"The context must be at least 1 token, got {context_length}.")
    if lengths is None:
        stored: LengthArray = sample_lengths(SAMPLED_DOCUMENTS, seed)
        origin = "the built-in sampler of a long-tailed 128K mix (no lengths given)"
    elif re.fullmatch(r"[\d,\s-]*", lengths):
        given = _parse_list(lengths)
        return LengthSource(given, f"{_documents(given)}, as given")
    elif Path(lengths).exists():
        source = read_lengths(lengths)
        stored, origin = source.lengths, f"the {source.description}"
    else:
        raise ValueError(
            f"The lengths must be whole numbers separated by commas, such as 90000,12000,800, or a file of lengths or "
            f"documents; {lengths!r} is neither: there is no such file."
        )
    drawn = fill_context(stored, context_length, seed)
    return LengthSource(drawn, f"{_documents(drawn)}, drawn from {origin}, seed {seed}")


def fill_context(lengths: LengthArray, context_length: int, seed: int = 0) -> IntArray:
    """Documents in random order until the context is full; the last one is cut to fit, empty ones are left out.

    >>> fill_context(np.array([5, 5, 0, 5]), 12).tolist()
    [5, 5, 2]
    """
    order = RandomOrder(len(lengths), seed, 0)
    drawn: list[int] = []
    room = context_length
    for start in range(0, len(lengths), _BLOCK):
        for length in np.asarray(lengths[order.block(start, min(start + _BLOCK, len(lengths)))]).tolist():
            if length:
                drawn.append(min(int(length), room))
                room -= drawn[-1]
            if not room:
                return np.array(drawn, dtype=np.int64)
    if not drawn:
        raise ValueError("There is no document with tokens to draw from.")
    return np.array(drawn, dtype=np.int64)


def _documents(lengths: IntArray) -> str:
    return f"{len(lengths):,} document{'s' if len(lengths) > 1 else ''} of {lengths.sum():,} tokens"


def _parse_list(text: str) -> IntArray:
    words = [word.strip() for word in text.split(",") if word.strip()]
    parsed = [parse_length(word) for word in words]
    bad = [word for word, length in zip(words, parsed, strict=True) if not length]
    if bad or not words:
        found = f"{bad[0]!r} is not" if bad else "there are none"
        raise ValueError(f"The lengths must be whole numbers from 1 to {MOST_TOKENS:,}, separated by commas; {found}.")
    return np.array(parsed, dtype=np.int64)
