"""How many steps and epochs are planned, and where a resumed run goes on."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import TrainerCallback

from hf_wlb.data.sampler import PlannedBatchSampler
from tests.support.training import Recorder, rows_of, train, trainer_of

ROWS = [{"input_ids": [number] * 8} for number in range(1, 61)]
FIXED: dict[str, Any] = {"packer": "next-fit", "gradient_accumulation_steps": 1, "shuffle_documents": False}


def documents(recorder: Recorder) -> list[list[int]]:
    return [sorted(document.index for document in plan.documents) for plan in recorder.plans]


class EndsEpochs(TrainerCallback):
    """Ends one after the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 3


class Stops(TrainerCallback):
    """In the middle of the third step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_stop_in_a_step_leaves_no_document_out(tmp_path: Path) -> None:
    options: dict[str, Any] = {**FIXED, "gradient_accumulation_steps": 3, "max_steps": 6, "save_strategy": "epoch"}
    _, whole = train(tmp_path / "whole", ROWS, **options)
    trainer, begun = train(tmp_path / "stopped", ROWS, callbacks=[Stops()], **options)
    assert trainer.state.global_step == len(begun.plans) == 3
    _, rest = train(tmp_path / "on", ROWS, resume_from_checkpoint=tmp_path / "stopped" / "checkpoint-3", **options)
    assert begun.losses + rest.losses == whole.losses and len(whole.losses) == 6


@pytest.mark.parametrize(("before", "after"), [(10, 20), (20, 10), (40, 50)])
def test_a_stream_goes_on_with_another_number_of_steps(before: int, after: int, tmp_path: Path) -> None:
    """Also in its second pass, which begins with step 31."""
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    saved = before - 5
    _, whole = train(tmp_path / "whole", stream, max_steps=max(before, after), **FIXED)
    saving = {"save_strategy": "steps", "save_steps": saved}
    train(tmp_path / "saved", stream, max_steps=before, **saving, **FIXED)
    checkpoint = tmp_path / "saved" / f"checkpoint-{saved}"
    trainer, found = train(tmp_path / "on", stream, max_steps=after, resume_from_checkpoint=checkpoint, **FIXED)
    assert documents(found) == documents(whole)[saved:after]
    assert trainer.state.global_step == max(saved, after)


@pytest.mark.parametrize("saved", [2, 5, 18])
def test_an_epoch_that_was_ended_early(saved: int, tmp_path: Path) -> None:
    """One has 15 steps: the second, third and last checkpoint are of the first, second and third one."""
    rows, options = ROWS[:30], {**FIXED, "max_steps": 22, "save_strategy": "steps", "save_steps": saved}
    _, whole = train(tmp_path / "whole", rows, callbacks=[EndsEpochs()], **options)
    assert documents(whole)[3:5] == documents(whole)[:2] == [[0, 1], [2, 3]]
    checkpoint = tmp_path / "whole" / f"checkpoint-{saved}"
    _, found = train(tmp_path / "on", rows, callbacks=[EndsEpochs()], resume_from_checkpoint=checkpoint, **options)
    assert documents(found) == documents(whole)[saved:]


def test_thousands_of_epochs_are_not_planned_beforehand(tmp_path: Path, monkeypatch: Any) -> None:
    trainer, _ = trainer_of(tmp_path, rows_of(), max_steps=100_000)
    planned: set[int] = set()
    steps = PlannedBatchSampler.steps
    monkeypatch.setattr(PlannedBatchSampler, "steps", lambda self, epoch: planned.add(epoch) or steps(self, epoch))
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert max(planned) < 16 and values[6] == 100_000
    # No fewer than it takes: at least 4 steps each.
    assert 100_000 / 5 <= values[0] <= 100_000 / 3


def test_the_number_of_epochs_is_exact_where_it_is_counted(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, ROWS[:30], max_steps=40, **FIXED)
    assert (trainer.state.num_train_epochs, trainer.state.global_step) == (3, 40)


def test_steps_beyond_the_counted_epochs_are_trained(tmp_path: Path) -> None:
    trainer, recorder = train(tmp_path, ROWS[:4], max_steps=37, **FIXED)
    assert trainer.state.global_step == 37 and trainer.state.epoch == 18.5
    assert documents(recorder) == ([[0, 1], [2, 3]] * 19)[:37]


def test_no_epochs_are_no_steps(tmp_path: Path) -> None:
    trainer, recorder = train(tmp_path, ROWS, num_train_epochs=0, **FIXED)
    assert trainer.state.global_step == 0 and recorder.losses == []


def test_the_summary_of_data_that_one_step_reads_makes_up_no_imbalance(tmp_path: Path) -> None:
    """It was 0, which no step's can be."""
    few, many = (trainer_of(tmp_path, rows_of(lengths), max_steps=-1)[0] for lengths in ([5, 4], [5, 9] * 20))
    for trainer in (few, many):
        trainer.train()
    of_few, of_many = few.state.log_history[-1], many.state.log_history[-1]
    assert of_few["packing_documents"] == 2
    names = {f"packing_{name}" for name in ("imbalance", "time_gap", "token_variation")}
    assert not names & of_few.keys()
    assert names <= of_many.keys() and of_many["packing_imbalance"] >= 1
