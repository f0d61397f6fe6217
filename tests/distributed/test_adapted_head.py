"""An adapter on the head, or a trained copy of it: fused_loss='auto' takes whole logits, whoever has which tokens."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.equivalence import Outcome, check, prepared, replicas, run
from tests.support.oracle import loss_and_gradients, worst_error
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import NEGATIVE_CONTROL_FACTOR, TRAINER
from tests.support.training import check_first_step, rows_of, train, trainer_of

#: What is adapted, as scripts say it that add tokens.
HEADS: dict[str, dict[str, Any]] = {
    "copy": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "adapter": {"target_modules": ["q_proj", "lm_head"]},
}
#: A parameter of it that is trained.
TRAINED = {
    "copy": "base_model.model.lm_head.modules_to_save.default.weight",
    "adapter": "base_model.model.lm_head.lora_A.default.weight",
}
SPLITS_2: dict[str, dict[str, Any]] = {
    "dp2": {},
    "cp2": {"cp_size": 2},
    "fsdp2": {"dp_shard_size": 2},
    "fsdp over cp2": {"cp_size": 2, "fsdp": True},
}


def adapted(head: str, model: Any = None) -> Any:
    """Its head is another one than that below it."""
    torch.manual_seed(4)
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **HEADS[head])
    found: Any = get_peft_model(tiny_llama() if model is None else model, config)
    if head == "copy":
        with torch.no_grad():
            dict(found.named_parameters())[TRAINED[head]].mul_(1.5)
    return found


def with_the_head_below(head: str) -> Any:
    """The same model, as if its loss were computed from the head that is not trained."""
    model = adapted(head)
    with torch.no_grad():
        if head == "copy":
            model.get_output_embeddings().modules_to_save.default.weight.div_(1.5)
        else:
            model.get_output_embeddings().lora_B.default.weight.mul_(1e-3)  # all but
    return model


@pytest.mark.parametrize("head", HEADS)
def test_the_trained_head_has_its_gradient(head: str, tmp_path: Path, caplog: Any) -> None:
    rows = rows_of()
    with caplog.at_level(logging.WARNING):
        _, found = train(tmp_path, rows, adapted(head), max_steps=1)
    (said,) = [record.getMessage() for record in caplog.records if "whole logits" in record.getMessage()]
    assert said.startswith("The head of LlamaForCausalLM is a peft.") and "micro-batch of 20 tokens" in said
    assert TRAINED[head] in found.gradients and float(found.gradients[TRAINED[head]].norm()) > 0
    assert check_first_step(found, rows, adapted(head)) <= TRAINER
    _, below = loss_and_gradients(with_the_head_below(head), found.documents(0, rows))
    assert worst_error(found.gradients, below) > NEGATIVE_CONTROL_FACTOR * TRAINER


@pytest.mark.parametrize("name", ["chunked", "liger"])
def test_a_loss_that_was_asked_for_is_not_replaced(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the head of LlamaForCausalLM is a peft\.\S+ and not .*fused_loss='off'"):
        trainer_of(tmp_path, model=adapted("copy"), fused_loss=name)


def test_a_model_that_is_made_anew(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, model=adapted("copy"), max_steps=1)
    trainer._set_up_loss(adapted("copy").get_base_model())
    assert trainer._head_loss is None


def source(head: str) -> Any:
    return adapted(head, tiny_llama().double()).double()


def runs(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Outcome]]:
    found = {
        head: {
            split: run(folder, "llama", replicas(world_size, options), source(head), max_steps=3, **options)
            for split, options in (SPLITS_2 if world_size > 1 else {"one": {}}).items()
        }
        for head in HEADS
    }
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> Any:
    folder = str(tmp_path_factory.mktemp("heads"))
    return {**run_distributed(runs, 2, folder)[0], "one": runs(0, 1, folder)}


@pytest.mark.parametrize("split", SPLITS_2)
@pytest.mark.parametrize("head", HEADS)
def test_under_every_split(head: str, split: str, outcomes: Any) -> None:
    expected = outcomes["one"][head]["one"]
    assert TRAINED[head] in expected.gradients[0]
    check(outcomes[head][split], expected, f"{head} under {split}")


def test_adapters_stay_refused_where_they_cannot_be_split(tmp_path: Path) -> None:
    for found in run_distributed(refusals, 2, str(tmp_path)):
        assert all(f"{name}=2" in said and "adapter" in said for name, said in found.items()), found
        assert found.keys() == {"tp_size", "pp_size"}


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    found = {}
    for name in ("tp_size", "pp_size"):
        try:
            prepared(folder, "llama", 1, {name: 2}, source("adapter"))
        except ValueError as error:
            found[name] = str(error)
    return found
