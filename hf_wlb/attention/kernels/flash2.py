"""FlashAttention 2 from the package flash-attn, below its autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from hf_wlb.attention.kernels.base import AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.kernels.fused import (
    FusedKernel,
    different_value_size,
    lacking_parameters,
    tokens_to_the_left,
)
from hf_wlb.attention.segments import Segments


class FlashAttention2Kernel(FusedKernel):
    """``_flash_attn_varlen_forward`` and ``_backward`` of flash-attn 2.7 and later 2.x."""

    name = "flash-attn-2"

    def _missing_library(self) -> str | None:
        found = _load()
        return found if isinstance(found, str) else None

    def _own_refusal(self, request: KernelRequest, capability: tuple[int, int] | None) -> str | None:
        """Where a softcap is asked for on a CUDA device, this imports the library and tries: builds differ."""
        if request.softcap and capability is not None and not isinstance(_load(), str):
            failure = _softcap_failure(_current_device())
            if failure is not None:
                return f"has no softcap here: a trial call failed with {failure!r}"
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
        attended, lse, *_ = _functions().forward(q, k, v, **_arguments(segments, options))
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
        dq, dk, dv = into
        _functions().backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
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
        "dropout_p": 0.0,
        "softmax_scale": options.scaling,
        "causal": left is None,
        # Nothing to the right, said here as well as by causal: flash-attn drops causal where segments have one query,
        # and would then take the batch for one query per segment.
        "window_size_left": -1 if left is None else left,
        "window_size_right": 0,
        "softcap": options.softcap or 0.0,
        "alibi_slopes": None,
    }


class _Functions(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


_NEEDED = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "alibi_slopes",
)


@cache
def _load() -> _Functions | str:
    """The library's functions, or why there are none."""
    try:
        import flash_attn
        from flash_attn import flash_attn_interface as interface
    except ModuleNotFoundError as error:
        return f"is not installed ({error}): pip install flash-attn"
    except Exception as error:  # a build for another torch fails in many ways
        return f"is installed but cannot be imported ({type(error).__name__}: {error})"
    version = getattr(flash_attn, "__version__", "of unknown version")
    try:
        found = _Functions(interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward)
        lacking = [*lacking_parameters(found.forward, _NEEDED)]
        lacking += lacking_parameters(found.backward, (*_NEEDED, "dq", "dk", "dv", "deterministic"))
    except AttributeError as error:
        lacking = [str(error)]
    if lacking:
        return f"is flash-attn {version}, whose functions are others than those of 2.7 to 2.8 ({', '.join(lacking)})"
    return found


@cache
def _softcap_failure(device: torch.device) -> str | None:
    """What a tiny call with a softcap fails with, or None; builds can leave softcaps out and do not say so."""
    token = torch.ones(1, 1, 64, dtype=torch.bfloat16, device=device)
    arguments = _arguments(Segments.from_lengths([1], device=device), AttentionOptions(1.0, softcap=1.0))
    try:
        _functions().forward(token, token, token, **arguments)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return None


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _functions() -> _Functions:
    found = _load()
    if isinstance(found, str):
        raise ImportError(f"attention kernel 'flash-attn-2' {found}")
    return found
