"""Measures an attention kernel for a profile: seconds of documents and of chunks, forward and backward.

A short document never runs alone, so every sample is a call full of equal documents or chunks, of which one's share is
written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from hf_wlb.attention.kernels import AttentionKernel, AttentionOptions, KernelRequest
from hf_wlb.attention.segments import Segments
from hf_wlb.profiling.timing import PairTimer, forward_backward_seconds

Point = tuple[int, int]
"""Queries and keys of a document (as many) or of a chunk (more keys)."""

_CHUNK_QUERIES = (16, 64, 320, 1088, 4160, 16448)
_KEYS_PER_QUERY = (2, 4, 8, 16, 64)


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        head_size: Of queries and keys.
        value_head_size: Of values; None for the same.
        dtype: Of all of them.
        softcap: Of the scores; None for none.

    Raises:
        ValueError: For sizes below 1, or KV heads that do not divide the heads.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.head_size, self.values)
        if min(sizes) < 1:
            raise ValueError(f"heads, kv_heads and head sizes must be at least 1, got {sizes}.")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, but {self.kv_heads} does not divide {self.heads}.")

    @property
    def values(self) -> int:
        """Value head size."""
        return self.head_size if self.value_head_size is None else self.value_head_size

    @property
    def kv_width(self) -> int:
        """Numbers that a token's keys and values hold."""
        return self.kv_heads * (self.head_size + self.values)

    @property
    def options(self) -> AttentionOptions:
        """The usual scaling, and the softcap if there is one."""
        return AttentionOptions(scaling=self.head_size**-0.5, softcap=self.softcap)

    def request(self, device: torch.device, *, window: bool = False) -> KernelRequest:
        """What a kernel must be able to do for it; with a sliding window if ``window``."""
        grouped = self.heads != self.kv_heads
        capped = self.softcap is not None
        return KernelRequest(
            device.type,
            self.dtype,
            self.head_size,
            self.values,
            sliding_window=window,
            softcap=capped,
            grouped=grouped,
        )

    def random(self, queries: int, keys: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Random q, k, v and gradient of the output, the same for the same seed on one kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        sizes = (
            (queries, self.heads, self.head_size),
            (keys, self.kv_heads, self.head_size),
            (keys, self.kv_heads, self.values),
            (queries, self.heads, self.values),
        )
        return tuple(torch.randn(*size, generator=generator, device=device, dtype=self.dtype) for size in sizes)


def attention_points(longest: int = 131_072) -> list[Point]:
    """What to measure up to documents of ``longest`` tokens, on a coarse logarithmic grid.

    Lengths are half a tile (64 tokens) beyond powers of two: kernels work in tiles of about 128 tokens, of which a
    document of any length leaves half a one empty on average.

    >>> attention_points(600)  # doctest: +ELLIPSIS
    [(16, 16), (16, 32), (16, 64), (16, 128), (16, 256), (16, 600), (64, 64), ..., (576, 576), (600, 600)]
    """
    documents = [n for n in (16, 64, *(2**power + 64 for power in range(7, 40))) if n < longest]
    points = {(n, n) for n in (*documents, longest)}
    for queries in _CHUNK_QUERIES:
        keys = (min(queries * ratio, longest) for ratio in _KEYS_PER_QUERY)
        points |= {(queries, n) for n in keys if n > queries}
    return sorted(points)


def time_attention(
    kernel: AttentionKernel,
    shape: AttentionShape,
    points: Iterable[Point],
    device: torch.device,
    *,
    queries_per_call: int = 65_536,
    keys_per_call: int = 262_144,
    repeats: int = 5,
    seconds_per_point: float = 1.0,
    timer: PairTimer | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[dict[str, int | float]]:
    """The ``attention`` section of a profile, for these points.

    Args:
        kernel: What attends.
        shape: Heads and sizes.
        points: What to measure; see ``attention_points``.
        device: Where.
        queries_per_call: Queries of a call, about; a longer document has a call for itself.
        keys_per_call: Most keys of a call of chunks, which have many keys for few queries; one chunk is always taken.
        repeats: Measurements of each point, after a warm-up.
        seconds_per_point: Three are enough once they took that long.
        timer: How to time, instead of ``forward_backward_seconds`` with these repeats.
        tell: Called with a line about every point.

    Returns:
        ``q_len``, ``kv_len``, ``forward_seconds`` and ``backward_seconds``, sorted.

    Raises:
        ValueError: For a point with more queries than keys.
    """
    measure = partial(forward_backward_seconds, device=device, repeats=repeats, enough=seconds_per_point)
    time: PairTimer = measure if timer is None else timer
    calls = {point: per_call(point, queries_per_call, keys_per_call) for point in sorted(set(points))}
    queries = max((q * count for (q, _), count in calls.items()), default=0)
    keys = max((kv * count for (_, kv), count in calls.items()), default=0)
    tensors = shape.random(queries, keys, device)
    samples: list[dict[str, int | float]] = []
    for (q_len, kv_len), count in calls.items():
        segments = Segments.from_lengths([q_len] * count, [kv_len] * count, device)
        forward, backward = _time_call(kernel, shape, tensors, segments, time)
        sample = {"q_len": q_len, "kv_len": kv_len}
        samples.append({**sample, "forward_seconds": forward / count, "backward_seconds": backward / count})
        if tell is not None:
            tell(f"{count} x {q_len} queries, {kv_len} keys: {forward * 1e3:.3f} + {backward * 1e3:.3f} ms")
    return samples


def per_call(point: Point, queries_per_call: int, keys_per_call: int) -> int:
    """How many of a document or chunk share a call; see ``time_attention``."""
    q_len, kv_len = point
    if not 1 <= q_len <= kv_len:
        raise ValueError(f"a point has at least 1 query and at least as many keys, got {point}.")
    count = round(queries_per_call / q_len)
    return max(1, count if q_len == kv_len else min(count, keys_per_call // kv_len))


def _time_call(
    kernel: AttentionKernel,
    shape: AttentionShape,
    tensors: tuple[torch.Tensor, ...],
    segments: Segments,
    timer: PairTimer,
) -> tuple[float, float]:
    """Seconds of forward and backward of one call."""
    queries, keys = int(segments.q[-1]), int(segments.k[-1])
    q, k, v, dout = (tensor[:rows] for tensor, rows in zip(tensors, (queries, keys, keys, queries), strict=True))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.forward(q, k, v, segments, shape.options)

    def backward(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        kernel.backward(dout, q, k, v, *found, segments, shape.options)

    return timer(forward, backward)
