"""Which part of a whole tensor this process holds, as ranges along each dimension; no communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_wlb.parallel.parameter_layout import ParameterLayout

#: For one dimension: first row and the one behind the last, of every piece, in the order in which they are held.
Ranges = list[tuple[int, int]]


def whole_shape(layout: ParameterLayout, name: str, part: torch.Tensor) -> torch.Size:
    """The shape of the whole tensor of which ``part``, plain or FSDP2's ``DTensor``, is this process's part."""
    shape, shard = list(part.shape), layout.tensor_shards.get(name)
    if shard is not None:
        shape[shard.dim] = sum(shard.blocks)
    return torch.Size(shape)


def held_ranges(layout: ParameterLayout, name: str, part: torch.Tensor) -> list[Ranges]:
    """What this process holds of a parameter, or of optimizer state of its shape, along each dimension.

    Args:
        layout: How parameters are split.
        name: Of the parameter.
        part: As this process holds it.

    Raises:
        ValueError: For a ``DTensor`` that is placed otherwise than FSDP2 does.
    """
    ranges: list[Ranges] = [[(0, size)] for size in whole_shape(layout, name, part)]
    shard = layout.tensor_shards.get(name)
    if shard is not None:
        ranges[shard.dim] = shard.ranges()
    if not isinstance(part, DTensor):
        return ranges
    for axis, placement in enumerate(part.placements):
        if type(placement) is Shard:
            mesh = part.device_mesh
            ranges[placement.dim] = clip(ranges[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{name} is placed as {placement}, which checkpoints do not know: only FSDP2's shards.")
    return ranges


def clip(ranges: Ranges, count: int, index: int) -> Ranges:
    """One of ``count`` chunks of what the ranges hold, cut as ``torch.chunk`` does.

    >>> clip([(0, 3), (10, 13)], count=4, index=1)  # of rows 0 1 2 10 11 12, two a chunk
    [(2, 3), (10, 11)]
    >>> clip([(0, 3)], count=4, index=3)
    []
    """
    total = sum(last - first for first, last in ranges)
    size = -(-total // count)
    begin = size * index
    found, passed = [], 0
    for first, last in ranges:
        low, high = max(first, first + begin - passed), min(last, first + begin + size - passed)
        if low < high:
            found.append((low, high))
        passed += last - first
    return found


def take(source: Any, ranges: Sequence[Ranges]) -> torch.Tensor | None:
    """The part of a whole tensor that the ranges name; None if there is none.

    Args:
        source: A tensor, or anything that gives tensors for tuples of slices.
        ranges: Of every dimension.

    >>> take(torch.arange(8).view(4, 2), [[(0, 1), (3, 4)], [(1, 2)]])
    tensor([[1],
            [7]])
    """
    if not all(ranges):
        return None

    def along(dim: int, chosen: tuple[slice, ...]) -> torch.Tensor:
        if dim == len(ranges):
            return torch.as_tensor(source[chosen])
        parts = [along(dim + 1, (*chosen, piece)) for piece in starmap(slice, ranges[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return along(0, ())


def held(part: torch.Tensor) -> torch.Tensor:
    """This process's own elements, as a plain tensor that shares their memory."""
    return part.to_local() if isinstance(part, DTensor) else part


def gather_whole(layout: ParameterLayout, name: str, part: torch.Tensor, keep: bool) -> torch.Tensor | None:
    """The whole tensor on the CPU, where it is to be kept; all processes must call this together."""
    part = part.detach()
    if isinstance(part, DTensor) and part.device.type != part.device_mesh.device_type:
        part = part.to(part.device_mesh.device_type)  # offloaded to the CPU, where its group may not talk
    whole = layout.whole(name, part)
    return whole.to("cpu") if keep else None
