"""Attention on shards, all ranks in one process: exact for every strategy, and the tests notice what breaks it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hf_wlb.attention import AttentionContext, AttentionOptions, KernelMeter, Segments, ShardTensors, attend
from hf_wlb.attention.groups import Backward, ExchangeSizes
from hf_wlb.attention.kernels import ReferenceKernel
from hf_wlb.sharding import Sharder, ShardingConfig, ShardLayout, ShardPlan, per_document, per_sequence, shard_layout
from hf_wlb.workload import AnalyticWorkload
from tests.support.exchange import DoneSum, ThreadExchange, ThreadGroup, poisoned_memory
from tests.support.oracle import dense_attention, relative_error
from tests.support.tolerances import ATTENTION_FLOAT32, NEGATIVE_CONTROL_FACTOR

HEADS, KV_HEADS, SIZE = 8, 1, 8
WORKLOAD = AnalyticWorkload.from_crossover(200, exchange_per_token=0.1)


def special_lengths(cp: int) -> list[int]:
    return [1, max(2 * cp - 1, 1), 2 * cp, 2 * cp + 1, 7, 137, 2041]


def plan_of(strategy: str, lengths: Sequence[int], cp: int, threshold: int | None = None) -> ShardPlan:
    return Sharder(ShardingConfig(cp, strategy, threshold), WORKLOAD).plan(lengths)  # type: ignore[arg-type]


@dataclasses.dataclass
class Inputs:
    """Tensors of a whole micro-batch [tokens, heads, head size], the output's gradient and sinks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sinks: torch.Tensor | None = None

    @classmethod
    def random(cls, tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS, value_size: int = SIZE) -> "Inputs":
        made = torch.Generator().manual_seed(tokens)
        shapes = ((heads, SIZE), (kv_heads, SIZE), (kv_heads, value_size), (heads, value_size))
        return cls(*(torch.randn(tokens, *shape, generator=made) for shape in shapes))


Result = dict[str, torch.Tensor]


def expected(inputs: Inputs, lengths: Sequence[int], **options: Any) -> Result:
    """In float64, with one mask over everything."""
    names = ("q", "k", "v", *(("sinks",) if inputs.sinks is not None else ()))
    leaves = {name: getattr(inputs, name).double().requires_grad_() for name in names}
    q, k, v = (leaves[name].transpose(0, 1)[None] for name in ("q", "k", "v"))
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    out = dense_attention(q, k, v, bounds, sinks=leaves.get("sinks"), **options)[0].transpose(0, 1)
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout.double())
    return {"out": out.detach(), **dict(zip([f"d{name}" for name in names], gradients, strict=True))}


def sharded(inputs: Inputs, plan: ShardPlan, options: AttentionOptions, change: Any = None, **context: Any) -> Result:
    """What all ranks together compute, put back into the micro-batch's order; sinks' gradients added up."""
    layouts = [shard_layout(plan, rank) for rank in range(plan.cp_size)]

    def rank_main(exchange: ThreadExchange) -> Result:
        layout = layouts[exchange.rank]
        shard = ShardTensors.of(layout)
        if change is not None:
            shard = change(shard, exchange)
        tokens = torch.from_numpy(layout.tokens)
        leaves = {name: getattr(inputs, name)[tokens].requires_grad_() for name in ("q", "k", "v")}
        if inputs.sinks is not None:
            leaves["sinks"] = inputs.sinks.clone().requires_grad_()
        made = AttentionContext(kernel=ReferenceKernel(), exchange=exchange if plan.cp_size > 1 else None, **context)
        out = attend(leaves["q"], leaves["k"], leaves["v"], shard, made, options, leaves.get("sinks"))
        gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout[tokens])
        return {"out": out.detach(), **dict(zip([f"d{name}" for name in leaves], gradients, strict=True))}

    with poisoned_memory():
        ranks = ThreadGroup(plan.cp_size).run(rank_main)
    whole: Result = {}
    for name in ranks[0]:
        if name == "dsinks":
            whole[name] = torch.stack([rank[name] for rank in ranks]).sum(0)
            continue
        joined = torch.cat([rank[name] for rank in ranks])
        whole[name] = torch.empty_like(joined)
        whole[name][torch.from_numpy(np.concatenate([layout.tokens for layout in layouts]))] = joined
    return whole


def worst(found: Result, right: Result) -> float:
    assert found.keys() == right.keys()
    return max(relative_error(found[name], right[name]) for name in right)


OPTIONS = AttentionOptions(scaling=SIZE**-0.5)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_exact_for_every_strategy(cp: int) -> None:
    lengths = special_lengths(cp)
    assert sum(lengths) % (2 * cp) or cp == 1
    inputs = Inputs.random(sum(lengths))
    right = expected(inputs, lengths)
    for strategy, threshold in (("per_sequence", None), ("per_document", None), ("placed", 137), ("adaptive", None)):
        plan = plan_of(strategy, lengths, cp, threshold)
        assert worst(sharded(inputs, plan, OPTIONS), right) <= ATTENTION_FLOAT32, strategy


@pytest.mark.parametrize("window", [2, 5, 300, 5000])
def test_sliding_window(window: int) -> None:
    lengths = [3, 137, 30, 512]
    inputs = Inputs.random(sum(lengths))
    options = dataclasses.replace(OPTIONS, sliding_window=window)
    right = expected(inputs, lengths, sliding_window=window)
    for plan in (per_sequence(lengths, 3), per_document(lengths, 3), plan_of("placed", lengths, 3, 30)):
        assert worst(sharded(inputs, plan, options), right) <= ATTENTION_FLOAT32


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("regather", [True, False])
def test_kv_head_groups_and_what_is_kept_change_nothing(groups: int, regather: bool) -> None:
    lengths = [40, 9, 200, 5]
    inputs = Inputs.random(sum(lengths), heads=6, kv_heads=3, value_size=12)
    inputs.sinks = torch.linspace(-1, 2, 6)
    options = dataclasses.replace(OPTIONS, softcap=2.0)
    right = expected(inputs, lengths, softcap=2.0)
    found = sharded(inputs, per_sequence(lengths, 4), options, kv_head_groups=groups, regather=regather)
    assert worst(found, right) <= ATTENTION_FLOAT32
    exact = sharded(inputs, per_sequence(lengths, 4), options, deterministic=True)
    assert worst(exact, right) <= ATTENTION_FLOAT32


def by_hand(lengths: list[int], owner: list[int], edges: list[list[int]], cp: int) -> ShardPlan:
    made = ShardPlan(np.array(lengths), cp, np.array(owner), np.array(edges).reshape(-1, 2 * cp + 1), "by hand")
    assert made.tokens.sum() == sum(lengths)
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_local_documents_and_reductions_in_any_order_are_exact(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [9, 300, 25, 8]
    inputs = Inputs.random(sum(lengths), heads=6, kv_heads=3)
    plan, right = plan_of("placed", lengths, 2, 25), expected(inputs, lengths)
    monkeypatch.setattr(ExchangeSizes, "backward", lambda sizes: Backward(3, overlap))
    for parts in (1, 2, 3):
        monkeypatch.setattr(ExchangeSizes, "local_parts", lambda sizes, tokens, groups, parts=parts: parts)
        assert worst(sharded(inputs, plan, OPTIONS), right) <= ATTENTION_FLOAT32


def test_much_to_gather_is_gathered_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in forward as gathered bytes ask for, and in backward as the memory allowed asks for."""
    inputs, plan = Inputs.random(64, heads=4, kv_heads=4), per_document([64], 2)
    gathered = 64 * 4 * 2 * SIZE * 4
    counts: list[list[int]] = []

    def listen(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
        sizes: list[int] = []
        gather = exchange.gather
        exchange.gather = lambda part: sizes.append(part.numel()) or gather(part)  # type: ignore
        counts.append(sizes)
        return shard

    def gathers(**context: Any) -> list[int]:
        counts.clear()
        assert worst(sharded(inputs, plan, OPTIONS, listen, **context), expected(inputs, [64])) <= ATTENTION_FLOAT32
        assert counts[0] == counts[1]
        return counts[0]

    groups = "hf_wlb.attention.groups"
    monkeypatch.setattr(f"{groups}.GROUP_QUERIES", 1)
    for limit, forward in ((gathered, 1), (gathered - 1, 2), (gathered * 2 // 5, 2), (gathered // 4, 4), (1, 4)):
        monkeypatch.setattr(f"{groups}.GROUP_BYTES", limit)
        assert len(gathers()) == 2 * forward + 2  # keys and values; little is gathered again in one group
        assert len(gathers(regather=False)) == 2 * forward
    monkeypatch.setattr(f"{groups}.GROUP_BYTES", gathered)
    for free, forward, backward in ((3 * gathered, 1, 1), (2.6 * gathered, 1, 2), (0, 2, 4)):
        monkeypatch.setattr(f"{groups}.FREE_BYTES", free)
        assert len(gathers()) == 2 * (forward + backward)
    assert len(gathers(kv_head_groups=2)) == 8  # holds for both


def test_tensors_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models hand over views of [heads, tokens, head size]."""
    lengths = [9, 30, 25]
    inputs = Inputs.random(64, heads=4, kv_heads=2)
    right = expected(inputs, lengths)
    attended = attend
    given: list[bool] = []

    def strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        views = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
        given.append(any(view.is_contiguous() for view in views))
        return attended(*views, *rest)

    monkeypatch.setattr("tests.numerics.test_context_attention.attend", strided)
    for plan in (per_document(lengths, 2), plan_of("placed", lengths, 2, 9)):
        assert worst(sharded(inputs, plan, OPTIONS, regather=False), right) <= ATTENTION_FLOAT32
    assert given and not any(given)


EXTREMES = {
    "rank 0 only local, rank 1 only long, rank 2 nothing": by_hand([8, 9], [0, -1], [[0, 0, 4, 4, 4, 9, 9]], 3),
    "one rank has all of a sharded document": by_hand([8, 9], [1, -1], [[0, 5, 5, 5, 9]], 2),
    "chunks of one token": by_hand([4], [-1], [[0, 1, 2, 3, 4]], 2),
    "only tails": by_hand([6, 5], [-1, -1], [[0, 0, 0, 2, 6], [0, 0, 0, 5, 5]], 2),
    "everything local": by_hand([6, 5, 4], [1, 0, 1], [], 2),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("slices", [0, 16])
def test_any_plan_is_exact(name: str, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_wlb.attention.function.MOST_SLICES", slices)
    plan = EXTREMES[name]
    inputs = Inputs.random(int(plan.lengths.sum()))
    for regather in (True, False):
        found = sharded(inputs, plan, OPTIONS, regather=regather)
        assert worst(found, expected(inputs, plan.lengths.tolist())) <= ATTENTION_FLOAT32


def test_local_documents_are_not_exchanged() -> None:
    exchanges: list[ThreadExchange] = []

    def listen(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
        exchanges.append(exchange)
        return shard

    plan = EXTREMES["everything local"]
    sharded(Inputs.random(15), plan, OPTIONS, listen)
    assert all(exchange.gathered == exchange.reduced == 0 for exchange in exchanges) and len(exchanges) == 2
    exchanges.clear()
    plan = plan_of("placed", [64, 5, 5, 6, 4], 2, 6)
    sharded(Inputs.random(84), plan, OPTIONS, listen, regather=False)
    numbers = int(plan.exchanged_tokens.max()) * 2 * KV_HEADS * SIZE
    assert [(e.gathered, e.reduced) for e in exchanges] == [(numbers, 2 * numbers)] * 2


def test_changing_a_document_leaves_the_others_bit_identical() -> None:
    lengths = [50, 33, 20, 9]
    for plan in (per_sequence(lengths, 2), per_document(lengths, 2), plan_of("adaptive", lengths, 2)):
        one = Inputs.random(sum(lengths))
        other = dataclasses.replace(one, k=one.k.clone(), v=one.v.clone())
        other.k[:50] += 1.0
        other.v[:50] -= 2.0
        first, second = (sharded(inputs, plan, OPTIONS)["out"] for inputs in (one, other))
        assert torch.equal(first[50:], second[50:]) and not torch.equal(first[:50], second[:50])


# ---- negative controls: each of these faults must be far outside the tolerance ----


def _dropped_reduce_scatter(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
    def own_part_only(parts: torch.Tensor) -> DoneSum:
        rows = parts.shape[0] // exchange.size
        return DoneSum(parts[exchange.rank * rows : (exchange.rank + 1) * rows])

    exchange.reduce_scatter = own_part_only  # type: ignore[method-assign]
    return shard


def _wrong_segment(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
    moved = shard.chunks.k.clone()
    moved[-2] += 1
    return dataclasses.replace(shard, chunks=dataclasses.replace(shard.chunks, k=moved, max_k=shard.chunks.max_k + 1))


def _swapped_halves(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
    middle = int(shard.chunks.k[len(shard.chunks.k) // 2])  # where the keys of tail chunks begin
    head, tail = shard.order.tensor_split([middle])
    return dataclasses.replace(shard, order=torch.cat([tail[: len(head)], head, tail[len(head) :]]))


def _keys_in_rank_order(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
    return dataclasses.replace(shard, order=shard.order.sort().values)


def _documents_joined(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
    q, k = shard.chunks.q[[0, -1]], shard.chunks.k[[0, -1]]
    return dataclasses.replace(shard, chunks=Segments(q, k, int(q[-1]), int(k[-1])))


def _head_gradients_lost(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
    return dataclasses.replace(shard, overlaps=())


FAULTS = [
    _dropped_reduce_scatter,
    _wrong_segment,
    _swapped_halves,
    _keys_in_rank_order,
    _documents_joined,
    _head_gradients_lost,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: Any) -> None:
    lengths = [40, 26]
    inputs = Inputs.random(sum(lengths))
    error = worst(sharded(inputs, per_document(lengths, 2), OPTIONS, fault), expected(inputs, lengths))
    assert error > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT32 or np.isnan(error)


# ---- bad input ----


def layout_of(rank: int = 0) -> ShardLayout:
    return shard_layout(per_document([9, 6], 2), rank)


def test_a_plan_for_other_tensors_is_refused_on_every_rank() -> None:
    inputs = Inputs.random(15)

    def longer(shard: ShardTensors, exchange: ThreadExchange) -> ShardTensors:
        return dataclasses.replace(shard, local_tokens=1) if exchange.rank == 1 else shard

    with pytest.raises(ValueError, match=r"the plan is for a shard of 9 tokens, but the model was given 8"):
        sharded(inputs, per_document([9, 6], 2), OPTIONS, longer)


def test_a_plan_for_another_rank_is_refused() -> None:
    tensors = [torch.zeros(7, 2, 8)] * 3
    with pytest.raises(ValueError, match="for rank 0 of 2 context-parallel ranks, but this process is rank 0 of 1"):
        attend(*tensors, ShardTensors.of(layout_of()), AttentionContext(), OPTIONS)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="kv_head_groups must be at least 1, or None, got 0"):
        AttentionContext(kv_head_groups=0)


def test_the_meter_takes_kernel_time() -> None:
    meter = KernelMeter()
    inputs = Inputs.random(300)
    sharded(inputs, per_document([300], 1), OPTIONS, meter=meter)
    assert meter.take() > 0 and meter.take() == 0


class Event:
    """A CUDA event at a time in milliseconds, which the GPU has come to or not."""

    def __init__(self, at: float, done: bool) -> None:
        self.at, self.done = at, done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end: "Event") -> float:
        assert self.done and end.done
        return end.at - self.at


def test_the_meter_can_take_what_is_done_without_waiting() -> None:
    meter = KernelMeter()
    events: Any = [(Event(0, True), Event(100, True)), (Event(100, True), Event(300, False))]
    meter._events.extend(events)
    assert meter.drain() == 0.1 and meter.drain() == 0.0 and not events[1][1].done
    assert meter.take() == 0.2 and meter.take() == 0.0
