"""The FlashAttention 2 that is built into torch: what ``torch.nn.attention.varlen`` calls, without its autograd."""

from __future__ import annotations

import torch

from hf_wlb.attention.kernels.base import AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.kernels.fused import FusedKernel, different_value_size, tokens_to_the_left
from hf_wlb.attention.segments import Segments


class TorchKernel(FusedKernel):
    """``torch.ops.aten._flash_attention_forward`` and ``_backward``, as of torch 2.11."""

    name = "torch"

    def _missing_library(self) -> str | None:
        if not torch.backends.cuda.is_flash_attention_available():
            return "is not part of this build of torch, which was made without FlashAttention"
        return None

    def _own_refusal(self, request: KernelRequest, capability: tuple[int, int] | None) -> str | None:
        if request.softcap:
            return "has no softcap"
        if request.deterministic and not _deterministic():
            return f"gives the same gradients every time {_ONLY_UNDER}"
        return different_value_size(request)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left = tokens_to_the_left(segments, options)
        attended, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            segments.q,
            segments.k,
            segments.max_q,
            segments.max_k,
            0.0,  # dropout
            left is None,  # causal; a window says so by itself
            False,  # debug mask
            scale=options.scaling,
            window_size_left=-1 if left is None else left,
            window_size_right=0,
        )
        return attended if out is None else out.copy_(attended), lse

    def _backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        into: Gradients,
    ) -> Gradients:
        if options.deterministic and not _deterministic():
            raise ValueError(f"attention kernel 'torch' gives the same gradients every time {_ONLY_UNDER}")
        left = tokens_to_the_left(segments, options)
        found = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            segments.q,
            segments.k,
            segments.max_q,
            segments.max_k,
            0.0,  # dropout
            left is None,
            torch.zeros(2, dtype=torch.uint64, device=q.device),  # state of the dropout that there is not
            torch.empty(0, device=q.device),
            scale=options.scaling,
            window_size_left=-1 if left is None else left,
            window_size_right=0,
        )
        for memory, gradient in zip(into, found, strict=True):
            memory.copy_(gradient)
        return into


_ONLY_UNDER = (
    "only under torch.use_deterministic_algorithms(True), without warn_only, which is not set; set it before training "
    "or choose another kernel"
)


def _deterministic() -> bool:
    """Whether torch's backward takes its deterministic form: a global setting, not an argument."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
