"""The order in which a replica's micro-batches go through a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from hf_wlb.packing.step_time import lightest_at_both_ends


def pipeline_order(workloads: Sequence[float]) -> list[int]:
    """Order micro-batches so that workloads rise to the heaviest in the middle and fall again.

    Stages idle for as long as the first and the last micro-batches take, and a stage waits wherever its neighbour runs
    a heavier micro-batch at the same time: the lightest belong to both ends, and alike ones next to each other.

    By ``pipeline_seconds``, over the time of a step whose workloads are even: means of 400 steps each of 4, 8 and 16
    micro-batches in 2 and 4 stages, workloads lognormal with sigma 0.3, 0.6 and 1; backwards that take twice, and three
    times as long as forwards:

    ========================================  =====  =====
    rising to the middle and falling (this)   1.094  1.112
    the same mirrored (lightest last)         1.095  1.112
    twice as many rising as falling           1.103  1.119
    twice as many falling as rising           1.102  1.116
    lightest at both ends, rising between     1.120  1.133
    lightest at both ends, falling between    1.127  1.137
    rising                                    1.141  1.149
    falling                                   1.148  1.159
    as they come                              1.296  1.304
    heaviest at both ends                     1.309  1.318
    ========================================  =====  =====

    The best of all orders is 1 to 2% faster on average (4 and 6 micro-batches, sigma 0.6), and not of one kind.

    Args:
        workloads: of a replica's micro-batches, in any unit.

    Returns:
        The micro-batches' indices in the order they run, a permutation. Equal workloads keep their order; so a step
        that the planner has ordered, or one of equal micro-batches, stays as it is.

    >>> pipeline_order([5.0, 1.0, 4.0, 2.0, 3.0])
    [1, 4, 0, 2, 3]
    >>> pipeline_order([2.0, 2.0, 2.0])
    [0, 1, 2]
    """
    heaviest_first = sorted(range(len(workloads)), key=lambda index: -workloads[index])
    waiting: dict[float, list[int]] = {}
    for index in reversed(range(len(workloads))):
        waiting.setdefault(workloads[index], []).append(index)
    return [waiting[workloads[index]].pop() for index in lightest_at_both_ends(heaviest_first)]
