"""Whether the simulator prices single layers' attention and exchange as they were measured.

``recipes/benchmarks/context_parallel.py`` timed attention, forward and backward with all collectives, of single layers
on context-parallel ranks: micro-batches of known documents under every sharding strategy. Its results hold the profile
measured in the same run, too. Here the same plans are made again and priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from hf_wlb.sharding import Sharder, ShardingConfig, ShardPlan, per_document
from hf_wlb.simulator.cluster import Cluster
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.linear import LinearCosts, Pass
from hf_wlb.simulator.split import Split
from hf_wlb.workload import ProfiledWorkload, WorkloadModel

WHOLE = "one GPU"
"""What the whole micro-batch on one GPU is called, beside the strategies."""
_CONTEXT_LENGTH = 128 * 1024  # linear work goes by it, which is left out
SAME_TIME = 0.01
"""Strategies whose times differ by no more than this share are equally good, as in the benchmark."""


@dataclass(frozen=True)
class LayerCheck:
    """One micro-batch under one strategy.

    Attributes:
        micro_batch: Its name.
        kv_heads: Key and value heads of the layer.
        strategy: As the benchmark calls it, or ``WHOLE``.
        measured: Seconds of the slowest rank.
        predicted: Seconds of the slowest rank.
    """

    micro_batch: str
    kv_heads: int
    strategy: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class StrategyErrors:
    """Errors of one strategy over micro-batches.

    Attributes:
        strategy: Its name.
        checks: So many micro-batches.
        median: Of the errors' sizes.
        worst: The error of largest size, with its sign.
        bias: Median of the errors with their signs.
    """

    strategy: str
    checks: int
    median: float
    worst: float
    bias: float


@dataclass(frozen=True)
class Choices:
    """Choosing strategies by prediction.

    Attributes:
        races: Micro-batches.
        right: How many of them had the fastest strategy chosen, or one within ``SAME_TIME`` of it.
        worst_loss: Measured time of a choice over the fastest strategy's, minus 1; the largest.
    """

    races: int
    right: int
    worst_loss: float


def layer_profile(results: Mapping[str, Any], kv_heads: int, layers: int = 1) -> ProfiledWorkload:
    """The profile of attention and exchange that the context-parallel benchmark measured, for a model of many layers.

    Args:
        results: The benchmark's results file, read.
        kv_heads: One of the numbers of KV heads that it ran.
        layers: Layers of the model.

    Raises:
        ValueError: If it did not run that number, or for fewer layers than 1.
    """
    parts = results["kv_heads"]
    if str(kv_heads) not in parts:
        raise ValueError(f"The results hold no layers with {kv_heads} KV heads; they hold {', '.join(parts)}.")
    measured = parts[str(kv_heads)]["profile"]
    return ProfiledWorkload.from_dict({**measured, "layers": [{"count": layers, "window": None}]})


def check_layers(results: Mapping[str, Any], cluster: Cluster, *, profiled: bool) -> list[LayerCheck]:
    """Prices all measured micro-batches under all strategies, and on one GPU.

    Args:
        results: The benchmark's results file, read.
        cluster: Where the layers are said to have run.
        profiled: Whether attention and exchange are priced by the profile that was measured in the same run, or by the
            cluster's figures alone.

    Raises:
        ValueError: If a plan comes out otherwise than it was measured.
    """
    checks: list[LayerCheck] = []
    for kv_heads in map(int, results["kv_heads"]):
        measured = layer_profile(results, kv_heads)
        profile = measured if profiled else None
        cp_size = results["settings"]["cp_size"]
        spread, alone = (_layer_model(results["settings"], kv_heads, size, cluster, profile) for size in (cp_size, 1))
        for case in results["kv_heads"][str(kv_heads)]["cases"]:
            whole = _seconds(per_document(np.asarray(case["lengths"]), 1), alone)
            checks.append(LayerCheck(case["name"], kv_heads, WHOLE, case["ideal_ms"] * cp_size / 1000, whole))
            for strategy, row in case["strategies"].items():
                plan = measured_plan(case["lengths"], row, cp_size, measured)
                checks.append(LayerCheck(case["name"], kv_heads, strategy, row["ms"] / 1000, _seconds(plan, spread)))
    return checks


def measured_plan(lengths: Iterable[int], row: Mapping[str, Any], cp_size: int, workload: WorkloadModel) -> ShardPlan:
    """The plan that was measured, made again.

    Args:
        lengths: Of the micro-batch's documents.
        row: What the results say of it under one strategy.
        cp_size: Ranks.
        workload: What it was planned by.

    Raises:
        ValueError: If another plan comes out, by its sharded documents and its tokens: sharding has changed since.
    """
    chosen = row["chosen"]
    threshold = row["threshold"] if chosen == "placed" else None
    plan = Sharder(ShardingConfig(cp_size, chosen, threshold), workload).plan(list(lengths))
    found = (len(plan.edges), round(plan.token_skew, 4))
    if found != (row["sharded_documents"], row["token_skew"]):
        raise ValueError(
            f"The measured plan ({chosen}, threshold {threshold}) cannot be made again: it sharded "
            f"{row['sharded_documents']} documents with a token skew of {row['token_skew']}, now it is {found[0]} and "
            f"{found[1]}. Sharding has changed since: run recipes/benchmarks/context_parallel.py again."
        )
    return plan


def strategy_errors(checks: Iterable[LayerCheck]) -> list[StrategyErrors]:
    """Errors strategy by strategy, in the order in which these come.

    >>> checks = [LayerCheck("a", 8, "placed", 1.0, time) for time in (0.9, 1.05, 1.0)]
    >>> found = strategy_errors(checks)[0]
    >>> found.strategy, round(found.median, 3), round(found.worst, 3), round(found.bias, 3)
    ('placed', 0.05, -0.1, 0.0)
    """
    found: dict[str, list[float]] = defaultdict(list)
    for check in checks:
        found[check.strategy].append(check.error)
    return [
        StrategyErrors(
            strategy,
            len(errors),
            median=float(np.median(np.abs(errors))),
            worst=max(errors, key=abs),
            bias=float(np.median(errors)),
        )
        for strategy, errors in found.items()
    ]


def choices(checks: Iterable[LayerCheck]) -> Choices:
    """Whether the strategy that is predicted to be fastest is the fastest one, for every micro-batch.

    Args:
        checks: Those of one micro-batch with one number of KV heads are compared; ``WHOLE`` is none to choose.
    """
    races: dict[tuple[str, int], list[LayerCheck]] = defaultdict(list)
    for check in checks:
        if check.strategy != WHOLE:
            races[check.micro_batch, check.kv_heads].append(check)
    losses = []
    for race in races.values():
        chosen = min(race, key=lambda check: check.predicted)
        losses.append(chosen.measured / min(check.measured for check in race) - 1)
    return Choices(len(losses), sum(loss <= SAME_TIME for loss in losses), max(losses))


def _seconds(plan: ShardPlan, model: StepModel) -> float:
    """Forward and backward of a micro-batch on one stage."""
    cost = model.micro_batch(plan)
    return sum(cost.forward) + sum(cost.backward)


def _layer_model(
    settings: Mapping[str, Any], kv_heads: int, cp_size: int, cluster: Cluster, profile: ProfiledWorkload | None
) -> StepModel:
    """Of one such layer's attention and exchange: linear work takes no time."""
    heads, head_dim = settings["heads"], settings["head_size"]
    config = SimpleNamespace(
        model_type="llama",
        hidden_size=heads * head_dim,
        intermediate_size=heads * head_dim,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=1024,
        tie_word_embeddings=False,
    )
    split = Split(cp_size=cp_size)
    model = StepModel.of(config, split, cluster, context_length=_CONTEXT_LENGTH, profile=profile)
    nothing = Pass(0.0, 0.0)
    return replace(model, linear=LinearCosts((nothing,), nothing, nothing))
