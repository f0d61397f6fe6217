"""WLBTrainer on two gloo processes: one global step, whatever the ranks hold of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracle import in_double, loss_and_gradients, mean_loss, relative_error, worst_error
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import EVALUATION, NEGATIVE_CONTROL_FACTOR, RESUME, TRAINER, TRAINER_AFTER_STEPS

EVALUATED = (20, 1, 3, 9, 16, 2, 1, 7)
#: Name, lengths and arguments of runs of one step.
ONE_STEP: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "uneven tokens": ((20, 2, 1), {"gradient_accumulation_steps": 1}),
    "a rank with only a dummy": ((13,), {"gradient_accumulation_steps": 1}),
    "a rank with only dummies": ((20,), {"gradient_accumulation_steps": 3}),
    "a rank with only one-token documents": ((20, 1), {"gradient_accumulation_steps": 1}),
    "no target anywhere": ((1, 1, 1), {"gradient_accumulation_steps": 1, "logging_nan_inf_filter": False}),
    "label smoothing": ((20, 3, 1, 9), {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.2}),
}


def _outcome(trainer: Any, recorder: Any) -> dict[str, Any]:
    from tests.support.training import steps_by_epoch

    return {
        "losses": recorder.losses,
        "epochs": [log["epoch"] for log in recorder.logs if "loss" in log],
        "tokens": [log["tokens_per_step"] for log in recorder.logs if "loss" in log],
        "recorder": recorder,
        "steps": (trainer.state.global_step, trainer.state.max_steps, steps_by_epoch(trainer)),
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
    }


def _one_step(folder: str) -> dict[str, Any]:
    from hf_wlb import WLBTrainer
    from tests.support.training import rows_of, train, trainer_of

    found = {
        name: _outcome(*train(folder, rows_of(lengths), max_steps=1, **options))
        for name, (lengths, options) in ONE_STEP.items()
    }

    class LocalCount(WLBTrainer):
        """What a mean of the ranks' means is."""

        def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> torch.Tensor:
            own = sum((batch["labels"][..., 1:] != -100).sum() for batch in batch_samples)
            return torch.as_tensor(own).clamp(min=1) * self.args.world_size

    lengths, options = ONE_STEP["uneven tokens"]
    trainer, recorder = trainer_of(folder, rows_of(lengths), max_steps=1, **options)
    trainer.__class__ = LocalCount
    trainer.train()
    return {**found, "local count": _outcome(trainer, recorder)}


def _evaluation(folder: str) -> dict[str, Any]:
    from tests.support.training import rows_of, trainer_of

    def metrics(prediction: Any) -> dict[str, float]:
        valid = prediction.label_ids[:, 1:] != -100
        return {"targets": float(valid.sum()), "labels": float(prediction.label_ids[:, 1:][valid].sum())}

    sets = {"many": rows_of(EVALUATED, 1), "one": rows_of((9,), 1)}
    trainer, _ = trainer_of(folder, eval_dataset=sets, compute_metrics=metrics)
    found = trainer.evaluate()
    predicted = trainer.predict(rows_of(EVALUATED, 1))
    return {**found, **predicted.metrics, "shape": predicted.predictions.shape}


def _disagreements(rank: int, folder: str) -> dict[str, str]:
    from tests.support.training import rows_of, trainer_of

    said = {}
    for name, rows, options in (
        ("documents", rows_of((20, 3 + rank, 9) * 4), {"max_steps": 3}),
        ("seed", rows_of(), {"data_seed": rank, "max_steps": 3}),
        ("settings", rows_of(), {"max_tokens_per_micro_batch": 20 + rank, "max_steps": 3}),
        ("steps", rows_of((20,) * (8 + 8 * rank)), {"shuffle_documents": False}),
        ("evaluation", rows_of(), {"eval_dataset": rows_of((5 + rank, 7))}),
    ):
        try:
            trainer, _ = trainer_of(folder, rows, **options)
        except RuntimeError as error:
            said[name] = str(error)
            continue
        try:
            trainer.evaluate() if name == "evaluation" else trainer.train()
            said[name] = "no error"
        except RuntimeError as error:
            said[name] = str(error)
        assert trainer.model.config._attn_implementation == "sdpa"
    return said


def _everything(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from hf_wlb.callbacks import MetricsFileCallback
    from tests.support.training import train

    metrics = MetricsFileCallback(f"{folder}/metrics-{rank}.jsonl")
    saving = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    whole = _outcome(*train(f"{folder}/whole", callbacks=[metrics], **saving))
    resumed = {}
    for step in {1, whole["steps"][2][0], whole["steps"][2][0] + 1}:
        checkpoint = f"{folder}/whole/checkpoint-{step}"
        resumed[step] = _outcome(*train(f"{folder}/again", num_train_epochs=2, resume_from_checkpoint=checkpoint))
    return {
        "whole": whole,
        "resumed": resumed,
        "one step": _one_step(folder),
        "evaluation": _evaluation(folder),
        "disagreements": _disagreements(rank, folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Every run below, in one start of two processes, which takes longer than the runs."""
    return run_distributed(_everything, 2, str(folder), timeout_s=400)


def first_step_error(found: dict[str, Any], lengths: tuple[int, ...], label_smoothing: float = 0.0) -> float:
    from tests.support.training import rows_of

    documents = found["recorder"].documents(0, rows_of(lengths))
    loss, gradients = loss_and_gradients(tiny_llama(), documents, label_smoothing)
    loss_error = relative_error(torch.tensor(found["losses"][0]), torch.tensor(loss))
    return max(loss_error, worst_error(found["recorder"].gradients, gradients))


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_step_is_the_token_mean_over_both_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    lengths, options = ONE_STEP[name]
    for rank in ranks:
        found = rank["one step"][name]
        if name == "no target anywhere":
            assert found["losses"] == [0.0]
            assert all(bool((gradient == 0).all()) for gradient in found["recorder"].gradients.values())
        else:
            assert first_step_error(found, lengths, options.get("label_smoothing_factor", 0.0)) <= TRAINER
        replicas = found["recorder"].plans[0].replicas
        if "only" in name and "dumm" in name:
            assert any(not any(micro_batch.documents for micro_batch in replica) for replica in replicas)


def test_the_check_notices_a_division_by_the_ranks_own_tokens(ranks: list[dict[str, Any]]) -> None:
    lengths, _ = ONE_STEP["uneven tokens"]
    for rank in ranks:
        assert first_step_error(rank["one step"]["local count"], lengths) > NEGATIVE_CONTROL_FACTOR * TRAINER


def test_losses_and_weights_of_two_epochs_equal_the_oracle(ranks: list[dict[str, Any]]) -> None:
    from tests.support.training import LENGTHS, rows_of

    model, rows = in_double(tiny_llama()), rows_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ranks[0]["whole"]["recorder"]
    expected = []
    for step in range(len(recorder.plans)):
        optimizer.zero_grad()
        loss = mean_loss(model, recorder.documents(step, rows))
        expected.append(float(loss.detach()))
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    for rank in ranks:
        found = rank["whole"]
        assert found["losses"] == pytest.approx(expected, rel=TRAINER_AFTER_STEPS, abs=1e-12)
        assert worst_error(found["weights"], model.state_dict()) <= TRAINER_AFTER_STEPS
        assert found["recorder"].plans == recorder.plans
        steps, max_steps, by_epoch = found["steps"]
        assert steps == max_steps == sum(by_epoch) == len(expected)
        assert found["tokens"] == [plan.tokens for plan in recorder.plans]  # of both replicas
        assert sum(found["tokens"][: by_epoch[0]]) == sum(LENGTHS)
    for name, value in ranks[0]["whole"]["weights"].items():
        assert torch.equal(value, ranks[1]["whole"]["weights"][name]), name
    uneven = [[sum(m.tokens for m in replica) for replica in plan.replicas] for plan in recorder.plans]
    assert any(tokens[0] != tokens[1] for tokens in uneven)


def test_resume_gives_the_same_losses(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        whole = rank["whole"]
        assert len(rank["resumed"]) == 3
        for step, found in rank["resumed"].items():
            assert found["losses"] == pytest.approx(whole["losses"][step:], rel=RESUME, abs=RESUME), step
            assert found["recorder"].plans == whole["recorder"].plans[step:]
            assert found["epochs"] == pytest.approx(whole["epochs"][step:])
            for name, value in whole["weights"].items():
                assert torch.equal(found["weights"][name], value), name


def test_evaluation_is_exact_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    from tests.support.training import rows_of

    model = in_double(tiny_llama())
    many, one = (float(mean_loss(model, rows_of(lengths, 1)).detach()) for lengths in (EVALUATED, (9,)))
    targets = [row["input_ids"][1:] for row in rows_of(EVALUATED, 1)]
    for rank in ranks:
        found = rank["evaluation"]
        assert found["eval_many_loss"] == pytest.approx(many, rel=EVALUATION)
        assert found["eval_one_loss"] == pytest.approx(one, rel=EVALUATION)  # one rank has a dummy only
        assert found["test_loss"] == pytest.approx(many, rel=EVALUATION)
        assert found["eval_many_targets"] == found["test_targets"] == sum(map(len, targets))
        assert found["eval_many_labels"] == sum(map(sum, targets))
        assert found["eval_one_targets"] == 8
        assert found["shape"][2] == 128 and found["shape"][0] % 2 == 0
        assert not math.isnan(found["eval_one_loss"])


def test_metrics_are_written_once(ranks: list[dict[str, Any]], folder: Path) -> None:
    assert not (folder / "metrics-1.jsonl").exists()
    lines = [json.loads(line) for line in (folder / "metrics-0.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == ranks[0]["whole"]["losses"]


def test_ranks_that_disagree_fail_together(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["disagreements"] for rank in ranks)
    assert first == second
    for name, sentence in first.items():
        assert sentence.startswith("The ranks do not agree on "), (name, sentence)
        assert "rank 0 has" in sentence and "rank 1 has" in sentence
        assert ("the same arguments" if name in ("seed", "settings") else "the same documents") in sentence
    assert "the seed of the documents' order" in first["seed"]
    assert "max_tokens_per_micro_batch" in first["settings"]
    assert "the number of steps to train" in first["steps"]
