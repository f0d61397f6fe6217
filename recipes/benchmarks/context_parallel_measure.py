"""Measuring context-parallel attention: races of plans, the error against float64, peak memory. Ranks call together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hf_wlb.attention.context import AttentionContext, ShardTensors
from hf_wlb.attention.function import attend
from hf_wlb.attention.kernels import AttentionKernel, ReferenceKernel
from hf_wlb.attention.segments import Segments
from hf_wlb.profiling import AttentionShape, Stopwatch
from hf_wlb.sharding import ShardPlan, shard_layout

Run = Callable[[], None]
GRADIENTS = ("out", "dq", "dk", "dv")
GATHERED_FACTOR = 1.25


@dataclass(frozen=True)
class Place:
    """This process among the ranks."""

    rank: int
    size: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Bench:
    """Random tensors of one shape, and runs over parts of them.

    Args:
        place: This process.
        shape: Heads and sizes.
        kernel: What attends.
        tokens: The longest micro-batch.
        ahead_ms: How long hosts queue ahead before each sample; see ``Stopwatch``.
    """

    def __init__(
        self, place: Place, shape: AttentionShape, kernel: AttentionKernel, tokens: int, ahead_ms: float
    ) -> None:
        self.place, self.shape, self.kernel = place, shape, kernel
        self._tensors = shape.random(tokens, tokens, place.device, seed=1000 + place.rank)
        self._watch = Stopwatch(place.device, ahead_ms)
        self._token = torch.zeros(1, device=place.device)

    def plain(self, lengths: Iterable[int]) -> Run:
        """The kernel over a whole micro-batch on one device: one call forward, one backward."""
        segments = Segments.from_lengths(list(lengths), device=self.place.device)
        q, k, v, dout = (tensor[: int(segments.q[-1])] for tensor in self._tensors)

        def run() -> None:
            out, lse = self.kernel.forward(q, k, v, segments, self.shape.options)
            self.kernel.backward(dout, q, k, v, out, lse, segments, self.shape.options)

        return run

    def sharded(self, plan: ShardPlan, context: AttentionContext) -> Run:
        """This rank's part of a plan, forward and backward with all collectives."""
        shard = ShardTensors.of(shard_layout(plan, self.place.rank), self.place.device)
        tensors = [tensor[: shard.tokens] for tensor in self._tensors]
        return attention_run(tensors, shard, context, self.shape)

    def race(self, runs: Mapping[str, Run], samples: int, warmups: int) -> dict[str, NDArray[np.float64]]:
        """Seconds of every run, ``[ranks, samples]``.

        One sample of each in turn, so that drift hits all alike; ranks begin every sample together.
        """
        for _ in range(warmups):
            for run in runs.values():
                run()
        self._watch.take()
        with _no_collector():
            for _ in range(samples):
                for run in runs.values():
                    dist.barrier()
                    self._watch.start(self._meet)
                    run()
                    self._watch.stop()
        own = np.array(self._watch.take()).reshape(samples, len(runs)).T
        everywhere = np.stack(self.place.gather(own), axis=1)  # [runs, ranks, samples]
        return dict(zip(runs, everywhere, strict=True))

    def _meet(self) -> None:
        dist.all_reduce(self._token)


@contextmanager
def _no_collector() -> Any:
    """Keeps Python's garbage collector, which takes longer than hosts queue ahead, out of the samples."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def attention_run(
    tensors: Iterable[torch.Tensor], shard: ShardTensors, context: AttentionContext, shape: AttentionShape
) -> Run:
    """Forward and backward of ``attend``."""
    *parts, dout = tensors
    q, k, v = (tensor.detach().requires_grad_() for tensor in parts)

    def run() -> None:
        torch.autograd.grad(attend(q, k, v, shard, context, shape.options), (q, k, v), dout)

    return run


# ---- the error against float64 ----


def errors(
    place: Place,
    shape: AttentionShape,
    kernel: AttentionKernel,
    context: AttentionContext,
    lengths: list[int],
    plans: Mapping[str, ShardPlan],
) -> dict[str, Any]:
    """Relative L2 errors of output and gradients: of the plain kernel, of every plan, and their ratio.

    The reference is plain torch in float64, on the same inputs as rounded to the shape's dtype.
    """
    tokens = sum(lengths)
    device = place.device
    inputs = [tensor.to(device) for tensor in shape.random(tokens, tokens, torch.device("cpu"), seed=7)]
    segments = Segments.from_lengths(lengths, device=device)
    exact = _outputs(ReferenceKernel(), [tensor.double() for tensor in inputs], segments, shape)
    plain = _outputs(kernel, inputs, segments, shape)
    norms = _squares(exact)
    plain_error = np.sqrt(_differences(plain, exact) / norms)
    found: dict[str, Any] = {"lengths": lengths, "plain": _named(plain_error), "plans": {}}
    for label, plan in plans.items():
        layout = shard_layout(plan, place.rank)
        own = torch.from_numpy(layout.tokens).to(device)
        q, k, v = (tensor[own].requires_grad_() for tensor in inputs[:3])
        out = attend(q, k, v, ShardTensors.of(layout, device), context, shape.options)
        results = (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3][own]))
        squares = _differences(results, [tensor[own] for tensor in exact])
        error = np.sqrt(np.sum(place.gather(squares), axis=0) / norms)
        ratio = error / np.maximum(plain_error, np.finfo(np.float64).tiny)
        found["plans"][label] = {"error": _named(error), "ratio": _named(ratio), "sharded": len(plan.edges)}
    found["ratio"] = max(_worst(row["ratio"].values()) for row in found["plans"].values())
    return found


def _outputs(
    kernel: AttentionKernel, inputs: list[torch.Tensor], segments: Segments, shape: AttentionShape
) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = inputs
    out, lse = kernel.forward(q, k, v, segments, shape.options)
    return (out, *kernel.backward(dout, q, k, v, out, lse, segments, shape.options))


def _squares(tensors: Iterable[torch.Tensor]) -> NDArray[np.float64]:
    return np.array([float(tensor.double().square().sum()) for tensor in tensors])


def _differences(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> NDArray[np.float64]:
    return _squares(a.double() - b for a, b in zip(found, exact, strict=True))


def _named(values: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in zip(GRADIENTS, values, strict=True)}


def _worst(ratios: Iterable[float]) -> float:
    """The largest; NaN if any is one."""
    return float(np.max(list(ratios)))


# ---- memory ----


def peak_memory(
    place: Place, shape: AttentionShape, plan: ShardPlan, contexts: Mapping[str, AttentionContext]
) -> dict[str, Any]:
    """Peak memory of forward and backward under each context, over what is allowed, on the worst rank.

    Allowed are the shard's q, k, v, output and their gradients and ``GATHERED_FACTOR`` times the keys and values of all
    sharded documents; the plan's own tensors and whatever else lies in memory are taken off.
    """
    shard = ShardTensors.of(shard_layout(plan, place.rank), place.device)
    before = torch.cuda.memory_allocated()
    tensors = shape.random(shard.tokens, shard.tokens, place.device, seed=11)
    item = shape.dtype.itemsize
    local = 2 * sum(tensor.numel() for tensor in tensors) * item  # dout is the output's gradient, as large as it
    gathered = shard.gathered_tokens * shape.kv_width * item
    allowed = local + GATHERED_FACTOR * gathered
    rows: dict[str, Any] = {}
    for label, context in contexts.items():
        run = attention_run(tensors, shard, context, shape)
        run()  # what kernels keep for good is not this run's
        place.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        place.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        ranks = place.gather((peak / allowed, peak, local, gathered))
        ratio, peak, own, whole = max(ranks)
        mib = {"peak_mib": peak, "local_mib": own, "gathered_mib": whole}
        rows[label] = {"ratio": round(ratio, 4), **{name: round(size / 2**20, 1) for name, size in mib.items()}}
    return rows
