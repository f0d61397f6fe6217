"""Ranks that the stage-times benchmark runs alone: the stand-in for their exchange, and what they are given."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_wlb.attention import AttentionContext, AttentionOptions, ShardTensors, attend
from hf_wlb.attention.kernels import ReferenceKernel
from hf_wlb.data import WLBDataCollator
from hf_wlb.presets import MODEL_PRESETS
from hf_wlb.sharding import Sharder, ShardingConfig, ShardPlan, per_document, shard_layout
from hf_wlb.workload import AnalyticWorkload
from tests.support.exchange import poisoned_memory
from tests.support.oracle import dense_attention, relative_error
from tests.support.source_tree import REPOSITORY
from tests.support.tolerances import ATTENTION_FLOAT32, NEGATIVE_CONTROL_FACTOR

FOLDER = REPOSITORY / "recipes" / "benchmarks"
OPTIONS = AttentionOptions(scaling=8**-0.5)
WORKLOAD = AnalyticWorkload.from_crossover(200, exchange_per_token=0.1)
#: Tokens 0-29 stay whole on rank 0, 30-49 on rank 1; of the cut 61 rank 0 has 35 and rank 1 has 26, which are padded.
PLAN = ShardPlan(np.array([30, 20, 61]), 2, np.array([0, 1, -1]), np.array([[0, 20, 33, 46, 61]]), "by hand")


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("stage_times_exchange")


@pytest.fixture
def tensors():
    made = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(111, 4, 8, generator=made) for _ in range(2))
    k, v = (torch.randn(111, 2, 8, generator=made) for _ in range(2))
    return SimpleNamespace(q=q, k=k, v=v, dout=dout)


def attended(given, plan: ShardPlan, rank: int, exchange, **context) -> dict[str, torch.Tensor]:
    """What a rank computes, alone: output and gradients of its tokens."""
    layout = shard_layout(plan, rank)
    tokens = torch.from_numpy(layout.tokens)
    leaves = [tensor[tokens].requires_grad_() for tensor in (given.q, given.k, given.v)]
    made = AttentionContext(kernel=ReferenceKernel(), exchange=exchange, **context)
    with poisoned_memory():
        out = attend(*leaves, ShardTensors.of(layout), made, OPTIONS)
        gradients = torch.autograd.grad(out, leaves, given.dout[tokens])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def expected(given, lengths) -> dict[str, torch.Tensor]:
    """In float64, with one mask over everything."""
    leaves = [tensor.double().requires_grad_() for tensor in (given.q, given.k, given.v)]
    bounds = [0, *np.cumsum(lengths).tolist()]
    heads_first = [leaf.transpose(0, 1)[None] for leaf in leaves]
    out = dense_attention(*heads_first, bounds)[0].transpose(0, 1)
    gradients = torch.autograd.grad(out, leaves, given.dout.double())
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


# ---- the stand-in ----


def test_own_parts_are_at_their_place_and_all_is_finite(stand_in) -> None:
    filler = stand_in.Filler()
    for rank in range(3):
        exchange = stand_in.StandInExchange(rank, 3, filler)
        assert (exchange.rank, exchange.size) == (rank, 3)
        for dtype in (torch.float32, torch.bfloat16):
            parts = [torch.full((tokens, 2, 4), 7.0, dtype=dtype) for tokens in (5, 9, 2)]
            with poisoned_memory():
                pending = [exchange.gather(part) for part in parts]  # several at a time, as head groups are
            for part, one in zip(parts, pending, strict=True):
                found, rows = one.wait(), len(part)
                assert found.shape == (3 * rows, 2, 4) and found.dtype == dtype and found.isfinite().all()
                own = torch.zeros(3 * rows, dtype=torch.bool)
                own[rank * rows : (rank + 1) * rows] = True
                assert (found[own] == 7.0).all() and (found[~own] != 7.0).all() and found[~own].unique().numel() > 4
    with pytest.raises(ValueError, match=r"rank must be from 0 to 1 \(size - 1\), got 2"):
        stand_in.StandInExchange(2, 2, filler)


def test_pieces_are_added_up(stand_in) -> None:
    exchange = stand_in.StandInExchange(1, 2, stand_in.Filler())
    parts = torch.arange(6.0)[:, None].repeat(1, 3)
    into = torch.full((2, 3), math.nan)  # the last row of every piece is padding
    exchange.reduce_scatter(parts).wait(into=into)
    assert into.tolist() == [[3.0] * 3, [5.0] * 3]
    alone = torch.full((6, 3), math.nan)
    stand_in.StandInExchange(0, 1, stand_in.Filler()).reduce_scatter(parts).wait(into=alone)
    assert torch.equal(alone, parts)


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
def test_local_documents_are_exact_and_the_others_finite(stand_in, tensors, regather, groups) -> None:
    right, filler = expected(tensors, PLAN.lengths), stand_in.Filler()
    for rank in range(2):
        exchange = stand_in.StandInExchange(rank, 2, filler)
        found = attended(tensors, PLAN, rank, exchange, regather=regather, kv_head_groups=groups)
        tokens = torch.from_numpy(shard_layout(PLAN, rank).tokens)
        local = int(PLAN.local_tokens[rank])
        for name, values in found.items():
            assert values.shape[0] == len(tokens) and values.isfinite().all()
            assert relative_error(values[:local], right[name][tokens[:local]]) <= ATTENTION_FLOAT32
            # Control: nothing was exchanged, so what needs other ranks' keys is wrong.
            wrong = relative_error(values[local:], right[name][tokens[local:]])
            assert wrong > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT32, name


def test_a_rank_without_chunks_goes_along(stand_in, tensors) -> None:
    plan = ShardPlan(np.array([50, 61]), 2, np.array([1, -1]), np.array([[0, 40, 40, 40, 61]]), "by hand")
    found = attended(tensors, plan, 1, stand_in.StandInExchange(1, 2, stand_in.Filler()))
    right = expected(tensors, plan.lengths)
    assert all(relative_error(found[name], right[name][:50]) <= ATTENTION_FLOAT32 for name in right)


def test_of_one_rank_alone_nothing_is_missing(stand_in, tensors) -> None:
    """Cut documents go through the exchange all the same: what is gathered and added up is all there is."""
    plan = ShardPlan(np.array([50, 61]), 1, np.array([-1, -1]), np.array([[0, 20, 50], [0, 1, 61]]), "by hand")
    exchange = stand_in.StandInExchange(0, 1, stand_in.Filler())
    found, right = attended(tensors, plan, 0, exchange), expected(tensors, plan.lengths)
    tokens = torch.from_numpy(shard_layout(plan, 0).tokens)
    assert all(relative_error(found[name], right[name][tokens]) <= ATTENTION_FLOAT32 for name in right)


def test_a_rank_s_own_problem_is_raised(stand_in, tensors) -> None:
    exchange = stand_in.StandInExchange(1, 2, stand_in.Filler())
    with pytest.raises(ValueError, match="the plan is for rank 0 of 2 context-parallel ranks, but this process"):
        attended(tensors, PLAN, 0, exchange)
    exchange.agree(ShardTensors.of(shard_layout(PLAN, 1)), "a call", None)


# ---- what is run ----


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """(parts of the quick model, how to attend)."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import end_to_end
    import stage_times_run
    from end_to_end_cases import QUICK

    settings = dataclasses.replace(QUICK, cp_size=2)
    job = stage_times_run.alone(end_to_end.Job(settings, "", "", str(tmp_path), "", "a-quick_cp2", use_cpu=True))
    assert job.settings.cp_size == 1
    args = stage_times_run.arguments(job, 1)
    made = stage_times_run.Parts(stage_times_run.model_config(settings), args, 1024)
    return made, made.context(args)[0]


@pytest.mark.parametrize("strategy", ["per_sequence", "per_document", "placed", "adaptive"])
def test_every_rank_has_the_shard_that_the_trainer_would_give_it(parts, strategy) -> None:
    made, context = parts
    sharder, lengths = Sharder(ShardingConfig(2, strategy), WORKLOAD), [300, 41, 7]
    found = list(made._shards(lengths, context, sharder))
    drawn = np.random.default_rng(0)
    rows = [{"input_ids": drawn.integers(MODEL_PRESETS["tiny"].vocab_size, size=length)} for length in lengths]
    for rank, inputs in enumerate(found):
        right = WLBDataCollator().for_rank(sharder, rank)(rows)
        assert inputs.keys() == right.keys() - {"wlb_info"} | {"wlb_context"}
        for name in ("input_ids", "position_ids", "labels", "shift_labels"):
            assert torch.equal(inputs[name], right[name])
        assert inputs["wlb_shard"].digest == right["wlb_shard"].digest == shard_layout(sharder.plan(lengths), 0).digest
        assert (inputs["wlb_context"].cp_rank, inputs["wlb_context"].cp_size) == (rank, 2)
        assert inputs["wlb_context"].kernel is context.kernel and inputs["wlb_context"].regather == context.regather
    assert not torch.equal(found[0]["position_ids"], found[1]["position_ids"])
    assert sum(inputs["input_ids"].numel() for inputs in found) == sum(lengths)


def test_times_are_of_every_rank_and_the_loss_of_all(parts) -> None:
    made, context = parts
    sharder = Sharder(ShardingConfig(2, "per_document"), WORKLOAD)
    measured = made.step([[300, 41], [64], [9, 90]], context, sharder)
    assert {np.shape(times) for times in measured.times.values()} == {(2, 3)}
    assert min(np.min(times) for times in measured.times.values()) > 0
    assert measured.loss == pytest.approx(math.log(MODEL_PRESETS["tiny"].vocab_size), rel=0.1)
    whole = made.step([[300, 41], [64], [9, 90]], context)
    assert {np.shape(times) for times in whole.times.values()} == {(1, 3)}
    assert whole.loss == pytest.approx(measured.loss, rel=0.1)


def test_times_are_told_apart_by_rank_and_micro_batch(parts, monkeypatch) -> None:
    """As if forward took a second for every token, and backward two."""
    made, context = parts
    whole = ShardPlan(np.array([512, 8]), 2, np.array([0, 1]), np.zeros((0, 5), dtype=np.int64), "by hand")
    sharder = SimpleNamespace(
        config=SimpleNamespace(cp_size=2), plan=lambda lengths: whole if lengths[0] == 512 else per_document(lengths, 2)
    )
    taken: list[float] = []

    def timed(stage, inputs) -> torch.Tensor:
        tokens = float(inputs["input_ids"].shape[1])
        taken.extend((tokens, 2 * tokens))
        return torch.zeros(())

    monkeypatch.setattr(made, "_time", timed)
    monkeypatch.setattr("stage_times_run.Stopwatch", lambda *args, **kwargs: SimpleNamespace(take=lambda: taken))
    measured = made.step([[512, 8], [500, 20], [512, 8]], context, sharder)
    for part in ("layer", "embedding", "head"):
        assert measured.times[f"{part}_forward"] == [[512, 260, 512], [8, 260, 8]]
        assert measured.times[f"{part}_backward"] == [[1024, 520, 1024], [16, 520, 16]]
