"""The processes that a launcher started, for commands that are no training run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hf_wlb.parallel.collectives import process_count


@contextmanager
def joined_processes(device_type: str) -> Iterator[torch.device]:
    """Joins the processes that torchrun started, and leaves them at the end; a process on its own stays so.

    Where ``torch.distributed`` is initialised already, that is used and left as it is.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.

    Returns:
        This process's device.

    Raises:
        ValueError: If there are fewer GPUs than processes of this machine.

    >>> with joined_processes("cpu") as device:
    ...     device.type
    'cpu'
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device(device_type)
    if device_type == "cuda":
        place = (
            int(os.environ.get("LOCAL_RANK", "0")) if several or process_count() > 1 else torch.cuda.current_device()
        )
        if place >= torch.cuda.device_count():
            raise ValueError(
                f"process {place} of this machine has no GPU of its own, there are {torch.cuda.device_count()}. Start "
                "as many processes as there are GPUs."
            )
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    if not several or dist.is_initialized():
        yield device
        return
    if device_type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def process_rank() -> int:
    """This process's rank among all that run together; 0 for one on its own.

    >>> process_rank()
    0
    """
    return dist.get_rank() if process_count() > 1 else 0


def neighbour_groups() -> dict[int, dist.ProcessGroup | None]:
    """Groups of neighbouring ranks of 2, 4, 8, ... and of all processes; all of them must call this together.

    Returns:
        Size -> the group of this process (None: all processes). Only sizes that divide the processes; nothing for one
        process on its own.

    >>> neighbour_groups()
    {}
    """
    count = process_count()
    if count == 1:
        return {}
    found: dict[int, dist.ProcessGroup | None] = {}
    size = 2
    while size < count:
        if count % size == 0:
            found[size] = dist.new_subgroups(group_size=size)[0]
        size *= 2
    return {**found, count: None}
