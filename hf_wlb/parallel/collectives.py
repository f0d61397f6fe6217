"""Collectives of torch under the names that its version has, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed these; 2.11 knows the old names only.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(output, input, group=None, async_op=False)``: [rows, ...] of every rank to [ranks * rows, ...]."""
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``(output, input, group=None, async_op=False)``: the sum over ranks of [ranks * rows, ...], to each its rows."""


def process_count() -> int:
    """Return the number of processes that run together: 1 where ``torch.distributed`` is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend can gather: the CPU where it can (nothing to wait for), else this rank's GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise RuntimeError(
            f"The process group's backend ({dist.get_backend_config(group)}) gathers on an accelerator, but this "
            "process has none."
        )
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order; pickled, so meant for what happens once or when something went wrong."""
    if process_count() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
