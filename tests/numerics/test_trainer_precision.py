"""What an earlier trainer left around a model's forward, and a later one must not compute in."""

import functools
from pathlib import Path

from hf_wlb.trainer.swap import without_mixed_precision
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import NEGATIVE_CONTROL_FACTOR, TRAINER
from tests.support.training import check_first_step, rows_of, train


def test_a_second_trainer_of_a_model_computes_in_its_own_type(tmp_path: Path) -> None:
    """Accelerate leaves autocast around the forward of a model that was trained."""
    model = tiny_llama()
    train(tmp_path / "first", rows_of(), model, max_steps=1, bf16=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(tmp_path / "again", rows_of(), model, max_steps=1, bf16=True)
    model.load_state_dict(weights)
    _, recorder = train(tmp_path / "exact", rows_of(), model, max_steps=1)
    fresh = tiny_llama()
    fresh.load_state_dict(weights)
    assert check_first_step(recorder, rows_of(), fresh) <= TRAINER
    fresh.load_state_dict(weights)
    _, rounded = train(tmp_path / "rounded", rows_of(), fresh, max_steps=1, bf16=True)
    fresh = tiny_llama()
    fresh.load_state_dict(weights)
    assert check_first_step(rounded, rows_of(), fresh) > NEGATIVE_CONTROL_FACTOR * TRAINER
    assert "forward" not in vars(model)


def test_a_forward_of_the_models_own_stays(tmp_path: Path) -> None:
    model = tiny_llama()
    own = model.forward
    model.forward = own_forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    model._original_forward, model.forward = model.forward, lambda *args, **kwargs: None
    without_mixed_precision(model)
    assert model.forward is own_forward and "_original_forward" not in vars(model)
    without_mixed_precision(model)
    assert model.forward is own_forward
