"""Models that compute their loss from hidden states: as with whole logits, in every family, and restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_pt_utils import LabelSmoother

from hf_wlb.loss import HeadLoss, check, check_head_loss, linear_cross_entropy
from tests.numerics.test_families import ACCEPTED, COMMON, REFUSED, VOCABULARY, Family, build
from tests.support.oracle import gradients_of, relative_error, worst_error
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import CHECKPOINTING, HEAD_LOSS_FLOAT32, HEAD_LOSS_FLOAT64, NEGATIVE_CONTROL_FACTOR

NUMBER = 31  # of tokens in the whole step: more than there are here
CAPPED = {"gemma2": 3.0, "gemma3": 3.0}
BIASED_HEAD = Family("phi", {"attention_dropout": 0.0})


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build(BIASED_HEAD if name == "phi" else ACCEPTED[name]).to(dtype)
    if name in CAPPED:
        model.config.final_logit_softcapping = CAPPED[name]
    return model


def micro_batch(tokens: int = 23, rows: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, :: tokens // 3] = -100
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(NUMBER), "use_cache": False}


def loss_and_gradients(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**given)
    output.loss.backward()
    return output.loss.detach(), gradients_of(model)


def whole_logits(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Without the model's own loss function, which rounds logits to float32."""
    model.zero_grad()
    logits = model(input_ids=given["input_ids"], use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten(), reduction="sum") / NUMBER
    loss.backward()
    return loss.detach(), gradients_of(model)


def error(found: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: Any) -> float:
    return max(relative_error(found[0], expected[0]), worst_error(found[1], expected[1]))


@pytest.mark.parametrize("name", [*ACCEPTED, "phi"])
def test_every_family_has_its_own_loss_and_gradients(name: str) -> None:
    given = micro_batch(rows=2)
    for dtype, expected, tolerance in (
        (torch.float32, loss_and_gradients, HEAD_LOSS_FLOAT32),
        (torch.float64, whole_logits, HEAD_LOSS_FLOAT64),
    ):
        model = model_of(name, dtype)
        check_head_loss(model)
        wanted = expected(model, given)
        with HeadLoss(model).enabled():
            assert error(loss_and_gradients(model, given), wanted) <= tolerance


@pytest.mark.parametrize("wrong", ["no softcap", "no factor", "mean of the micro-batch"])
def test_the_comparison_notices(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of("granite" if wrong == "no factor" else "gemma2"), micro_batch()
    expected = loss_and_gradients(model, given)
    if wrong == "no softcap":
        model.config.final_logit_softcapping = None
    elif wrong == "no factor":
        model.config.logits_scaling = 1.0
    else:
        del given["num_items_in_batch"]
    with HeadLoss(model).enabled():
        found = loss_and_gradients(model, given)
    assert error(found, expected) > NEGATIVE_CONTROL_FACTOR * HEAD_LOSS_FLOAT32


@pytest.mark.parametrize("case", ["shifted labels", "a mean", "a number", "another ignored label", "positional"])
def test_arguments_of_the_models_own_loss(case: str) -> None:
    model, given = tiny_llama(), micro_batch()
    if case == "shifted labels":
        given["shift_labels"] = given["labels"].roll(5)
    elif case == "a mean":
        del given["num_items_in_batch"]
    elif case == "a number":
        given["num_items_in_batch"] = 7
    elif case == "another ignored label":
        given |= {"ignore_index": 0, "labels": given["labels"].clamp(min=0)}
    if case == "positional":
        ids, labels = given.pop("input_ids"), given.pop("labels")

        def run() -> Any:
            return model(ids, None, None, None, None, labels, **given)
    else:

        def run() -> Any:
            return model(**given)

    expected = run().loss
    with HeadLoss(model).enabled():
        output = run()
    assert output.logits is None and relative_error(output.loss, expected) <= HEAD_LOSS_FLOAT32


@pytest.mark.parametrize("number", [None, NUMBER])
def test_label_smoothing_is_the_trainers(number: int | None) -> None:
    model, given = tiny_llama(), micro_batch()
    given["num_items_in_batch"] = number
    labels = given.pop("labels")
    expected = LabelSmoother(0.2)(model(**given), labels, shift_labels=True, num_items_in_batch=number)
    with HeadLoss(model, label_smoothing=0.2).enabled():
        found = model(**given, labels=labels).loss
    assert relative_error(found, expected) <= HEAD_LOSS_FLOAT32


# ---- what the output and the model look like ----


def test_the_output_holds_no_logits() -> None:
    model, given = tiny_llama(), micro_batch()
    with HeadLoss(model).enabled():
        output = model(**given, output_hidden_states=True)
        row = model(**given, output_hidden_states=True, return_dict=False)
    assert output.logits is None and list(output.keys()) == ["loss", "hidden_states"]
    assert len(row) == 2 and torch.equal(row[0], output.loss) and isinstance(row[1], tuple)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    given = micro_batch()
    before = model(**given)
    state = (model.lm_head, model.config.to_dict(), set(model.__dict__), len(model._forward_hooks))
    yield
    after = model(**given)
    assert state == (model.lm_head, model.config.to_dict(), set(model.__dict__), len(model._forward_hooks))
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)


def test_outside_the_block_everything_is_as_before() -> None:
    model = model_of("gemma2")
    with unchanged(model):
        head_loss = HeadLoss(model)
        for _ in range(2):
            with head_loss.enabled(), head_loss.enabled():
                loss_and_gradients(model, micro_batch())
        with pytest.raises(ValueError, match="labels must be"), head_loss.enabled():
            model(**{**micro_batch(), "labels": torch.full((1, 23), 99)})


def test_without_labels_there_are_logits_inside_the_block_too() -> None:
    model, given = tiny_llama(), micro_batch()
    del given["labels"]
    expected = model(**given).logits
    with HeadLoss(model).enabled():
        assert torch.equal(model(**given).logits, expected)
        generated = model.generate(given["input_ids"], max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 26)


def test_the_models_own_loss_function_comes_back() -> None:
    model = tiny_llama()

    def own(*args: Any, **kwargs: Any) -> Any:
        return torch.zeros(())

    model.loss_function = own
    with HeadLoss(model).enabled():
        assert float(model(**micro_batch()).loss.detach()) > 0
    assert model.loss_function is own


# ---- together with what training does to a model ----


def test_gradient_checkpointing_and_training_mode() -> None:
    model, given = tiny_llama().train(), micro_batch()
    expected = loss_and_gradients(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with HeadLoss(model).enabled():
        loss = model(**given).loss
    loss.backward()  # outside: layers are computed again, the head is not
    model.zero_grad()
    with HeadLoss(model).enabled():
        assert error(loss_and_gradients(model, given), expected) <= HEAD_LOSS_FLOAT32 + CHECKPOINTING


def test_compiled_decoder_layers() -> None:
    model, given = tiny_llama(), micro_batch()
    expected = loss_and_gradients(model, given)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with HeadLoss(model).enabled():
        assert error(loss_and_gradients(model, given), expected) <= HEAD_LOSS_FLOAT32


def test_autocast() -> None:
    model, given = tiny_llama(), micro_batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(model, given)
        with HeadLoss(model).enabled():
            found = loss_and_gradients(model, given)
    assert error(found, expected) <= 1e-2 and found[1]["lm_head.weight"].dtype == torch.float32


def test_an_adapted_model_with_a_frozen_head() -> None:
    from peft import LoraConfig, get_peft_model

    model, given = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj", "down_proj"])), micro_batch()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = loss_and_gradients(model, given)
    base = model.get_base_model()
    check_head_loss(base)
    with HeadLoss(base).enabled():
        assert error(loss_and_gradients(model, given), expected) <= HEAD_LOSS_FLOAT32
    assert base.lm_head.weight.grad is None


# ---- refused ----


def test_the_check_leaves_no_trace() -> None:
    model = tiny_llama().train()
    with torch.no_grad():
        check_head_loss(model)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    with unchanged(model.eval()):
        check_head_loss(model)


@pytest.mark.parametrize("name", ["llama", "cohere2", "granite", "gemma2", "phi"])
def test_the_check_in_bfloat16(name: str) -> None:
    check_head_loss(model_of(name, torch.bfloat16))


class _Capped(LlamaForCausalLM):
    """Caps its logits under a name that nobody knows, and as weakly as Gemma does."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        logits = 30 * torch.tanh(logits / 30)
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, VOCABULARY, **kwargs), logits=logits)


class _Scaled(LlamaForCausalLM):
    """Multiplies logits whose bias is 0 so far."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        torch.nn.init.zeros_(self.lm_head.bias)

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = 0.5 * self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, VOCABULARY, **kwargs), logits=logits)


class _Twice(LlamaForCausalLM):
    """Adds its loss to itself."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = sum(self.loss_function(logits, labels, VOCABULARY, **kwargs) for _ in range(2))
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (_Capped, r"the loss of _Capped cannot be computed from hidden states.*fused_loss='off'.*in a trial"),
        (_Scaled, r"_Scaled multiplies logits that have a bias.*fused_loss='off'"),
        (_Twice, r"the loss of _Twice.*fused_loss='off'.*called its loss_function 2 times"),
    ],
)
def test_models_that_do_more_with_logits_are_refused(kind: Any, sentence: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**COMMON)).to(dtype)
    with pytest.raises(ValueError, match=sentence):
        check_head_loss(model)


def test_the_check_of_a_model_that_knows_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the trial's own tokens as labels loss and gradient would vanish, and rounding alone be compared."""
    model, tokens = tiny_llama().train(), torch.tensor([[1, 2] * 8])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.01
    trial, found = check._loss_and_gradient, []
    monkeypatch.setattr(check, "_loss_and_gradient", lambda *args: found.append(trial(*args)) or found[-1])
    check_head_loss(model)
    assert len(found) == 2
    assert all(loss > 1 and gradient.norm() > 0.1 * model.lm_head.weight.norm(dim=1).mean() for loss, gradient in found)


class _LossOnly(LlamaForCausalLM):
    """Returns no logits with its loss."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, VOCABULARY, **kwargs))


def test_the_check_of_a_model_that_returns_no_logits_with_its_loss() -> None:
    torch.manual_seed(0)
    check_head_loss(_LossOnly(LlamaConfig(**COMMON)))


@pytest.mark.parametrize("kind", ["recurrent_gemma", "bart"])
def test_families_that_do_more_with_logits_are_refused(kind: str) -> None:
    if kind == "bart":
        model = build(REFUSED["bart, which numbers positions by itself"][0])
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON))
    with pytest.raises(ValueError, match="cannot be computed from hidden states, without whole logits"):
        check_head_loss(model)


class _Quantized(torch.nn.Linear):
    """As libraries derive theirs."""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("adapter", r"the head of LlamaForCausalLM is a peft\.\S+\.Linear and not a plain torch.nn.Linear"),
        ("copy", r"the head of LlamaForCausalLM is a peft\.\S+\.ModulesToSaveWrapper and not a plain"),
        ("quantized", r"the head of LlamaForCausalLM is a \S+\._Quantized and not a plain.*fused_loss='off'"),
        ("none", r"LlamaForCausalLM names no head.*fused_loss='off'"),
        ("hook", r"the head of LlamaForCausalLM has hooks or a forward of its own.*fused_loss='off'"),
        ("loss", r"the loss_function of LlamaForCausalLM is not Transformers' own.*fused_loss='off'"),
    ],
)
def test_a_head_that_is_not_plain_is_refused(change: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    if change == "adapter":
        get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    elif change == "copy":
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    elif change == "quantized":
        model.lm_head = _Quantized(32, model.config.vocab_size, bias=False)
    elif change == "none":
        monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    elif change == "hook":
        model.lm_head.register_forward_hook(lambda module, given, output: output * 2)
    else:
        model.loss_function = lambda *args, **kwargs: torch.zeros(())
    with pytest.raises(ValueError, match=sentence):
        check_head_loss(model)


def test_a_forward_that_computes_its_loss_in_another_way_is_told() -> None:
    """As Liger's patched models do in training, but not in evaluation, where the check looks."""
    model, given = tiny_llama(), micro_batch()
    head_loss = HeadLoss(model)
    own = model.forward

    def patched(input_ids: Any, labels: Any, **kwargs: Any) -> Any:
        hidden = model.model(input_ids=input_ids).last_hidden_state
        loss = linear_cross_entropy(hidden[0, :-1], model.lm_head.weight, labels[0, 1:])
        return CausalLMOutputWithPast(loss=loss)

    model.forward = patched
    with pytest.raises(RuntimeError, match=r"called its loss_function 0 times.*fused_loss='off'"), head_loss.enabled():
        model(**given)
    model.forward = own
    model.lm_head = torch.nn.Linear(32, model.config.vocab_size, bias=False)
    replaced = r"the head of LlamaForCausalLM was replaced.*before the trainer is made"
    with pytest.raises(RuntimeError, match=replaced), head_loss.enabled():
        model(**given)
