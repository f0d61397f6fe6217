"""How the trainer finds its model behind whatever wraps it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import GradientState

from tests.support.tiny_llama import tiny_llama
from tests.support.training import trainer_of


def test_what_wraps_the_model_is_not_taken_off_for_every_micro_batch(tmp_path: Path, monkeypatch: Any) -> None:
    """It takes Accelerate some milliseconds."""
    trainer, _ = trainer_of(tmp_path, max_steps=4)
    calls: list[Any] = []
    unwrap = trainer.accelerator.unwrap_model
    monkeypatch.setattr(
        trainer.accelerator, "unwrap_model", lambda *given, **kw: calls.append(1) or unwrap(*given, **kw)
    )
    trainer.train()
    few = len(calls)
    trainer.args.max_steps = 8
    trainer.train()
    assert len(calls) - few == few
    trainer.model = tiny_llama()  # as hyperparameter searches do
    assert trainer._causal_lm is trainer.model


def test_a_trainer_can_be_pickled_as_transformers_own(tmp_path: Path, monkeypatch: Any) -> None:
    """Before any training in the process: Accelerate keeps weak references to the loaders of one that was cut short,
    and no trainer can be pickled with these."""
    monkeypatch.setattr(GradientState, "_shared_state", {})  # as in a fresh process
    trainer, _ = trainer_of(tmp_path)
    assert trainer._causal_lm is trainer.model
    copied = pickle.loads(pickle.dumps(trainer))
    assert copied._causal_lm is copied.model is not trainer.model


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "of one replica without pipeline stages"),
        ({"gradient_accumulation_steps": 1, "plan_pp_size": 4}, "where a step has only one"),
        ({"plan_pp_size": 4}, None),  # rehearses a pipeline
        ({"packer": "greedy"}, None),  # for comparison, and holds nothing back
    ],
)
def test_a_run_that_has_nothing_to_balance_says_so(
    options: dict[str, Any], named: str | None, tmp_path: Path, caplog: Any
) -> None:
    trainer_of(tmp_path, **options)
    said = [message for message in caplog.messages if "There is nothing to balance" in message]
    assert len(said) == (named is not None)
    assert all(f"between micro-batches {named}: " in message for message in said)


def test_embeddings_resized_after_the_trainer_was_made_are_refused_with_advice(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path)
    trainer.model.resize_token_embeddings(136)
    advice = "resize_token_embeddings does. Resize before the trainer is made: make a new WLBTrainer of this model"
    with pytest.raises(RuntimeError, match=advice):
        trainer.train()
    trainer_of(tmp_path, model=trainer.model, max_steps=1)[0].train()  # as it says
