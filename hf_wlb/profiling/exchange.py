"""Measures what exchanging keys, values and their gradients costs a layer, as context parallelism does it.

That is more than bare collectives: keys and values are packed and put into document order, gathered again in backward
where so configured, and done in groups of heads. So ``attend`` itself is timed, with a kernel that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from hf_wlb.attention.context import AttentionContext, ShardTensors
from hf_wlb.attention.function import attend
from hf_wlb.profiling.attention import AttentionShape
from hf_wlb.profiling.no_kernel import NoKernel
from hf_wlb.profiling.timing import median_seconds
from hf_wlb.sharding import per_document, shard_layout

OPERATION = "key_value_exchange"
"""What profiles call it: forward plus backward of one layer; bytes are those of all ranks' keys and values."""


def time_exchange(
    context: AttentionContext,
    shape: AttentionShape,
    token_counts: Iterable[int],
    device: torch.device,
    repeats: int = 7,
) -> list[dict[str, str | int | float]]:
    """Samples for a profile's ``collectives``: one sharded document of so many tokens each. All ranks call together.

    Args:
        context: How this process attends; its kernel is not used.
        shape: Heads and sizes.
        token_counts: Tokens of all ranks together; rounded up to a multiple of 2 cp_size.
        device: Where.
        repeats: Measurements of each; the slowest rank's median is taken.

    Returns:
        Sorted samples, the same on every rank; none where there is only one.
    """
    exchange = context.exchange
    if exchange is None or exchange.size == 1:
        return []
    unit = 2 * exchange.size
    counts = sorted({-(-count // unit) * unit for count in token_counts})
    idle = replace(context, kernel=NoKernel(), meter=None)
    few_heads = replace(shape, heads=shape.kv_heads)  # queries take no part, so as few as there can be
    own = [_time(idle, few_heads, count, device, repeats) for count in counts]
    gathered = exchange.gather(torch.tensor([own], dtype=torch.float32, device=device)).wait()
    slowest = gathered.max(dim=0).values.tolist()
    size = shape.kv_width * shape.dtype.itemsize
    return [
        {"operation": OPERATION, "group_size": exchange.size, "bytes": count * size, "seconds": seconds}
        for count, seconds in zip(counts, slowest, strict=True)
    ]


def _time(context: AttentionContext, shape: AttentionShape, tokens: int, device: torch.device, repeats: int) -> float:
    shard = ShardTensors.of(shard_layout(per_document([tokens], context.cp_size), context.cp_rank), device)
    q, k, v, dout = shape.random(shard.tokens, shard.tokens, device)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def run() -> None:
        torch.autograd.grad(attend(q, k, v, shard, context, shape.options), inputs, dout)

    def meet() -> None:
        assert context.exchange is not None
        context.exchange.gather(q.new_zeros(1, 1)).wait()

    return median_seconds(run, meet, device=device, repeats=repeats)
