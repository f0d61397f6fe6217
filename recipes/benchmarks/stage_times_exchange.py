"""A stand-in for the exchange of context-parallel ranks, for a rank that is run alone to see what its computing takes.

It is no exchange: nothing is sent, and what other ranks would have sent are random numbers. Outputs and gradients of
sharded documents are therefore meaningless, though finite; those of local documents are what they should be. Only the
time of one rank's computing is measured with it: its attention over keys of the right number and shape, and the copies
around an exchange, which ``hf_wlb.attention`` makes itself. What it takes to write the random numbers is in that time,
about as many bytes as a real exchange writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_wlb.attention import ShardTensors


class Filler:
    """Random numbers to stand where another rank's would, made once: new ones every time would take a while.

    One for all ranks that are run in turns. It grows where more are asked for, so the largest micro-batches should come
    before anything is timed.
    """

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def like(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, ...] of the other dimensions, type and device of ``part``; not to be written to."""
        count = rows * part[:1].numel()
        known = self._numbers
        if known.dtype != part.dtype or known.device != part.device or known.numel() < count:
            self._numbers = torch.randn(max(count, 2 * known.numel()), dtype=part.dtype, device=part.device)
        return self._numbers[:count].view(-1 if count else 0, *part.shape[1:])


@dataclass(frozen=True, slots=True)
class _Gathered:
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.result


@dataclass(frozen=True, slots=True)
class _Sum:
    """Adds up what this rank has for all of them, as it would what all have for it."""

    parts: torch.Tensor
    size: int

    def wait(self, into: torch.Tensor) -> None:
        rows = self.parts.view(self.size, -1, *self.parts.shape[1:])[:, : into.shape[0]]
        torch.sum(rows, 0, out=into)


class StandInExchange:
    """What a rank that is alone takes for ``hf_wlb.attention.context.KeyValueExchange``; see this file's beginning.

    Args:
        rank: That is run.
        size: Ranks that there would be.
        filler: What others would have sent.

    Raises:
        ValueError: If there is no such rank.

    >>> part = torch.arange(4.0)[:, None]
    >>> gathered = StandInExchange(1, 2, Filler()).gather(part).wait()
    >>> gathered.shape, torch.equal(gathered[4:], part), bool(gathered.isfinite().all())
    (torch.Size([8, 1]), True, True)
    """

    def __init__(self, rank: int, size: int, filler: Filler) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to {size - 1} (size - 1), got {rank}.")
        self.rank, self.size, self._filler = rank, size, filler

    def gather(self, part: torch.Tensor) -> _Gathered:
        """``part`` [tokens, ...] at this rank's place of [size * tokens, ...], random numbers at the others'."""
        rows = part.shape[0]
        result = part.new_empty(self.size * rows, *part.shape[1:])
        before, own, behind = result.split([self.rank * rows, rows, (self.size - 1 - self.rank) * rows])
        own.copy_(part)
        for others in (before, behind):
            others.copy_(self._filler.like(part, others.shape[0]))
        return _Gathered(result)

    def reduce_scatter(self, parts: torch.Tensor) -> _Sum:
        """The sum of the ``size`` pieces of ``parts`` [size * tokens, ...], once it is waited for."""
        return _Sum(parts, self.size)

    def agree(self, shard: ShardTensors, call: str, problem: str | None) -> None:
        """There is nobody to agree with.

        Raises:
            ValueError: If this rank found something wrong.
        """
        if problem is not None:
            raise ValueError(problem)
