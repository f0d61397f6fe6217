"""Context-parallel attention over NCCL in bf16: as exact as one GPU, the same bits twice, within its memory."""

from typing import Any

import pytest
import torch

from tests.support.oracle import dense_attention, relative_error
from tests.support.spawn import run_distributed
from tests.support.tolerances import GPU_BF16_OVER_PLAIN_KERNEL

LENGTHS = [1, 7, 3, 4, 5, 137, 2041, 700, 350]
HEADS, SIZE = 8, 64
STRATEGIES = (("per_sequence", None), ("per_document", None), ("placed", 400), ("adaptive", None))

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _inputs(kv_heads: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(kv_heads)
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(*shape, generator=made, dtype=torch.float64).bfloat16() for shape in shapes]


def _expected(kv_heads: int) -> list[torch.Tensor]:
    q, k, v, dout = (tensor.double() for tensor in _inputs(kv_heads))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    out = dense_attention(*(leaf.transpose(0, 1)[None] for leaf in leaves), bounds)[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _attend(context: Any, plan: Any, kv_heads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Output and gradients of this rank, and the places of its tokens."""
    from hf_wlb.attention import AttentionOptions, ShardTensors, attend
    from hf_wlb.sharding import shard_layout

    layout = shard_layout(plan, context.cp_rank)
    tokens = torch.from_numpy(layout.tokens)
    q, k, v, dout = (tensor[tokens].cuda() for tensor in _inputs(kv_heads))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    shard = ShardTensors.of(layout, "cuda")
    out = attend(*leaves, shard, context, AttentionOptions(SIZE**-0.5, deterministic=context.deterministic))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)], tokens


def _kernels() -> list[str]:
    from hf_wlb.attention import available_kernels

    return [name for name in available_kernels() if name != "reference"]


def _every_strategy(rank: int, world_size: int) -> list[tuple[str, list[torch.Tensor], torch.Tensor, bool]]:
    import torch.distributed as dist

    from hf_wlb.attention import AttentionContext
    from hf_wlb.attention.kernels import KERNELS
    from hf_wlb.parallel import ProcessGroupExchange
    from hf_wlb.sharding import Sharder, ShardingConfig
    from hf_wlb.workload import AnalyticWorkload

    torch.cuda.set_device(rank)
    exchange = ProcessGroupExchange(dist.new_group(backend="nccl"))
    found = []
    for name in _kernels():
        for strategy, threshold in STRATEGIES:
            for kv_heads, groups in ((1, 1), (8, 4)):
                context = AttentionContext(
                    KERNELS[name], exchange, groups, regather=groups > 1, deterministic=name != "torch"
                )
                config = ShardingConfig(world_size, strategy, threshold)
                plan = Sharder(config, AnalyticWorkload.from_crossover(1000)).plan(LENGTHS)
                once, tokens = _attend(context, plan, kv_heads)
                twice, _ = _attend(context, plan, kv_heads)
                same = all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
                case = f"{name} {strategy} {kv_heads}"
                found.append((case, [tensor.cpu() for tensor in once], tokens, same or name == "torch"))
    return found


def test_as_exact_as_one_gpu() -> None:
    from hf_wlb.attention import AttentionContext
    from hf_wlb.attention.kernels import KERNELS
    from hf_wlb.sharding import per_document

    right = {kv_heads: _expected(kv_heads) for kv_heads in (1, 8)}
    plain = {}
    for name in _kernels():
        for kv_heads, expected in right.items():
            found, _ = _attend(AttentionContext(KERNELS[name]), per_document(LENGTHS, 1), kv_heads)
            plain[name, kv_heads] = [relative_error(f.cpu(), e) for f, e in zip(found, expected, strict=True)]
    ranks = run_distributed(_every_strategy, 2, timeout_s=400)
    for (case, one, tokens, same), (_, other, more, same_there) in zip(*ranks, strict=True):
        name, _, kv_heads = case.split()
        expected = right[int(kv_heads)]
        order = torch.cat([tokens, more])
        for part, label in enumerate(("out", "dq", "dk", "dv")):
            error = relative_error(torch.cat([one[part], other[part]]), expected[part][order])
            limit = GPU_BF16_OVER_PLAIN_KERNEL * plain[name, int(kv_heads)][part]
            assert error <= limit, f"{case} {label}: {error:.2e} > {limit:.2e}"
        assert same and same_there, f"{case}: not the same bits twice"
