"""Timing what a device does, the same way for profiles and benchmarks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

PairTimer = Callable[[Callable[[], Any], Callable[[Any], object]], tuple[float, float]]
"""Seconds of a forward, and of the backward that takes what the forward gave; may call both any number of times."""

#: Of the square matrices that a GPU multiplies while it is kept busy, and how many products fill a millisecond: an H200
#: takes 1.5 ms each; where they are faster, the host has less time ahead.
_BUSY_SIZE, _BUSY_PER_MS = 8192, 0.7
_FEWEST_REPEATS = 3


class Stopwatch:
    """Takes the device's time between ``start`` and ``stop``, any number of times.

    On a GPU these are events on the current stream. Each start first keeps the GPU busy for ``ahead_ms``, while the
    host queues what is to be timed: the time to launch kernels is then hidden, as it is in training, where the host
    runs ahead of the GPU. Busy with matrix products, so that its clock is that of a GPU at work. On other devices it is
    the host's clock.

    Args:
        device: The device that works.
        ahead_ms: How long the host may queue ahead; 0 to time its launches too.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> watch.start(); watch.stop()
    >>> len(watch.take()), watch.take()
    (1, [])
    """

    def __init__(self, device: torch.device, ahead_ms: float = 5.0) -> None:
        self._on_gpu = device.type == "cuda"
        self._products = math.ceil(ahead_ms * _BUSY_PER_MS) if self._on_gpu else 0
        if self._products:
            factor = torch.randn(_BUSY_SIZE, _BUSY_SIZE, device=device, dtype=torch.bfloat16)
            self._busy_with = factor, torch.empty_like(factor)
        self._begun = 0.0
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, meet: Callable[[], None] | None = None) -> None:
        """Begin; ``meet`` is what makes processes begin together, queued right before."""
        for _ in range(self._products):
            factor, product = self._busy_with
            torch.mm(factor, factor, out=product)
        if meet is not None:
            meet()
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._begun = time.perf_counter()

    def stop(self) -> None:
        """End what the last ``start`` began."""
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds.append(time.perf_counter() - self._begun)

    def take(self) -> list[float]:
        """Seconds of every start and stop since the last call; waits for the GPU."""
        if self._on_gpu and self._events:
            torch.cuda.synchronize()
            self._seconds = [begin.elapsed_time(end) / 1000 for begin, end in self._events]
            self._events.clear()
        seconds, self._seconds = self._seconds, []
        return seconds


def median_seconds(
    run: Callable[[], object],
    meet: Callable[[], None] | None = None,
    *,
    device: torch.device,
    repeats: int = 7,
    warmups: int = 2,
) -> float:
    """Median time of ``run`` on ``device``, after ``warmups`` that are not counted; ``meet`` as for ``Stopwatch``.

    Raises:
        ValueError: For fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    watch = Stopwatch(device)
    for _ in range(warmups):
        run()
    for _ in range(repeats):
        watch.start(meet)
        run()
        watch.stop()
    return statistics.median(watch.take())


def forward_backward_seconds(
    forward: Callable[[], Any],
    backward: Callable[[Any], object],
    *,
    device: torch.device,
    repeats: int = 5,
    enough: float | None = None,
) -> tuple[float, float]:
    """Median times of a forward and of its backward on ``device``, after one of each that is not counted.

    Args:
        forward: Whatever it gives is handed to ``backward``.
        backward: Takes that.
        device: The device that works.
        repeats: Measurements.
        enough: Seconds after which three measurements are enough; None for all of them, which processes that work
            together must do.

    Raises:
        ValueError: For fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    watch = Stopwatch(device)
    times: list[list[float]] = []
    begun = time.perf_counter()
    for number in range(repeats + 1):
        watch.start()
        out = forward()
        watch.stop()
        watch.start()
        backward(out)
        watch.stop()
        del out
        measured = watch.take()
        if number:
            times.append(measured)
        else:  # the first compiles and warms up
            begun = time.perf_counter()
        if enough is not None and len(times) >= _FEWEST_REPEATS and time.perf_counter() - begun > enough:
            break
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return first, second
