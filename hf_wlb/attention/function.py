"""Exact attention on one rank's shard of a micro-batch, forward and backward.

Local documents attend straight to local keys and values. Those of sharded documents are gathered from all ranks, one
group of KV heads after the other. Putting them into document order picks, for each head and each tail chunk, the prefix
of its document that it reads: one copy, an eighth more than a copy of everything on four ranks, and one kernel call.
The first gather runs while local documents are attended to, later ones while the group before is (or all at once, where
they are kept for backward); in backward, so do the reductions of gradients. Local documents come in parts there, some
heads before the groups and some after them, for the first gather and the last reduction to run meanwhile.

Memory is held no longer than needed, for that of backward is what a layer takes at its peak: lists of tensors are
emptied as they are used up, and what a group was given is let go before its reduction begins. See
``hf_wlb.attention.groups`` for how many groups there are, and what they take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_wlb.attention.context import AttentionContext, KeyValueExchange, Pending, PendingSum, ShardTensors
from hf_wlb.attention.groups import Backward, ExchangeSizes, HeadGroup, head_groups
from hf_wlb.attention.kernels import AttentionKernel, AttentionOptions, KernelRequest, choose_kernel
from hf_wlb.attention.kernels.selection import obstacle
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
    kernel = _check_plan(q, k, v, shard, context, options)
    call = _Call(kernel, shard, context, options)
    output: torch.Tensor = _ShardAttention.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
    return output


#: Documents whose overlapping gradients are added up one by one; more are, all at once, by index.
MOST_SLICES = 16

_fastest, _obstacle = cache(choose_kernel), cache(obstacle)  # asked in every layer


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: ShardTensors,
    context: AttentionContext,
    options: AttentionOptions,
) -> AttentionKernel:
    """The kernel to use, once all ranks can go on: a rank that raised alone would leave the others waiting."""
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
    try:
        kernel = _kernel(context, kernel_request(q, k, v, options))
    except ValueError as error:
        problem = problem or str(error)
    if context.exchange is not None:
        call = (
            f"{q.shape[1]} heads, {k.shape[1]} KV heads, head sizes {k.shape[2]} and {v.shape[2]}, {k.dtype}, "
            f"{options}, kv_head_groups {context.kv_head_groups}, regather {context.regather}"
        )
        context.exchange.agree(shard, call, problem)
    if problem is not None:
        raise ValueError(problem)
    return kernel


def _kernel(context: AttentionContext, request: KernelRequest) -> AttentionKernel:
    kernel = context.kernel
    if kernel is None:
        return _fastest(request)
    if reason := _obstacle(kernel, request):
        raise ValueError(f"the context's attention kernel {kernel.name!r} was given {request}, but it {reason}")
    return kernel


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a shard that share a kernel call."""

    tokens: slice
    segments: Segments


# Of keys and of values, in this order; whoever uses them up empties the list.
_Gathers = list[Pending]
_Reductions = list[PendingSum]
_KeyValue = tuple[torch.Tensor, torch.Tensor]


class _Call:
    """What one call of ``attend`` knows besides its tensors."""

    def __init__(
        self, kernel: AttentionKernel, shard: ShardTensors, context: AttentionContext, options: AttentionOptions
    ) -> None:
        self.kernel, self.shard, self.context, self.options = kernel, shard, context, options
        local = shard.local_tokens
        self.local = _Part(slice(0, local), shard.local) if local else None
        self.chunks = _Part(slice(local, shard.tokens), shard.chunks)
        self.exchanges = shard.gathered_tokens > 0  # on any rank, perhaps not on this one

    @property
    def exchange(self) -> KeyValueExchange:
        assert self.context.exchange is not None, "a plan with sharded documents is for several ranks"
        return self.context.exchange

    def _sizes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ExchangeSizes:
        return ExchangeSizes(
            padded=self.shard.padded,
            cp_size=self.shard.cp_size,
            gathered_tokens=self.shard.gathered_tokens,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_size=k.shape[2],
            value_head_size=v.shape[2],
            item=k.element_size(),
        )

    def forward_groups(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> list[HeadGroup]:
        """The groups of KV heads in forward, whose keys and values backward finds again where they are kept."""
        if not self.exchanges:
            return []
        count = self.context.kv_head_groups
        if count is None:
            sizes = self._sizes(q, k, v)
            count = sizes.kept_groups() if keep else sizes.forward_groups()
        return head_groups(count, q.shape[1], k.shape[1])

    def backward_groups(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[list[HeadGroup], list[HeadGroup], bool]:
        """Where keys and values are gathered again: their groups, local documents' parts, and ``Backward.overlap``."""
        heads = q.shape[1], k.shape[1]
        if not self.exchanges:
            return [], head_groups(1, *heads), False
        count, sizes = self.context.kv_head_groups, self._sizes(q, k, v)
        chosen = sizes.backward() if count is None else Backward(min(count, k.shape[1]), overlap=True)
        parts = head_groups(sizes.local_parts(self.shard.local_tokens, chosen.groups), *heads)
        return head_groups(chosen.groups, *heads), parts, chosen.overlap

    @contextlib.contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        if self.context.meter is None:
            yield
        else:
            with self.context.meter.measure(device):
                yield

    # ---- the exchange ----

    def gather(self, k: torch.Tensor, v: torch.Tensor, group: HeadGroup) -> _Gathers:
        """Start gathering a group's keys and values; padding is left as it is, because ``order`` skips it."""
        return [self._gather(tensor[self.chunks.tokens, group.kv_heads]) for tensor in (k, v)]

    def _gather(self, own: torch.Tensor) -> Pending:
        if own.shape[0] < self.shard.padded or not own.is_contiguous():
            part = own.new_empty(self.shard.padded, *own.shape[1:])
            part[: own.shape[0]] = own
            own = part
        return self.exchange.gather(own)

    def pick(self, gathers: _Gathers) -> _KeyValue:
        """Keys and values that this rank's chunks read, every chunk's in one piece; uses the gathers up."""
        return self._pick(gathers.pop(0)), self._pick(gathers.pop(0))

    def _pick(self, gather: Pending) -> torch.Tensor:
        return gather.wait().index_select(0, self.shard.order)

    def reduce(self, gradients: list[torch.Tensor]) -> _Reductions:
        """Start adding a group's gradients up over the ranks.

        Args:
            gradients: Of the keys and values that were picked, with one row more; used up.
        """
        reductions: _Reductions = []
        while gradients:
            reductions.append(self.exchange.reduce_scatter(self._by_place(gradients.pop(0))))
        return reductions

    def _by_place(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradients of picked keys as the gathered ones lie, those that were picked twice added up."""
        overlaps = self.shard.overlaps
        if len(overlaps) <= MOST_SLICES:
            for head, tail, count in overlaps:
                gradient[tail : tail + count].add_(gradient[head : head + count])
        else:
            heads, tails = self.shard.overlapping_rows
            gradient.index_copy_(0, tails, gradient.index_select(0, tails).add_(gradient.index_select(0, heads)))
        gradient[-1] = 0  # for keys that this rank did not read, and for padding
        return gradient.index_select(0, self.shard.inverse)

    def receive(self, group: HeadGroup, reductions: _Reductions, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Put the sums of a group's gradients where they belong, padding left out; uses the reductions up."""
        for gradient in (dk, dv):
            reductions.pop(0).wait(into=gradient[self.chunks.tokens, group.kv_heads])

    # ---- the kernel ----

    def forward(
        self, part: _Part, heads: slice, q: torch.Tensor, kv: _KeyValue, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Attention of a part's query heads, into ``out`` and ``lse`` of the whole shard."""
        own = out[part.tokens, heads]
        memory = own if own.is_contiguous() else None
        with self.measured(q.device):
            found = self.kernel.forward(q[part.tokens, heads], *kv, part.segments, self.options, memory)
        if memory is None:
            own.copy_(found[0])
        lse[heads, part.tokens] = found[1]

    def backward(
        self,
        part: _Part,
        heads: slice,
        saved: tuple[torch.Tensor, ...],
        kv: _KeyValue,
        dq: torch.Tensor,
        dkv: _KeyValue,
    ) -> None:
        """Gradients of a part's query heads, into ``dq`` of the whole shard and ``dkv`` of the keys given."""
        dout, q, out, lse = (tensor[part.tokens, heads] for tensor in saved)
        places = (dq[part.tokens, heads], *dkv)
        dense = (_dense(places[0]), _dense(places[1]), _dense(places[2]))
        with self.measured(q.device):
            self.kernel.backward(dout, q, *kv, out, lse.t().contiguous(), part.segments, self.options, dense)
        for place, memory in zip(places, dense, strict=True):
            if memory is not place:
                place.copy_(memory)

    def backward_local(
        self,
        parts: list[HeadGroup],
        saved: tuple[torch.Tensor, ...],
        k: torch.Tensor,
        v: torch.Tensor,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Gradients of local documents, some of the heads after the other."""
        if self.local is None:
            return
        for part in parts:
            own = (self.local.tokens, part.kv_heads)
            dq, dk, dv = gradients
            self.backward(self.local, part.heads, saved, (k[own], v[own]), dq, (dk[own], dv[own]))


def _dense(place: torch.Tensor) -> torch.Tensor:
    """Memory for a kernel's results: where they belong, if that is in one piece."""
    return place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)


class _ShardAttention(torch.autograd.Function):
    """See ``attend``; saves q, k, v, the output and log-sum-exps, and gathered keys only where asked to."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        lse_type = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=lse_type)
        keep = not call.context.regather and any(ctx.needs_input_grad)
        groups = call.forward_groups(q, k, v, keep)
        # What is kept anyway is gathered before anything else: begun after local documents, a gather would wait for
        # the rank that has most of them. Otherwise one group ahead, for less memory.
        ahead = len(groups) if keep else 1
        gathers = [call.gather(k, v, group) for group in groups[:ahead]]
        if call.local is not None:  # hides them
            tokens = call.local.tokens
            call.forward(call.local, slice(None), q, (k[tokens], v[tokens]), out, lse)
        kept: list[torch.Tensor] = []
        for number, group in enumerate(groups):
            kv = call.pick(gathers.pop(0))
            if ahead + number < len(groups):
                gathers.append(call.gather(k, v, groups[ahead + number]))
            if call.shard.exchanged_tokens:
                call.forward(call.chunks, group.heads, q, kv, out, lse)
            if keep:
                kept += kv
            del kv  # before the next group's are picked
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
        # Kernels write into slices of these, whatever the strides of q, k and v are.
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        saved = (dout, q, out, lse.t())
        gradients = (dq, dk, dv)
        if kept:  # local documents hide the last reduction
            groups, overlap = call.forward_groups(q, k, v, keep=True), True
            before, after = [], head_groups(1, q.shape[1], k.shape[1])
        else:
            groups, parts, overlap = call.backward_groups(q, k, v)
            half = (len(parts) + 1) // 2 if groups else 0
            before, after = parts[:half], parts[half:]
        gathers = call.gather(k, v, groups[0]) if groups and not kept else []
        call.backward_local(before, saved, k, v, gradients)
        reductions: _Reductions = []  # of the group before
        for number, group in enumerate(groups):
            kv = (kept[2 * number], kept[2 * number + 1]) if kept else call.pick(gathers)
            if not kept and number + 1 < len(groups):
                gathers = call.gather(k, v, groups[number + 1])
            if reductions and not overlap:
                call.receive(groups[number - 1], reductions, dk, dv)
            dkv = [_one_row_more(tensor) for tensor in kv]
            if call.shard.exchanged_tokens:
                call.backward(call.chunks, group.heads, saved, kv, dq, (dkv[0][:-1], dkv[1][:-1]))
            del kv
            if reductions:
                call.receive(groups[number - 1], reductions, dk, dv)
            reductions = call.reduce(dkv)
        call.backward_local(after, saved, k, v, gradients)
        if reductions:
            call.receive(groups[-1], reductions, dk, dv)
        dsinks = None if sinks is None else _backward_sinks(dout, out, lse, sinks)
        return dq, dk, dv, dsinks, None


def _one_row_more(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(like.shape[0] + 1, *like.shape[1:])


def _backward_sinks(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The sink's share of the softmax takes ``dout . out`` away from its score."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sinks.dtype)
