"""Keys, values and their gradients between context-parallel ranks: the collectives behind ``hf_wlb.attention``."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_wlb.parallel.agreement import by_rank
from hf_wlb.parallel.collectives import all_gather, gather_objects, group_device

if TYPE_CHECKING:  # loads Transformers
    from hf_wlb.attention import ShardTensors


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
        self._calls: set[str] = set()  # that the ranks agreed on
        self._shard: weakref.ref[ShardTensors] | None = None  # the last one that they agreed on

    def gather(self, part: torch.Tensor) -> _Started:
        """Start an all-gather of ``part`` [tokens, ...] to [size * tokens, ...]."""
        result = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        work = all_gather(result, part, group=self.group, async_op=True)
        return _Started(work, result, part)

    def reduce_scatter(self, parts: torch.Tensor) -> _Sum:
        """Start adding up ``parts`` [size * tokens, ...] over the ranks; each gets its own [tokens, ...].

        Every rank is sent what is for it and adds up itself, in float32: NCCL's reduce-scatter moves as many bytes but
        rounds to bfloat16 at every hop, which made gradients of keys and values 1.5 times less exact.
        """
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=self.group, async_op=True)
        return _Sum(_Started(work, received, parts), self.size)

    @cached_property
    def _meeting_place(self) -> torch.device:
        return group_device(self.group)

    def agree(self, shard: ShardTensors, call: str, problem: str | None) -> None:
        """Compare the ranks; see the protocol.

        Where the group gathers on the CPU, every micro-batch is compared at its first layer. On an accelerator this
        would wait for it, so only the first call of each kind is; the data loader compares every step there.
        """
        known = call in self._calls
        if known and (self._meeting_place.type != "cpu" or (self._shard is not None and self._shard() is shard)):
            return
        mine = hashlib.blake2b(f"{shard.digest} {call}".encode(), digest_size=8).digest()
        numbers = [int.from_bytes(mine, "little") >> 1, problem is not None]
        own = torch.tensor(numbers, dtype=torch.int64, device=self._meeting_place)
        gathered = own.new_empty(self.size * 2)
        all_gather(gathered, own, group=self.group)
        rows = gathered.view(self.size, 2).tolist()
        if len({number for number, _ in rows}) > 1 or any(has_problem for _, has_problem in rows):
            told = gather_objects((shard.digest, call, problem), self.group)
            if problem is None:
                raise ValueError(_disagreement(told))
            return
        self._calls.add(call)
        self._shard = weakref.ref(shard)


def _disagreement(told: list[tuple[int, str, str | None]]) -> str:
    """What is wrong, from every rank's plan, call and problem."""
    plans, calls, problems = zip(*told, strict=True)
    wrong = [f"context-parallel rank {rank} cannot attend: {text}" for rank, text in enumerate(problems) if text]
    if wrong:
        return "; ".join(wrong)
    if len(set(calls)) > 1:
        return (
            f"the context-parallel ranks attend in different ways: {by_rank(calls)}. Give every rank the same model, "
            "in the same type, and the same settings of AttentionContext."
        )
    digests = by_rank([f"plan {plan}" for plan in plans])
    return (
        f"the context-parallel ranks were given plans of different micro-batches or settings: {digests}. Give every "
        "rank the same documents, workload model and sharding settings."
    )
