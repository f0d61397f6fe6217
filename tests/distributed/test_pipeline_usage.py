"""What users do with a trainer, and with its model, when that is a stage of a pipeline."""

from typing import Any

import pytest
import torch

from hf_wlb import WLBTrainer
from tests.distributed.test_pipeline_trainer import deep
from tests.numerics.test_families import build
from tests.support.equivalence import RUN, rows
from tests.support.spawn import run_distributed
from tests.support.tolerances import TRAINER
from tests.support.training import arguments, trainer_of

FAMILY = "gemma3"  # tied


class Doubled(WLBTrainer):
    """A loss of one's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class FromLogits(WLBTrainer):
    """One that does without Trainer's."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / kwargs["num_items_in_batch"]


def trained(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def what_is_said(action: Any) -> str:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def usage(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Each once, by one process or two stages."""
    settings: dict[str, Any] = {**RUN, "max_steps": 3, "gradient_accumulation_steps": 4, "pp_size": world_size}
    found: dict[str, Any] = {}
    for kind in (Doubled, FromLogits):
        trainer, _ = trainer_of(folder, rows(), build(deep(FAMILY)), eval_dataset=rows()[:5], **settings)
        trainer.__class__ = kind
        found[kind.__name__] = trained(trainer)
        if kind is Doubled:
            found["evaluated"] = trainer.evaluate()["eval_loss"]
    trainer, _ = trainer_of(folder, rows(), build(deep(FAMILY)), **settings)
    for name, parameter in trainer.model.named_parameters():
        if "embed_tokens" in name:
            parameter.requires_grad_(False)
    found["frozen"] = trained(trainer)
    made = WLBTrainer(
        model_init=lambda: build(deep(FAMILY)),
        args=arguments(folder, **settings),
        train_dataset=rows(),
        workload=trainer.workload,
    )
    found["model_init"] = trained(made)
    if world_size > 1:
        stage = trainer.model
        tokens = torch.tensor([[5, 6, 7]])
        found["said"] = {
            "called": what_is_said(lambda: stage(input_ids=tokens)),
            "saved": what_is_said(lambda: stage.save_pretrained(folder)),
            "trained again": what_is_said(lambda: trainer_of(folder, rows(), stage, **settings)),
        }
        trainer, _ = trainer_of(folder, rows(), build(deep(FAMILY)), **settings)
        trainer.train()
        found["drawn"] = float(torch.rand(()))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(usage, 2, str(tmp_path_factory.mktemp("stages")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return usage(0, 1, str(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("what", ["Doubled", "FromLogits", "frozen", "model_init"])
def test_it_is_what_one_process_does(what: str, found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for stage in found:
        for pair, expected in zip(stage[what], alone[what], strict=True):
            assert pair == pytest.approx(expected, rel=TRAINER)


def test_controls(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for what in ("Doubled", "frozen"):
        assert alone[what][-1] != pytest.approx(alone["model_init"][-1], rel=100 * TRAINER)
    assert found[0]["evaluated"] == pytest.approx(alone["evaluated"], rel=TRAINER)


def test_a_stage_is_no_model(found: list[dict[str, Any]]) -> None:
    for stage in found:
        said = stage["said"]
        assert said["called"].startswith("a stage of a pipeline was called by itself")
        assert said["saved"].startswith("save_pretrained would write some of the model's layers only")
        assert "an earlier WLBTrainer has cut it" in said["trained again"]


def test_stages_draw_random_numbers_of_their_own(found: list[dict[str, Any]]) -> None:
    first, second = (stage["drawn"] for stage in found)
    assert first != second
