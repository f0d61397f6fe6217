"""Times bare collectives for a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hf_wlb.parallel.collectives import all_gather, reduce_scatter

Timer = Callable[[Callable[[], None], Callable[[], None]], float]
"""Seconds of its first argument on the device; the second makes ranks begin together. Calls both equally often on
every rank."""


def time_collectives(
    sizes: Iterable[int],
    timer: Timer,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, str | int | float]]:
    """The ``collectives`` section of a profile: all-gather and reduce-scatter. All ranks of the group call together.

    Args:
        sizes: Bytes of the whole tensor, as every rank holds it after an all-gather; rounded up to equal parts.
        timer: How to time, such as ``functools.partial(median_seconds, device=device)``.
        device: Where the tensors lie.
        group: The ranks; None for all.
        dtype: Of the numbers.

    Returns:
        ``operation``, ``group_size``, ``bytes`` and ``seconds`` (the slowest rank's), sorted, the same on every rank;
        none for a single rank.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return []
    token = torch.zeros(1, device=device)
    unit = ranks * dtype.itemsize
    counts = sorted({max(1, -(-size // unit)) for size in sizes})
    samples: list[tuple[str, int, float]] = []

    def meet() -> None:
        dist.all_reduce(token, group=group)

    for count in counts:
        part = torch.randn(count, dtype=dtype, device=device)
        whole = torch.randn(count * ranks, dtype=dtype, device=device)

        def gather(part: torch.Tensor = part, whole: torch.Tensor = whole) -> None:
            all_gather(whole, part, group=group)

        def reduce(part: torch.Tensor = part, whole: torch.Tensor = whole) -> None:
            reduce_scatter(part, whole, group=group)

        for operation, run in (("all_gather", gather), ("reduce_scatter", reduce)):
            samples.append((operation, count * unit, timer(run, meet)))
    seconds = torch.tensor([sample[2] for sample in samples], dtype=torch.float32, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    slowest = zip(samples, seconds.tolist(), strict=True)
    return [
        {"operation": operation, "group_size": ranks, "bytes": size, "seconds": time}
        for (operation, size, _), time in sorted(slowest, key=lambda found: found[0][:2])
    ]
