"""WLBTrainer under every split: whoever holds which tokens and which parameters, it is the same training."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.test_families import ACCEPTED, VOCABULARY, build
from tests.support.oracle import relative_error
from tests.support.spawn import run_distributed
from tests.support.training import Recorder, trainer_of

STEPS = 10
MICRO_BATCHES = 4  # of a step, all replicas together
FAMILIES = ("llama", "qwen3", "mistral, window", "gemma3", "gpt_oss, sinks", "qwen3_moe")
#: By number of processes: what each split is called in the arguments.
SPLIT_BY: dict[int, dict[str, dict[str, Any]]] = {
    1: {f"accumulation {steps}": {"context_length": 64 // steps} for steps in ()},
    2: {
        "dp2": {},
        "cp2": {"cp_size": 2},
        "tp2": {"tp_size": 2},
        "fsdp2": {"dp_shard_size": 2},
        "fsdp over cp2": {"cp_size": 2, "fsdp": True},
    },
    4: {
        "dp2 x cp2": {"cp_size": 2},
        "dp2 x tp2": {"tp_size": 2},
        "cp2 x tp2": {"cp_size": 2, "tp_size": 2},
        "fsdp2 x cp2": {"dp_shard_size": 2, "cp_size": 2},
        "fsdp2 x tp2": {"dp_shard_size": 2, "tp_size": 2},
        "dp2 x fsdp2": {"dp_replicate_size": 2, "dp_shard_size": 2},
    },
}
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
        """Of all steps together, and of the first."""
        first, second, last = self.parameters[0], self.parameters[1], self.parameters[-1]
        return [{name: then[name] - first[name] for name in first} for then in (second, last)]


def run(folder: str, family: str, dp_size: int, **options: Any) -> Outcome:
    steps = Steps()
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 25, (160,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]
    settings = {**RUN, "gradient_accumulation_steps": MICRO_BATCHES // dp_size, **options}
    trainer, _ = trainer_of(folder, rows, build(ACCEPTED[family]).double(), callbacks=[steps], **settings)
    steps.trainer = trainer
    trainer.train()
    documents = [sorted((d.index, d.start, d.length) for d in plan.documents) for plan in steps.plans]
    norms = [log["grad_norm"] for log in steps.logs if "loss" in log]
    return Outcome(steps.losses, norms, steps.whole_gradients, steps.parameters, documents)


def runs(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Outcome]]:
    found = {}
    for split, options in SPLIT_BY[world_size].items():
        inner = options.get("cp_size", 1) * options.get("tp_size", 1)
        found[split] = {family: run(folder, family, world_size // inner, **options) for family in FAMILIES}
    return found if rank == 0 else {}


def differences(found: Outcome, expected: Outcome) -> dict[str, list[float]]:
    """Relative differences of everything that two runs can be compared by."""
    pairs = {
        "gradient": zip(found.gradients, expected.gradients, strict=True),
        "update": zip(found.updates, expected.updates, strict=True),
    }
    return {
        "loss": [abs(a / b - 1) for a, b in zip(found.losses, expected.losses, strict=True)],
        "norm": [abs(a / b - 1) for a, b in zip(found.norms, expected.norms, strict=True)],
        **{
            f"{what} of {name}": [relative_error(a[name], b[name]) for a, b in both]
            for what, both in {what: list(both) for what, both in pairs.items()}.items()
            for name in expected.gradients[0]
        },
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory: Any) -> dict[str, Outcome]:
    return {family: run(str(tmp_path_factory.mktemp("single")), family, 1) for family in FAMILIES}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_split_trains_alike(ranks: int, single: dict[str, Outcome], tmp_path: Path) -> None:
    found = run_distributed(runs, ranks, str(tmp_path), timeout_s=400)[0]
    for split, by_family in found.items():
        for family, outcome in by_family.items():
            expected = single[family]
            assert outcome.documents == expected.documents
            errors = differences(outcome, expected)
            worst = max(errors, key=lambda name: max(errors[name]))
            flat = [error for some in errors.values() for error in some]
            print(f"{split:15} {family:16} {max(errors[worst]):.1e} {worst:60} mean {sum(flat) / len(flat):.1e}")
