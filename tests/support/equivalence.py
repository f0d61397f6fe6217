"""One training under several splits, compared in everything: losses, norms, every gradient and every update.

Weights are float64, so that storing them rounds nothing away; norms, rotary angles and the loss stay float32 inside
Transformers and the trainer.
"""

import dataclasses
from typing import Any

import torch

from hf_wlb import WLBTrainer
from tests.numerics.test_families import ACCEPTED, VOCABULARY, Family, build
from tests.support.oracle import relative_error
from tests.support.tolerances import SPLITS, SPLITS_MEAN
from tests.support.training import Recorder, trainer_of

STEPS = 6
MICRO_BATCHES = 4  # of a step, all replicas together
RUN: dict[str, Any] = {
    "packer": "next-fit",
    "context_length": 24,
    "max_document_tokens": 24,
    "max_steps": STEPS,
    "learning_rate": 0.1,
    "optim": "sgd",  # Adam makes full steps of gradients that are rounding alone
    "max_grad_norm": 1.0,
    "weight_decay": 0.1,
}


class Steps(Recorder):
    """Besides, the whole gradients and parameters at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None
        self.whole_gradients: list[dict[str, torch.Tensor]] = []
        self.parameters: list[dict[str, torch.Tensor]] = []

    def _whole(self, of: Any) -> dict[str, torch.Tensor]:
        named = self.trainer.model.named_parameters()
        return {name: self.trainer.layout.whole(name, of(p)).detach().clone() for name, p in named if of(p) is not None}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.parameters.append(self._whole(lambda parameter: parameter))

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.whole_gradients.append(self._whole(lambda parameter: parameter.grad))
        self.plans.append(kwargs["train_dataloader"].plan)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.parameters.append(self._whole(lambda parameter: parameter))


@dataclasses.dataclass
class Outcome:
    """What a run did, the same on every rank."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: list[dict[str, torch.Tensor]]
    documents: list[list[tuple[int, int, int]]]

    @property
    def updates(self) -> list[dict[str, torch.Tensor]]:
        """Of the first step, and of all together."""
        first, second, last = self.parameters[0], self.parameters[1], self.parameters[-1]
        return [{name: then[name] - first[name] for name in first} for then in (second, last)]

    def differences(self, expected: "Outcome") -> dict[str, float]:
        """The largest relative difference over the steps of everything that two runs can be compared by."""
        assert self.documents == expected.documents

        def scalar(found: list[float], wanted: list[float]) -> float:
            return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))

        pairs = {"gradient": (self.gradients, expected.gradients), "update": (self.updates, expected.updates)}
        return {
            "loss": scalar(self.losses, expected.losses),
            "gradient norm": scalar(self.norms, expected.norms),
            **{
                f"{what} of {name}": max(relative_error(a[name], b[name]) for a, b in zip(found, wanted, strict=True))
                for what, (found, wanted) in pairs.items()
                for name in expected.gradients[0]
            },
        }


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 25, (160,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]


def replicas(world_size: int, options: dict[str, Any]) -> int:
    return world_size // (options.get("pp_size", 1) * options.get("cp_size", 1) * options.get("tp_size", 1))


def prepared(
    folder: str, family: str | Family, dp_size: int, options: dict[str, Any], source: Any = None
) -> tuple[WLBTrainer, Steps]:
    """A trainer of a family's model in float64, or of what ``source`` names."""
    steps = Steps()
    settings = {**RUN, "gradient_accumulation_steps": MICRO_BATCHES // dp_size, **options}
    model = source or build(ACCEPTED[family] if isinstance(family, str) else family).double()
    steps.trainer, _ = trainer_of(folder, rows(), model, callbacks=[steps], **settings)
    return steps.trainer, steps


def run(folder: str, family: str | Family, dp_size: int, source: Any = None, **options: Any) -> Outcome:
    trainer, steps = prepared(folder, family, dp_size, options, source)
    trainer.train()
    return outcome(steps)


def outcome(steps: Steps) -> Outcome:
    documents = [sorted((d.index, d.start, d.length) for d in plan.documents) for plan in steps.plans]
    norms = [log["grad_norm"] for log in steps.logs if "loss" in log]
    return Outcome(steps.losses, norms, steps.whole_gradients, steps.parameters, documents)


def metrics(prediction: Any) -> dict[str, float]:
    valid = prediction.label_ids[:, 1:] != -100
    right = (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]) & valid
    return {"targets": float(valid.sum()), "right": float(right.sum())}


def check(found: Outcome, expected: Outcome, what: str, tolerance: float = SPLITS) -> None:
    errors = found.differences(expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{what}: {worst} is {errors[worst]:.1e} off"
    assert sum(errors.values()) / len(errors) <= SPLITS_MEAN, what
