"""Collectives between the ranks that share matrices, each with the one that its gradient needs.

Every pair is exact where what lies between them is: "whole" tensors are the same on all ranks, and so are their
gradients; "own" ones are a rank's slice or its term of a sum. Functional collectives, known by the name of a group, can
be traced by ``torch.compile``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

_collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share matrices.

    Attributes:
        group: Name of their process group.
        rank: This one.
        size: Of them.
    """

    group: str
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TensorRanks:
        """Of a process group that this process is in."""
        return cls(str(group.group_name), dist.get_rank(group), dist.get_world_size(group))


def enter_tensor_parallel(hidden: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Hands a whole tensor to computations of which every rank does a part.

    Args:
        hidden: The same on all ranks of the group.
        group: The tensor-parallel ranks; None where this one is alone.

    Returns:
        ``hidden``, whose gradient is the sum over the ranks. All of them must run its backward together.
    """
    return hidden if group is None else enter(hidden, TensorRanks.of(group))


def enter(whole: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """The same tensor; its gradient is the sum of what the ranks find."""
    return _of(_Enter.apply(whole, ranks.group))  # type: ignore[no-untyped-call]


def leave(own: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """The sum of all ranks' terms; its gradient is every term's."""
    return _of(_Leave.apply(own, ranks.group))  # type: ignore[no-untyped-call]


def gather_features(own: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """All ranks' features (last dimension), one after the other; the gradient is cut again."""
    return _of(_Gather.apply(own, ranks.group, ranks.rank, ranks.size))  # type: ignore[no-untyped-call]


def own_features(whole: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """This rank's features (last dimension) of a whole tensor; the gradient is put together again."""
    return _of(_Cut.apply(whole, ranks.group, ranks.rank, ranks.size))  # type: ignore[no-untyped-call]


def sum_over_copies(own: torch.Tensor, ranks: TensorRanks, index: int, count: int) -> torch.Tensor:
    """The same tensor; its gradient is the sum over the ranks that hold the same slice, ``index`` of ``count``."""
    return _of(_SumOverCopies.apply(own, ranks.group, index, count))  # type: ignore[no-untyped-call]


def _of(tensor: Any) -> torch.Tensor:
    return cast(torch.Tensor, tensor)


def _sum(own: torch.Tensor, group: str) -> torch.Tensor:
    started = _collectives.all_reduce(own.contiguous(), "sum", group)
    return _of(_collectives.wait_tensor(started))


def _gather(own: torch.Tensor, group: str, size: int) -> torch.Tensor:
    started = _collectives.all_gather_into_tensor(own.contiguous(), size, group)
    return torch.cat(_of(_collectives.wait_tensor(started)).chunk(size), -1)


def _cut(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    width = whole.shape[-1] // size
    return whole.narrow(-1, rank * width, width).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _sum(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: str) -> torch.Tensor:
        return _sum(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: str, rank: int, size: int) -> torch.Tensor:
        ctx.rank, ctx.size = rank, size
        return _gather(own, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _cut(gradient, ctx.rank, ctx.size), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: str, rank: int, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _cut(whole, rank, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _gather(gradient, ctx.group, ctx.size), None, None, None


class _SumOverCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: str, index: int, count: int) -> torch.Tensor:
        ctx.group, ctx.index, ctx.count = group, index, count
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if ctx.count == 1:
            return _sum(gradient, ctx.group), None, None, None
        slices = gradient.new_zeros(ctx.count, *gradient.shape)
        slices[ctx.index] = gradient
        return _sum(slices, ctx.group)[ctx.index], None, None, None
