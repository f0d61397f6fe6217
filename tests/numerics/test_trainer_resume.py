"""WLBTrainer resumed: the very same losses from every checkpoint, streams too, and sentences where it cannot be."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracle import loss_and_gradients
from tests.support.tiny_llama import VOCABULARY, tiny_llama
from tests.support.tolerances import RESUME, TRAINER
from tests.support.training import Recorder, rows_of, steps_by_epoch, train, trainer_of

EPOCHS = 2
OPTIONS: dict[str, Any] = {
    "num_train_epochs": EPOCHS,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
}


def with_dropout() -> Any:
    """A tiny Phi-3 with dropout everywhere but in attention, which shows that random states come back."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(1)
    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            sliding_window=None,
            resid_pdrop=0.2,
            embd_pdrop=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> tuple[Path, Any, Recorder]:
    """Two epochs with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp("whole")
    trainer, recorder = train(folder, model=with_dropout(), save_strategy="steps", save_steps=1, **OPTIONS)
    assert trainer.state.global_step >= 6 and len(set(recorder.losses)) == len(recorder.losses)
    return folder, trainer, recorder


@pytest.fixture
def checkpoint(finished: Any, tmp_path: Path) -> Path:
    """A copy of the third checkpoint, to be damaged."""
    return Path(shutil.copytree(finished[0] / "checkpoint-3", tmp_path / "checkpoint-3"))


def assert_goes_on(folder: Path, step: int, finished: Any, **options: Any) -> None:
    _, whole, expected = finished
    checkpoint = finished[0] / f"checkpoint-{step}"
    trainer, found = train(folder, model=with_dropout(), resume_from_checkpoint=checkpoint, **{**OPTIONS, **options})
    assert found.losses == pytest.approx(expected.losses[step:], rel=RESUME, abs=RESUME), step
    assert found.plans == expected.plans[step:]
    assert trainer.state.global_step == trainer.state.max_steps == whole.state.global_step
    assert trainer.state.epoch == whole.state.epoch == EPOCHS
    epochs = [log["epoch"] for log in expected.logs if "loss" in log][step:]
    assert [log["epoch"] for log in found.logs if "loss" in log] == pytest.approx(epochs)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def test_resume_from_every_checkpoint(finished: Any, tmp_path: Path) -> None:
    _, trainer, _ = finished
    assert 0 < steps_by_epoch(trainer)[0] < trainer.state.global_step  # so that the end of an epoch is among them
    for step in range(1, trainer.state.global_step):
        assert_goes_on(tmp_path, step, finished)


@pytest.mark.parametrize("boundary", [False, True])
def test_resume_with_workers(boundary: bool, finished: Any, tmp_path: Path) -> None:
    step = steps_by_epoch(finished[1])[0] - (0 if boundary else 2)
    assert_goes_on(tmp_path, step, finished, dataloader_num_workers=2)


def test_dropout_is_at_work(finished: Any, tmp_path: Path) -> None:
    """The negative control: without the checkpoint's random state the losses are others."""
    checkpoint = Path(shutil.copytree(finished[0] / "checkpoint-3", tmp_path / "checkpoint-3"))
    (checkpoint / "rng_state.pth").unlink()
    _, found = train(tmp_path, model=with_dropout(), resume_from_checkpoint=checkpoint, **OPTIONS)
    assert found.losses != finished[2].losses[3:]


def test_resume_of_a_finished_run_trains_nothing(finished: Any, tmp_path: Path) -> None:
    last = finished[1].state.global_step
    trainer, found = train(
        tmp_path, model=with_dropout(), resume_from_checkpoint=finished[0] / f"checkpoint-{last}", **OPTIONS
    )
    assert found.losses == [] and trainer.state.global_step == last
    # nor in the middle of an epoch, where max_steps ends it
    for more in ({"max_steps": 3}, {"max_steps": 3, "ignore_data_skip": True}):
        trainer, found = train(
            tmp_path, model=with_dropout(), resume_from_checkpoint=finished[0] / "checkpoint-3", **{**OPTIONS, **more}
        )
        assert found.losses == [] and trainer.state.global_step == 3


def test_resume_from_the_folder_takes_the_last_checkpoint(finished: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (1, 3):
        shutil.copytree(finished[0] / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    trainer, found = trainer_of(folder, model=with_dropout(), **OPTIONS)
    trainer.train(resume_from_checkpoint=True)
    assert found.losses == finished[2].losses[3:]


def test_ignore_data_skip_starts_the_epochs_data_anew(finished: Any, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "planner_state.json").unlink()
    trainer, found = train(
        tmp_path, model=with_dropout(), resume_from_checkpoint=checkpoint, ignore_data_skip=True, **OPTIONS
    )
    assert found.plans[0] == finished[2].plans[0]
    assert trainer.state.global_step == trainer.state.max_steps == finished[1].state.global_step
    first = steps_by_epoch(finished[1])[0]
    later = finished[0] / f"checkpoint-{first + 1}"
    _, found = train(tmp_path, model=with_dropout(), resume_from_checkpoint=later, ignore_data_skip=True, **OPTIONS)
    assert found.plans == finished[2].plans[first:][: len(found.plans)]  # the second epoch from its beginning
    assert len(found.plans) == finished[1].state.global_step - first - 1


def rewrite(checkpoint: Path, change: Any) -> None:
    path = checkpoint / "planner_state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


DAMAGES: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda c: (c / "planner_state.json").unlink(),
        "holds no planner_state.json, so it is not known which documents were trained.*ignore_data_skip=True",
    ),
    "cut off": (
        lambda c: (c / "planner_state.json").write_text((c / "planner_state.json").read_text()[:40]),
        "planner_state.json cannot be read .*the checkpoint is damaged",
    ),
    "a list": (lambda c: (c / "planner_state.json").write_text("[1]"), "cannot be read .*the checkpoint is damaged"),
    "no data": (lambda c: rewrite(c, lambda s: s.pop("data")), "cannot be read .KeyError: 'data'.*damaged"),
    "another step": (
        lambda c: rewrite(c, lambda s: s.update(global_step=2)),
        "was written at step 2 but the checkpoint is of step 3: the checkpoint is damaged",
    ),
    "another version": (
        lambda c: rewrite(c, lambda s: s["data"].update(schema="hf_wlb.loader/99")),
        "state has schema 'hf_wlb.loader/99', but this version of hf_wlb reads",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_named(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    do, sentence = DAMAGES[damage]
    do(checkpoint)
    model = with_dropout()
    trainer, _ = trainer_of(tmp_path, model=model, **OPTIONS)
    with pytest.raises(ValueError, match=sentence):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert model.config._attn_implementation == "sdpa"


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "documents": ({"rows": rows_of((9, 20, 3) * 8)}, "belongs to another data set.*start anew without the state"),
    "seed": ({"data_seed": 99}, "the same documents in another order.*start anew without the state"),
    "context": ({"context_length": 17}, r"other packing settings \(context_length: 16 -> 17\)"),
    "accumulation": ({"gradient_accumulation_steps": 3}, r"\(gradient_accumulation_steps: 2 -> 3\)"),
    "packer": ({"packer": "wlb"}, r"\(packer: 'steady' -> 'wlb'\)"),
    "empty documents": ({"empty_documents": "skip"}, r"\(empty_documents: 'error' -> 'skip'\)"),
}


@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("change", OTHERS)
def test_other_data_or_settings_are_refused(change: str, boundary: bool, finished: Any, tmp_path: Path) -> None:
    steps = steps_by_epoch(finished[1])[0]
    options, sentence = OTHERS[change]
    folder = finished[0] / f"checkpoint-{steps if boundary else steps - 1}"
    trainer, _ = trainer_of(tmp_path, model=with_dropout(), **{**OPTIONS, **options})
    with pytest.raises(ValueError, match=sentence):
        trainer.train(resume_from_checkpoint=str(folder))


# ---- streams ----


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows_of())


def hub_stream() -> Any:
    import datasets

    return datasets.Dataset.from_list(rows_of()).to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize("make", [Stream, hub_stream])
def test_a_stream_over_several_passes_and_resumed(make: Any, tmp_path: Path) -> None:
    options = {**OPTIONS, "max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    trainer, whole = train(tmp_path / "whole", make(), tiny_llama(), **options)
    assert trainer.state.global_step == 8 and max(plan.step for plan in whole.plans) < 7  # more than one pass
    loss, _ = loss_and_gradients(tiny_llama(), whole.documents(0, rows_of()))
    assert whole.losses[0] == pytest.approx(loss, rel=TRAINER)
    second = next(place for place in range(1, 8) if whole.plans[place].step == 0)
    for step in (1, second - 1, second, second + 1):
        resumed, found = train(
            tmp_path / "again",
            make(),
            tiny_llama(),
            resume_from_checkpoint=tmp_path / "whole" / f"checkpoint-{step}",
            **{**options, "save_strategy": "no"},
        )
        assert found.losses == pytest.approx(whole.losses[step:], rel=RESUME, abs=RESUME)
        assert found.plans == whole.plans[step:] and resumed.state.global_step == 8
        if step != second:  # there only the stream itself knows that its pass had ended
            epochs = [log["epoch"] for log in whole.logs if "loss" in log][step:]
            assert [log["epoch"] for log in found.logs if "loss" in log] == pytest.approx(epochs)


def test_workers_for_a_stream_are_not_used_and_that_is_said(tmp_path: Path, caplog: Any) -> None:
    train(tmp_path, Stream(), max_steps=1, dataloader_num_workers=2)
    assert "dataloader_num_workers is not used" in caplog.text


def test_a_stream_needs_max_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        trainer_of(tmp_path, Stream())
