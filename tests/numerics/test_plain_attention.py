"""A model in training that is called on other inputs: generation in a callback, and what is not switched back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, TrainerCallback

from hf_wlb import WLBDataCollator, WLBTrainer, plain_attention
from hf_wlb.attention import document_attention_enabled, register
from hf_wlb.attention.registration import IMPLEMENTATION, MASKLESS, _own
from tests.support.oracle import relative_error
from tests.support.tiny_llama import random_documents, tiny_llama
from tests.support.tolerances import MODEL, NEGATIVE_CONTROL_FACTOR
from tests.support.training import Recorder, train, trainer_of

PROMPTS = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
CALLS: dict[str, dict[str, torch.Tensor]] = {
    "one row": {"input_ids": PROMPTS[1:]},
    "two rows": {"input_ids": PROMPTS},
    "padded": {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long()},
}
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


class Generates(TrainerCallback):
    """Logits and greedy tokens after every step, against those of a copy that attends eagerly."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.generated = 0
        self.unmasked = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.eval()
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
        for given in CALLS.values():
            seen = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
            with plain_attention(model), torch.no_grad():
                found, tokens = model(**given).logits, model.generate(**given, **GREEDY)
            self.worst = max(self.worst, relative_error(found[seen], eager(**given).logits[seen].detach()))
            assert torch.equal(tokens, eager.generate(**given, **GREEDY))
            self.generated += 1
        self.unmasked = relative_error(found[seen], eager(PROMPTS).logits[seen].detach())  # of the padded ones


class Switches(TrainerCallback):
    """Changes the model's attention after the first step, and forgets to change it back."""

    def __init__(self, to: Any = "sdpa") -> None:
        self.to = to

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.set_attn_implementation(self.to)


def adapted() -> Any:
    torch.manual_seed(1)
    return get_peft_model(tiny_llama(), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]))


MODELS = pytest.mark.parametrize("make", [tiny_llama, adapted], ids=["plain", "PEFT"])


@MODELS
def test_a_callback_generates_and_training_goes_on_as_without_it(make: Any, tmp_path: Path) -> None:
    generates = Generates()
    _, found = train(tmp_path, model=make(), callbacks=[generates])
    _, alone = train(tmp_path, model=make())
    assert found.losses == alone.losses and found.implementations == {MASKLESS}
    assert generates.generated == 3 * len(found.losses) and generates.worst < MODEL
    assert generates.unmasked > NEGATIVE_CONTROL_FACTOR * MODEL


@MODELS
def test_what_is_not_switched_back_is_refused(make: Any, tmp_path: Path) -> None:
    model, recorder = make(), Recorder()
    sentence = (
        "LlamaForCausalLM got a packed micro-batch, but its attention implementation is 'sdpa' now and not "
        "'wlb_maskless'.*callback.*plain_attention.*before = model.config._attn_implementation"
    )
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path, model=model, callbacks=[Switches(), recorder])
    assert len(recorder.plans) == 1
    assert model.config._attn_implementation == "sdpa" and not _own


@pytest.mark.parametrize("to", [IMPLEMENTATION, MASKLESS])
def test_control_the_librarys_own_are_not(to: str, tmp_path: Path) -> None:
    _, found = train(tmp_path, callbacks=[Switches(to)])
    _, alone = train(tmp_path)
    assert found.losses == alone.losses


def test_a_switch_within_the_loss_is_refused(tmp_path: Path) -> None:
    """After the micro-batch was looked at; the model itself refuses it."""

    class Own(WLBTrainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.set_attn_implementation("eager")
            return super().compute_loss(model, *args, **kwargs)

    trainer, _ = trainer_of(tmp_path)
    trainer.__class__ = Own
    with pytest.raises(ValueError, match="attention implementation is 'eager' now"):
        trainer.train()


def test_outside_of_training_it_says_how_to_go_in(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, eval_dataset=[{"input_ids": d} for d in random_documents([5, 9])])
    (batch,) = trainer.get_eval_dataloader()
    with pytest.raises(ValueError, match=r"'sdpa' now.*inside `with hf_wlb.attention.document_attention_enabled"):
        trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)


@pytest.mark.parametrize("call", CALLS)
def test_other_inputs_are_refused_with_a_way_out(call: str) -> None:
    model = tiny_llama()
    with document_attention_enabled(model):
        for action in (model, lambda **given: model.generate(**given, **GREEDY)):
            with pytest.raises(ValueError, match=r"in a callback: `with hf_wlb.plain_attention\(model\): model.gener"):
                action(**CALLS[call])


def test_it_is_the_models_own_and_comes_back_after_an_exception() -> None:
    for own in ("eager", "sdpa", IMPLEMENTATION):
        register()
        model = tiny_llama()
        model.set_attn_implementation(own)
        with document_attention_enabled(model), document_attention_enabled(model):  # as evaluation within training
            with pytest.raises(RuntimeError, match="stop"), plain_attention(torch.nn.ModuleList([model])):
                assert model.config._attn_implementation == ("sdpa" if own == IMPLEMENTATION else own)
                with plain_attention(model):
                    pass
                raise RuntimeError("stop")
            assert model.config._attn_implementation == MASKLESS
        assert model.config._attn_implementation == own
        with plain_attention(model):  # not in training
            assert model.config._attn_implementation == ("sdpa" if own == IMPLEMENTATION else own)
        assert model.config._attn_implementation == own
    with pytest.raises(ValueError, match="of Transformers, got a Linear"), plain_attention(torch.nn.Linear(1, 1)):
        pass


def test_a_sub_model_that_is_switched_alone_is_noticed() -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 128, "num_key_value_heads": 1, "head_dim": 16}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config={**small, "image_size": 28, "patch_size": 14})
    )
    batch = WLBDataCollator()([{"input_ids": document} for document in random_documents([5, 9])])
    with document_attention_enabled(model), torch.no_grad():
        model.model.language_model(**{name: given for name, given in batch.items() if name != "labels"})
        model.set_attn_implementation({"text_config": "sdpa"})
        assert model.config._attn_implementation == MASKLESS
        with pytest.raises(ValueError, match=r"Gemma3ForConditionalGeneration got a packed micro-batch.*'sdpa' now"):
            model(**batch)
