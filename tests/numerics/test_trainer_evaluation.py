"""WLBTrainer's evaluation: the exact token mean, metrics on masked labels, and predictions."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback

from tests.support.oracle import in_double, mean_loss
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import EVALUATION, NEGATIVE_CONTROL_FACTOR
from tests.support.training import rows_of, train, trainer_of

FIRST, SECOND = (20, 1, 3, 9, 16, 2, 1, 7, 25), (2, 11)


def exact(lengths: tuple[int, ...], seed: int = 1, model: Any = None) -> float:
    """The loss of documents run alone; those over S_max (20 tokens) in pieces, as they are evaluated."""
    pieces = [
        {"input_ids": row["input_ids"][start : start + 20]}
        for row in rows_of(lengths, seed)
        for start in range(0, len(row["input_ids"]), 20)
    ]
    return float(mean_loss(in_double(model or tiny_llama()), pieces).detach())


def test_the_loss_is_the_mean_over_all_tokens(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, eval_dataset=rows_of(FIRST, 1))
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(exact(FIRST), rel=EVALUATION)
    assert trainer.model.config._attn_implementation == "sdpa"
    micro_batches = [[{"input_ids": row["input_ids"]}] for row in rows_of(FIRST[:4], 1) if len(row["input_ids"]) > 1]
    model = in_double(tiny_llama())
    means = [float(mean_loss(model, rows).detach()) for rows in micro_batches]
    assert abs(np.mean(means) - exact(FIRST)) > NEGATIVE_CONTROL_FACTOR * EVALUATION  # what a mean of means gives
    assert trainer.evaluate(rows_of(SECOND, 1))["eval_loss"] == pytest.approx(exact(SECOND), rel=EVALUATION)


def test_several_sets_during_training_disturb_nothing(tmp_path: Path) -> None:
    sets = {"long": rows_of(FIRST, 1), "short": rows_of(SECOND, 1)}
    trainer, found = train(
        tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=1, eval_on_start=True, logging_steps=1
    )
    _, plain = train(tmp_path)
    assert found.losses == plain.losses and found.plans == plain.plans
    logged: list[dict[str, Any]] = [log for log in found.logs if "eval_long_loss" in log or "eval_short_loss" in log]
    assert len(logged) == 2 * (trainer.state.global_step + 1)
    assert logged[0]["eval_long_loss"] == pytest.approx(exact(FIRST), rel=EVALUATION)
    assert logged[1]["eval_short_loss"] == pytest.approx(exact(SECOND), rel=EVALUATION)
    assert logged[-2]["eval_long_loss"] == pytest.approx(exact(FIRST, model=trainer.model), rel=EVALUATION)
    assert logged[-1]["eval_short_loss"] == pytest.approx(exact(SECOND, model=trainer.model), rel=EVALUATION)


def test_evaluation_is_left_out_of_the_tokens_per_second(tmp_path: Path) -> None:
    class Slow(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.2)

        def on_prediction_step(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
            time.sleep(2.0 if state.global_step == 1 else 0.0)  # between the two steps of the log

    options = {"max_steps": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    _, slow = train(tmp_path, eval_dataset=rows_of((5,)), callbacks=[Slow()], **options)
    log = next(log for log in slow.logs if "tokens_per_second" in log)
    seconds = 2 * log["tokens_per_step"] / log["tokens_per_second"]
    assert 0.4 <= seconds < 2.0  # both steps, the one before the evaluation included


def test_compute_metrics_gets_masked_labels(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        valid = prediction.label_ids[:, 1:] != -100
        right = (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]) & valid
        return {"accuracy": float(right.sum() / valid.sum())}

    trainer, _ = trainer_of(tmp_path, eval_dataset=rows_of(FIRST, 1), compute_metrics=metrics)
    result = trainer.evaluate()
    labels = seen[0].label_ids
    pieces = [*FIRST[:-1], 20, 5]
    assert (labels != -100).sum() == sum(pieces) - len(pieces)  # each document's first token is masked
    assert sorted(labels[labels != -100]) == sorted(
        t for row in rows_of(FIRST, 1) for place, t in enumerate(row["input_ids"]) if place % 20
    )
    assert seen[0].predictions.shape == (*labels.shape, 128)
    assert 0 <= result["eval_accuracy"] <= 1
    assert result["eval_loss"] == pytest.approx(exact(FIRST), rel=EVALUATION)


class Accuracy:
    """``compute_metrics`` for ``batch_eval_metrics``: counts, until Trainer says that the last micro-batch came."""

    def __init__(self) -> None:
        self.closed: list[int] = []  # how many calls every evaluation took
        self._sums = [0, 0, 0]

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        right, valid = right_and_valid(prediction)
        calls, rights, valids = self._sums = [a + b for a, b in zip(self._sums, (1, right, valid), strict=True)]
        if not compute_result:
            return {}
        self.closed.append(calls)
        self._sums = [0, 0, 0]
        return {"accuracy": rights / valids, "valid": valids}


def right_and_valid(prediction: Any) -> tuple[int, int]:
    """Of next tokens only whether they are even: a random model is right about half of the time."""
    labels = np.asarray(prediction.label_ids)[:, 1:]
    right = np.asarray(prediction.predictions).argmax(-1)[:, :-1] % 2 == labels % 2
    return int((right & (labels != -100)).sum()), int((labels != -100).sum())


def whole_accuracy(prediction: Any) -> dict[str, float]:
    """The same metric from all micro-batches together."""
    right, valid = right_and_valid(prediction)
    return {"accuracy": right / valid, "valid": valid}


@pytest.mark.parametrize("workers", [0, 1])
def test_metrics_batch_by_batch_are_those_of_all(workers: int, tmp_path: Path) -> None:
    sets = {"long": rows_of(FIRST, 1), "short": rows_of(SECOND, 1)}
    options: dict[str, Any] = {"eval_dataset": sets, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    batches = Accuracy()
    trainer, found = train(
        tmp_path, compute_metrics=batches, batch_eval_metrics=True, dataloader_num_workers=workers, **options
    )
    _, whole = train(tmp_path, compute_metrics=whole_accuracy, **options)
    assert found.losses == whole.losses and found.plans == whole.plans
    names = [f"eval_{name}_{what}" for name in sets for what in ("accuracy", "valid", "loss")]
    pairs = [[(name, log[name]) for log in logs for name in names if name in log] for logs in (found.logs, whole.logs)]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 2 * len(names)
    assert batches.closed == [6, 1, 6, 1]
    state = trainer.accelerator.gradient_state
    assert not state.in_dataloader and not state.end_of_dataloader
    assert trainer.predict(rows_of(SECOND, 1)).metrics["test_valid"] == 11


def test_an_evaluation_that_fails_leaves_accelerate_without_a_loader(tmp_path: Path) -> None:
    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        assert trainer.accelerator.gradient_state.in_dataloader
        raise RuntimeError("stop")

    trainer, _ = trainer_of(tmp_path, eval_dataset=rows_of(FIRST, 1), compute_metrics=metrics, batch_eval_metrics=True)
    with pytest.raises(RuntimeError, match="stop"):
        trainer.evaluate()
    assert not trainer.accelerator.gradient_state.in_dataloader


def test_predict(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path)
    output = trainer.predict(rows_of(SECOND, 1))
    assert output.metrics["test_loss"] == pytest.approx(exact(SECOND), rel=EVALUATION)
    assert output.predictions.shape == (*output.label_ids.shape, 128) == (1, 13, 128)
    assert (output.label_ids == -100).sum() == 2


def test_no_target_at_all_is_nan_and_not_0(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path)
    assert np.isnan(trainer.evaluate(rows_of((1, 1)))["eval_loss"])


def test_a_stream_is_refused(tmp_path: Path) -> None:
    import datasets

    trainer, _ = trainer_of(tmp_path)
    with pytest.raises(ValueError, match=r"documents with a length, one a row, got IterableDataset; take some"):
        trainer.evaluate(datasets.Dataset.from_list(rows_of()).to_iterable_dataset())


@pytest.mark.parametrize("rows", [[], [{"input_ids": []}] * 2], ids=["no rows", "only empty ones"])
def test_without_documents_it_is_refused(rows: Any, tmp_path: Path) -> None:
    options = {"empty_documents": "skip", "eval_dataset": {"whole": rows_of(SECOND, 1), "none": rows}}
    trainer, _ = trainer_of(tmp_path, **options)
    with pytest.raises(ValueError, match="the eval_dataset 'none' holds no documents, so there is no loss"):
        trainer.evaluate()
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the data set to evaluate on holds no documents"):
            evaluate(rows)
    mixed = [*rows, *rows_of(SECOND, 1)]
    assert trainer.evaluate(mixed)["eval_loss"] == pytest.approx(exact(SECOND), rel=EVALUATION)


def test_what_cannot_be_evaluated_on_is_refused_before_training(tmp_path: Path) -> None:
    import datasets

    stream = datasets.Dataset.from_list(rows_of()).to_iterable_dataset()
    every_step = {"eval_strategy": "steps", "eval_steps": 3}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], every_step, "the eval_dataset holds no documents"),
        ({"whole": rows_of(SECOND), "none": []}, every_step, "the eval_dataset 'none' holds no documents"),
        ({"none": None, "whole": rows_of(SECOND)}, every_step, "the eval_dataset 'none' holds no documents"),
        ({}, every_step, "the eval_dataset, an empty dict, holds no documents"),
        ([], {"eval_on_start": True}, "the eval_dataset holds no documents"),
        (stream, every_step, "documents with a length, one a row, got IterableDataset"),
    ]
    for given, options, sentence in cases:
        trainer, _ = trainer_of(tmp_path, eval_dataset=given, **options)
        with pytest.raises(ValueError, match=sentence):
            trainer.train()
        assert trainer.state.global_step == 0
    trainer, _ = train(tmp_path, eval_dataset=[], max_steps=1)  # nobody evaluates on it
    assert trainer.state.global_step == 1


def test_label_smoothing(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, eval_dataset=rows_of(SECOND, 1), label_smoothing_factor=0.3)
    expected = mean_loss(in_double(tiny_llama()), rows_of(SECOND, 1), label_smoothing=0.3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected.detach()), rel=EVALUATION)
