"""How long this rank's attention kernels take, apart from waiting for other ranks."""

from __future__ import annotations

import contextlib
import time
from collections import deque
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
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

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
        """Seconds since they were last asked for; waits for the GPU."""
        return self._finished(wait=True)

    def drain(self) -> float:
        """Seconds since they were last asked for of what the GPU has done already, without waiting for it."""
        return self._finished(wait=False)

    def _finished(self, wait: bool) -> float:
        while self._events and (wait or self._events[0][1].query()):
            begin, end = self._events.popleft()
            if wait:
                end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds
