"""WLBTrainer under every split: whoever holds which tokens and which parameters, it is the same training."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_wlb import WLBTrainer
from tests.numerics.test_families import ACCEPTED, build
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
from tests.support.tolerances import EVALUATION, NEGATIVE_CONTROL_FACTOR, SPLITS, SPLITS_MEAN
from tests.support.training import trainer_of

LLAMA = "llama"
FAMILIES = (LLAMA, "qwen3", "mistral, window", "gemma3", "gpt_oss, sinks", "qwen3_moe")
#: Split by number of processes: its arguments, and the families that are tried.
SPLIT_BY: dict[int, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    2: {
        "dp2": ({}, (LLAMA,)),
        "cp2": ({"cp_size": 2}, FAMILIES),
        "tp2": ({"tp_size": 2}, FAMILIES),
        "fsdp2": ({"dp_shard_size": 2}, (LLAMA, "gpt_oss, sinks", "qwen3_moe")),
        "fsdp over cp2": ({"cp_size": 2, "fsdp": True}, (LLAMA,)),
    },
    4: {
        "dp2 x cp2": ({"cp_size": 2}, (LLAMA,)),
        "dp2 x tp2": ({"tp_size": 2}, (LLAMA,)),
        "cp2 x tp2": ({"cp_size": 2, "tp_size": 2}, (LLAMA, "gemma3", "gpt_oss, sinks")),
        "fsdp2 x cp2": ({"dp_shard_size": 2, "cp_size": 2}, (LLAMA, "mistral, window", "qwen3_moe")),
        "fsdp2 x tp2": ({"dp_shard_size": 2, "tp_size": 2}, ("qwen3",)),
        "dp2 x fsdp2": ({"dp_replicate_size": 2, "dp_shard_size": 2}, (LLAMA,)),
    },
}
#: Options that meet splitting somewhere, tried for three steps with each of SPLIT_EXTRAS.
EXTRAS: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.2},
    "recomputation": {"activation_checkpointing": True},
    "whole logits": {"fused_loss": "off"},
    "label smoothing of whole logits": {"label_smoothing_factor": 0.2, "fused_loss": "off"},
    "gradients gathered again": {"gradient_accumulation_steps": 1},
}
SPLIT_EXTRAS = ("tp2", "fsdp2")
#: Splits that evaluate, predict and generate before they train.
SPLIT_FIRST = ("dp2", "cp2", "tp2", "fsdp2")


def without_training(folder: str, dp_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Evaluation, predictions and generation of a split model; before training, and evaluation again after it."""
    smoothing = {"label_smoothing_factor": 0.2}  # of whole logits here, as they are predicted, too
    accumulation = {"gradient_accumulation_steps": MICRO_BATCHES // dp_size}
    settings = {**RUN, **smoothing, **accumulation, "max_steps": 4, **options}
    evaluated = rows()[:9]
    more: dict[str, Any] = {"eval_dataset": evaluated, "compute_metrics": metrics}
    trainer, _ = trainer_of(folder, rows(), build(ACCEPTED[LLAMA]), **settings, **more)
    before, predicted = trainer.evaluate(), trainer.predict(evaluated)
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    generate: Any = trainer.model
    with torch.no_grad():
        generated = generate.generate(**prompt, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
    trainer.train()
    return {
        "before": before,
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "generated": generated.tolist(),
        "after": trainer.evaluate()["eval_loss"],
        "norms": [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log],
    }


def unsummed(folder: str) -> Outcome:
    """What an all-reduce of gradients that is left out gives: control of the comparison."""
    trainer, steps = prepared(folder, LLAMA, 2, {})
    trainer._wrap_model = lambda model, *args, **kwargs: model  # type: ignore[method-assign]
    trainer.accelerator.prepare_model = functools.partial(trainer.accelerator.prepare_model, evaluation_mode=True)
    trainer.train()
    return outcome(steps)


class MeanOfMeans(WLBTrainer):
    """Every rank divides by its own tokens."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> torch.Tensor:
        own = sum((batch["labels"][:, 1:] != -100).sum() for batch in batch_samples)
        return torch.as_tensor(own) * dist.get_world_size()


def mean_of_means(folder: str) -> Outcome:
    trainer, steps = prepared(folder, LLAMA, 2, {})
    trainer.__class__ = MeanOfMeans
    trainer.train()
    return outcome(steps)


def runs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        split: {family: run(folder, family, replicas(world_size, options), **options) for family in families}
        for split, (options, families) in SPLIT_BY[world_size].items()
    }
    if world_size == 2:
        given = {split: SPLIT_BY[2][split][0] for split in SPLIT_EXTRAS}
        found["extras"] = {
            (split, name): run(
                folder, LLAMA, replicas(2, options), **{**options, **adapted(extra, split), "max_steps": 3}
            )
            for split, options in given.items()
            for name, extra in EXTRAS.items()
        }
        first = {split: SPLIT_BY[2][split][0] for split in SPLIT_FIRST}
        found["without training"] = {
            split: without_training(folder, replicas(2, options), options) for split, options in first.items()
        }
        found["controls"] = {"no all-reduce": unsummed(folder), "mean of means": mean_of_means(folder)}
    return found if rank == 0 else {}


def adapted(extra: dict[str, Any], split: str) -> dict[str, Any]:
    """A step of one micro-batch a replica has as many of them as there are replicas."""
    return {name: value for name, value in extra.items() if name != "gradient_accumulation_steps" or split != "tp2"}


@pytest.fixture(scope="module")
def single(tmp_path_factory: Any) -> Any:
    """One process alone, each run made when it is first asked for."""

    @functools.cache
    def ask(family: str, extra: str | None = None, micro_batches: int = MICRO_BATCHES) -> Outcome:
        options = {} if extra is None else {**EXTRAS[extra], "max_steps": 3}
        options["gradient_accumulation_steps"] = micro_batches
        return run(str(tmp_path_factory.mktemp("single")), family, 1, **options)

    return ask


@pytest.fixture(scope="module")
def split_runs(tmp_path_factory: Any) -> Any:
    @functools.cache
    def ask(ranks: int) -> dict[str, Any]:
        return run_distributed(runs, ranks, str(tmp_path_factory.mktemp(f"ranks_{ranks}")), timeout_s=400)[0]

    return ask


@pytest.mark.parametrize(("ranks", "split"), [(ranks, split) for ranks, splits in SPLIT_BY.items() for split in splits])
def test_a_split_trains_as_one_process(ranks: int, split: str, split_runs: Any, single: Any) -> None:
    found = split_runs(ranks)[split]
    assert found.keys() == set(SPLIT_BY[ranks][split][1])
    for family, trained in found.items():
        check(trained, single(family), f"{split}, {family}")


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("split", SPLIT_EXTRAS)
def test_options_that_meet_splitting(split: str, extra: str, split_runs: Any, single: Any) -> None:
    changes = "gradient_accumulation_steps" in adapted(EXTRAS[extra], split)
    expected = single(LLAMA, extra, replicas(2, SPLIT_BY[2][split][0]) if changes else MICRO_BATCHES)
    check(split_runs(2)["extras"][split, extra], expected, f"{split}, {extra}")


def test_accumulation_is_only_a_matter_of_order(tmp_path: Path, single: Any) -> None:
    """One process whose steps are the same documents in 1, 2 or 4 micro-batches."""
    few = [{"input_ids": row["input_ids"][:6]} for row in rows()]  # four documents are a step
    found = {}
    for pieces in (1, 2, 4):
        options: dict[str, Any] = {"context_length": 24 // pieces, "max_document_tokens": 6, "packer": "concat-and-cut"}
        options |= {"gradient_accumulation_steps": pieces, "max_tokens_per_micro_batch": 24 // pieces}
        steps = Steps()
        settings = {**RUN, **options}
        whole = [row for row in few if len(row["input_ids"]) == 6]  # so that none is cut
        steps.trainer, _ = trainer_of(tmp_path, whole, build(ACCEPTED[LLAMA]).double(), callbacks=[steps], **settings)
        steps.trainer.train()
        found[pieces] = outcome(steps)
    for pieces in (2, 4):
        check(found[pieces], found[1], f"{pieces} micro-batches")


@pytest.mark.parametrize("control", ["no all-reduce", "mean of means"])
def test_the_comparison_notices(control: str, split_runs: Any, single: Any) -> None:
    errors = split_runs(2)["controls"][control].differences(single(LLAMA))
    assert max(errors.values()) > NEGATIVE_CONTROL_FACTOR * SPLITS
    assert sum(errors.values()) / len(errors) > NEGATIVE_CONTROL_FACTOR * SPLITS_MEAN


@pytest.fixture(scope="module")
def evaluated_first(tmp_path_factory: Any) -> dict[str, Any]:
    return without_training(str(tmp_path_factory.mktemp("evaluated")), 1, {})


@pytest.mark.parametrize("split", SPLIT_FIRST)
def test_evaluation_prediction_and_generation(split: str, split_runs: Any, evaluated_first: Any) -> None:
    found, expected = split_runs(2)["without training"][split], evaluated_first
    for name in ("eval_loss", "eval_targets", "eval_right"):
        assert found["before"][name] == pytest.approx(expected["before"][name], rel=EVALUATION)
    assert found["generated"] == expected["generated"]
    # An evaluation before training must not keep gradients from being summed.
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["after"] == pytest.approx(expected["after"], rel=1e-5)
    if split in ("cp2", "tp2"):  # micro-batches, and so rows, are those of one process
        assert np.array_equal(found["labels"], expected["labels"])
        valid = expected["labels"] != -100
        np.testing.assert_allclose(found["predictions"][valid], expected["predictions"][valid], rtol=1e-4, atol=1e-5)
