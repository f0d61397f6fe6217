"""A run that is resumed with other costs of documents goes on with those of its checkpoint, and says so."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_wlb import WLBTrainer
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import CHECKPOINTING
from tests.support.training import Recorder, arguments, rows_of

ROWS = rows_of((5, 1, 9, 14, 3, 1, 7, 20, 2, 11, 6, 4, 15, 1, 8, 13, 1, 2) * 2)
OPTIONS: dict[str, Any] = {"num_train_epochs": 2, "workload_crossover": 4.0}
CHECKPOINT = 3
#: What a resumed run gives otherwise, and how the warning calls it.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "crossover": ({"workload_crossover": 4000.0}, "(workload_crossover: 4.0 -> 4000.0)"),
    "hardware": (
        {"workload_crossover": None, "workload_hardware": "h100"},
        "(workload_hardware: None -> 'h100'; workload_crossover: 4.0 -> None)",
    ),
}


def trained(folder: Path, resume: Path | None = None, **options: Any) -> Recorder:
    recorder = Recorder()
    args = arguments(folder, **{**OPTIONS, **options})
    trainer = WLBTrainer(tiny_llama(), args, train_dataset=ROWS, callbacks=[recorder])
    own = trainer.workload
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert trainer.workload is own
    return recorder


def whole_run(folder: Path, **options: Any) -> Recorder:
    return trained(folder, save_strategy="steps", save_steps=CHECKPOINT, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[Path, Recorder]:
    folder = tmp_path_factory.mktemp("whole")
    return folder / f"checkpoint-{CHECKPOINT}", whole_run(folder)


@pytest.mark.parametrize("change", OTHERS)
def test_it_goes_on_with_the_same_steps(change: str, whole: Any, tmp_path: Path, caplog: Any) -> None:
    checkpoint, expected = whole
    options, said = OTHERS[change]
    with caplog.at_level(logging.WARNING):
        found = trained(tmp_path / "on", checkpoint, **options)
    assert found.plans == expected.plans[CHECKPOINT:] and found.losses == expected.losses[CHECKPOINT:]
    (warning,) = [text for record in caplog.records if "documents cost otherwise" in (text := record.getMessage())]
    assert said in warning
    fresh = trained(tmp_path / "fresh", **options)  # the control: these costs do make other steps
    assert fresh.plans[CHECKPOINT:] != found.plans


def test_gradient_checkpointing_may_be_switched_on(tmp_path: Path, caplog: Any) -> None:
    by_shape = {"workload_crossover": None}
    expected = whole_run(tmp_path / "whole", **by_shape)
    checkpoint = tmp_path / "whole" / f"checkpoint-{CHECKPOINT}"
    found = trained(tmp_path / "on", checkpoint, gradient_checkpointing=True, **by_shape)
    assert found.plans == expected.plans[CHECKPOINT:]
    assert found.losses == pytest.approx(expected.losses[CHECKPOINT:], rel=CHECKPOINTING)
    assert "(gradient_checkpointing: False -> True)" in caplog.text and "ignore_data_skip=True" in caplog.text


def test_a_second_resume_goes_on_with_the_first_costs(whole: Any, tmp_path: Path, caplog: Any) -> None:
    checkpoint, expected = whole
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path / "on", checkpoint, workload_crossover=4000.0, **saving)
    caplog.clear()
    found = trained(tmp_path / "again", tmp_path / "on" / "checkpoint-6", workload_crossover=400.0)
    assert "(workload_crossover: 4.0 -> 400.0)" in caplog.text
    assert found.plans == expected.plans[6:] and found.losses == expected.losses[6:]


def test_the_documents_anew_have_this_runs_costs(whole: Any, tmp_path: Path, caplog: Any) -> None:
    other: dict[str, Any] = {"workload_crossover": 4000.0}
    found = trained(tmp_path / "on", whole[0], ignore_data_skip=True, **other)
    assert found.plans[0] == trained(tmp_path / "fresh", **other).plans[0]
    assert "documents cost otherwise" not in caplog.text


def test_a_checkpoint_that_does_not_tell_its_costs_is_refused(whole: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole[0], tmp_path / whole[0].name))
    state = json.loads((path / "planner_state.json").read_text())
    del state["costs"]
    (path / "planner_state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"another workload model: .*gradient_checkpointing.*ignore_data_skip=True"):
        trained(tmp_path / "on", path, workload_crossover=4000.0)
