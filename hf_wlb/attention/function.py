"""Exact attention on one rank's shard of a micro-batch, forward and backward.

Local documents attend straight to local keys and values. Those of sharded documents are gathered from all ranks, one
group of KV heads after the other, and put into document order once; head chunks and tail chunks then read prefixes of
them in place (DESIGN 4: rows without queries step over the rest). The first gather runs while local documents are
attended to, later ones while the group before is; in backward, so do the reduce-scatters of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_wlb.attention.context import AttentionContext, KeyValueExchange, Pending, ShardTensors
from hf_wlb.attention.kernels import AttentionKernel, AttentionOptions, KernelRequest, choose_kernel
from hf_wlb.attention.segments import Segments


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: ShardTensors,
    context: AttentionContext,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token attends to its own document up to itself, wherever its keys and values are.

    All ranks of ``context.exchange`` must call this together, with their shards of one micro-batch; so must backward.

    Args:
        q: [tokens, heads, head size], the shard's queries in the plan's order.
        k: [tokens, KV heads, head size].
        v: [tokens, KV heads, value head size].
        shard: This rank's plan.
        context: How to attend.
        options: What shapes the scores.
        sinks: [heads], a score per head that takes part in the softmax without a value.

    Returns:
        [tokens, heads, value head size], differentiable in q, k, v and sinks.

    Raises:
        ValueError: If the plan is for other tensors or ranks, or no kernel can do what is asked.

    Two documents of 3 and 2 tokens on one rank:
        >>> from hf_wlb.sharding import per_document, shard_layout
        >>> shard = ShardTensors.of(shard_layout(per_document([3, 2], cp_size=1), rank=0))
        >>> q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
        >>> out = attend(q, k, k, shard, AttentionContext(), AttentionOptions(scaling=8**-0.5))
        >>> torch.allclose(out[3, 0], k[3, 0], atol=1e-6)  # a document's first token sees only itself
        True
    """
    _check_plan(q, k, v, shard, context)
    kernel = context.kernel or _fastest(kernel_request(q, k, v, options))
    call = _Call(kernel, shard, context, options)
    output: torch.Tensor = _ShardAttention.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
    return output


_fastest = cache(choose_kernel)  # asked in every layer


def kernel_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> KernelRequest:
    """What a call asks of a kernel; tensors [tokens, heads, head size]."""
    return KernelRequest(
        device_type=q.device.type,
        dtype=q.dtype,
        head_size=q.shape[-1],
        value_head_size=v.shape[-1],
        sliding_window=options.sliding_window is not None,
        softcap=options.softcap is not None,
        deterministic=options.deterministic,
        grouped=q.shape[1] != k.shape[1],
    )


def _check_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shard: ShardTensors, context: AttentionContext
) -> None:
    problem = None
    if not q.shape[0] == k.shape[0] == v.shape[0] == shard.tokens:
        problem = (
            f"the plan is for a shard of {shard.tokens} tokens, but the model was given {q.shape[0]}: feed it the "
            "input_ids and position_ids that came with the plan"
        )
    elif (shard.cp_size, shard.rank) != (context.cp_size, context.cp_rank):
        problem = (
            f"the plan is for rank {shard.rank} of {shard.cp_size} context-parallel ranks, but this process is rank "
            f"{context.cp_rank} of {context.cp_size}: give the collator the same cp_rank and cp_size as the context"
        )
    if context.exchange is not None:
        context.exchange.agree(shard.digest, problem)
    if problem is not None:
        raise ValueError(problem)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a shard that share a kernel call."""

    tokens: slice
    segments: Segments


@dataclass(frozen=True, slots=True)
class _Group:
    """KV heads that are exchanged together, and the query heads that read them."""

    kv_heads: slice
    heads: slice


class _Call:
    """What one call of ``attend`` knows besides its tensors."""

    def __init__(
        self, kernel: AttentionKernel, shard: ShardTensors, context: AttentionContext, options: AttentionOptions
    ) -> None:
        self.kernel, self.shard, self.context, self.options = kernel, shard, context, options
        local, head = shard.local_tokens, shard.local_tokens + shard.head_tokens
        self.exchanged = slice(local, shard.tokens)
        self.local = _Part(slice(0, local), shard.local) if local else None
        chunks = (_Part(slice(local, head), shard.head), _Part(slice(head, shard.tokens), shard.tail))
        self.chunks = [part for part in chunks if part.tokens.stop > part.tokens.start]
        self.exchanges = shard.gathered_tokens > 0  # on any rank, perhaps not on this one

    @property
    def exchange(self) -> KeyValueExchange:
        assert self.context.exchange is not None, "a plan with sharded documents is for several ranks"
        return self.context.exchange

    def groups(self, heads: int, kv_heads: int) -> list[_Group]:
        """KV heads dealt evenly to the context's number of groups."""
        if not self.exchanges:
            return []
        count = min(self.context.kv_head_groups, kv_heads)
        bounds = [kv_heads * number // count for number in range(count + 1)]
        shared = heads // kv_heads
        return [_Group(slice(first, last), slice(first * shared, last * shared)) for first, last in pairwise(bounds)]

    @contextlib.contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        if self.context.meter is None:
            yield
        else:
            with self.context.meter.measure(device):
                yield

    # ---- the exchange ----

    def gather(self, k: torch.Tensor, v: torch.Tensor, group: _Group) -> Pending:
        """Start gathering a group's keys and values; padding is left as it is, because ``order`` skips it."""
        k, v = k[self.exchanged, group.kv_heads], v[self.exchanged, group.kv_heads]
        width = k[0:1].numel() if k.shape[0] else k.shape[1] * k.shape[2]
        part = k.new_empty(self.shard.padded, width + v.shape[1] * v.shape[2])
        part[: k.shape[0], :width] = k.flatten(1)
        part[: v.shape[0], width:] = v.flatten(1)
        return self.exchange.gather(part)

    def in_document_order(self, gathered: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _Group) -> _KeyValue:
        """Keys and values of all sharded documents, each document's in one piece."""
        kv_heads = group.kv_heads.stop - group.kv_heads.start
        width = kv_heads * k.shape[2]
        order = self.shard.order
        keys = gathered[:, :width].index_select(0, order).view(-1, kv_heads, k.shape[2])
        values = gathered[:, width:].index_select(0, order).view(-1, kv_heads, v.shape[2])
        return keys, values

    def reduce(self, dk: torch.Tensor, dv: torch.Tensor) -> Pending:
        """Start adding a group's gradients up over the ranks; padding is added up too, and thrown away."""
        dtype = torch.promote_types(dk.dtype, torch.float32) if self.context.reduce_in_fp32 else dk.dtype
        width = dk.shape[1] * dk.shape[2]
        rows = self.exchange.size * self.shard.padded
        parts = dk.new_empty(rows, width + dv.shape[1] * dv.shape[2], dtype=dtype)
        parts[:, :width].index_copy_(0, self.shard.order, dk.flatten(1).to(dtype))
        parts[:, width:].index_copy_(0, self.shard.order, dv.flatten(1).to(dtype))
        return self.exchange.reduce_scatter(parts)


_KeyValue = tuple[torch.Tensor, torch.Tensor]


class _ShardAttention(torch.autograd.Function):
    """See ``attend``; saves q, k, v, the output and log-sum-exps, and gathered keys only where asked to."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        lse_type = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=lse_type)
        groups = call.groups(q.shape[1], k.shape[1])
        pending = call.gather(k, v, groups[0]) if groups else None
        everything = slice(None)
        if call.local is not None:
            tokens = call.local.tokens
            _forward(call, call.local, everything, q, k[tokens], v[tokens], out, lse)
        kept: list[torch.Tensor] = []
        for number, group in enumerate(groups):
            assert pending is not None
            ahead = call.gather(k, v, groups[number + 1]) if number + 1 < len(groups) else None
            keys, values = call.in_document_order(pending.wait(), k, v, group)
            pending = ahead
            for part in call.chunks:
                _forward(call, part, group.heads, q, keys, values, out, lse)
            if not call.context.regather:
                kept += [keys, values]
        if sinks is not None:
            column = sinks.to(lse_type)[:, None]
            out = (out * torch.sigmoid(lse - column).t()[..., None]).to(out.dtype)
            lse = torch.logaddexp(lse, column)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, sinks, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        q, k, v, out, lse, sinks, *kept = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        groups = call.groups(q.shape[1], k.shape[1])
        pending = call.gather(k, v, groups[0]) if groups and not kept else None
        saved = (dout, q, out, lse)
        if call.local is not None and not kept:  # hides the first gather
            _backward_local(call, saved, k, v, dq, dk, dv)
        reductions: list[Pending] = []
        for number, group in enumerate(groups):
            if kept:
                keys, values = kept[2 * number : 2 * number + 2]
            else:
                assert pending is not None
                ahead = call.gather(k, v, groups[number + 1]) if number + 1 < len(groups) else None
                keys, values = call.in_document_order(pending.wait(), k, v, group)
                pending = ahead
            reductions.append(call.reduce(*_backward_chunks(call, group, saved, keys, values, dq)))
            if number:
                _receive(call, groups[number - 1], reductions[number - 1], dk, dv)
        if call.local is not None and kept:  # hides the last reduction
            _backward_local(call, saved, k, v, dq, dk, dv)
        if groups:
            _receive(call, groups[-1], reductions[-1], dk, dv)
        dsinks = None if sinks is None else _backward_sinks(dout, out, lse, sinks)
        return dq, dk, dv, dsinks, None


def _forward(
    call: _Call,
    part: _Part,
    heads: slice,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    with call.measured(q.device):
        found = call.kernel.forward(q[part.tokens, heads], keys, values, part.segments, call.options)
    out[part.tokens, heads], lse[heads, part.tokens] = found


def _backward_part(
    call: _Call, part: _Part, heads: slice, saved: tuple[torch.Tensor, ...], keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout, q, out, lse = saved
    own = (part.tokens, heads)
    with call.measured(q.device):
        return call.kernel.backward(
            dout[own],
            q[own],
            keys,
            values,
            out[own],
            lse[heads, part.tokens].contiguous(),
            part.segments,
            call.options,
        )


def _backward_local(
    call: _Call,
    saved: tuple[torch.Tensor, ...],
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    assert call.local is not None
    own = call.local.tokens
    dq[own], dk[own], dv[own] = _backward_part(call, call.local, slice(None), saved, k[own], v[own])


def _backward_chunks(
    call: _Call,
    group: _Group,
    saved: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    values: torch.Tensor,
    dq: torch.Tensor,
) -> _KeyValue:
    """This rank's part of the gradients of a group's gathered keys and values."""
    dkeys: torch.Tensor | None = None
    dvalues: torch.Tensor | None = None
    for part in call.chunks:
        own, dk, dv = _backward_part(call, part, group.heads, saved, keys, values)
        dq[part.tokens, group.heads] = own
        dkeys = dk if dkeys is None else dkeys.add_(dk)
        dvalues = dv if dvalues is None else dvalues.add_(dv)
    if dkeys is None or dvalues is None:  # this rank holds local documents only
        return torch.zeros_like(keys), torch.zeros_like(values)
    return dkeys, dvalues


def _receive(call: _Call, group: _Group, reduction: Pending, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Put the sum of a group's gradients where it belongs; what lies behind this rank's tokens is padding."""
    reduced = reduction.wait()[: call.shard.exchanged_tokens]
    own = (call.exchanged, group.kv_heads)
    width = dk[own].shape[1] * dk.shape[2]
    dk[own] = reduced[:, :width].view(dk[own].shape)
    dv[own] = reduced[:, width:].view(dv[own].shape)


def _backward_sinks(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The sink's share of the softmax takes ``dout . out`` away from its score."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sinks.dtype)
