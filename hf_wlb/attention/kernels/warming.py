"""Calling a kernel before training begins, so that it is compiled then."""

from __future__ import annotations

import torch

from hf_wlb.attention.kernels.base import AttentionKernel, AttentionOptions, KernelRequest
from hf_wlb.attention.segments import Segments

#: Queries and keys of every segment, of the kinds that are compiled by themselves: within one block of the kernel or
#: not, of few segments or many, documents whole or chunks that read what comes before them.
_CALLS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((40, 64), (40, 64)),
    ((4000,), (4000,)),
    ((1500, 600, 40) * 32, (1500, 600, 40) * 32),
    ((300, 200), (3000, 1000)),
    ((200,) * 64, (600,) * 64),
    ((64,), (3000,)),
    ((64, 40) * 64, (600, 300) * 64),
)
_WINDOW = 512


def warm_up(kernel: AttentionKernel, request: KernelRequest, heads: int, kv_heads: int) -> int:
    """Calls a kernel that compiles at first use, forward and backward, once for every kind of call.

    Else each rank would do so when its first call of a kind comes, for seconds, while the others wait for it.

    Args:
        kernel: Chosen for the request.
        request: What layers ask. With a softcap nothing is done: it is compiled for the cap itself, not known here.
        heads: Of queries, on this process.
        kv_heads: Of keys and values, on this process.

    Returns:
        The number of calls.
    """
    if not kernel.compiles_at_first_use or request.softcap:
        return 0
    options = AttentionOptions(
        request.head_size**-0.5, _WINDOW if request.sliding_window else None, deterministic=request.deterministic
    )
    for q_lengths, k_lengths in _CALLS:
        segments = Segments.from_lengths(q_lengths, k_lengths, device=request.device_type)
        sizes = ((sum(q_lengths), heads), (sum(k_lengths), kv_heads), (sum(k_lengths), kv_heads))
        widths = (request.head_size, request.head_size, request.value_head_size)
        q, k, v = (
            torch.ones(*size, width, dtype=request.dtype, device=request.device_type)
            for size, width in zip(sizes, widths, strict=True)
        )
        out, lse = kernel.forward(q, k, v, segments, options)
        kernel.backward(torch.ones_like(out), q, k, v, out, lse, segments, options)
    return len(_CALLS)
