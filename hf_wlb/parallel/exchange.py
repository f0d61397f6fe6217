"""Keys, values and their gradients between context-parallel ranks: the collectives behind ``hf_wlb.attention``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_wlb.parallel.agreement import group_device

# torch 2.13 renamed it; 2.11 knows the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class _Started:
    """A collective under way, and where its result will be."""

    work: dist.Work
    result: torch.Tensor
    sent: torch.Tensor  # kept until the collective has read it

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.result


@dataclass(frozen=True, slots=True)
class _Sum:
    """Parts of this rank's tokens from all ranks, under way."""

    parts: _Started
    size: int

    def wait(self, into: torch.Tensor) -> None:
        received = self.parts.wait()
        own = received.view(self.size, -1, *received.shape[1:])[:, : into.shape[0]]
        torch.sum(own, 0, out=into)  # half precision: in float32, rounded once


class ProcessGroupExchange:
    """The exchange of keys and values over a process group; see ``hf_wlb.attention.context.KeyValueExchange``.

    One collective a call, of one shape on all ranks (gloo refuses uneven ones): shards are padded to the largest.

    Args:
        group: The context-parallel ranks; None for all processes.

    Raises:
        ValueError: If this process does not belong to the group, or ``torch.distributed`` is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "Context parallelism needs several processes that know each other: start them with torchrun or "
                "accelerate launch, and initialise torch.distributed before this."
            )
        if dist.get_rank(group) < 0:
            raise ValueError("This process is not in the context-parallel group that it was given.")
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._agreed = False

    def gather(self, part: torch.Tensor) -> _Started:
        """Start an all-gather of ``part`` [tokens, ...] to [size * tokens, ...]."""
        result = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        work = _all_gather(result, part, group=self.group, async_op=True)
        return _Started(work, result, part)

    def reduce_scatter(self, parts: torch.Tensor) -> _Sum:
        """Start adding up ``parts`` [size * tokens, ...] over the ranks; each gets its own [tokens, ...].

        Every rank is sent what is for it and adds up itself, in float32: NCCL's reduce-scatter moves as many bytes but
        rounds to bfloat16 at every hop, which made gradients of keys and values 1.5 times less exact.
        """
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=self.group, async_op=True)
        return _Sum(_Started(work, received, parts), self.size)

    def agree(self, digest: int, problem: str | None) -> None:
        """Compare the first plan over the ranks, once; see the protocol.

        Later plans are compared by the data loader, step by step: a comparison waits for the GPU.
        """
        if self._agreed:
            return
        own = torch.tensor([digest, problem is not None], dtype=torch.int64, device=group_device(self.group))
        gathered = own.new_empty(self.size * 2)
        _all_gather(gathered, own, group=self.group)
        rows = gathered.view(self.size, 2).tolist()
        wrong = [rank for rank, (_, has_problem) in enumerate(rows) if has_problem]
        if problem is None and wrong:
            raise ValueError(
                f"context-parallel rank {wrong[0]} was given a plan that does not fit its tensors; its own error says "
                "what is wrong"
            )
        if problem is None and len({plan for plan, _ in rows}) > 1:
            raise ValueError(
                "the context-parallel ranks were given plans of different micro-batches or settings: "
                f"{', '.join(f'rank {rank} has plan {plan}' for rank, (plan, _) in enumerate(rows))}. Give every rank "
                "the same documents, workload model and sharding settings."
            )
        self._agreed = problem is None
