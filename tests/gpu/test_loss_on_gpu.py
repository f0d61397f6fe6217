"""The loss without whole logits on a GPU: ours and Liger's against whole logits in float64, and their memory."""

from typing import Any

import pytest
import torch

from hf_wlb.compilation import CompileDefaults, function_compiler
from hf_wlb.loss import HeadLoss, choose_fused_loss, liger, linear_cross_entropy
from tests.numerics.test_loss_chunked import loss_and_gradients as loss_and_gradients_of
from tests.numerics.test_loss_chunked import whole_logits, worst
from tests.numerics.test_loss_head import error, loss_and_gradients, micro_batch
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import GPU_TRAINER, LOSS_BFLOAT16, LOSS_FLOAT32

TOKENS, WIDTH, WORDS = 2048, 256, 20_000


FUNCTIONS = ["chunked", "chunked, compiled", "liger"]


def function_of(name: str, dtype: torch.dtype) -> Any:
    if name == "liger" and liger.missing() is not None:
        pytest.skip(f"liger-kernel {liger.missing()}")
    name, _, compiled = name.partition(", ")
    compiler = function_compiler(CompileDefaults(torch.device("cuda"), torch_compile=bool(compiled)))
    return choose_fused_loss(name, "cuda", dtype, compiler=compiler)


def inputs(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) / 4).to(dtype).requires_grad_()

    labels = torch.randint(0, WORDS, (TOKENS,), device="cuda", generator=generator)
    labels[::5] = -100
    return {"hidden": random(TOKENS, WIDTH), "weight": random(WORDS, WIDTH), "labels": labels}


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "label_smoothing": 0.1}], ids=["plain", "softcap, smoothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_whole_logits(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    function, given = function_of(name, dtype), inputs(dtype)
    double = {n: t.detach().double().requires_grad_() if n != "labels" else t for n, t in given.items()}
    expected = loss_and_gradients_of(whole_logits, double, **options)
    tolerance = LOSS_BFLOAT16 if dtype == torch.bfloat16 else 10 * LOSS_FLOAT32
    assert worst(loss_and_gradients_of(function, given, **options), expected) <= tolerance
    if name != "liger":
        found = loss_and_gradients_of(function, given, **options, chunk_tokens=300)
        assert worst(found, expected) <= tolerance


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_weights_under_autocast(name: str) -> None:
    function, given = function_of(name, torch.bfloat16), inputs(torch.float32)
    rounded = {n: t.detach().bfloat16().double().requires_grad_() if n != "labels" else t for n, t in given.items()}
    with torch.autocast("cuda", torch.bfloat16):
        found = loss_and_gradients_of(function, given)
    assert found[2].dtype == torch.float32
    assert worst(found, loss_and_gradients_of(whole_logits, rounded)) <= LOSS_BFLOAT16


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_stays_below_whole_logits(name: str) -> None:
    function, given = function_of(name, torch.bfloat16), inputs(torch.bfloat16)
    options = {"chunk_tokens": 256} if name != "liger" else {}
    function(**given, **options)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_and_gradients_of(function, given, **options)
    assert torch.cuda.max_memory_allocated() - before < TOKENS * WORDS * 4


def test_labels_are_checked_without_waiting_for_the_gpu() -> None:
    """The last word passes; a label beyond it would end this process's use of the GPU."""
    given = inputs(torch.float32)
    given["labels"][0] = WORDS - 1
    assert linear_cross_entropy(**given).isfinite()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_models_loss_and_gradients(name: str) -> None:
    function = function_of(name, torch.float32)
    model = tiny_llama().cuda()
    given = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in micro_batch().items()}
    expected = loss_and_gradients(model, given)
    with HeadLoss(model, function).enabled():
        assert error(loss_and_gradients(model, given), expected) <= GPU_TRAINER
