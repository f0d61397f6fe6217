"""Steps of a pipeline put together from times that one GPU measured. No torch.

A stage's forward of a micro-batch takes as many times one layer's as the stage has layers, with the embedding's on the
first stage and the head's on the last; the backward likewise. The simulator's own schedule (1F1B) and solver say when
each runs, and its NVLink how long hidden states are on their way (``exchange_prices.CLUSTER``).

Where ranks share micro-batches, the one GPU computed every rank's shard, one after the other, and a part takes as long
as the slowest rank. What the exchange of keys and values adds to a rank's layer is simulated, not measured: what the
simulator has ranks wait for under the very plan (``StepModel.waiting``), but for copies around the exchange, which the
GPU made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from exchange_prices import exchange_cluster

from hf_wlb.sharding import Sharder, ShardPlan
from hf_wlb.sharding.types import FloatArray
from hf_wlb.simulator.cluster import CLUSTERS, send_seconds
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.measured import MeasuredLaunch
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.timeline import OpTimes, Timeline, run_schedule
from hf_wlb.simulator.validation import step_model
from hf_wlb.workload import ProfiledWorkload

#: What is timed, by the name that a step's line has it under: the part (layer, embedding, head), forward or backward.
_PARTS = ("layer", "embedding", "head")
_WAYS = ("forward", "backward")
PARTS = {f"{part}_{way}": (place, back) for place, part in enumerate(_PARTS) for back, way in enumerate(_WAYS)}

Row = Mapping[str, Any]

_NO_TIME = 1e24  # bytes a second, with which copies take none


def compose(about: Row, step: Row) -> Timeline:
    """A step on all stages of its slowest replica.

    Args:
        about: The launch's line: ``stage_layers`` and ``handover``; where ranks share micro-batches, all of it.
        step: The step's line: ``times`` and ``micro_batch_lengths``, and then ``shards``.

    Two micro-batches of 1 + 2 s a layer, on stages of 2 and 1 layers, a head of 0.5 + 0.5 s, nothing else:

    >>> times = {name: [[0.0, 0.0]] for name in PARTS}
    >>> times |= {"layer_forward": [[1.0, 1.0]], "layer_backward": [[2.0, 2.0]]}
    >>> times |= {"head_forward": [[0.5, 0.5]], "head_backward": [[0.5, 0.5]]}
    >>> about = {"stage_layers": [2, 1], "handover": {"cluster": "h100", "bytes_per_token": 0}}
    >>> compose(about, {"times": times, "micro_batch_lengths": [[[5], [3, 2]]]}).seconds
    14.0
    """
    return max(compose_replicas(about, step), key=lambda timeline: timeline.seconds)


def compose_replicas(about: Row, step: Row) -> list[Timeline]:
    """A step on all stages of every replica, see ``compose``."""
    return [_replica(about, step, replica) for replica in range(len(step["micro_batch_lengths"]))]


def _replica(about: Row, step: Row, replica: int) -> Timeline:
    layers = np.array(about["stage_layers"], dtype=np.float64)
    passes, seconds = [], part_seconds(about, step, replica)
    for way in _WAYS:
        layer, embedding, head = (seconds[f"{part}_{way}"] for part in _PARTS)
        taken = np.multiply.outer(layers, layer)  # [stages, micro-batches]
        taken[0] += embedding
        taken[-1] += head
        passes.append(taken[..., None])
    if "shards" in step:
        tokens = [(int(plan.tokens.max()), plan.cp_size) for plan in plans_of(about, step, replica)]
    else:
        tokens = [(sum(lengths), 1) for lengths in step["micro_batch_lengths"][replica]]
    send = [[handover_seconds(about, count, ranks)] for count, ranks in tokens]
    return run_schedule(ScheduleConfig(), len(layers), OpTimes(passes[0], passes[1], np.array(send)))


def handover_seconds(about: Row, tokens: int, cp_size: int = 1) -> float:
    """For hidden states of a micro-batch to the next stage; the slowest hop is the one that counts.

    Args:
        about: The launch's line: ``stage_layers`` and ``handover``.
        tokens: That a rank sends.
        cp_size: Ranks that share a micro-batch: so many GPUs away is the next stage's.

    >>> about = {"stage_layers": [3, 3, 3, 2], "handover": {"cluster": "h100", "bytes_per_token": 4 * 4096}}
    >>> 0.001 < handover_seconds(about, 131072) < 0.02
    True
    """
    given = about["handover"]
    cluster = CLUSTERS[given["cluster"]]
    inside = cp_size * len(about["stage_layers"]) <= cluster.gpus_per_node
    stride = cp_size if inside else max(cp_size, cluster.gpus_per_node)
    return float(send_seconds(cluster, stride, tokens * given["bytes_per_token"]))


def part_seconds(about: Row, step: Row, replica: int, *, exchange: bool = True) -> dict[str, FloatArray]:
    """What every part takes of a replica's micro-batches, on the slowest rank of each.

    Args:
        about: The launch's line.
        step: The step's line.
        replica: Which.
        exchange: Whether what the exchange adds to layers is in it.

    Returns:
        Seconds by the names of ``PARTS``, each ``[micro-batches]``.
    """
    found = {name: np.array(step["times"][name][replica], dtype=np.float64) for name in PARTS}
    if "shards" not in step:
        return found
    if exchange:
        waits = np.array([exchange_seconds(about, plan) for plan in plans_of(about, step, replica)])
        for back, way in enumerate(_WAYS):
            found[f"layer_{way}"] = found[f"layer_{way}"] + waits[:, back].T
    return {name: seconds.max(axis=0) for name, seconds in found.items()}


def plans_of(about: Row, step: Row, replica: int) -> Iterator[ShardPlan]:
    """How a replica's micro-batches were shared out when they were measured, see ``plan_row``."""
    cp_size = about["settings"]["cp_size"]
    for lengths, row in zip(step["micro_batch_lengths"][replica], step["shards"][replica], strict=True):
        edges = np.array(row["edges"], dtype=np.int64).reshape(-1, 2 * cp_size + 1)
        owner = np.array(row["owner"], dtype=np.int64)
        yield ShardPlan(np.array(lengths, dtype=np.int64), cp_size, owner, edges, row["strategy"])


def planned_shards(replica: Sequence[Sequence[int]], sharder: Sharder | None) -> tuple[list[Row], float]:
    """How a replica's micro-batches are shared out, for the results, and the seconds that it takes to decide on that.

    Args:
        replica: Lengths of documents, micro-batch by micro-batch.
        sharder: None where one rank has them to itself.
    """
    if sharder is None:
        return [], 0.0
    begun = time.perf_counter()
    plans = [sharder.plan(lengths) for lengths in replica]
    seconds = time.perf_counter() - begun
    return [plan_row(plan) for plan in plans], seconds


def plan_row(plan: ShardPlan) -> Row:
    """What the results keep of a plan, besides lengths: every document's owner, and where sharded ones are cut."""
    return {"strategy": plan.strategy, "owner": plan.owner.tolist(), "edges": plan.edges.tolist()}


# ---- the exchange, which is simulated ----


def exchange_seconds(about: Row, plan: ShardPlan) -> tuple[FloatArray, FloatArray]:
    """What the exchange adds to one layer of a micro-batch, as the simulator prices it.

    That is what it has ranks wait for, for keys and values and for one another, less the time of copies around the
    exchange. These were measured with the rest, as the stand-in for the exchange leaves them to be made.

    Args:
        about: The launch's line.
        plan: Of the micro-batch.

    Returns:
        Seconds of every rank in forward and in backward, each ``[ranks]``.
    """
    keys = ("settings", "stage_layers", "launch", "replicas", "kernel", "device", "workload", "exchange")
    model, free = _models(json.dumps({key: about[key] for key in keys}))
    layers = len(model.shape.layers)
    moved = int(plan.exchanged_tokens.max()) * plan.cp_size if len(plan.edges) else 0
    parts = (own.workload.exchange_costs.parts(moved) for own in (model, free))
    copies = np.subtract(*parts)  # forward, backward
    forward, backward = (
        np.maximum(own - copied, 0.0) / layers for own, copied in zip(model.waiting(plan), copies, strict=True)
    )
    return forward, backward


@lru_cache(maxsize=16)
def _models(launch: str) -> tuple[StepModel, StepModel]:
    """What prices a launch's exchange: with the time of copies, and without."""
    about = {**json.loads(launch), "streams": {}}
    measured = MeasuredLaunch.of(about, [])
    profile = None
    if isinstance(measured.workload, ProfiledWorkload):  # its attention; what it says of links is none of this GPU's
        profile = replace(measured.workload, profile=replace(measured.workload.profile, collectives=()))
    cluster = exchange_cluster(about["exchange"]["cluster"], measured.device)

    free = replace(cluster, memory_bytes_per_second=_NO_TIME)
    return step_model(measured, cluster, profile), step_model(measured, free, profile)
