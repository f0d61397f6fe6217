"""How long this rank's attention kernels take, apart from waiting for other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class KernelMeter:
    """Adds up the time inside ``measure`` blocks; on a GPU by events, without waiting for it.

    >>> meter = KernelMeter()
    >>> with meter.measure(torch.device("cpu")):
    ...     pass
    >>> meter.take() >= 0, meter.take()
    (True, 0.0)
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Times what the block runs on ``device``."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take(self) -> float:
        """Seconds since the last call; waits for the GPU."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
