"""Steps whose loss is not finite, in one process: stopped at, or left out and counted."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_wlb.trainer import faults
from hf_wlb.trainer.faults import NonFiniteSteps
from tests.support.training import rows_of, train, trainer_of

NAN, INF = float("nan"), float("inf")
LENGTHS = (5, 9, 14, 3, 7, 20, 2, 11, 6, 4, 25, 8, 13) * 4
RUN: dict[str, Any] = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1}


def poisoned(trainer: Any, steps: tuple[int, ...], by: float = NAN) -> Any:
    """Losses of the second micro-batch of these steps, from 1."""
    compute, before = trainer.compute_loss, trainer.state.global_step
    calls = iter(range(2 * before, 1000))

    def loss_of(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        call = next(calls)
        return loss * by if call % 2 and call // 2 + 1 in steps else loss

    trainer.compute_loss = loss_of
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("by", [NAN, INF])
def test_stops_before_the_weights_change(by: float, tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, rows_of(LENGTHS), **RUN)
    poisoned(trainer, (3,), by)
    with pytest.raises(RuntimeError, match=rf"The loss of step 3 is not finite: {by} in micro-batch 1 of rank 0\."):
        trainer.train()
    two, _ = train(tmp_path, rows_of(LENGTHS), **{**RUN, "max_steps": 2})
    for name, value in weights_of(two).items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def test_left_out_as_if_it_had_not_been(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, recorder = trainer_of(tmp_path, rows_of(LENGTHS), **RUN, on_nonfinite_loss="skip")
    states: list[Any] = []
    poisoned(trainer, (2,))
    take = trainer._get_grad_norm

    def spied(*args: Any, **kwargs: Any) -> Any:
        norm = take(*args, **kwargs)
        moments = trainer.optimizer.state_dict()["state"]
        states.append((weights_of(trainer), {k: float(v["exp_avg"].sum()) for k, v in moments.items()}))
        return norm

    trainer._get_grad_norm = spied  # as they are before steps 1, 2, 3 and 4
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (_, _), (before, moments), (after, moments_after), (last, _) = states
    assert all(torch.equal(before[name], after[name]) for name in before) and moments == moments_after
    assert any(not torch.equal(after[name], last[name]) for name in after)
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
    assert [log["nonfinite_steps"] for log in recorder.logs if "loss" in log] == [0, 1, 1, 1]
    assert [math.isfinite(loss) for loss in recorder.losses] == [True, False, True, True]
    assert "The loss of step 2 is not finite: nan in micro-batch 1 of rank 0. It is left out; 1 so far." in caplog.text
    assert math.isfinite(recorder.logs[-1]["train_loss"])


def test_the_log_is_the_mean_of_the_steps_that_were_trained(tmp_path: Path) -> None:
    _, single = train(tmp_path, rows_of(LENGTHS), **RUN)
    trainer, recorder = trainer_of(tmp_path, rows_of(LENGTHS), **RUN, on_nonfinite_loss="skip", logging_steps=2)
    poisoned(trainer, (2,)).train()
    assert recorder.losses[0] == pytest.approx(single.losses[0])
    assert math.isfinite(recorder.losses[1])


def test_control_nan_is_in_the_weights_without_the_policy(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, rows_of(LENGTHS), **RUN)
    trainer.nonfinite.passes = lambda *args, **kwargs: True  # type: ignore[method-assign]
    poisoned(trainer, (3,)).train()
    assert any(torch.isnan(value).any() for value in trainer.model.state_dict().values())


def test_the_count_survives_a_resume(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "on_nonfinite_loss": "skip"}
    whole, found = trainer_of(tmp_path, rows_of(LENGTHS), **RUN, **saving)
    poisoned(whole, (2,)).train()
    _, again = train(
        tmp_path / "again", rows_of(LENGTHS), **RUN, **saving, resume_from_checkpoint=tmp_path / "checkpoint-3"
    )
    assert [log["nonfinite_steps"] for log in again.logs if "loss" in log] == [1]
    assert again.losses == pytest.approx(found.losses[3:], rel=1e-6)


def test_stops_after_so_many_in_a_row(tmp_path: Path) -> None:
    trainer, recorder = trainer_of(
        tmp_path, rows_of(LENGTHS), **{**RUN, "max_steps": 6}, on_nonfinite_loss="skip", max_nonfinite_steps=2
    )
    poisoned(trainer, (1, 3, 4))
    with pytest.raises(RuntimeError, match=r"The loss of step 4 .* That makes 2 such steps in a row"):
        trainer.train()
    assert [log["nonfinite_steps"] for log in recorder.logs] == [1, 1, 2]


def test_a_gradient_scaler_lowers_its_scale_by_itself() -> None:
    steps = NonFiniteSteps("stop")
    steps.add(torch.tensor(1.0))
    assert steps.passes(torch.tensor(INF), step=1, loss_scaled=True)
    assert steps.figures() == {"nonfinite_steps": 0}
    steps.add(torch.tensor(NAN))
    with pytest.raises(RuntimeError, match="The loss of step 2 is not finite"):
        steps.passes(torch.tensor(NAN), step=2, loss_scaled=True)


def test_gradients_alone() -> None:
    steps = NonFiniteSteps("stop")
    steps.add(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="The gradients of step 1 are not finite, though every loss is"):
        steps.passes(INF, step=1)


def test_many_places_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "gather_objects", lambda own: [("", []), *[own] * 5])
    steps = NonFiniteSteps("stop")
    for loss in (1.0, NAN, -INF):
        steps.add(torch.tensor(loss))
    with pytest.raises(RuntimeError) as found:
        steps.passes(NAN, step=7)
    assert "step 7 is not finite: nan in micro-batch 1 of rank 1, -inf in micro-batch 2 of rank 1" in str(found.value)
    assert "of rank 4 and 2 more." in str(found.value)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="on_nonfinite_loss must be one of stop, skip, got 'ignore'"):
        NonFiniteSteps("ignore")
    with pytest.raises(ValueError, match="max_nonfinite_steps must be at least 1, got 0"):
        NonFiniteSteps("skip", 0)
