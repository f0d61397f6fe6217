"""What the fused CUDA kernels have in common."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_wlb.attention.kernels.base import AttentionKernel, AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.segments import Segments

LARGEST_HEAD_SIZE = 256


class FusedKernel(AttentionKernel):
    """A kernel for float16 and bfloat16 on CUDA devices."""

    #: Compute capability that forward and backward need, at least.
    capability: tuple[int, int] = (8, 0)

    def missing(self) -> str | None:
        """Looks for a CUDA device first, and imports the kernel's library only where there is one."""
        if not torch.cuda.is_available():
            return "needs a CUDA device, and torch sees none"
        return self._missing_library()

    def refusal(self, request: KernelRequest) -> str | None:
        """What no fused kernel can, then what this one cannot."""
        sizes = (request.head_size, request.value_head_size)
        if request.device_type != "cuda":
            return f"runs on CUDA devices only, not on {request.device_type}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"computes in float16 and bfloat16, not in {str(request.dtype).removeprefix('torch.')}"
        if any(size % 8 or not 8 <= size <= LARGEST_HEAD_SIZE for size in sizes):
            return f"takes head sizes that are multiples of 8 up to {LARGEST_HEAD_SIZE}, not {sizes[0]} and {sizes[1]}"
        capability = device_capability()
        if capability is not None and capability < self.capability:
            return (
                f"needs compute capability {_dotted(self.capability)} or newer; this device has {_dotted(capability)}"
            )
        return self._own_refusal(request, capability)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``AttentionKernel.forward``."""
        tokens, heads, _ = q.shape
        if tokens == 0:
            return q.new_empty(0, heads, v.shape[-1]), q.new_empty(heads, 0, dtype=torch.float32)
        return self._forward(q, k, v, segments, options, out)

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
        """See ``AttentionKernel.backward``."""
        if into is None:
            into = (_memory_for(q), _memory_for(k), _memory_for(v))
        if q.shape[0] == 0:
            return into[0], into[1].zero_(), into[2].zero_()
        return self._backward(dout, q, k, v, out, lse.contiguous(), segments, options, into)

    @abstractmethod
    def _missing_library(self) -> str | None:
        """As ``missing``, where there is a CUDA device."""

    @abstractmethod
    def _own_refusal(self, request: KernelRequest, capability: tuple[int, int] | None) -> str | None:
        """As ``refusal``, for what is particular to this kernel; ``capability`` is None where there is no device."""

    @abstractmethod
    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``forward``, where there are queries."""

    @abstractmethod
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
        """As ``backward``, where there are queries."""


def device_capability() -> tuple[int, int] | None:
    """Of the current CUDA device; None where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def tokens_to_the_left(segments: Segments, options: AttentionOptions) -> int | None:
    """How many earlier tokens a query sees, or None if the window hides nothing of these segments."""
    window = options.sliding_window
    return None if window is None or window >= segments.max_k else window - 1


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Dense, uninitialised memory for a tensor's gradient.

    The kernels write all of it: where a segment has no queries, zeros over the ``max_k`` keys that they are told of.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def lacking_parameters(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Which named parameters a function of a library's private interface lacks."""
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters  # _init_fn: of a custom op
    return [name for name in names if name not in parameters]


def different_value_size(request: KernelRequest) -> str | None:
    """The refusal of kernels that know one head size."""
    if request.value_head_size == request.head_size:
        return None
    return f"takes one head size, not {request.head_size} for queries and {request.value_head_size} for values"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
