"""How long the micro-batches of a step take through a pipeline under 1F1B, where they differ in workload.

DeepSpeed's ``TrainSchedule`` gives every stage ``2 (m + pp_size - 1)`` steps for m micro-batches. Stage s runs the
forward of micro-batch i at step ``2 i + s`` and its backward at step ``2 i + 2 pp_size - s - 1``: ``pp_size - s``
forwards to begin with, then one backward and one forward in turn, then the backwards left over. A stage goes on as soon
as what it needs has arrived: hidden states from the stage before it, gradients from the one after it. Transfers take no
time here, and nobody waits for a receiver. (If senders did, only filling and draining would change: by under 0.1% on
average for the orders that ``lightest_at_both_ends`` was compared with, and not at all for its own.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from hf_wlb.staging.partition import check_pp_size


def pipeline_seconds(workloads: Sequence[float], pp_size: int, backward_ratio: float = 2.0) -> float:
    """Time from the first forward to the last backward, with stages of equal cost.

    Equal micro-batches take ``(m + pp_size - 1) W``. Where they differ, ``sum W + (pp_size - 1) max W``
    (``StepTimeModel.replica_time``) was never exceeded in the order of ``lightest_at_both_ends``, in 60,000 random
    steps; it is where heavy and light ones take turns.

    Args:
        workloads: of the micro-batches in their order, forward plus backward of one stage, in any unit of time.
        pp_size: number of stages.
        backward_ratio: time of a backward over that of its forward: 2, or 3 with gradient checkpointing.

    Returns:
        In the unit of the workloads; 0.0 without micro-batches.

    Raises:
        ValueError: if ``pp_size`` is no whole number of at least 1, or a workload or the ratio is negative or not
            finite.

    >>> pipeline_seconds([3.0, 3.0, 3.0, 3.0], pp_size=2)  # (4 + 2 - 1) x 3
    15.0
    >>> pipeline_seconds([3.0, 6.0, 9.0, 3.0], 2), pipeline_seconds([9.0, 3.0, 3.0, 6.0], 2)
    (27.0, 33.0)
    """
    check_pp_size(pp_size)
    if not (math.isfinite(backward_ratio) and backward_ratio >= 0):
        raise ValueError(f"backward_ratio must be a finite number of at least 0, got {backward_ratio!r}.")
    forward = [workload / (1 + backward_ratio) for workload in workloads]
    backward = [workload - part for workload, part in zip(workloads, forward, strict=True)]
    return schedule_seconds([forward] * pp_size, [backward] * pp_size)


def schedule_seconds(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]) -> float:
    """Time from the first forward to the last backward, given how long each takes.

    Args:
        forward: times [stage][micro-batch], in the order the micro-batches go.
        backward: the same of the backwards.

    Returns:
        In the unit of the times; 0.0 without micro-batches.

    Raises:
        ValueError: if the two are not of one shape, there is no stage, or a time is negative or not finite.

    The last of two stages twice as slow, as it is with a large LM head:

    >>> schedule_seconds([[1.0] * 3, [2.0] * 3], [[2.0] * 3, [4.0] * 3])  # 1 + 3 x 6 + 2
    21.0
    """
    pp_size, micro_batches = len(forward), len(forward[0]) if forward else 0
    if not forward or len(backward) != pp_size or {len(row) for row in chain(forward, backward)} != {micro_batches}:
        shapes = [[len(row) for row in times] for times in (forward, backward)]
        raise ValueError(
            f"forward and backward must be times [stage][micro-batch] of one shape with one stage at least, but "
            f"their stages have {shapes[0]} and {shapes[1]} micro-batches."
        )
    for time in chain.from_iterable(chain(forward, backward)):
        if not (math.isfinite(time) and time >= 0):
            raise ValueError(f"Workloads and times must be finite and at least 0, but {time!r} was given.")
    ends = [0.0] * pp_size
    for step in range(2 * (micro_batches + pp_size - 1)):
        ends = [_end(stage, step, ends, forward, backward) for stage in range(pp_size)]
    return max(ends)


def slot(stage: int, step: int, pp_size: int) -> tuple[int, bool]:
    """What DeepSpeed's ``TrainSchedule`` lets a stage do at a step.

    Returns:
        (micro-batch, whether it is its forward); a number that no micro-batch has while a stage idles.

    >>> [slot(1, step, pp_size=2) for step in range(1, 5)]
    [(0, True), (0, False), (1, True), (1, False)]
    """
    if (step - stage) % 2 == 0:
        return (step - stage) // 2, True
    return (step + stage + 1) // 2 - pp_size, False


def _end(
    stage: int,
    step: int,
    ends: Sequence[float],
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
) -> float:
    """When a stage ends a step, given when every stage ended the one before."""
    micro_batch, is_forward = slot(stage, step, len(ends))
    times = (forward if is_forward else backward)[stage]
    if not 0 <= micro_batch < len(times):
        return ends[stage]
    # What the stage needs, a neighbour computed at its last step.
    source = stage - 1 if is_forward else stage + 1
    ready = ends[source] if 0 <= source < len(ends) else 0.0
    return max(ends[stage], ready) + times[micro_batch]
