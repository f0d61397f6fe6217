"""Linear cross-entropy by chunks of tokens: against whole logits in float64; memory; which function is taken."""

import inspect
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from hf_wlb.compilation import CompileDefaults, function_compiler
from hf_wlb.loss import choose_fused_loss, liger, liger_cross_entropy, linear_cross_entropy
from hf_wlb.loss.softmax import CompiledPieces
from tests.support.oracle import relative_error
from tests.support.tolerances import LOSS_BFLOAT16, LOSS_FLOAT32, LOSS_FLOAT64, NEGATIVE_CONTROL_FACTOR


class Case(NamedTuple):
    """Sizes and options of one call."""

    tokens: int = 13
    vocabulary: int = 29
    chunk: int | None = 4
    bias: bool = False
    softcap: float | None = None
    smoothing: float = 0.0


CASES = {
    "chunks that do not divide the tokens": Case(),
    "one chunk": Case(chunk=None),
    "a chunk longer than all": Case(chunk=100),
    "chunks of one token": Case(chunk=1),
    "one token": Case(tokens=1),
    "bias": Case(bias=True),
    "softcap": Case(softcap=1.5),
    "smoothing": Case(smoothing=0.1),
    "all together": Case(bias=True, softcap=1.5, smoothing=0.3),
}
WIDTH = 6
#: What would be compiled, as it is: the same operations, sooner.
UNCOMPILED = CompiledPieces(lambda function, name: function)


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, case.vocabulary, (case.tokens,), generator=generator)
    if case.tokens > 1:
        labels[::3] = -100
    made: dict[str, Any] = {
        "hidden": torch.randn(case.tokens, WIDTH, generator=generator),
        "weight": torch.randn(case.vocabulary, WIDTH, generator=generator),
        "bias": torch.randn(case.vocabulary, generator=generator) if case.bias else None,
    }
    made = {name: None if tensor is None else tensor.to(dtype).requires_grad_() for name, tensor in made.items()}
    return {**made, "labels": labels}


def whole_logits(hidden, weight, labels, *, bias=None, softcap=None, label_smoothing=0.0):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)


def loss_and_gradients(function, given: dict[str, Any], factor: float = 0.7, **options: Any) -> list[torch.Tensor]:
    """Loss, and gradients of hidden, weight and bias, of `factor` times the loss."""
    leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in given.items() if t is not None}
    loss = function(**leaves, **options)
    (loss * factor).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def expected_of(given: dict[str, Any], **options: Any) -> list[torch.Tensor]:
    double = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in given.items()}
    return loss_and_gradients(whole_logits, double, **options)


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(relative_error(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("pieces", [None, UNCOMPILED], ids=["in place", "pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_equals_whole_logits(name: str, dtype: torch.dtype, pieces: CompiledPieces | None) -> None:
    case = CASES[name]
    given = inputs_of(case, dtype)
    options = {"softcap": case.softcap, "label_smoothing": case.smoothing}
    found = loss_and_gradients(linear_cross_entropy, given, chunk_tokens=case.chunk, pieces=pieces, **options)
    assert [tensor.dtype for tensor in found] == [dtype] * (4 if case.bias else 3)
    tolerance = LOSS_FLOAT32 if dtype == torch.float32 else LOSS_FLOAT64
    assert worst(found, expected_of(given, **options)) <= tolerance


@pytest.mark.parametrize("wrong", ["no softcap", "no smoothing", "no bias", "labels off by one"])
def test_the_comparison_notices(wrong: str) -> None:
    given = inputs_of(Case(bias=True))
    options: dict[str, Any] = {"softcap": 1.5, "label_smoothing": 0.1}
    expected = expected_of(given, **options)
    if wrong == "no softcap":
        options["softcap"] = None
    elif wrong == "no smoothing":
        options["label_smoothing"] = 0.0
    elif wrong == "no bias":
        given["bias"] = torch.zeros_like(given["bias"]).requires_grad_()
    else:
        given["labels"] = given["labels"].roll(1)
    found = loss_and_gradients(linear_cross_entropy, given, chunk_tokens=4, **options)
    assert worst(found, expected) > NEGATIVE_CONTROL_FACTOR * LOSS_FLOAT32


@pytest.mark.parametrize("pieces", [None, UNCOMPILED], ids=["in place", "pieces"])
def test_far_logits_neither_overflow_nor_vanish(pieces: CompiledPieces | None) -> None:
    given = inputs_of(Case())
    given["hidden"] = (given["hidden"].detach() * 300).requires_grad_()
    found = loss_and_gradients(linear_cross_entropy, given, chunk_tokens=4, pieces=pieces)
    assert all(tensor.isfinite().all() for tensor in found)
    assert worst(found, expected_of(given)) <= 10 * LOSS_FLOAT32  # float32 logits of a thousand


def test_compiled_between_the_products() -> None:
    """By the compiler of this machine; other numbers of tokens compile nothing anew."""
    compiler = function_compiler(CompileDefaults(torch.device("cpu")))
    assert compiler is not None and function_compiler(CompileDefaults(torch.device("cpu"), torch_compile=False)) is None
    compiled = choose_fused_loss("chunked", "cpu", torch.float32, compiler=compiler)
    torch._dynamo.utils.counters.clear()
    for tokens in (13, 40, 7):
        case = Case(tokens=tokens, softcap=1.5, smoothing=0.3)
        given, options = inputs_of(case), {"softcap": 1.5, "label_smoothing": 0.3}
        found = loss_and_gradients(compiled, given, chunk_tokens=5, **options)
        assert worst(found, expected_of(given, **options)) <= LOSS_FLOAT32
        assert worst(found, expected_of(given, softcap=1.5)) > NEGATIVE_CONTROL_FACTOR * LOSS_FLOAT32
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_predict(tokens: int) -> None:
    given = inputs_of(Case(tokens=tokens, bias=True))
    given["labels"] = torch.full((tokens,), -100)
    loss, *gradients = loss_and_gradients(linear_cross_entropy, given, label_smoothing=0.1, chunk_tokens=2)
    assert float(loss) == 0 and len(gradients) == 3
    assert not any(gradient.any() for gradient in gradients)


def test_every_element_of_its_buffers_is_written() -> None:
    """torch.empty gives NaNs here."""
    given = inputs_of(Case(bias=True))
    expected = expected_of(given, softcap=2.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
        found = loss_and_gradients(linear_cross_entropy, given, chunk_tokens=4, softcap=2.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert worst(found, expected) <= LOSS_FLOAT32


def test_backward_may_run_again_and_the_loss_may_be_used_twice() -> None:
    given = inputs_of(Case())
    loss = linear_cross_entropy(**given, chunk_tokens=4)
    leaves = (given["hidden"], given["weight"])
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    squared = torch.autograd.grad(loss * loss, leaves)  # uses it twice: 2 x loss x gradient
    for first, second, third in zip(once, again, squared, strict=True):
        assert torch.equal(first, second)
        assert relative_error(third, 2 * loss.detach() * first) <= LOSS_FLOAT32


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    given = inputs_of(Case(bias=True))
    given[frozen] = given[frozen].detach()
    found, expected = loss_and_gradients(linear_cross_entropy, given, chunk_tokens=4), expected_of(given)
    assert len(found) == 3 and worst(found, expected) <= LOSS_FLOAT32


def test_autocast_takes_its_type_and_keeps_the_weights_gradient_in_float32() -> None:
    given = inputs_of(Case(tokens=64, bias=True))
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(linear_cross_entropy, given, chunk_tokens=5)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 4
    rounded = {n: t if n == "labels" else t.detach().bfloat16().float().requires_grad_() for n, t in given.items()}
    assert LOSS_FLOAT32 < worst(found, expected_of(rounded)) <= LOSS_BFLOAT16


def test_bfloat16_gradients_are_scaled_by_the_factor_as_it_is() -> None:
    """Rounded to bfloat16 first, it would shift every gradient by up to 0.4% the same way."""
    given = inputs_of(Case(tokens=64), torch.bfloat16)
    _, one, _ = loss_and_gradients(linear_cross_entropy, given, factor=1.0)
    factor = 1.3  # in bfloat16 1.297
    _, scaled, _ = loss_and_gradients(linear_cross_entropy, given, factor=factor)
    share = float((scaled.double() * one.double()).sum() / one.double().square().sum())
    assert scaled.dtype == torch.bfloat16 and abs(share - factor) < 5e-4


# ---- memory ----


class _Sizes(TorchDispatchMode):
    """Records the elements of every result, and how many matrix products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        self.products += "mm" in func.__name__
        return result


def test_no_more_than_a_chunk_of_logits_exists() -> None:
    case = Case(tokens=64, vocabulary=100, chunk=8, softcap=2.0, smoothing=0.1)
    given = inputs_of(case)
    options = {"softcap": 2.0, "label_smoothing": 0.1}
    with _Sizes() as chunked:
        loss_and_gradients(linear_cross_entropy, given, chunk_tokens=8, **options)
    with _Sizes() as whole:
        loss_and_gradients(whole_logits, given, **options)
    assert chunked.largest == 8 * 100 and chunked.products == 3 * 8
    assert whole.largest == 64 * 100  # the control: whole logits would have been seen


def test_without_gradients_there_is_no_work_for_them() -> None:
    given = inputs_of(Case(tokens=64, chunk=8))
    with _Sizes() as sizes, torch.no_grad():
        loss = linear_cross_entropy(**given, chunk_tokens=8)
    assert sizes.products == 8 and not loss.requires_grad


def test_the_default_chunk_bounds_the_logits() -> None:
    hidden, labels = torch.zeros(40, 1), torch.zeros(40, dtype=torch.long)
    with _Sizes() as sizes, torch.no_grad():
        linear_cross_entropy(hidden, torch.zeros(1 << 20, 1), labels)
    assert sizes.products == 3 and sizes.largest == 14 << 20  # 16 tokens fit, and 14 make three equal chunks


# ---- input ----


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weight": torch.zeros(29, 7)}, r"hidden must be \[tokens, hidden size\].*got \(13, 6\), \(29, 7\), \(13,\)"),
        ({"labels": torch.zeros(12, dtype=torch.long)}, r"labels \[tokens\].*\(12,\)"),
        ({"bias": torch.zeros(28)}, r"bias \[vocabulary\].*\(28,\)"),
        ({"labels": torch.full((13,), 29)}, "labels must be -100 or from 0 to 28.*got values from 29 to 29"),
        ({"labels": torch.full((13,), -1)}, "labels must be -100 or from 0 to 28"),
        ({"weight": torch.zeros(29, 6, dtype=torch.bfloat16)}, "hidden is torch.float32 and weight is torch.bfloat16"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
    ],
)
def test_bad_input(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        linear_cross_entropy(**{**inputs_of(Case()), **change})


# ---- choice ----


def test_the_choice_by_name() -> None:
    assert choose_fused_loss("chunked", "cuda", torch.bfloat16) is linear_cross_entropy
    assert choose_fused_loss("off", "cuda", torch.bfloat16) is None
    assert choose_fused_loss("auto", "cpu", torch.float32) is linear_cross_entropy
    assert choose_fused_loss("auto", "cuda", torch.bfloat16, split_vocabulary=True) is linear_cross_entropy
    named = list[str]()
    choose_fused_loss("chunked", "cuda", torch.bfloat16, compiler=lambda function, name: named.append(name) or function)
    assert named == ["the loss's softmax", "the loss's gradient"]
    with pytest.raises(ValueError, match=r"fused_loss must be one of auto, chunked, liger, off, got 'fast'"):
        choose_fused_loss("fast", "cpu", torch.float32)


@pytest.mark.parametrize(
    ("device", "dtype", "split", "reason"),
    [
        ("cpu", torch.float32, False, "runs on CUDA devices only, not on cpu"),
        ("cuda", torch.float64, False, "does not know torch.float64"),
        ("cuda", torch.bfloat16, True, "needs the whole vocabulary in one process"),
    ],
)
def test_liger_is_refused_with_the_reason(device: str, dtype: torch.dtype, split: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"fused_loss='liger' was asked for, but it {reason}.*fused_loss='chunked'"):
        choose_fused_loss("liger", device, dtype, split_vocabulary=split)


class _FakeLiger(torch.autograd.Function):
    """Liger's arguments and its habit to leave out all gradients where hidden states need none, on the CPU."""

    @staticmethod
    def forward(  # as the original names them
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
    ):
        assert (ce_weight, ignore_index, lse_square_scale, reduction) == (None, -100, 0.0, "sum")
        assert return_z_loss is False and accum_dtype is torch.float32
        options = {"softcap": softcap, "label_smoothing": label_smoothing}
        given = {"hidden": _input, "weight": weight, "labels": target, "bias": bias}
        if not _input.requires_grad:
            ctx.gradients = None
            return whole_logits(**given, **options).detach(), None
        with torch.enable_grad():
            loss, *ctx.gradients = loss_and_gradients(whole_logits, given, factor=1.0, **options)
        return loss, None

    @staticmethod
    def backward(ctx, upstream, _):
        assert ctx.gradients is not None
        hidden, weight, bias = (gradient * upstream for gradient in ctx.gradients)
        return hidden, weight, None, bias, *[None] * 8


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    name = "liger_kernel.ops.fused_linear_cross_entropy"
    module: Any = types.ModuleType(name)
    module.LigerFusedLinearCrossEntropyFunction = _FakeLiger
    for package in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(liger, "refusal", lambda *given: None)  # this machine has no GPU
    liger._load.cache_clear()
    yield module
    liger._load.cache_clear()


def test_liger_is_called_as_it_wants_to_be(fake_liger: Any) -> None:
    assert choose_fused_loss("auto", "cuda", torch.bfloat16) is liger_cross_entropy
    given = inputs_of(Case(bias=True))
    options = {"softcap": 1.5, "label_smoothing": 0.1}
    assert worst(loss_and_gradients(liger_cross_entropy, given, **options), expected_of(given, **options)) <= 1e-6
    given["hidden"] = given["hidden"].detach()
    assert len(loss_and_gradients(liger_cross_entropy, given)) == 3  # the head is trained all the same


@pytest.mark.parametrize("last", ["chunk_mem_const", "something_else"])
def test_liger_is_told_how_many_logits_a_chunk_may_hold(fake_liger: Any, last: str) -> None:
    """Where its version has that argument; another one in its place is left alone."""
    told: list[Any] = []
    skipped = ["use_token_scaling", "return_token_accuracy", "return_predicted_tokens", "ce_impl", "ce_mode"]

    class Newer(_FakeLiger):
        @staticmethod
        def forward(ctx, *given):
            told.append(given[12:])
            return _FakeLiger.forward(ctx, *given[:12])

        @staticmethod
        def backward(ctx, *upstream):
            return *_FakeLiger.backward(ctx, *upstream), *[None] * len(told[-1])

    known = list(inspect.signature(_FakeLiger.forward).parameters.values())
    more = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in (*skipped, last)]
    Newer.forward.__signature__ = inspect.Signature([*known, *more])
    fake_liger.LigerFusedLinearCrossEntropyFunction = Newer
    given = inputs_of(Case(bias=True))
    assert worst(loss_and_gradients(liger_cross_entropy, given), expected_of(given)) <= 1e-6
    budget = liger.logits_budget(*given["hidden"].shape)
    assert told == [(False, False, False, None, None, budget) if last == "chunk_mem_const" else ()]


def test_another_liger_is_refused(fake_liger: Any) -> None:
    class Older(_FakeLiger):
        @staticmethod
        def forward(ctx, _input, weight, target, bias=None, ignore_index=-100):
            return _input

    fake_liger.LigerFusedLinearCrossEntropyFunction = Older
    with pytest.raises(ValueError, match=r"it has other arguments in this version; liger-kernel 0.6.2 to 0.8"):
        choose_fused_loss("liger", "cuda", torch.bfloat16)
    assert choose_fused_loss("auto", "cuda", torch.bfloat16) is linear_cross_entropy
