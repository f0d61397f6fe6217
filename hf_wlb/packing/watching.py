"""Watching a planner at work: what left in every step, what went on waiting, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_wlb.packing.base import documents_from_state
from hf_wlb.packing.metrics import PackingMetrics
from hf_wlb.packing.planner import StepPlanner
from hf_wlb.packing.types import Document, StepPlan


@dataclass(frozen=True)
class WatchedStep:
    """A step and what waits after it.

    Attributes:
        plan: What was trained.
        queues: What waits, queue by queue: the levels of ``wlb``'s outlier queue, shortest documents first, or
            ``steady``'s one pool, heaviest document first. Empty for packers that hold nothing back.
        left_over: Documents that wait outside a queue: they found no room in the step, are the rest of one that was
            cut, or are planned for a later step of a window.
        figures: The step's imbalance, time_gap, delay, tokens and waiting_contexts, see ``PackingMetrics.observe``.
    """

    plan: StepPlan
    queues: tuple[tuple[Document, ...], ...]
    left_over: tuple[Document, ...]
    figures: Mapping[str, float]


def watch(planner: StepPlanner, steps: int | None = None) -> list[WatchedStep]:
    """Runs a planner and keeps every step with what waited after it.

    Keeps all documents in memory: for a look at some hundred steps, not for a whole run.

    Args:
        planner: Continued from where it is.
        steps: Steps to take; None takes all that are left.

    Raises:
        ValueError: As the planner does, for documents that it must not take.

    >>> import numpy as np
    >>> from hf_wlb.packing import ArraySource, PackingConfig
    >>> from hf_wlb.workload import AnalyticWorkload
    >>> config = PackingConfig(4, micro_batches_per_replica=2, packer="wlb", thresholds=(3,))
    >>> planner = StepPlanner(ArraySource(np.array([4, 2, 2, 4, 1])), AnalyticWorkload.from_crossover(4), config)
    >>> [[[d.length for d in level] for level in step.queues] for step in watch(planner)]
    [[[4]], [[]]]
    """
    metrics = PackingMetrics(planner.config)
    watched: list[WatchedStep] = []
    while steps is None or len(watched) < steps:
        plan = next(planner, None)
        if plan is None:
            break
        figures = metrics.observe(plan, planner.waiting)
        state = planner.state_dict()["packer"]
        levels = state["queue"] if "queue" in state else [state["pool"]] if "pool" in state else []
        queues = tuple(tuple(documents_from_state(level)) for level in levels)
        queued = {document for queue in queues for document in queue}
        left_over = tuple(document for document in planner.waiting if document not in queued)
        watched.append(WatchedStep(plan, queues, left_over, figures))
    return watched


def tokens_by_wait(steps: Iterable[WatchedStep]) -> list[int]:
    """Tokens that left at once, after one step, after two, and so on: entry k is what waited k steps.

    Flush steps are left out, as from a report's ``delay``.

    >>> from hf_wlb.packing.types import MicroBatch
    >>> late = MicroBatch.of([Document(0, 0, 5, 5.0, arrived=1), Document(1, 0, 2, 2.0, arrived=3)])
    >>> tokens_by_wait([WatchedStep(StepPlan(3, ((late,),)), (), (), {})])
    [2, 0, 5]
    """
    tokens: list[int] = [0]
    for step in steps:
        if step.plan.flush:
            continue
        for document in step.plan.documents:
            wait = step.plan.step - document.arrived
            tokens += [0] * (wait + 1 - len(tokens))
            tokens[wait] += document.length
    return tokens
