"""The reference kernel: plain torch, segment by segment, on every device and in every floating dtype.

What the fused kernels are compared with, and what runs where there is none. Work is what the segments need; memory is
that of one block of scores.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from hf_wlb.attention.kernels.base import AttentionKernel, AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.segments import Segments

#: Queries that are looked at together, at most.
BLOCK = 256
#: Scores that are held at a time, about: fewer queries are looked at together where keys are many.
BLOCK_SCORES = 2**25


class Segment(NamedTuple):
    """The rows of one segment that has queries."""

    queries: slice
    keys: slice

    @property
    def is_document(self) -> bool:
        """Whether every key has its query."""
        return bool(self.queries.stop - self.queries.start == self.keys.stop - self.keys.start)


class ReferenceKernel(AttentionKernel):
    """Exact attention in plain torch; half precision is computed in float32."""

    name = "reference"

    def refusal(self, request: KernelRequest) -> str | None:
        """Takes every floating dtype, and everything else."""
        return None if request.dtype.is_floating_point else f"does not compute in {request.dtype}"

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
        out = q.new_empty(tokens, heads, v.shape[-1]) if out is None else out
        lse = torch.empty(heads, tokens, dtype=_compute_dtype(q), device=q.device)
        for segment in _with_queries(segments, q, k):
            rows, columns = segment
            attend = _attend_whole if _has_fused_form(segment, q, v, options) else _attend_in_blocks
            attend(q[rows], k[columns], v[columns], out[rows], lse[:, rows], options)
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
        """See ``AttentionKernel.backward``."""
        if into is None:
            into = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
        dq, dk, dv = into
        for gradient in (dk, dv):
            gradient.zero_()  # for keys without queries
        for segment in _with_queries(segments, q, k):
            rows, columns = segment
            gradients = _gradients_whole if _has_fused_form(segment, q, v, options) else _gradients_in_blocks
            found = gradients(dout[rows], q[rows], k[columns], v[columns], out[rows], lse[:, rows], options)
            for whole, place, part in zip((dq, dk, dv), (rows, columns, columns), found, strict=True):
                whole[place] = part
        return dq, dk, dv


def _with_queries(segments: Segments, q: torch.Tensor, k: torch.Tensor) -> list[Segment]:
    rows, columns = segments.q.tolist(), segments.k.tolist()
    if (rows[0], rows[-1], columns[0], columns[-1]) != (0, q.shape[0], 0, k.shape[0]):
        raise ValueError(
            f"segments run from query {rows[0]} to {rows[-1]} and from key {columns[0]} to {columns[-1]}, but must "
            f"cover all {q.shape[0]} queries and {k.shape[0]} keys"
        )
    found = []
    for (first, last), (start, stop) in zip(pairwise(rows), pairwise(columns), strict=True):
        if last < first or stop - start < last - first:
            raise ValueError(f"a segment of {last - first} queries does not fit its {stop - start} keys")
        if last > first:
            found.append(Segment(slice(first, last), slice(start, stop)))
    return found


def _compute_dtype(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


# ---- whole documents on a CPU: torch's own fused kernel, whose causal mask begins at the first key ----


def _has_fused_form(segment: Segment, q: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> bool:
    keys = segment.keys.stop - segment.keys.start
    unlimited = options.softcap is None and (options.sliding_window is None or options.sliding_window >= keys)
    return segment.is_document and unlimited and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _by_kv_head(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, heads, size] as [KV heads, heads per KV head, tokens, size], without a copy."""
    grouped: torch.Tensor = q.unflatten(1, (kv_heads, -1))
    return grouped.permute(1, 2, 0, 3)


def _attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, options: AttentionOptions
) -> None:
    kv_heads = k.shape[1]
    queries = _by_kv_head(q, kv_heads)
    keys, values = (_by_kv_head(tensor, kv_heads).expand_as(queries) for tensor in (k, v))  # not repeated: stride 0
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, True, scale=options.scaling
    )
    _by_kv_head(out, kv_heads).copy_(attended)
    lse.copy_(sums.flatten(0, 1))


def _gradients_whole(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads = k.shape[1]
    gradient, queries, attended = (_by_kv_head(tensor, kv_heads) for tensor in (dout, q, out))
    keys, values = (_by_kv_head(tensor, kv_heads).expand_as(queries) for tensor in (k, v))
    # In memory the tokens come before the heads, as torch's forward leaves them.
    sums = lse.t().contiguous().unflatten(1, (kv_heads, -1)).permute(1, 2, 0)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, queries, keys, values, attended, sums, 0.0, True, scale=options.scaling
    )
    return dq.permute(2, 0, 1, 3).flatten(1, 2), dk.sum(1).transpose(0, 1), dv.sum(1).transpose(0, 1)


# ---- everything else: blocks of queries with the keys that they can see ----


class _Block:
    """Some consecutive queries of a segment, and the scores of the keys that they can see.

    Attributes:
        queries: Which of the segment's queries.
        keys: Which of the segment's keys some of them sees.
        q: [KV heads, heads per KV head * queries, head size], like k and v in the dtype of the computation.
        k: [KV heads, keys, head size].
        scores: [KV heads, heads per KV head * queries, keys], -inf where a key is hidden.
        slope: Derivative of the softcap, shaped like scores; None without.
    """

    def __init__(self, queries: slice, q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> None:
        shift = k.shape[0] - q.shape[0]  # the segment's queries are the last of its keys
        first, window = queries.start + shift, options.sliding_window
        self.queries = queries
        self.keys = slice(0 if window is None else max(0, first - window + 1), queries.stop + shift)
        self.q, self.k = _rows(q[queries], k.shape[1]), _rows(k[self.keys], k.shape[1])
        scores = (self.q @ self.k.transpose(1, 2)).mul_(options.scaling)
        self.slope = None
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap)
            self.slope = 1 - scores * scores
            scores = scores * options.softcap
        count = queries.stop - queries.start
        positions = torch.arange(self.keys.start, self.keys.stop, device=q.device)
        distance = torch.arange(first, first + count, device=q.device)[:, None] - positions
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores.unflatten(1, (-1, count)).masked_fill_(hidden, float("-inf"))
        self.scores = scores


def _rows(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, heads, size] as [KV heads, heads per KV head * tokens, size] in the dtype of the computation."""
    return _by_kv_head(tensor, kv_heads).flatten(1, 2).to(_compute_dtype(tensor))


def _tokens(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Undo ``_rows``: [count, heads, size]."""
    by_head: torch.Tensor = rows.unflatten(1, (-1, count))
    return by_head.permute(2, 0, 1, 3).flatten(1, 2)


def _blocks(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> list[slice]:
    seen = k.shape[0] if options.sliding_window is None else min(k.shape[0], options.sliding_window + BLOCK)
    size = max(1, min(BLOCK, BLOCK_SCORES // (q.shape[1] * seen)))
    return [slice(first, min(first + size, q.shape[0])) for first in range(0, q.shape[0], size)]


def _attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, options: AttentionOptions
) -> None:
    for queries in _blocks(q, k, options):
        block = _Block(queries, q, k, options)
        sums = block.scores.logsumexp(-1, keepdim=True)
        weights = block.scores.sub_(sums).exp_()
        count = queries.stop - queries.start
        out[queries] = _tokens(weights @ _rows(v[block.keys], v.shape[1]), count).to(out.dtype)
        lse[:, queries] = sums.reshape(-1, count)


def _gradients_in_blocks(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads, dtype = k.shape[1], _compute_dtype(q)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(kv_heads, k.shape[0], t.shape[-1], dtype=dtype, device=q.device) for t in (k, v))
    for queries in _blocks(q, k, options):
        block = _Block(queries, q, k, options)
        gradient, attended = _rows(dout[queries], kv_heads), _rows(out[queries], kv_heads)
        weights = block.scores.sub_(lse[:, queries].reshape(kv_heads, -1, 1)).exp_()
        dv[:, block.keys] += weights.transpose(1, 2) @ gradient
        dscores = gradient @ _rows(v[block.keys], kv_heads).transpose(1, 2)
        dscores.sub_((gradient * attended).sum(-1, keepdim=True)).mul_(weights).mul_(options.scaling)
        if block.slope is not None:
            dscores.mul_(block.slope)
        dq[queries] = _tokens(dscores @ block.k, queries.stop - queries.start)
        dk[:, block.keys] += dscores.transpose(1, 2) @ block.q
    return dq, dk.transpose(0, 1), dv.transpose(0, 1)
