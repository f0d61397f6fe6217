"""FlashAttention 4 from the package flash-attn-4 (``flash_attn.cute``), below its autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from hf_wlb.attention.kernels.base import AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.kernels.fused import FusedKernel, lacking_parameters, tokens_to_the_left
from hf_wlb.attention.segments import Segments


class FlashAttention4Kernel(FusedKernel):
    """``_flash_attn_fwd`` and ``_flash_attn_bwd`` as of flash-attn-4 4.0.0b36.

    What it refuses is what these functions assert on the device at hand, most of it in the backward pass.
    """

    name = "flash-attn-4"
    compiles_at_first_use = True
    capability = (9, 0)

    def _missing_library(self) -> str | None:
        found = _load()
        return found if isinstance(found, str) else None

    def _own_refusal(self, request: KernelRequest, capability: tuple[int, int] | None) -> str | None:
        generation = 9 if capability is None else capability[0]
        return _REFUSALS.get(generation, _unknown_device)(request)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended, lse, *_ = _functions().forward(q, k, v, out=out, return_lse=True, **_arguments(segments, options))
        return attended, lse

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
        dq, dk, dv = into
        _functions().backward(
            q,
            k,
            v,
            out,
            dout,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=options.deterministic,
            **_arguments(segments, options),
        )
        return dq, dk, dv


def _arguments(segments: Segments, options: AttentionOptions) -> dict[str, Any]:
    left = tokens_to_the_left(segments, options)
    return {
        "cu_seqlens_q": segments.q,
        "cu_seqlens_k": segments.k,
        "max_seqlen_q": segments.max_q,
        "max_seqlen_k": segments.max_k,
        "softmax_scale": options.scaling,
        "causal": left is None,
        "window_size_left": left,
        "window_size_right": 0,
        "softcap": options.softcap or 0.0,
    }


# ---- what the backward pass of each generation of devices asserts ----


def _hopper(request: KernelRequest) -> str | None:
    if request.grouped and request.value_head_size != request.head_size:
        return (
            f"takes heads that share KV heads with one head size only, not {request.head_size} for queries and "
            f"{request.value_head_size} for values"
        )
    return None


def _blackwell(request: KernelRequest) -> str | None:
    sizes = (request.head_size, request.value_head_size)
    if max(sizes) > 128 and sizes not in ((192, 128), (256, 256)):
        return (
            f"takes head sizes up to 128, 192 with values of 128, and 256 on this device, not {sizes[0]} with values "
            f"of {sizes[1]}"
        )
    if sizes == (256, 256) and request.softcap:
        return "has no softcap for head size 256 on this device"
    return None


def _consumer_blackwell(request: KernelRequest) -> str | None:
    if request.deterministic:
        return "has no deterministic gradients on this device"
    sizes = (request.head_size, request.value_head_size)
    if max(sizes) > 128 or sizes[0] != sizes[1]:
        return f"takes one head size up to 128 on this device, not {sizes[0]} with values of {sizes[1]}"
    return None


def _unknown_device(request: KernelRequest) -> str | None:
    return "has no backward pass for devices of this compute capability"


_REFUSALS: dict[int, Callable[[KernelRequest], str | None]] = {
    9: _hopper,
    10: _blackwell,
    11: _blackwell,
    12: _consumer_blackwell,
}


# ---- the library ----


class _Functions(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


_NEEDED = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
)


@cache
def _load() -> _Functions | str:
    """The library's functions, or why there are none."""
    try:
        from flash_attn.cute import interface
    except ModuleNotFoundError as error:
        return f"is not installed ({error}): pip install --pre flash-attn-4"
    except Exception as error:  # it compiles and links as it is imported, which fails in many ways
        return f"is installed but cannot be imported ({type(error).__name__}: {error})"
    try:
        found = _Functions(interface._flash_attn_fwd, interface._flash_attn_bwd)
        lacking = [*lacking_parameters(found.forward, (*_NEEDED, "return_lse", "out"))]
        lacking += lacking_parameters(found.backward, (*_NEEDED, "dq", "dk", "dv", "deterministic"))
    except AttributeError as error:
        lacking = [str(error)]
    if lacking:
        return f"{_version()} has other functions than 4.0.0b36, which is known to work ({', '.join(lacking)})"
    return found


def _version() -> str:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return "of unknown version"


def _functions() -> _Functions:
    found = _load()
    if isinstance(found, str):
        raise ImportError(f"attention kernel 'flash-attn-4' {found}")
    return found
