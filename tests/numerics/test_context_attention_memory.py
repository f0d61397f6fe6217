"""Peak memory of a layer's attention on shards: every tensor that is alive counted, on the device without memory.

Tensors on ``meta`` have sizes and no numbers, so micro-batches of real length cost nothing. The kernel takes what
FlashAttention 4 takes, see ``ExchangeSizes``; the exchange holds what a process group's does while it is under way.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_wlb.attention import AttentionContext, AttentionOptions, ShardTensors, attend
from hf_wlb.attention.function import _Call
from hf_wlb.attention.groups import GATHERED_FACTOR, Backward, ExchangeSizes
from hf_wlb.profiling.no_kernel import NoKernel
from hf_wlb.sharding import Sharder, ShardingConfig, ShardPlan, per_document, shard_layout
from hf_wlb.workload import AnalyticWorkload

HEADS, SIZE = 32, 128
#: A long document and short ones, 131,072 tokens as in the benchmark of context parallelism.
LENGTHS = [90_000, 4712, 2049, 4071, 5511, 2788, 5049, 4365, 5467, 2311, 4103, 646]
#: Log-sum-exps lie between forward and backward; over gathered keys and values.
SMALL = 0.05


class LiveMemory(TorchDispatchMode):
    """Counts bytes of storages from the operator that makes them until they are let go.

    Args:
        apart: Tensors that are not counted.
    """

    def __init__(self, apart: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in apart}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


class WorkspaceKernel(NoKernel):
    """Allocates what FlashAttention 4 does in backward, and nothing else happens."""

    def backward(self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        work = [q.new_empty(q.shape, dtype=torch.float32)]
        if q.shape[1] > k.shape[1]:
            work += [tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (k, v)]
        assert all(tensor.is_contiguous() for tensor in rest[-1])
        return super().backward(dout, q, k, v, *rest)


@dataclass
class Started:
    """Holds what it sent until its result is used, as ``ProcessGroupExchange`` does."""

    result: torch.Tensor
    sent: torch.Tensor

    def wait(self, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is not None:
            into.copy_(self.result[: len(into)])
        return self.result


@dataclass
class Sizes:
    """An exchange of one process: memory is what it is with others, nothing comes."""

    rank: int
    size: int
    gathers: int = 0

    def gather(self, part: torch.Tensor) -> Started:
        self.gathers += 1
        return Started(part.new_empty(self.size * part.shape[0], *part.shape[1:]), part)

    def reduce_scatter(self, parts: torch.Tensor) -> Started:
        return Started(torch.empty_like(parts), parts)

    def agree(self, shard: ShardTensors, call: str, problem: str | None) -> None:
        assert problem is None


@dataclass(frozen=True)
class Peaks:
    """Bytes that are there at a time beyond local tensors, on one rank.

    Attributes:
        forward: Most in forward, over q, k, v, the output and its gradient.
        backward: Most in backward, over these and the gradients of q, k and v.
        between: From forward to backward, as in forward.
        local: q, k, v, the output and their gradients.
        gradients: Gradients of q, k and v.
        sizes: Of the exchange.
        gathers: Tensors gathered in forward and in backward.
    """

    forward: int
    backward: int
    between: int
    local: int
    gradients: int
    sizes: ExchangeSizes
    gathers: tuple[int, int]

    @property
    def over_allowed(self) -> float:
        """The peak over what the benchmark allows, with its reckoning."""
        peak = self.local + max(self.backward, self.forward - self.gradients)
        return peak / (self.local + GATHERED_FACTOR * self.sizes.gathered_bytes)


def peaks(plan: ShardPlan, rank: int, kv_heads: int, heads: int = HEADS, **settings: Any) -> Peaks:
    shard = ShardTensors.of(shard_layout(plan, rank), "meta")
    shapes = ((heads, SIZE), (kv_heads, SIZE), (kv_heads, SIZE), (heads, SIZE))
    q, k, v, dout = (torch.empty(shard.tokens, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    exchange = Sizes(rank, plan.cp_size)
    context = AttentionContext(kernel=WorkspaceKernel(), exchange=exchange, **settings)
    memory = LiveMemory([*leaves, dout, shard.order, shard.inverse])
    with memory:
        out = attend(q, k, v, shard, context, AttentionOptions(scaling=1.0))
        own = out.nbytes
        forward, between, memory.peak = memory.peak - own, memory.now - own, memory.now
        in_forward = exchange.gathers
        gradients = sum(tensor.nbytes for tensor in torch.autograd.grad(out, leaves, dout))
        backward = memory.peak - own - gradients
    local = 2 * (gradients + own)
    sizes = ExchangeSizes(shard.padded, plan.cp_size, shard.gathered_tokens, heads, kv_heads, SIZE, SIZE, item=2)
    return Peaks(forward, backward, between, local, gradients, sizes, (in_forward, exchange.gathers - in_forward))


def placed(cp_size: int) -> ShardPlan:
    """The long document cut, the others whole on some rank."""
    plan = Sharder(ShardingConfig(cp_size, "placed"), AnalyticWorkload.from_crossover(8192)).plan(LENGTHS)
    assert plan.sharded.tolist() == [0]
    return plan


@pytest.mark.parametrize(("kv_heads", "cp_size"), [(8, 2), (8, 4), (8, 8), (32, 2), (32, 4), (32, 8)])
def test_a_layer_stays_within_what_is_allowed(kv_heads: int, cp_size: int) -> None:
    """And neither half of the groups that are chosen would, nor one group."""
    for plan in (placed(cp_size), per_document(LENGTHS, cp_size)):
        for rank in {0, cp_size - 1}:
            found = peaks(plan, rank, kv_heads)
            assert found.over_allowed <= 1
            in_backward = found.gathers[1] // 2
            assert in_backward == found.sizes.backward().groups > 1
            for fewer in {1, in_backward // 2}:
                assert peaks(plan, rank, kv_heads, kv_head_groups=fewer).over_allowed > 1.05


@pytest.mark.parametrize(("heads", "kv_heads", "cp_size"), [(32, 8, 4), (32, 32, 4), (64, 8, 2), (32, 2, 8), (8, 1, 2)])
def test_the_prediction_is_what_is_there(heads: int, kv_heads: int, cp_size: int) -> None:
    plan = per_document([65_536], cp_size)
    counts = [groups for groups in (1, 2, 4, 8) if groups <= kv_heads]
    for groups in counts:
        found = peaks(plan, 0, kv_heads, heads, kv_head_groups=groups)
        assert found.gathers == (2 * groups, 2 * groups)
        most = 1.03 if groups > 1 else 1 + 0.5 / cp_size  # all heads of a contiguous tensor are sent as they lie
        assert 0.98 < found.sizes.backward_bytes(groups) / found.backward < most
        assert 0.98 < found.sizes.forward_bytes(groups) / (found.forward - found.between) < most
    chosen = peaks(plan, 0, kv_heads, heads)
    backward = chosen.sizes.backward()
    assert 0.98 < chosen.sizes.backward_bytes(backward.groups, backward.overlap) / chosen.backward < most
    assert chosen.backward <= found.backward and chosen.between < SMALL * chosen.sizes.gathered_bytes


def test_adding_up_gradients_before_the_next_call_takes_less() -> None:
    """Where one KV head at a time is too much for both to be under way."""
    found = peaks(placed(2), 0, 8)
    assert found.sizes.backward() == Backward(8, overlap=False)
    assert found.over_allowed <= 1 < peaks(placed(2), 0, 8, kv_head_groups=8).over_allowed


def test_kept_keys_and_values_are_gathered_once_and_there_in_between() -> None:
    found = peaks(placed(4), 0, 8, regather=False)
    assert found.gathers[1] == 0 and found.gathers[0] == 2 * found.sizes.kept_groups()
    assert 1.1 < found.between / found.sizes.gathered_bytes < 1.15


def test_control_what_is_held_on_to_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    pick = _Call._pick
    monkeypatch.setattr(_Call, "_pick", lambda call, gather: pick(call, held.append(gather) or gather))
    assert peaks(placed(4), 0, 8).over_allowed > 1.1 and len(held) == 4 + 16


def test_figures_that_ranks_do_not_share_change_no_group() -> None:
    """A rank with other groups than the rest would wait for ever."""
    plan = placed(4)
    layouts = [shard_layout(plan, rank) for rank in range(4)]
    assert len({layout.local_tokens for layout in layouts}) == 4
    found = [peaks(plan, rank, 8) for rank in range(4)]
    assert len({row.gathers for row in found}) == len({row.sizes for row in found}) == 1


def test_little_is_gathered_at_once() -> None:
    found = peaks(per_document([1024, 512], 2), 0, 8)
    assert found.gathers == (2, 2) and found.backward < found.sizes.allowed


@pytest.mark.parametrize("kv_heads", [1, 2, 7, 12])
def test_groups_are_of_one_size(kv_heads: int) -> None:
    sizes = ExchangeSizes(32_768, 4, 131_072, 84, kv_heads, SIZE, SIZE, item=2)
    for groups in (sizes.forward_groups(), sizes.kept_groups(), sizes.backward().groups):
        assert kv_heads % groups == 0
    assert sizes.local_parts(20_000, 1) in range(1, kv_heads + 1)
