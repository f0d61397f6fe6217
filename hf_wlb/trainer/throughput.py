"""How well a run uses its devices: MFU, tokens per second and device, and how long every rank computes in a step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_wlb.parallel import gather_figures, process_count
from hf_wlb.workload.model_flops import ModelFlops, bf16_peak, check_peak

logger = logging.getLogger(__name__)

MOST_RANKS_LOGGED = 16
"""Up to so many ranks have a figure of their own in the logs."""


class ComputeTimer:
    """Seconds of forward and backward of every step on this rank, until the lowest gradient is there.

    Not counted is what comes after: data parallel's wait for other ranks at the end of backward. Waiting in the middle
    is (context parallelism's exchanges, FSDP's gathers), where ranks therefore look alike. On a GPU it is measured by
    events, which are read once the GPU has passed them.

    Args:
        device: Where the model computes.

    >>> timer = ComputeTimer(torch.device("cpu"))
    >>> timer.begin_step()
    >>> with timer.measure():
    ...     pass
    >>> len(timer.take()), timer.take()
    (1, [])
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[float] = []
        self._events: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._lowest: Any = None  # when the lowest gradient of the present micro-batch was there
        self._hook: Any = None

    def watch(self, model: torch.nn.Module) -> None:
        """Takes the moment of the lowest gradient from this model: the first trainable parameter's, the embedding's.

        Without it, or where the model never makes that gradient, all of backward is counted.
        """
        self.unwatch()
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            self._hook = first.register_post_accumulate_grad_hook(self._lowest_is_there)

    def unwatch(self) -> None:
        """Leaves the model alone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _lowest_is_there(self, parameter: torch.Tensor) -> None:
        self._lowest = self._now()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """The micro-batches that follow are of another step."""
        self._drain(wait=False)  # so that events do not pile up
        self._steps.append(0.0)

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Times a micro-batch's forward and backward."""
        self._lowest, begin = None, self._now()
        yield
        end = self._now() if self._lowest is None else self._lowest
        if not self._steps:  # outside of steps
            return
        if self._on_gpu:
            self._events.append((len(self._steps) - 1, begin, end))
        else:
            self._steps[-1] += end - begin

    def take(self) -> list[float]:
        """Seconds of every step since they were last asked for; waits for the GPU."""
        self._drain(wait=True)
        steps, self._steps = self._steps, []
        return steps

    def _drain(self, wait: bool) -> None:
        while self._events and (wait or self._events[0][2].query()):
            step, begin, end = self._events.popleft()
            if wait:
                end.synchronize()
            self._steps[step] += begin.elapsed_time(end) / 1000


class Throughput:
    """What the steps since the last log came to. All processes log together.

    Args:
        flops: What documents cost; None logs no MFU.
        peak: FLOP/s of one device in the type that is trained in; None logs no MFU.
        device: This process's.

    Attributes:
        timer: Times this process's forward and backward.
    """

    def __init__(self, flops: ModelFlops | None, peak: float | None, device: torch.device) -> None:
        self._flops = flops
        self._peak = None if peak is None else check_peak(peak)
        self.timer = ComputeTimer(device)
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self.timer.take()
        self._tokens, self._done = 0, 0.0
        self._since = time.perf_counter()

    def add(self, lengths: Iterable[int]) -> None:
        """Takes the documents in, on all replicas together, of a step that is about to be trained."""
        self.timer.begin_step()
        given = list(lengths)
        self._tokens += sum(given)
        if self._flops is not None:
            self._done += self._flops.documents(given)

    def leave_out(self, seconds: float) -> None:
        """Leaves an evaluation that took so long out; the steps before it still count."""
        self._since += seconds

    def figures(self) -> dict[str, float]:
        """What goes into the log; all processes must call this together, after as many steps.

        Returns:
            Empty without steps. ``tokens_per_second_per_gpu`` of wall-clock time since the last log, data, optimizer
            and checkpoints included, and ``mfu``, see ``hf_wlb.workload.model_flops`` (not where the peak or the model
            is unknown). Of forward and backward in a step, see ``ComputeTimer``: ``rank_seconds_max``, the slowest
            rank's of every step, ``rank_seconds_mean``, ``rank_imbalance``, the first over the second, and, of up to
            16 ranks, ``rank_seconds_rank_{r}``; means over the steps.
        """
        seconds = max(time.perf_counter() - self._since, 1e-9)
        own = self.timer.take()
        if not own:
            return {}
        devices = process_count()
        found = {"tokens_per_second_per_gpu": self._tokens / (seconds * devices)}
        if self._flops is not None and self._peak is not None:
            found["mfu"] = self._done / (seconds * devices * self._peak)
        ranks = gather_figures(own)
        slowest = sum(max(step) for step in zip(*ranks, strict=True)) / len(own)
        means = [sum(steps) / len(own) for steps in ranks]
        mean = sum(means) / len(ranks)
        found |= {"rank_seconds_max": slowest, "rank_seconds_mean": mean}
        if mean:
            found["rank_imbalance"] = slowest / mean
        if len(ranks) <= MOST_RANKS_LOGGED:
            found |= {f"rank_seconds_rank_{rank}": value for rank, value in enumerate(means)}
        self.clear()
        return found


def flops_of(model: Any) -> ModelFlops | None:
    """Counts a model of Transformers or PEFT, whole: before it is split over ranks.

    Returns:
        None, with a warning, for a family that cannot be counted: then there is no MFU, and training goes on.
    """
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if hasattr(model, "peft_config"):
        share, adapters = 0.0, trainable
    else:
        share, adapters = trainable / max(sum(parameter.numel() for parameter in model.parameters()), 1), 0
    try:
        return ModelFlops.from_config(model.config, trainable_share=share, adapter_weights=adapters)
    except ValueError as error:
        logger.warning("The logs will hold no MFU. %s", error)
        return None


def peak_of(device: torch.device, given: float | None = None) -> float | None:
    """FLOP/s of a device in bf16, at most: the one given, else by the device's name, None where that is not known.

    Raises:
        ValueError: If the one given is not positive and finite.
    """
    if given is not None:
        return check_peak(given)
    return bf16_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
