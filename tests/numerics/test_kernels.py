"""The reference kernel against a dense oracle in float64, memory that kernels are given, and what builds lack.

test_kernel_selection.py has the choice among kernels.
"""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_wlb.attention.kernels import (
    KERNELS,
    AttentionOptions,
    KernelRequest,
    ReferenceKernel,
    choose_kernel,
    flash2,
    reference,
    warm_up,
)
from hf_wlb.attention.segments import Segments
from tests.support.attention_calls import Call, expected_of, outcome_of
from tests.support.oracle import dense_segments, relative_error, worst_error
from tests.support.tolerances import (
    ATTENTION_BFLOAT16,
    ATTENTION_FLOAT32,
    ATTENTION_FLOAT64,
    NEGATIVE_CONTROL_FACTOR,
)

LENGTHS = (1, 7, 64, 137, 300)
DOCUMENTS = Call(LENGTHS, LENGTHS)
CHUNKS = Call((1, 3, 64, 10, 270), (5, 7, 64, 137, 600))
GAPS = Call((0, 7, 0, 0, 64, 1, 0), (9, 20, 137, 1, 64, 300, 3))
EIGHT_TO_ONE = {"heads": 8, "kv_heads": 1}
assert max(CHUNKS.q_lengths) > reference.BLOCK

CASES: dict[str, Call] = {
    "documents": DOCUMENTS,
    "chunks": CHUNKS,
    "gaps": GAPS,
    "documents, gqa 8 to 1": replace(DOCUMENTS, **EIGHT_TO_ONE),
    "gaps, gqa 8 to 1": replace(GAPS, **EIGHT_TO_ONE),
    "documents, own keys per head": replace(DOCUMENTS, kv_heads=4),
    "chunks, own keys per head": replace(CHUNKS, kv_heads=4),
    "window 1": replace(CHUNKS, sliding_window=1),
    "window 6": replace(CHUNKS, sliding_window=6),
    "window as long as a document": replace(DOCUMENTS, sliding_window=137),
    "window over a block": replace(CHUNKS, sliding_window=reference.BLOCK + 3),
    "window beyond every document": replace(DOCUMENTS, sliding_window=1000),
    "window and gaps": replace(GAPS, sliding_window=6),
    "softcap": replace(DOCUMENTS, softcap=1.5),
    "softcap in chunks": replace(CHUNKS, softcap=1.5),
    "value size": replace(DOCUMENTS, value_size=5),
    "value size in chunks": replace(CHUNKS, value_size=12),
    "everything": replace(GAPS, **EIGHT_TO_ONE, value_size=12, sliding_window=70, softcap=2.0, scaling=0.11),
}


@pytest.fixture(scope="module")
def kernel() -> ReferenceKernel:
    return ReferenceKernel()


# ---- the reference kernel ----


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_equal_the_dense_oracle(kernel: ReferenceKernel, case: str) -> None:
    call = CASES[case]
    inputs = call.inputs()
    expected = expected_of(call, inputs)
    for dtype, tolerance in ((torch.float32, ATTENTION_FLOAT32), (torch.float64, ATTENTION_FLOAT64)):
        found = outcome_of(kernel, call, inputs, dtype)
        assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert worst_error(found, expected) <= tolerance


@pytest.mark.parametrize("case", ["documents", "gaps", "everything"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(kernel: ReferenceKernel, case: str, dtype: torch.dtype) -> None:
    call = CASES[case]
    inputs = call.inputs(dtype)
    found = outcome_of(kernel, call, inputs, dtype)
    assert found.pop("lse").dtype is torch.float32
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    expected = expected_of(call, inputs)
    del expected["lse"]
    assert worst_error(found, expected) <= ATTENTION_BFLOAT16


@pytest.mark.parametrize(
    "length", [1, 2, reference.BLOCK - 1, reference.BLOCK, reference.BLOCK + 1, 2 * reference.BLOCK]
)
def test_one_segment_of_an_edge_length_in_blocks(kernel: ReferenceKernel, length: int) -> None:
    call = Call((length,), (length + 3,), sliding_window=100)
    inputs = call.inputs()
    assert worst_error(outcome_of(kernel, call, inputs, torch.float32), expected_of(call, inputs)) <= ATTENTION_FLOAT32


def test_blocks_shrink_where_keys_are_many(kernel: ReferenceKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CHUNKS.inputs()
    seen: list[int] = []
    rows = reference._rows

    def counting(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
        seen.append(tensor.shape[0])
        return rows(tensor, kv_heads)

    monkeypatch.setattr(reference, "_rows", counting)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 10 * CHUNKS.heads * 600)
    found = outcome_of(kernel, CHUNKS, inputs, torch.float32)
    assert worst_error(found, expected_of(CHUNKS, inputs)) <= ATTENTION_FLOAT32
    assert sorted(seen)[0] <= 10 and 600 in seen and 270 not in seen


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"softcap": 2.0}], ids=str)
def test_keys_without_queries_are_neither_read_nor_given_a_gradient(
    kernel: ReferenceKernel, options: dict[str, Any]
) -> None:
    call = replace(GAPS, **options)
    inputs, unread = call.inputs(), call.unread()
    expected = expected_of(call, inputs)
    poisoned = {**inputs, **{name: inputs[name].clone() for name in ("k", "v")}}
    for name in ("k", "v"):
        poisoned[name][unread] = torch.nan
    found = outcome_of(kernel, call, poisoned, torch.float32)
    assert worst_error(found, expected) <= ATTENTION_FLOAT32
    for name in ("dk", "dv"):
        assert torch.equal(found[name][unread], torch.zeros_like(found[name][unread]))
        assert found[name][~unread].abs().amax() > 0


@pytest.mark.parametrize("call", [Call((0,), (5,)), Call((0, 0), (5, 1)), Call((), ()), Call((0,), (0,))], ids=str)
def test_nothing_to_attend(kernel: ReferenceKernel, call: Call) -> None:
    found = outcome_of(kernel, call, call.inputs(), torch.float32)
    assert found["out"].shape == (0, 4, 8) and found["lse"].shape == (4, 0) and found["dq"].shape == (0, 4, 8)
    assert torch.equal(found["dk"], torch.zeros(sum(call.k_lengths), 2, 8))
    assert torch.equal(found["dv"], found["dk"])


@pytest.mark.parametrize("call", [DOCUMENTS, replace(CHUNKS, sliding_window=6)], ids=["whole", "blocks"])
def test_views_give_the_same_as_dense_tensors(kernel: ReferenceKernel, call: Call) -> None:
    dense = {name: tensor.float() for name, tensor in call.inputs().items()}
    # heads first in memory, as Transformers projects; heads taken out of a larger tensor, as from gathered K and V
    views = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in dense.items()}
    views["k"] = torch.cat([dense["k"], dense["k"] + 1], 1)[:, :2]
    segments, options = Segments.from_lengths(call.q_lengths, call.k_lengths), AttentionOptions(**call.options)
    expected = outcome_of(kernel, call, dense, torch.float32)
    out, lse = kernel.forward(views["q"], views["k"], views["v"], segments, options)
    spread = lse.t().contiguous().t()
    found = kernel.backward(views["dout"], views["q"], views["k"], views["v"], out, spread, segments, options)
    for tensor, name in zip((out, lse, *found), ("out", "lse", "dq", "dk", "dv"), strict=True):
        assert relative_error(tensor, expected[name]) <= 1e-7


def test_a_segment_is_the_same_alone_to_the_last_bit(kernel: ReferenceKernel) -> None:
    inputs = CHUNKS.inputs()
    rows, columns = CHUNKS.bounds
    together = outcome_of(kernel, CHUNKS, inputs, torch.float32)
    for number in range(len(CHUNKS.q_lengths)):
        own, seen = slice(*rows[number : number + 2]), slice(*columns[number : number + 2])
        places = {"q": own, "k": seen, "v": seen, "dout": own}
        call = replace(CHUNKS, q_lengths=CHUNKS.q_lengths[number:][:1], k_lengths=CHUNKS.k_lengths[number:][:1])
        alone = outcome_of(kernel, call, {name: inputs[name][place] for name, place in places.items()}, torch.float32)
        for name, place in (("out", own), ("dq", own), ("dk", seen), ("dv", seen)):
            assert torch.equal(alone[name], together[name][place])


def test_sinks_are_folded_in_through_the_log_sum_exp(kernel: ReferenceKernel) -> None:
    inputs = GAPS.inputs()
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
    expected, _ = dense_segments(*leaves, *GAPS.bounds, **GAPS.options, sinks=sinks)
    (expected * inputs["dout"]).sum().backward()
    segments, options = Segments.from_lengths(GAPS.q_lengths, GAPS.k_lengths), AttentionOptions(**GAPS.options)
    plain, lse = kernel.forward(inputs["q"], inputs["k"], inputs["v"], segments, options)
    out, lse = plain * torch.sigmoid(lse - sinks[:, None]).t()[..., None], torch.logaddexp(lse, sinks[:, None])
    found = kernel.backward(inputs["dout"], inputs["q"], inputs["k"], inputs["v"], out, lse, segments, options)
    assert relative_error(out, expected) <= ATTENTION_FLOAT64
    assert relative_error(plain, expected) > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT64
    for gradient, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None and relative_error(gradient, leaf.grad) <= ATTENTION_FLOAT64


WRONG: dict[str, tuple[Call, Call]] = {
    "a segment that begins a query late": (CHUNKS, replace(CHUNKS, q_lengths=(1, 4, 63, 10, 270))),
    "a segment that begins a key late": (CHUNKS, replace(CHUNKS, k_lengths=(5, 8, 64, 136, 600))),
    "a gap that is read": (GAPS, replace(GAPS, q_lengths=(0, 7, 0, 64, 1, 0), k_lengths=(9, 157, 1, 64, 300, 3))),
    "no segments": (DOCUMENTS, replace(DOCUMENTS, q_lengths=(509,), k_lengths=(509,))),
    "another scaling": (DOCUMENTS, replace(DOCUMENTS, scaling=1.0)),
    "no window": (replace(CHUNKS, sliding_window=6), CHUNKS),
    "window one too long": (replace(CHUNKS, sliding_window=6), replace(CHUNKS, sliding_window=7)),
    "a window that hides one token": (DOCUMENTS, replace(DOCUMENTS, sliding_window=299)),
    "no softcap": (replace(DOCUMENTS, softcap=1.5), DOCUMENTS),
}


class Compiling(ReferenceKernel):
    """Counts its calls, as a kernel would that compiles when it is first used."""

    compiles_at_first_use = True
    backwards = 0

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        type(self).backwards += 1
        return super().backward(*args, **kwargs)


def test_a_kernel_that_compiles_is_called_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [((4, 6), (4, 6)), ((2,), (9,))]
    monkeypatch.setattr("hf_wlb.attention.kernels.warming._CALLS", calls)
    request = KernelRequest("cpu", torch.float32, 8, 16, sliding_window=True)
    state = torch.random.get_rng_state()
    assert warm_up(Compiling(), request, 4, 2) == Compiling.backwards == len(calls)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert warm_up(ReferenceKernel(), request, 4, 2) == 0
    assert warm_up(Compiling(), replace(request, softcap=True), 4, 2) == 0


@pytest.mark.parametrize("case", WRONG)
def test_the_check_notices(kernel: ReferenceKernel, case: str) -> None:
    right, wrong = WRONG[case]
    inputs = right.inputs()
    found = outcome_of(kernel, wrong, inputs, torch.float32)
    assert worst_error(found, expected_of(right, inputs)) > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT32


@pytest.mark.parametrize("call", [DOCUMENTS, CHUNKS], ids=["whole", "blocks"])
def test_the_check_notices_swapped_head_groups(kernel: ReferenceKernel, call: Call) -> None:
    inputs = call.inputs()
    swapped = {**inputs, "k": inputs["k"].flip(1), "v": inputs["v"].flip(1)}
    found = outcome_of(kernel, call, swapped, torch.float32)
    found = {**found, "dk": found["dk"].flip(1), "dv": found["dv"].flip(1)}
    for name, tensor in expected_of(call, inputs).items():
        assert relative_error(found[name], tensor) > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT32


# ---- segments and options ----


def test_segments_that_cannot_be_are_refused(kernel: ReferenceKernel) -> None:
    with pytest.raises(ValueError, match="segment 1 has 3 queries and 2 keys"):
        Segments.from_lengths([1, 3], [1, 2])
    with pytest.raises(ValueError, match="segment 0 has -1 queries"):
        Segments.from_lengths([-1], [2])
    with pytest.raises(ValueError, match="2 lengths of queries do not fit 1 lengths of keys"):
        Segments.from_lengths([1, 1], [2])
    assert len(Segments.from_lengths([2, 0, 1])) == 3
    q, k = torch.zeros(5, 4, 8), torch.zeros(6, 2, 8)
    options = AttentionOptions(1.0)
    for lengths in ([5], [6]):
        with pytest.raises(ValueError, match="must cover all 5 queries and 6 keys"):
            kernel.forward(q, k, k, Segments.from_lengths(lengths), options)
    backwards = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="a segment of 3 queries does not fit its 2 keys"):
        kernel.forward(q, k, k, Segments(*backwards, 3, 4), options)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        AttentionOptions(1.0, sliding_window=0)
    with pytest.raises(ValueError, match="softcap must be above 0"):
        AttentionOptions(1.0, softcap=0.0)


# ---- flash-attn 2, on a machine that is made up ----


class Flash2:
    """A build of flash-attn that computes on the CPU, with softcaps or without, and counts its calls with one."""

    has_softcap = True
    tried = 0

    def __init__(self) -> None:
        interface = types.SimpleNamespace(
            _flash_attn_varlen_forward=lambda *given, **named: self.forward(*given, **named),
            _flash_attn_varlen_backward=lambda *given, **named: self.backward(*given, **named),
        )
        self.package = types.SimpleNamespace(__version__="2.8.3", flash_attn_interface=interface)

    def call(self, named: dict[str, Any]) -> tuple[Segments, AttentionOptions]:
        self.tried += named["softcap"] > 0
        if named["softcap"] and not self.has_softcap:
            raise RuntimeError("This flash attention build does not support softcap.\nException raised from ...")
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options = AttentionOptions(named["softmax_scale"], softcap=named["softcap"] or None)
        return Segments(*(named[name] for name in names)), options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> tuple[Any, ...]:
        return *ReferenceKernel().forward(q, k, v, *self.call(named)), None, None

    def backward(self, *given: torch.Tensor, deterministic: bool, **named: Any) -> None:
        tensors, into = given[:6], given[6:]
        ReferenceKernel().backward(*tensors, *self.call(named), into)


@pytest.fixture
def flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash2]:
    build = Flash2()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash2, "_current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(flash2, "lacking_parameters", lambda function, names: [])
    monkeypatch.setitem(sys.modules, "flash_attn", build.package)
    for function in (flash2._load, flash2._softcap_failure):
        function.cache_clear()
    yield build
    for function in (flash2._load, flash2._softcap_failure):
        function.cache_clear()


REQUEST = KernelRequest("cuda", torch.bfloat16, 128, 128)
SOFTCAP = replace(REQUEST, softcap=True)


def test_a_build_without_softcap_refuses_it_after_one_trial(flash_attn_2: Flash2) -> None:
    flash_attn_2.has_softcap = False
    assert KERNELS["flash-attn-2"].refusal(REQUEST) is None and not flash_attn_2.tried
    reason = "has no softcap here: a trial call failed with 'This flash attention build does not support softcap.'"
    for _ in range(3):
        assert KERNELS["flash-attn-2"].refusal(SOFTCAP) == reason
    assert flash_attn_2.tried == 1
    with pytest.raises(ValueError, match=r"'flash-attn-2' was asked for, .*, softcap, but it has no softcap here: a "):
        choose_kernel(SOFTCAP, "flash-attn-2")
    assert choose_kernel(REQUEST, "flash-attn-2").name == "flash-attn-2"


def test_a_build_with_softcap_takes_it_after_one_trial(flash_attn_2: Flash2) -> None:
    for _ in range(3):
        assert KERNELS["flash-attn-2"].refusal(SOFTCAP) is None
    assert flash_attn_2.tried == 1


def test_nothing_is_tried_without_a_device_or_the_library(
    flash_attn_2: Flash2, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn_2.has_softcap = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert KERNELS["flash-attn-2"].refusal(SOFTCAP) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert KERNELS["flash-attn-2"].refusal(SOFTCAP) is None
    assert "is not installed" in (KERNELS["flash-attn-2"].missing() or "") and not flash_attn_2.tried


# ---- memory that a kernel is given ----


@pytest.mark.parametrize("case", ["documents", "chunks", "gaps", "everything", "softcap", "own keys"])
@pytest.mark.parametrize("name", ["reference", "flash-attn-2"])
def test_results_go_where_they_are_told_to(flash_attn_2: Flash2, name: str, case: str) -> None:
    call = replace(GAPS, kv_heads=4) if case == "own keys" else CASES[case]
    if name == "flash-attn-2":  # it knows one head size, and windows are not this test's business
        call = replace(call, value_size=call.size, sliding_window=None)
    kernel = KERNELS[name]
    q, k, v, dout = (call.inputs()[part].float() for part in ("q", "k", "v", "dout"))
    segments, options = Segments.from_lengths(call.q_lengths, call.k_lengths), AttentionOptions(**call.options)
    memory, *into = (torch.full_like(tensor, torch.nan) for tensor in (dout, q, k, v))
    out, lse = kernel.forward(q, k, v, segments, options, memory)
    found = kernel.backward(dout, q, k, v, out, lse, segments, options, tuple(into))
    assert out is memory and all(gradient is given for gradient, given in zip(found, into, strict=True))
    expected = outcome_of(kernel, call, call.inputs(), torch.float32)
    for part, tensor in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found), strict=True):
        assert torch.equal(tensor, expected[part]), part
    unread = call.unread()
    assert not found[1][unread].any() and not found[2][unread].any()


def test_part_of_a_larger_memory_can_be_given(kernel: ReferenceKernel) -> None:
    """As context-parallel attention does: rows of the whole shard's; what lies around them stays."""
    q, k, v, dout = (GAPS.inputs()[part].float() for part in ("q", "k", "v", "dout"))
    segments, options = Segments.from_lengths(GAPS.q_lengths, GAPS.k_lengths), AttentionOptions(**GAPS.options)
    shards = [torch.full((t.shape[0] + 5, *t.shape[1:]), torch.nan) for t in (dout, q, k, v)]
    memory, *into = (shard[2:-3] for shard in shards)
    out, lse = kernel.forward(q, k, v, segments, options, memory)
    kernel.backward(dout, q, k, v, out, lse, segments, options, tuple(into))
    expected = outcome_of(kernel, GAPS, GAPS.inputs(), torch.float32)
    for part, shard in zip(("out", "dq", "dk", "dv"), shards, strict=True):
        assert torch.equal(shard[2:-3], expected[part])
        assert shard[:2].isnan().all() and shard[-3:].isnan().all()


@pytest.mark.parametrize("name", ["reference", "flash-attn-2", "flash-attn-4", "torch"])
def test_given_memory_is_zero_where_no_query_reads(name: str) -> None:
    call = Call((0, 0), (5, 1))
    q, k, v, dout = (call.inputs()[part].float() for part in ("q", "k", "v", "dout"))
    segments, options = Segments.from_lengths(call.q_lengths, call.k_lengths), AttentionOptions(**call.options)
    into = tuple(torch.full_like(tensor, torch.nan) for tensor in (q, k, v))
    out, lse = KERNELS[name].forward(q, k, v, segments, options, torch.empty_like(dout))
    found = KERNELS[name].backward(dout, q, k, v, out, lse, segments, options, into)
    assert all(gradient is given for gradient, given in zip(found, into, strict=True))
    assert torch.equal(into[1], torch.zeros(6, 2, 8)) and torch.equal(into[2], torch.zeros(6, 2, 8))
