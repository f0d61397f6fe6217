"""Context-parallel ranks as threads of one process, and uninitialised memory that shows."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch


@dataclass
class ThreadGroup:
    """``size`` threads that exchange tensors; each runs the same function as one rank of a process group would."""

    size: int
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)

    def run(self, function: Callable[["ThreadExchange"], Any]) -> list[Any]:
        """Return ``function(exchange)`` of every rank; the first rank's exception, if any raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def rank_main(rank: int) -> None:
            try:
                results[rank] = function(ThreadExchange(self, rank))
            except BaseException as error:
                errors[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
        for error in real or [e for e in errors if e is not None]:
            raise error
        return results


@dataclass
class ThreadExchange:
    """What ``ProcessGroupExchange`` is over a process group; counts what it did."""

    group: ThreadGroup
    rank: int
    gathered: int = 0
    reduced: int = 0

    @property
    def size(self) -> int:
        return self.group.size

    def _share(self, mine: Any) -> list[Any]:
        self.group.slots[self.rank] = mine
        self.group.barrier.wait()
        everyone = list(self.group.slots)
        self.group.barrier.wait()
        return everyone

    def gather(self, part: torch.Tensor) -> "Done":
        self.gathered += part.numel()
        return Done(torch.cat(self._share(part.clone())))

    def reduce_scatter(self, parts: torch.Tensor) -> "DoneSum":
        self.reduced += parts.numel()
        own = [_rows(everyones, self) for everyones in self._share(parts.clone())]
        return DoneSum(sum(own[1:], own[0]))

    def agree(self, shard: Any, call: str, problem: str | None) -> None:
        everyone = self._share((shard.digest, call, problem))
        wrong = next((text for *_, text in everyone if text is not None), None)
        if wrong is not None:
            raise ValueError(wrong)
        if len(set(everyone)) > 1:
            raise ValueError(f"ranks differ: {everyone}")


def _rows(parts: torch.Tensor, exchange: ThreadExchange) -> torch.Tensor:
    rows = parts.shape[0] // exchange.size
    return parts[exchange.rank * rows : (exchange.rank + 1) * rows]


@dataclass
class Done:
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.result


@dataclass
class DoneSum:
    result: torch.Tensor

    def wait(self, into: torch.Tensor) -> None:
        into.copy_(self.result[: len(into)])


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills what ``new_empty`` and ``empty_like`` give with NaN, so that reading it unwritten is noticed."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    with (
        mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: filled(new_empty(*a, **k))),
        mock.patch.object(torch, "empty_like", lambda *a, **k: filled(empty_like(*a, **k))),
    ):
        yield
