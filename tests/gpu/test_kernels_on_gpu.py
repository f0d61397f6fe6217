"""The fused attention kernels that this machine has, in bf16 against the dense oracle in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_wlb.attention.kernels import KERNELS, AttentionOptions, KernelRequest, warm_up
from hf_wlb.attention.kernels.selection import obstacle
from hf_wlb.attention.segments import Segments
from tests.support.attention_calls import Call, expected_of, outcome_of
from tests.support.oracle import relative_error, worst_error
from tests.support.tolerances import GPU_BF16, GPU_BF16_OVER_PLAIN_KERNEL

FUSED = ("flash-attn-4", "flash-attn-2", "torch")
CHUNKS = Call((1, 3, 128, 10, 270), (5, 7, 128, 137, 600), heads=8, kv_heads=1, size=64, value_size=64, scaling=0.125)
GAPS = replace(CHUNKS, q_lengths=(0, 7, 0, 0, 150, 1, 0), k_lengths=(9, 140, 137, 1, 150, 300, 333))
OWN_KEYS = {"heads": 4, "kv_heads": 4}
SIZE_128 = {"size": 128, "value_size": 128, "scaling": 128**-0.5}

# flash-attn-4 compiles for seconds for every head size, number of heads per KV head, and window or softcap, and again
# for calls that fit one of its blocks (64 or 128 queries, 128 keys). So every two of {64, 128}, {gqa 8 to 1, own keys}
# and {causal, window} meet in one configuration, not all three, and chunks and gaps are longer than a block.
CASES: dict[str, Call] = {
    "chunks, gqa 8 to 1, 64": CHUNKS,
    "gaps, gqa 8 to 1, 64": GAPS,
    "one query in every segment, gqa 8 to 1, 64": replace(GAPS, q_lengths=(0, 1, 1), k_lengths=(9, 1, 200)),
    "chunks, own keys, 128": replace(CHUNKS, **OWN_KEYS, **SIZE_128),
    "gaps, own keys, 128": replace(GAPS, **OWN_KEYS, **SIZE_128),
    "window, chunks, gqa 8 to 1, 128": replace(CHUNKS, sliding_window=70, **SIZE_128),
    "window, gaps, gqa 8 to 1, 128": replace(GAPS, sliding_window=6, **SIZE_128),
    "window, gaps, own keys, 64": replace(GAPS, sliding_window=6, **OWN_KEYS),
    "softcap, gaps, own keys, 128": replace(GAPS, softcap=2.0, **OWN_KEYS, **SIZE_128),
}


def kernel_for(name: str, call: Call, *, deterministic: bool = False) -> Any:
    """The kernel, or a skip that says why this machine's cannot do the call."""
    request = KernelRequest(
        "cuda",
        torch.bfloat16,
        call.size,
        call.value_size,
        sliding_window=call.sliding_window is not None,
        softcap=call.softcap is not None,
        deterministic=deterministic,
        grouped=call.heads != call.kv_heads,
    )
    reason = obstacle(KERNELS[name], request)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    return KERNELS[name]


def on_cpu(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in found.items()}


def copied_prefixes(kernel: Any, call: Call, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every segment by a call of its own on copies of its rows, put together again."""
    rows, columns = call.bounds
    whole = {
        "out": torch.zeros_like(inputs["dout"]),
        "lse": torch.zeros(call.heads, rows[-1], dtype=torch.float64),
        **{f"d{name}": torch.zeros_like(inputs[name]) for name in ("q", "k", "v")},
    }
    for number, (queries, keys) in enumerate(zip(call.q_lengths, call.k_lengths, strict=True)):
        if queries:
            own, seen = slice(*rows[number : number + 2]), slice(*columns[number : number + 2])
            copies = {n: inputs[n][place].clone() for n, place in (("q", own), ("k", seen), ("v", seen), ("dout", own))}
            alone = replace(call, q_lengths=(queries,), k_lengths=(keys,))
            found = on_cpu(outcome_of(kernel, alone, copies, torch.bfloat16, "cuda"))
            whole["lse"][:, own] = found["lse"].double()
            for name, place in (("out", own), ("dq", own), ("dk", seen), ("dv", seen)):
                whole[name][place] = found[name].double()
    return whole


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FUSED)
def test_forward_and_backward_equal_the_dense_oracle(name: str, case: str) -> None:
    call = CASES[case]
    kernel = kernel_for(name, call)
    inputs = call.inputs(torch.bfloat16)
    found = on_cpu(outcome_of(kernel, call, inputs, torch.bfloat16, "cuda"))
    assert worst_error(found, expected_of(call, inputs)) <= GPU_BF16


# Few, for calls on single segments make flash-attn-4 compile further kernels.
@pytest.mark.parametrize("case", ["chunks, gqa 8 to 1, 64", "gaps, own keys, 128", "window, gaps, gqa 8 to 1, 128"])
@pytest.mark.parametrize("name", FUSED)
def test_segments_are_as_exact_as_calls_on_copies(name: str, case: str) -> None:
    call = CASES[case]
    kernel = kernel_for(name, call)
    inputs = call.inputs(torch.bfloat16)
    found = on_cpu(outcome_of(kernel, call, inputs, torch.bfloat16, "cuda"))
    copied = copied_prefixes(kernel, call, inputs)
    for part, tensor in expected_of(call, inputs).items():
        plain = relative_error(copied[part], tensor)
        # The log-sum-exp is float32: below 1e-5 both errors are its last bits.
        assert relative_error(found[part], tensor) <= max(GPU_BF16_OVER_PLAIN_KERNEL * plain, 1e-5), part


@pytest.mark.parametrize("case", [case for case in CASES if "gaps" in case])
@pytest.mark.parametrize("name", FUSED)
def test_keys_without_queries_change_nothing_and_get_no_gradient(name: str, case: str) -> None:
    call = CASES[case]
    kernel = kernel_for(name, call)
    inputs, unread = call.inputs(torch.bfloat16), call.unread()
    poisoned = {**inputs, **{part: inputs[part].clone() for part in ("k", "v")}}
    for part in ("k", "v"):
        poisoned[part][unread] = 1e30
    clean = on_cpu(outcome_of(kernel, call, inputs, torch.bfloat16, "cuda"))
    # What the allocator hands out next is not zero.
    soiled = [torch.full((2**22,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    del soiled
    found = on_cpu(outcome_of(kernel, call, poisoned, torch.bfloat16, "cuda"))
    for part in ("dk", "dv"):
        assert torch.equal(found[part][unread], torch.zeros_like(found[part][unread]))
    assert torch.equal(found["out"], clean["out"]) and torch.equal(found["lse"], clean["lse"])
    # dq is summed in any order
    assert worst_error(found, {part: tensor.double() for part, tensor in clean.items()}) <= GPU_BF16


@pytest.mark.parametrize("case", ["gaps, gqa 8 to 1, 64", "window, gaps, gqa 8 to 1, 128", "gaps, own keys, 128"])
@pytest.mark.parametrize("name", FUSED)
def test_deterministic_gradients_are_the_same_twice(name: str, case: str) -> None:
    call = replace(CASES[case], q_lengths=(0, 300, 0, 500), k_lengths=(50, 700, 300, 500))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(name == "torch" or before)
    try:
        kernel = kernel_for(name, call, deterministic=True)
        inputs = call.inputs(torch.bfloat16)
        first, *more = (
            on_cpu(outcome_of(kernel, call, inputs, torch.bfloat16, "cuda", deterministic=True)) for _ in range(4)
        )
    finally:
        torch.use_deterministic_algorithms(before)
    for again in more:
        for part, tensor in first.items():
            assert torch.equal(again[part], tensor), part
    assert worst_error(first, expected_of(call, inputs)) <= GPU_BF16


@pytest.mark.parametrize("name", FUSED)
def test_results_go_where_they_are_told_to(name: str) -> None:
    kernel = kernel_for(name, GAPS)
    inputs = GAPS.inputs(torch.bfloat16)
    q, k, v, dout = (inputs[part].to("cuda", torch.bfloat16) for part in ("q", "k", "v", "dout"))
    segments = Segments.from_lengths(GAPS.q_lengths, GAPS.k_lengths, "cuda")
    options = AttentionOptions(**GAPS.options)
    # Rows of a larger memory, as context-parallel attention gives them: what lies around them stays.
    shards = [torch.full((t.shape[0] + 5, *t.shape[1:]), torch.nan).to(t) for t in (dout, q, k, v)]
    memory, *into = (shard[2:-3] for shard in shards)
    out, lse = kernel.forward(q, k, v, segments, options, memory)
    gradients = kernel.backward(dout, q, k, v, out, lse, segments, options, tuple(into))
    assert [t.data_ptr() for t in (out, *gradients)] == [t.data_ptr() for t in (memory, *into)]
    assert all(shard[:2].isnan().all() and shard[-3:].isnan().all() for shard in shards)
    given = on_cpu(dict(zip(("out", "lse", "dq", "dk", "dv"), (memory, lse, *into), strict=True)))
    own = on_cpu(outcome_of(kernel, GAPS, inputs, torch.bfloat16, "cuda"))
    assert torch.equal(given["out"], own["out"]) and torch.equal(given["lse"], own["lse"])
    # gradients are summed in any order
    assert worst_error(given, {part: tensor.double() for part, tensor in own.items()}) <= GPU_BF16
    for part in ("dk", "dv"):
        assert torch.equal(given[part][GAPS.unread()], torch.zeros_like(given[part][GAPS.unread()]))


@pytest.mark.parametrize("name", FUSED)
def test_the_check_notices_a_wrong_segment(name: str) -> None:
    kernel = kernel_for(name, CHUNKS)
    inputs = CHUNKS.inputs(torch.bfloat16)
    wrong = replace(CHUNKS, k_lengths=(5, 8, 128, 136, 600))
    found = on_cpu(outcome_of(kernel, wrong, inputs, torch.bfloat16, "cuda"))
    assert worst_error(found, expected_of(CHUNKS, inputs)) > 5 * GPU_BF16


def test_the_reference_kernel_agrees_on_a_gpu() -> None:
    inputs = GAPS.inputs(torch.bfloat16)
    found = on_cpu(outcome_of(KERNELS["reference"], GAPS, inputs, torch.bfloat16, "cuda"))
    assert worst_error(found, expected_of(GAPS, inputs)) <= GPU_BF16


@pytest.mark.parametrize("heads", [(16, 4), (8, 8)])
def test_training_finds_flash_attn_4_compiled(heads: tuple[int, int]) -> None:
    """After its warm-up no micro-batch of whole documents and chunks is of a kind that has not been called."""
    call = replace(CHUNKS, heads=heads[0], kv_heads=heads[1], **SIZE_128)
    kernel = kernel_for("flash-attn-4", call)
    from flash_attn.cute import interface

    request = KernelRequest("cuda", torch.bfloat16, 128, 128, grouped=heads[0] != heads[1])
    assert warm_up(kernel, request, *heads)
    caches = (interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache)

    def compiled() -> list[int]:
        return [len(getattr(cache, "cache", cache)) for cache in caches]

    before = compiled()
    generator = torch.Generator().manual_seed(0)
    for number in range(30):
        k_lengths = torch.randint(1, 6000, (1 + number,), generator=generator).tolist()
        q_lengths = k_lengths if number % 2 else [1 + length // 3 for length in k_lengths]
        segments = Segments.from_lengths(q_lengths, k_lengths, device="cuda")
        q = torch.ones(sum(q_lengths), heads[0], 128, dtype=torch.bfloat16, device="cuda")
        k = torch.ones(sum(k_lengths), heads[1], 128, dtype=torch.bfloat16, device="cuda")
        out, lse = kernel.forward(q, k, k, segments, AttentionOptions(128**-0.5))
        kernel.backward(torch.ones_like(out), q, k, k, out, lse, segments, AttentionOptions(128**-0.5))
    assert compiled() == before
