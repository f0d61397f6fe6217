"""Gradients of a step, once all of its micro-batches are through: over replicas, and of what two stages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_wlb.parallel.collectives import group_device
from hf_wlb.parallel.mesh import ParallelMesh

BUCKET_BYTES = 2**28
"""Gradients that go in one all-reduce."""


def average_gradients(
    parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """The mean of every gradient over the ranks that hold tokens, as DDP would make it; they must call this together.

    A parameter to be trained that had no gradient on this rank gets one: another rank's micro-batches may have used it.

    Args:
        parameters: Whole on this stage, or this process's slices; the same on every rank.
        group: These ranks; None where this one is alone.
        bucket_bytes: In one all-reduce, unless one gradient is larger.
    """
    if group is None:
        return
    size = dist.get_world_size(group)
    for bucket in _buckets(parameters, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]) if len(bucket) > 1 else bucket[0]
        dist.all_reduce(flat, group=group)
        flat /= size
        if len(bucket) > 1:
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Iterable[torch.nn.Parameter], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    room = bucket_bytes
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad = parameter.grad.contiguous()
        if bucket and (gradient.nbytes > room or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(gradient)
        room -= gradient.nbytes
    if bucket:
        yield bucket


class TiedEnds:
    """The first and the last stage, which hold the same embedding; all processes must make it together.

    Args:
        mesh: This process's place.
        model: This process's stage of it.
        tied: Parameters of the last stage, and what they are called on the first.
    """

    def __init__(self, mesh: ParallelMesh, model: torch.nn.Module, tied: Mapping[str, str]) -> None:
        self._group = _ends_of(mesh)
        names = [] if self._group is None else [first if mesh.is_first_stage else last for last, first in tied.items()]
        self._shared = [model.get_parameter(name) for name in sorted(names)]

    def agree_on_training(self) -> None:
        """The last stage trains what the first one does; they must call this together, before an optimizer is made."""
        if self._shared:
            device = group_device(self._group)
            trains = torch.tensor([parameter.requires_grad for parameter in self._shared], device=device)
            dist.broadcast(trains, group=self._group, group_src=0)
            for parameter, trained in zip(self._shared, trains.tolist(), strict=True):
                parameter.requires_grad_(trained)

    def sum_gradients(self) -> None:
        """Both stages get the sum of their gradients; they must call this together, once a step."""
        for parameter in self._shared:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(_local(parameter.grad), group=self._group)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ends_of(mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """The group of this process's first and last stage; None in between."""
    assert mesh.device_mesh is not None
    names = cast(tuple[str, ...], mesh.device_mesh.mesh_dim_names)
    lines = mesh.device_mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, mesh.pp_size)
    found = None
    for line in lines.tolist():
        group = dist.new_group([line[0], line[-1]])
        if dist.get_rank() in (line[0], line[-1]):
            found = group
    return found
