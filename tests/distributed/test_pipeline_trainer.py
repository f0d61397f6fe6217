"""Pipelines: whatever the stages and whoever is in them, it is the training of one process."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_wlb.trainer import pipeline
from tests.numerics.test_families import ACCEPTED, Family, build
from tests.support.equivalence import (
    MICRO_BATCHES,
    RUN,
    Outcome,
    Steps,
    check,
    metrics,
    outcome,
    prepared,
    replicas,
    rows,
    run,
)
from tests.support.spawn import run_distributed
from tests.support.tolerances import EVALUATION, NEGATIVE_CONTROL_FACTOR, PIPELINES
from tests.support.training import trainer_of

LAYERS = 4
STEPS = 5
ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-5}
LLAMA = "llama"
FAMILIES = (LLAMA, "qwen3", "mistral, window", "gemma3", "qwen2, window", "granite", "qwen3_moe")
#: By number of processes: arguments, and the families that are tried.
SPLIT_BY: dict[int, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    2: {
        "pp2": ({"pp_size": 2}, FAMILIES),
        "pp2, uneven": ({"pp_size": 2, "pp_stage_layers": [3, 1]}, ("gemma3",)),
        "pp2, adam": ({"pp_size": 2, **ADAM}, (LLAMA,)),
        "pp2, recomputed": ({"pp_size": 2, "activation_checkpointing": True}, (LLAMA,)),
        "pp2, smoothed": ({"pp_size": 2, "label_smoothing_factor": 0.2}, (LLAMA,)),
    },
    4: {
        "pp4": ({"pp_size": 4}, (LLAMA, "gemma3", "qwen3_moe")),
        "pp4, twenty steps": ({"pp_size": 4, "max_steps": 20}, (LLAMA,)),
        "pp2 x dp2": ({"pp_size": 2}, (LLAMA, "gemma3")),
        "pp2 x cp2": ({"pp_size": 2, "cp_size": 2}, (LLAMA, "gemma3", "mistral, window")),
        "pp2 x tp2": ({"pp_size": 2, "tp_size": 2}, (LLAMA, "gemma3")),
        "pp2 x fsdp2": ({"pp_size": 2, "dp_shard_size": 2}, (LLAMA, "gemma3")),
        "pp2 x fsdp over cp2, adam": ({"pp_size": 2, "cp_size": 2, "fsdp": True, **ADAM}, (LLAMA,)),
    },
}
#: Runs of one process to compare with: by what of a split changes them.
OWN_OPTIONS = (
    "max_steps",
    "optim",
    "learning_rate",
    "adam_epsilon",
    "activation_checkpointing",
    "label_smoothing_factor",
)


def deep(family: str) -> Family:
    """A family of the table with more layers."""
    found = ACCEPTED[family]
    settings = {**found.settings, "num_hidden_layers": LAYERS}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"] * (LAYERS // 2)
    return found._replace(settings=settings)


def whole(outcomes: list[tuple[dict[str, str], Outcome]]) -> Outcome:
    """What the stages did, put together; tied copies must be equal."""
    first = outcomes[0][1]
    for kind in ("gradients", "parameters"):
        for place, merged in enumerate(getattr(first, kind)):
            for copies, other in outcomes[1:]:
                found = getattr(other, kind)[place]
                for name, owner in copies.items():
                    assert torch.equal(found[name], merged[owner]), f"{name} and {owner} differ"
                merged.update({name: tensor for name, tensor in found.items() if name not in copies})
    for _, other in outcomes[1:]:
        assert other.losses == pytest.approx(first.losses, rel=1e-12)
        assert other.norms == pytest.approx(first.norms, rel=1e-12)
        assert other.documents == first.documents
    return first


def stages_of(rank: int, trainer: Any, steps: Steps) -> tuple[dict[str, str], Outcome] | None:
    mesh = trainer.mesh
    if (mesh.dp_rank, mesh.cp_rank, mesh.tp_rank) != (0, 0, 0):
        return None
    return dict(trainer.layout.copies), outcome(steps)


def runs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for split, (options, families) in SPLIT_BY[world_size].items():
        for family in families:
            given = {"max_steps": STEPS, **options}
            trainer, steps = prepared(folder, deep(family), replicas(world_size, options), given)
            trainer.train()
            found[split, family] = stages_of(rank, trainer, steps)
    for kind in SOURCES if world_size == 2 else ():
        trainer, steps = prepared(folder, "", 1, {"pp_size": 2, "max_steps": STEPS}, source(kind, folder))
        trainer.train()
        found[kind] = stages_of(rank, trainer, steps)
    if world_size == 2:
        found["evaluation"] = evaluation(folder, {"pp_size": 2})
    if world_size == 4:
        found["controls"] = {control: control_run(rank, folder, control) for control in CONTROLS}
    return found


#: What a trainer may be given instead of a model.
SOURCES = ("folder", "configuration")


def source(kind: str, folder: str) -> Any:
    """A folder of weights, or a configuration; the same in every process."""
    config = build(deep("gemma3")).config
    config.dtype = torch.float64
    if kind == "configuration":
        return config
    return str(Path(folder) / "weights")


def evaluation(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Evaluation before training, predictions, and evaluation after it."""
    more: dict[str, Any] = {"eval_dataset": rows()[:9], "compute_metrics": metrics}
    settings = {**RUN, "gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 3, "logging_steps": 2, **options}
    trainer, _ = trainer_of(folder, rows(), build(deep(LLAMA)), **settings, **more)
    before, predicted = trainer.evaluate(), trainer.predict(rows()[:9])
    trained = trainer.train()
    refused = ""
    if trainer.mesh.pp_size > 1:
        try:
            generate: Any = trainer.model
            generate.generate(torch.tensor([[5, 6, 7]]))
        except RuntimeError as error:
            refused = str(error)
    return {
        "refused": refused,
        "before": before,
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "after": trainer.evaluate()["eval_loss"],
        "train_loss": trained.training_loss,
    }


CONTROLS = {
    "no all-reduce over replicas": ({"pp_size": 2}, LLAMA),
    "no sum over tied ends": ({"pp_size": 2}, "gemma3"),
    "no sum of norms over stages": ({"pp_size": 2}, LLAMA),
}


def control_run(rank: int, folder: str, control: str) -> Any:
    options, family = CONTROLS[control]
    trainer, steps = prepared(folder, deep(family), replicas(4, options), {**options, "max_steps": STEPS})
    before = pipeline.average_gradients
    if control.startswith("no all-reduce"):
        pipeline.average_gradients = lambda *_: None
    elif control.startswith("no sum over tied"):
        trainer._tied_ends = None
    else:
        object.__setattr__(trainer.layout, "total_norm", lambda named: torch.tensor(1.0))
    try:
        trainer.train()
    finally:
        pipeline.average_gradients = before
    return stages_of(rank, trainer, steps)


@pytest.fixture(scope="module")
def single(tmp_path_factory: Any) -> Any:
    @functools.cache
    def ask(family: str, own: tuple[tuple[str, Any], ...]) -> Outcome:
        options = {"max_steps": STEPS, **dict(own), "gradient_accumulation_steps": MICRO_BATCHES}
        return run(str(tmp_path_factory.mktemp("single")), deep(family), 1, **options)

    return ask


@pytest.fixture(scope="module")
def split_runs(tmp_path_factory: Any) -> Any:
    @functools.cache
    def ask(ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        build(deep("gemma3")).double().save_pretrained(folder / "weights")
        return run_distributed(runs, ranks, str(folder), timeout_s=400)

    return ask


@pytest.mark.parametrize(
    ("ranks", "split", "family"),
    [
        (ranks, split, family)
        for ranks, splits in SPLIT_BY.items()
        for split, (_, families) in splits.items()
        for family in families
    ],
)
def test_a_pipeline_trains_as_one_process(ranks: int, split: str, family: str, split_runs: Any, single: Any) -> None:
    options = SPLIT_BY[ranks][split][0]
    found = whole([of for rank in split_runs(ranks) if (of := rank[split, family]) is not None])
    own = tuple((name, options[name]) for name in OWN_OPTIONS if name in options)
    check(found, single(family, own), f"{split}, {family}", PIPELINES)


@pytest.mark.parametrize("control", CONTROLS)
def test_the_comparison_notices(control: str, split_runs: Any, single: Any) -> None:
    outcomes = [of[1] for rank in split_runs(4) if (of := rank["controls"][control]) is not None]
    merged = outcomes[0]
    for other in outcomes[1:]:
        for kind in ("gradients", "parameters"):
            for mine, theirs in zip(getattr(merged, kind), getattr(other, kind), strict=True):
                mine.update(theirs)
    errors = merged.differences(single(CONTROLS[control][1], ()))
    assert max(errors.values()) > NEGATIVE_CONTROL_FACTOR * PIPELINES


@pytest.mark.parametrize("kind", SOURCES)
def test_stages_that_are_read_one_by_one(kind: str, split_runs: Any, tmp_path: Path) -> None:
    """Of a folder, or initialised: the weights, and so the training, of one process that has them all."""
    build(deep("gemma3")).double().save_pretrained(tmp_path / "weights")
    options = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES}
    expected = run(str(tmp_path), "", 1, source(kind, str(tmp_path)), **options)
    found = whole([of for rank in split_runs(2) if (of := rank[kind]) is not None])
    check(found, expected, kind, PIPELINES)
    if kind == "folder":
        check(expected, run(str(tmp_path), deep("gemma3"), 1, **options), "the folder itself")


def test_evaluation_and_predictions(split_runs: Any, tmp_path: Path) -> None:
    expected = evaluation(str(tmp_path), {})
    for rank in split_runs(2):
        found = rank["evaluation"]
        for name in ("eval_loss", "eval_targets", "eval_right"):
            assert found["before"][name] == pytest.approx(expected["before"][name], rel=EVALUATION)
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-6)
        assert found["after"] == pytest.approx(expected["after"], rel=1e-5)
        assert found["refused"].startswith("generate is not supported with pp_size above 1")
        assert np.array_equal(found["labels"], expected["labels"])
        valid = expected["labels"] != -100
        np.testing.assert_allclose(found["predictions"][valid], expected["predictions"][valid], rtol=1e-4, atol=1e-5)
