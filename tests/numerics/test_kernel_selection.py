"""The choice among attention kernels, and what the fused ones hand to their libraries, on a machine that is made up."""

import ast
import logging
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
    available_kernels,
    choose_kernel,
    flash2,
    flash4,
    selection,
)
from hf_wlb.attention.segments import Segments
from tests.support.attention_calls import Call, expected_of, outcome_of
from tests.support.oracle import dense_segments, worst_error
from tests.support.source_tree import REPOSITORY, python_files
from tests.support.tolerances import ATTENTION_FLOAT32

DOCUMENTS = Call((7, 64), (7, 64))
GAPS = Call((0, 7, 0, 0, 64, 1, 0), (9, 20, 137, 1, 64, 300, 3))
REQUEST = KernelRequest("cuda", torch.bfloat16, 128, 128)


REMEMBERING = (selection._tell, flash2._load, flash2._softcap_failure, flash4._load)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    for function in REMEMBERING:
        function.cache_clear()
    yield
    for function in REMEMBERING:
        function.cache_clear()


def by_oracle(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, left, right, softcap) -> Any:
    """What a library must compute that gets these arguments."""
    assert right == 0 and causal == (left in (None, -1)) and cu_seqlens_q.dtype == torch.int32
    window = None if left in (None, -1) else left + 1
    return dense_segments(
        *(tensor.double() for tensor in (q, k, v)),
        cu_seqlens_q.tolist(),
        cu_seqlens_k.tolist(),
        scaling=softmax_scale,
        sliding_window=window,
        softcap=softcap or None,
    )


def gradients_by_oracle(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    return torch.autograd.grad(by_oracle(*leaves, *rest)[0], leaves, dout.double())


def flash2_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    assert dropout_p == 0 and alibi_slopes is None
    window = (window_size_left, window_size_right, softcap)
    return *by_oracle(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window), None, None


def flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert softmax_lse.shape == (q.shape[1], q.shape[0]) and out.shape == dout.shape
    window = (window_size_left, window_size_right, softcap)
    found = gradients_by_oracle(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window)
    for place, gradient in zip((dq, dk, dv), found, strict=True):
        place.copy_(gradient)


def flash4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
    return_lse=False,
    out=None,
):  # fmt: skip
    assert return_lse
    window = (window_size_left, window_size_right, softcap)
    return *by_oracle(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window), None, None, None


def flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
):  # fmt: skip
    flash2_backward(
        dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale,
        causal, window_size_left, window_size_right, softcap, None, deterministic,
    )  # fmt: skip
    return dq, dk, dv


class Machine:
    """A machine with a GPU and both libraries, as far as the choice can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(flash2, "_current_device", lambda: torch.device("cpu"))
        self.has_capability(9, 0)
        self.interface2 = types.SimpleNamespace(
            _flash_attn_varlen_forward=flash2_forward, _flash_attn_varlen_backward=flash2_backward
        )
        self.interface4 = types.SimpleNamespace(_flash_attn_fwd=flash4_forward, _flash_attn_bwd=flash4_backward)
        cute = types.SimpleNamespace(interface=self.interface4)
        package = types.SimpleNamespace(__version__="2.8.3", flash_attn_interface=self.interface2, cute=cute)
        for name, module in (("flash_attn", package), ("flash_attn.cute", cute)):
            monkeypatch.setitem(sys.modules, name, module)

    def has_capability(self, *capability: int) -> None:
        self.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    def lacks(self, module: str) -> None:
        self.monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("name", ["flash-attn-2", "flash-attn-4"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"sliding_window": 300}, {"softcap": 2.0}], ids=str)
def test_the_libraries_get_what_they_ask_for(machine: Machine, name: str, options: dict[str, Any]) -> None:
    call = replace(GAPS, **options)
    inputs = call.inputs()
    assert (
        worst_error(outcome_of(KERNELS[name], call, inputs, torch.float32), expected_of(call, inputs))
        <= ATTENTION_FLOAT32
    )


def test_the_fastest_that_can_is_chosen(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert list(KERNELS) == available_kernels() == ["flash-attn-4", "flash-attn-2", "torch", "reference"]
    assert choose_kernel(REQUEST).name == "flash-attn-4"
    machine.has_capability(8, 0)
    assert choose_kernel(REQUEST).name == "flash-attn-2"
    machine.lacks("flash_attn")
    flash2._load.cache_clear()
    assert choose_kernel(REQUEST).name == "torch"
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert available_kernels() == ["flash-attn-4", "torch", "reference"]


def test_a_choice_is_logged_once_for_a_request(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        choose_kernel(REQUEST)
        choose_kernel(replace(REQUEST, sliding_window=True))
        choose_kernel(REQUEST, "torch")
    assert [record.getMessage() for record in caplog.records] == [
        "attention kernel 'flash-attn-4' for bfloat16 on cuda, head size 128",
        "attention kernel 'flash-attn-4' for bfloat16 on cuda, head size 128, sliding window",
        "attention kernel 'torch', as asked, for bfloat16 on cuda, head size 128",
    ]


def test_falling_down_to_the_reference_on_a_gpu_warns_with_every_reason(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.lacks("flash_attn")
    machine.has_capability(8, 0)
    for _ in range(2):
        assert choose_kernel(replace(REQUEST, softcap=True)).name == "reference"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for reason in (
        "'reference', which is slow, for bfloat16 on cuda, head size 128, softcap: no fused one can.",
        "flash-attn-4 needs compute capability 9.0 or newer; this device has 8.0",
        "flash-attn-2 is not installed",
        "torch has no softcap",
    ):
        assert reason in record.getMessage()
    assert choose_kernel(replace(REQUEST, dtype=torch.float32)).name == "reference"
    assert len(caplog.records) == 1


def test_without_a_gpu_the_reference_attends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_kernel(KernelRequest("cpu", torch.bfloat16, 32, 16)).name == "reference"
    (record,) = caplog.records
    assert record.getMessage() == (
        "attention kernel 'reference' for bfloat16 on cpu, head size 32 and value head size 16"
    )
    with pytest.raises(ValueError, match="no attention kernel can do int32 on cpu"):
        choose_kernel(KernelRequest("cpu", torch.int32, 32, 32))


def test_a_named_kernel_that_cannot_is_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match="no attention kernel 'flash'; there are flash-attn-4, flash-attn-2, torch, "):
        choose_kernel(REQUEST, "flash")
    with pytest.raises(
        ValueError, match=r"'torch' .* softcap, but it has no softcap\. .*: flash-attn-4, flash-attn-2, "
    ):
        choose_kernel(replace(REQUEST, softcap=True), "torch")
    machine.lacks("flash_attn.cute")
    flash4._load.cache_clear()
    with pytest.raises(
        ValueError, match=r"it is not installed \(.*\): pip install --pre flash-attn-4\. Kernels .* torch"
    ):
        choose_kernel(REQUEST, "flash-attn-4")
    assert choose_kernel(REQUEST, "reference").name == "reference"
    integers = KernelRequest("cpu", torch.int32, 32, 32)
    with pytest.raises(ValueError, match=r"runs on CUDA devices only, not on cpu\. No other one can here\."):
        choose_kernel(integers, "torch")


def test_a_library_with_other_functions_is_refused(machine: Machine) -> None:
    machine.interface2._flash_attn_varlen_forward = lambda q, k, v, window_size: None
    del machine.interface4._flash_attn_bwd
    with pytest.raises(ValueError, match=r"it is flash-attn 2\.8\.3, whose functions are others .*window_size_left"):
        choose_kernel(REQUEST, "flash-attn-2")
    with pytest.raises(ValueError, match=r"has other functions than 4\.0\.0b36, .*_flash_attn_bwd"):
        choose_kernel(REQUEST, "flash-attn-4")
    with pytest.raises(ImportError, match="whose functions are others"):
        outcome_of(KERNELS["flash-attn-2"], DOCUMENTS, DOCUMENTS.inputs(), torch.float32)


SIZES_192_128 = {"head_size": 192, "value_head_size": 128}
REFUSED: list[tuple[str, tuple[int, int], dict[str, Any], str]] = [
    ("torch", (9, 0), {"device_type": "cpu"}, "CUDA devices only, not on cpu"),
    ("torch", (9, 0), {"dtype": torch.float32}, "not in float32"),
    ("torch", (7, 5), {}, "needs compute capability 8.0 or newer; this device has 7.5"),
    ("torch", (9, 0), SIZES_192_128, "one head size, not 192 for queries and 128"),
    ("torch", (9, 0), {"deterministic": True}, "only under torch.use_deterministic_algorithms"),
    ("flash-attn-2", (9, 0), SIZES_192_128, "one head size"),
    ("flash-attn-2", (9, 0), {"head_size": 264, "value_head_size": 264}, "multiples of 8 up to 256"),
    ("flash-attn-2", (9, 0), {"head_size": 36, "value_head_size": 36}, "multiples of 8"),
    ("flash-attn-4", (8, 6), {}, "needs compute capability 9.0"),
    ("flash-attn-4", (9, 0), SIZES_192_128, "share KV heads with one head size only"),
    ("flash-attn-4", (10, 0), {"head_size": 192, "value_head_size": 192}, "up to 128, 192 with values of 128"),
    ("flash-attn-4", (10, 0), {"head_size": 256, "value_head_size": 256, "softcap": True}, "no softcap for head size"),
    ("flash-attn-4", (12, 0), {"deterministic": True}, "no deterministic gradients"),
    ("flash-attn-4", (12, 0), SIZES_192_128, "one head size up to 128"),
    ("flash-attn-4", (13, 0), {}, "no backward pass for devices of this"),
]
TAKEN: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("torch", (8, 0), {"sliding_window": True, "dtype": torch.float16}),
    ("flash-attn-2", (8, 0), {"sliding_window": True, "softcap": True, "deterministic": True}),
    ("flash-attn-4", (9, 0), {"sliding_window": True, "softcap": True, "deterministic": True}),
    ("flash-attn-4", (9, 0), {**SIZES_192_128, "grouped": False}),
    ("flash-attn-4", (10, 0), SIZES_192_128),
    ("flash-attn-4", (12, 0), {"softcap": True}),
    ("reference", (9, 0), {**SIZES_192_128, "sliding_window": True, "softcap": True, "deterministic": True}),
]


@pytest.mark.parametrize(("name", "capability", "wishes", "reason"), REFUSED)
def test_what_a_kernel_cannot_is_refused(
    machine: Machine, name: str, capability: tuple[int, int], wishes: dict[str, Any], reason: str
) -> None:
    machine.has_capability(*capability)
    assert reason in (KERNELS[name].refusal(replace(REQUEST, **wishes)) or "")


@pytest.mark.parametrize(("name", "capability", "wishes"), TAKEN)
def test_what_a_kernel_can_is_taken(
    machine: Machine, name: str, capability: tuple[int, int], wishes: dict[str, Any]
) -> None:
    machine.has_capability(*capability)
    assert KERNELS[name].refusal(replace(REQUEST, **wishes)) is None


def test_torch_is_deterministic_where_torch_is_told_to_be(machine: Machine) -> None:
    kernel, request = KERNELS["torch"], replace(REQUEST, deterministic=True)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "without warn_only" in (kernel.refusal(request) or "")
        with pytest.raises(ValueError, match=r"only under torch\.use_deterministic_algorithms"):
            options = AttentionOptions(1.0, deterministic=True)
            kernel.backward(*[torch.ones(2, 1, 8)] * 5, torch.ones(1, 2), Segments.from_lengths([2]), options)
        torch.use_deterministic_algorithms(True)
        assert kernel.refusal(request) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn-2", "torch"])
def test_a_fused_kernel_without_queries_calls_nothing(name: str) -> None:
    found = outcome_of(KERNELS[name], Call((0,), (5,)), Call((0,), (5,)).inputs(), torch.bfloat16)
    assert found["out"].shape == (0, 4, 8) and found["lse"].shape == (4, 0) and found["dq"].shape == (0, 4, 8)
    assert found["lse"].dtype is torch.float32
    assert torch.equal(found["dk"], torch.zeros(5, 2, 8, dtype=torch.bfloat16)) and not found["dv"].any()


def test_no_library_is_imported_before_a_gpu_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported() -> None:
        pytest.fail("a library was imported")

    for module in (flash2, flash4):
        monkeypatch.setattr(module, "_load", imported)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available_kernels() == ["reference"]
    assert choose_kernel(KernelRequest("cpu", torch.float32, 8, 8)).name == "reference"
    with pytest.raises(ValueError, match="needs a CUDA device, and torch sees none"):
        choose_kernel(REQUEST, "flash-attn-2")
    for path in python_files(REPOSITORY / "hf_wlb" / "attention"):
        at_once = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("flash_attn" in ast.unparse(node) for node in at_once), path
