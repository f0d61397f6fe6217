"""Times bare collectives for a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from hf_wlb.parallel.collectives import all_gather, reduce_scatter

Timer = Callable[[Callable[[], None], Callable[[], None]], float]
"""Seconds of its first argument on the device; the second makes ranks begin together. Calls both equally often on
every rank."""


BARE = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")
"""What can be timed."""


def time_collectives(
    sizes: Iterable[int],
    timer: Timer,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    operations: Sequence[str] = ("all_gather", "reduce_scatter"),
) -> list[dict[str, str | int | float]]:
    """The ``collectives`` section of a profile. All ranks of the group call together.

    Args:
        sizes: Bytes of the whole tensor, as every rank holds it after an all-gather; rounded up to equal parts. Of
            ``send_recv``: what goes from every even rank to the next one, all at the same time.
        timer: How to time, such as ``functools.partial(median_seconds, device=device)``.
        device: Where the tensors lie.
        group: The ranks; None for all.
        dtype: Of the numbers.
        operations: Of ``BARE``.

    Returns:
        ``operation``, ``group_size``, ``bytes`` and ``seconds`` (the slowest rank's), sorted, the same on every rank;
        none for a single rank.

    Raises:
        ValueError: For an operation that is none of ``BARE``.
    """
    unknown = [operation for operation in operations if operation not in BARE]
    if unknown:
        raise ValueError(f"operations must be of {', '.join(BARE)}, got {', '.join(map(repr, unknown))}.")
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return []
    token = torch.zeros(1, device=device)
    unit = ranks * dtype.itemsize
    samples: list[tuple[str, int, int, float]] = []

    def meet() -> None:
        dist.all_reduce(token, group=group)

    for count in sorted({max(1, -(-size // unit)) for size in sizes}):
        part = torch.randn(count, dtype=dtype, device=device)
        whole = torch.randn(count * ranks, dtype=dtype, device=device)
        runs = {operation: _run(operation, part, whole, group) for operation in operations}
        for operation, run in runs.items():
            among = 2 if operation == "send_recv" else ranks
            samples.append((operation, among, count * unit, timer(run, meet)))
    seconds = torch.tensor([sample[3] for sample in samples], dtype=torch.float32, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    slowest = zip(samples, seconds.tolist(), strict=True)
    return [
        {"operation": operation, "group_size": among, "bytes": size, "seconds": time}
        for (operation, among, size, _), time in sorted(slowest, key=lambda found: found[0][:3])
    ]


def _run(
    operation: str, part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """A collective of this process, ready to run; what it computes is thrown away."""

    def gather() -> None:
        all_gather(whole, part, group=group)

    def scatter() -> None:
        reduce_scatter(part, whole, group=group)

    def reduce() -> None:
        dist.all_reduce(whole, group=group)

    def send() -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        peer = rank ^ 1
        if peer < ranks:  # the last of an odd number has nobody
            kind = dist.irecv if rank % 2 else dist.isend
            for work in dist.batch_isend_irecv([dist.P2POp(kind, whole, group=group, group_peer=peer)]):
                work.wait()

    return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce, "send_recv": send}[operation]
