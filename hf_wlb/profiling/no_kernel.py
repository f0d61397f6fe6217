"""Attention kernels that do not attend: what surrounds attention can be timed with them, and looked at."""

from __future__ import annotations

import torch

from hf_wlb.attention.kernels import AttentionKernel, AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.segments import Segments

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NoKernel(AttentionKernel):
    """Returns memory as it finds it: for what surrounds attention."""

    name = "none"

    def refusal(self, request: KernelRequest) -> str | None:
        """Nothing is too much for it."""
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the output and the log-sum-exp."""
        lse_type = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(*q.shape[:2], v.shape[2]) if out is None else out
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=lse_type)
        self.fill_results((out, lse), (q, k, v), options)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        into: Gradients | None = None,
    ) -> Gradients:
        """Memory for the gradients."""
        gradients = into or (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
        self.fill_gradients(gradients, (dout, k, v))
        return gradients

    def fill_results(self, results: Pair, sources: Triple, options: AttentionOptions) -> None:
        """What ``forward`` writes into its output and log-sum-exp, given q, k and v: nothing."""

    def fill_gradients(self, gradients: Gradients, sources: Triple) -> None:
        """What ``backward`` writes into dq, dk and dv, given the output's gradient, k and v: nothing."""


class CopyKernel(NoKernel):
    """Copies its inputs: an eightieth or less of a layer's time, and real numbers go on, as if they were attended to.

    Memory as it is found may hold NaN or zeros, which a GPU multiplies with less power, hence faster.

    Attributes:
        seen: For every forward: heads, KV heads, head size, value head size, and what shapes the scores.
    """

    name = "copy"

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, int, AttentionOptions]] = []

    def fill_results(self, results: Pair, sources: Triple, options: AttentionOptions) -> None:
        """The queries; log-sum-exps are 0."""
        (out, lse), (q, k, v) = results, sources
        self.seen.append((q.shape[1], k.shape[1], q.shape[2], v.shape[2], options))
        _fill(out, q)
        lse.zero_()

    def fill_gradients(self, gradients: Gradients, sources: Triple) -> None:
        """The output's gradient, the keys and the values."""
        for gradient, source in zip(gradients, sources, strict=True):
            _fill(gradient, source)


def _fill(memory: torch.Tensor, source: torch.Tensor) -> None:
    """Copies what fits along the last dimension, and zeros behind it."""
    width = min(memory.shape[-1], source.shape[-1])
    memory[..., :width] = source[..., :width]
    memory[..., width:] = 0
