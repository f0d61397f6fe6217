"""WLBTrainer under context parallelism on gloo: one global step, whoever holds which token of it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_wlb import WLBDataCollator, WLBTrainer
from hf_wlb.sharding import SHARDING_STRATEGIES, Sharder, ShardingConfig
from hf_wlb.workload import AnalyticWorkload
from tests.numerics.test_trainer import model_with_losses
from tests.support.documents import WORKLOAD
from tests.support.oracle import in_double, loss_and_gradients, mean_loss, relative_error, worst_error
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import VOCABULARY, tiny_llama
from tests.support.tolerances import (
    CHECKPOINTING,
    EVALUATION,
    NEGATIVE_CONTROL_FACTOR,
    RESUME,
    TRAINER,
    TRAINER_AFTER_STEPS,
)
from tests.support.training import LENGTHS, rows_of, steps_by_epoch, train, trainer_of

EVALUATED = (20, 1, 3, 9, 16, 2, 1, 7)
COUNTERS = ("epoch", "tokens_per_step", "num_input_tokens_seen", "imbalance", "delay", "waiting_contexts")
WHOLE: dict[str, Any] = {"num_train_epochs": 2, "include_num_input_tokens_seen": "all"}
FIELD_4 = {"context_length": 1012, "max_steps": 1, "learning_rate": 0.0}


def masked_rows() -> list[dict[str, Any]]:
    """Per document, rank 1 of 2 holds no target: tokens 2 to 5 predict 3 to 6."""
    (row,) = rows_of((8,))
    return [{**row, "labels": [-100, *row["input_ids"][1:3], *[-100] * 5]}]


#: Name, documents and arguments of runs of one step.
ONE_STEP: dict[str, tuple[Any, dict[str, Any]]] = {
    **{strategy: (LENGTHS, {"cp_strategy": strategy}) for strategy in SHARDING_STRATEGIES},
    "placed, of at most 5 tokens whole": (LENGTHS, {"cp_strategy": "placed", "cp_threshold": 5}),
    "dummies": ((13,), {"gradient_accumulation_steps": 3}),
    "fewer tokens than ranks": ((1, 20), {"gradient_accumulation_steps": 4}),
    "one-token documents": ((20, 1, 1), {"max_tokens_per_shard": 20}),
    "a rank without targets": (masked_rows(), {"gradient_accumulation_steps": 1, "cp_strategy": "per_document"}),
    "label smoothing": ((20, 3, 1, 9), {"label_smoothing_factor": 0.2}),
    "kept keys in two groups": (
        LENGTHS,
        {"regather_key_values": False, "kv_head_groups": 2, "attention_kernel": "reference", "full_determinism": True},
    ),
    "gradient checkpointing": (LENGTHS, {"activation_checkpointing": True, "cp_strategy": "per_document"}),
}


class ShiftedLate(WLBDataCollator):
    """What shifting a shard's own labels gives."""

    def __call__(self, features: Any) -> dict[str, Any]:
        shard = super().__call__(features)
        late = torch.nn.functional.pad(shard["input_ids"][:, 1:], (0, 1), value=-100)
        return {**shard, "labels": late, "shift_labels": late}


class LocalCount(WLBTrainer):
    """What a mean of the ranks' means is."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> torch.Tensor:
        own = sum((batch["shift_labels"] != -100).sum() for batch in batch_samples)
        return torch.as_tensor(own).clamp(min=1) * self.args.world_size


def rows_for(documents: Any) -> Any:
    return rows_of(documents) if isinstance(documents, tuple) else documents


def outcome(trainer: Any, recorder: Any) -> dict[str, Any]:
    return {
        "losses": recorder.losses,
        "logs": [log for log in recorder.logs if "loss" in log],
        "summary": recorder.logs[-1],
        "recorder": recorder,
        "steps": (trainer.state.global_step, trainer.state.max_steps, steps_by_epoch(trainer)),
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        "place": (trainer.mesh.dp_rank, trainer.mesh.cp_rank),
    }


def one_step(folder: str, cp_size: int) -> dict[str, Any]:
    found = {
        name: outcome(*train(folder, rows_for(documents), max_steps=1, cp_size=cp_size, **options))
        for name, (documents, options) in ONE_STEP.items()
    }
    options = {"max_steps": 1, "cp_size": cp_size}
    found["shifted late"] = outcome(*train(folder, data_collator=ShiftedLate(), **options))
    trainer, recorder = trainer_of(folder, masked_rows(), cp_strategy="per_document", **options)
    trainer.__class__ = LocalCount
    trainer.train()
    found["local count"] = outcome(trainer, recorder)
    torch.use_deterministic_algorithms(False)  # full_determinism stays on otherwise
    return found


def field_4(folder: str, cp_size: int) -> list[float]:
    rows, found = [{"input_ids": [5] * 11}, {"input_ids": [6] * 1001}], []
    for accumulation in (1, 2):
        model = model_with_losses({5: 1.0, 6: 0.9})
        options = {**FIELD_4, "gradient_accumulation_steps": accumulation, "cp_size": cp_size, "eval_dataset": rows}
        trainer, recorder = train(folder, rows, model, **options)
        found += [recorder.losses[0], trainer.evaluate()["eval_loss"]]
    return found


def evaluation(folder: str, cp_size: int = 1) -> dict[str, Any]:
    def metrics(prediction: Any) -> dict[str, float]:
        valid = prediction.label_ids[:, 1:] != -100
        right = (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]) & valid
        return {"targets": float(valid.sum()), "right": float(right.sum()), "losses": prediction.losses.tolist()}

    options = {"cp_size": cp_size, "include_for_metrics": ["loss"]}
    trainer, _ = trainer_of(folder, eval_dataset=rows_of(EVALUATED, 1), compute_metrics=metrics, **options)
    predicted = trainer.predict(rows_of(EVALUATED, 1))
    smooth, _ = trainer_of(folder, cp_size=cp_size, label_smoothing_factor=0.3)
    loss = smooth.evaluate(rows_of(EVALUATED, 1))["eval_loss"]
    return {**trainer.evaluate(), "predictions": predicted.predictions, "labels": predicted.label_ids, "smooth": loss}


def lora(folder: str, cp_size: int = 1) -> dict[str, Any]:
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(), config)
    return outcome(*train(folder, rows_of(), model, max_steps=2, cp_size=cp_size))


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    cases: dict[str, dict[str, Any]] = {
        "does not divide": {"cp_size": 3},
        "sizes differ": {"cp_size": 1 + rank % 2},
        "strategies differ": {"cp_size": 2, "cp_strategy": ("placed", "per_document")[rank % 2]},
        "skews differ": {"cp_size": 2, "cp_max_token_skew": 0.05 + 0.01 * rank},
        # Steps are the same by next-fit; what differs is who would hold which shard of them.
        "costs differ": {
            **{"cp_size": 2, "packer": "next-fit"},
            "workload": AnalyticWorkload.from_crossover(10.0 * (1 + rank)),
        },
        "groups differ": {"cp_size": 2, "kv_head_groups": 1 + rank % 2},
        "loss": {"cp_size": 2, "compute_loss_func": lambda *args, **kwargs: None},
        "inputs": {"cp_size": 2, "include_for_metrics": ["inputs"]},
        "collator": {"cp_size": 2, "data_collator": WLBDataCollator(sharder=Sharder(ShardingConfig(4), WORKLOAD))},
    }
    said = {}
    for name, options in cases.items():
        try:
            trainer_of(folder, max_steps=1, **options)[0].train()
            said[name] = "no error"
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def on_two(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import datasets

    saving = {"save_strategy": "steps", "save_steps": 1}
    stream = datasets.Dataset.from_list(rows_of()).to_iterable_dataset()
    resume = functools.partial(train, f"{folder}/again", **WHOLE)
    return {
        "one step": one_step(folder, 2),
        "whole": outcome(*train(f"{folder}/two", cp_size=2, **WHOLE, **saving)),
        "resumed": outcome(*resume(cp_size=2, resume_from_checkpoint=f"{folder}/two/checkpoint-2")),
        "resumed from one": outcome(*resume(cp_size=2, resume_from_checkpoint=f"{folder}/one/checkpoint-2")),
        "stream": outcome(*train(folder, stream, cp_size=2, max_steps=3)),
        "workers": outcome(*train(folder, cp_size=2, dataloader_num_workers=1)),
        "field 4": field_4(folder, 2),
        "evaluation": evaluation(folder, 2),
        "lora": lora(folder, 2),
        "refusals": refusals(rank, world_size, folder),
    }


def on_four(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "one step": one_step(folder, 2),
        "one step of four": one_step(folder, 4),
        "whole": outcome(*train(folder, cp_size=2, **WHOLE)),
        "field 4": field_4(folder, 2) + field_4(folder, 4),
        "evaluation": evaluation(folder, 2),
        "refusals": refusals(rank, world_size, folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """The same without context parallelism, in this process."""
    return {
        "whole": outcome(*train(folder / "one", **WHOLE, save_strategy="steps", save_steps=1)),
        "evaluation": evaluation(str(folder)),
        "lora": lora(str(folder)),
    }


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    """One replica of two ranks; every run in one start, which takes longer than the runs."""
    return run_distributed(on_two, 2, str(folder), timeout_s=400)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    """Two replicas of two ranks, and one of four."""
    return run_distributed(on_four, 4, str(folder), timeout_s=400)


@pytest.fixture(params=["cp 2", "dp 2 x cp 2", "cp 4"])
def steps(request: Any) -> list[dict[str, Any]]:
    """Of every rank, the runs of one step."""
    if request.param == "cp 2":
        return [rank["one step"] for rank in request.getfixturevalue("two")]
    return [
        rank["one step" if "dp" in request.param else "one step of four"] for rank in request.getfixturevalue("four")
    ]


def first_step_error(found: dict[str, Any], documents: Any, label_smoothing: float = 0.0) -> float:
    trained = found["recorder"].documents(0, rows_for(documents))
    loss, gradients = loss_and_gradients(tiny_llama(), trained, label_smoothing)
    loss_error = relative_error(torch.tensor(found["losses"][0]), torch.tensor(loss))
    return max(loss_error, worst_error(found["recorder"].gradients, gradients))


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_step_is_the_token_mean_over_all_ranks(name: str, steps: list[dict[str, Any]]) -> None:
    documents, options = ONE_STEP[name]
    for rank in steps:
        assert first_step_error(rank[name], documents, options.get("label_smoothing_factor", 0.0)) <= TRAINER


def test_checkpointing_changes_nothing(steps: list[dict[str, Any]]) -> None:
    for rank in steps:
        found, plain = (rank[name]["recorder"].gradients for name in ("gradient checkpointing", "per_document"))
        assert worst_error(found, plain) <= CHECKPOINTING


@pytest.mark.parametrize(("name", "documents"), [("shifted late", LENGTHS), ("local count", masked_rows())])
def test_the_check_notices(name: str, documents: Any, steps: list[dict[str, Any]]) -> None:
    for rank in steps:
        assert first_step_error(rank[name], documents) > NEGATIVE_CONTROL_FACTOR * TRAINER


def test_a_rank_was_without_targets() -> None:
    config = ShardingConfig(cp_size=2, strategy="per_document")
    collators = [WLBDataCollator(sharder=Sharder(config, WORKLOAD), cp_rank=rank) for rank in range(2)]
    assert [int((c(masked_rows())["shift_labels"] != -100).sum()) for c in collators] == [2, 0]


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_losses_and_weights_of_two_epochs_equal_the_oracle(ranks: str, request: Any) -> None:
    values = request.getfixturevalue(ranks)
    model, rows, recorder = in_double(tiny_llama()), rows_of(), values[0]["whole"]["recorder"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(len(recorder.plans)):
        optimizer.zero_grad()
        loss = mean_loss(model, recorder.documents(step, rows))
        expected.append(float(loss.detach()))
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    for place, rank in enumerate(values):
        found = rank["whole"]
        assert found["place"] == divmod(place, 2)
        assert found["losses"] == pytest.approx(expected, rel=TRAINER_AFTER_STEPS, abs=1e-12)
        assert worst_error(found["weights"], model.state_dict()) <= TRAINER_AFTER_STEPS
        assert found["recorder"].plans == recorder.plans
        count, max_steps, by_epoch = found["steps"]
        assert count == max_steps == sum(by_epoch) == len(expected)
        for name, value in values[0]["whole"]["weights"].items():
            assert torch.equal(found["weights"][name], value), name


def test_counters_are_those_of_one_process(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    expected, found = one["whole"], two[1]["whole"]
    assert found["steps"] == expected["steps"] and found["recorder"].plans == expected["recorder"].plans
    for name in COUNTERS:
        assert [log[name] for log in found["logs"]] == [log[name] for log in expected["logs"]], name
    assert found["logs"][-1]["num_input_tokens_seen"] == 2 * sum(LENGTHS)
    assert all(log["tokens_per_second"] > 0 for log in found["logs"])
    rates = ("train_samples_per_second", "train_steps_per_second")  # of micro-batches: a step has 2
    for run in (found, expected):
        samples, steps_ = (run["summary"][name] for name in rates)
        assert samples / steps_ == pytest.approx(
            expected["summary"][rates[0]] / expected["summary"][rates[1]], rel=0.02
        )


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_logs_tell_how_even_the_shards_are(ranks: str, request: Any) -> None:
    values = request.getfixturevalue(ranks)
    logs = [rank["whole"]["logs"] for rank in values]
    for log in logs[0]:
        assert sum(log[f"cp_workload_rank_{rank}"] for rank in range(2)) == pytest.approx(1)
        assert sum(log[f"cp_{name}"] for name in ("per_sequence", "per_document", "placed")) == pytest.approx(1)
        assert 1 <= log["cp_imbalance"] <= 2 and 1 <= log["cp_attention_imbalance"] <= 2
        assert log["cp_attention_ms_rank_0"] > 0 and log["cp_attention_ms_rank_1"] > 0 and log["cp_token_skew"] >= 0
    names = [name for name in logs[0][0] if name.startswith("cp_")]
    assert len(names) == 10
    for own in logs[1:]:  # measured on every rank, logged alike by all
        assert [[log[name] for name in names] for log in own] == [[log[name] for name in names] for log in logs[0]]
    for rank in values:
        assert all(log["cp_per_document"] == 1 for log in rank["one step"]["per_document"]["logs"])


def test_one_process_logs_none_of_it(one: dict[str, Any]) -> None:
    assert not any(name.startswith("cp_") for log in one["whole"]["logs"] for name in log)


def test_resume_gives_the_same_losses(two: list[dict[str, Any]]) -> None:
    for rank in two:
        whole, found = rank["whole"], rank["resumed"]
        assert found["losses"] == pytest.approx(whole["losses"][2:], rel=RESUME, abs=RESUME)
        assert found["recorder"].plans == whole["recorder"].plans[2:]
        for name, value in whole["weights"].items():
            assert torch.equal(found["weights"][name], value), name


def test_resume_under_another_cp_size(
    one: dict[str, Any], two: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    back = outcome(*train(tmp_path, resume_from_checkpoint=folder / "two" / "checkpoint-2", **WHOLE))
    for found in (back, two[0]["resumed from one"], two[1]["resumed from one"]):
        whole = one["whole"]
        assert found["recorder"].plans == whole["recorder"].plans[2:]
        assert found["losses"] == pytest.approx(whole["losses"][2:], rel=TRAINER_AFTER_STEPS)
        for name in ("epoch", "num_input_tokens_seen"):
            assert [log[name] for log in found["logs"]] == pytest.approx([log[name] for log in whole["logs"][2:]])
    first, second = ((folder / run / "checkpoint-2" / "planner_state.json").read_text() for run in ("one", "two"))
    assert first == second


def test_shards_come_through_workers(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for rank in two:
        epoch = len(rank["workers"]["losses"])
        assert epoch == one["whole"]["steps"][2][0]
        assert rank["workers"]["losses"] == rank["whole"]["losses"][:epoch]


def test_a_stream_trains_the_same_on_both_ranks(two: list[dict[str, Any]], tmp_path: Path) -> None:
    import datasets

    stream = datasets.Dataset.from_list(rows_of()).to_iterable_dataset()
    _, expected = train(tmp_path, stream, max_steps=3)
    for rank in two:
        assert rank["stream"]["losses"] == pytest.approx(expected.losses, rel=TRAINER_AFTER_STEPS)
        assert rank["stream"]["recorder"].plans == expected.plans


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_sums_10_and_900_over_10_and_1000_tokens_are_0_901(ranks: str, request: Any) -> None:
    for rank in request.getfixturevalue(ranks):
        assert rank["field 4"] == pytest.approx([910 / 1010] * len(rank["field 4"]), rel=TRAINER)


def test_an_adapter_trains_as_on_one_process(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["lora"]["losses"] == pytest.approx(one["lora"]["losses"], rel=TRAINER_AFTER_STEPS)
        assert worst_error(rank["lora"]["recorder"].gradients, one["lora"]["recorder"].gradients) <= TRAINER


def test_evaluation_and_predictions_are_those_of_one_process(
    one: dict[str, Any], two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    model = in_double(tiny_llama())
    exact = float(mean_loss(model, rows_of(EVALUATED, 1)).detach())
    smooth = float(mean_loss(model, rows_of(EVALUATED, 1), 0.3).detach())
    expected = one["evaluation"]
    for rank in [*two, *four]:
        found = rank["evaluation"]
        assert found["eval_loss"] == pytest.approx(exact, rel=EVALUATION)
        assert found["smooth"] == pytest.approx(smooth, rel=EVALUATION)
        assert found["eval_targets"] == expected["eval_targets"] == sum(EVALUATED) - len(EVALUATED)
        assert found["eval_right"] == expected["eval_right"]
        assert found["predictions"].shape == (*found["labels"].shape, VOCABULARY)
    assert len(set(expected["eval_losses"])) > 1
    for rank in two:  # one replica: the same rows
        found = rank["evaluation"]
        assert found["eval_losses"] == pytest.approx(expected["eval_losses"], rel=EVALUATION)
        assert np.array_equal(found["labels"], expected["labels"])
        valid = expected["labels"] != -100
        np.testing.assert_allclose(found["predictions"][valid], expected["predictions"][valid], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_what_is_refused_is_refused_on_every_rank(ranks: str, request: Any) -> None:
    values = request.getfixturevalue(ranks)
    processes, able = (2, "1 or 2") if ranks == "two" else (4, "1, 2 or 4")
    expected = {
        "does not divide": f"ValueError: cp_size=3 does not divide the {processes} processes; set it to {able}",
        "sizes differ": "RuntimeError: The ranks do not agree on cp_size (rank",
        "strategies differ": "RuntimeError: The ranks do not agree on cp_strategy (rank",
        "skews differ": "RuntimeError: The ranks do not agree on cp_max_token_skew (rank",
        "costs differ": "RuntimeError: The ranks do not agree on ",
        "groups differ": "RuntimeError: The ranks do not agree on kv_head_groups (rank",
        "loss": "ValueError: compute_loss_func is not supported with cp_size=2",
        "inputs": "ValueError: include_for_metrics=['inputs'] is not supported with cp_size=2",
        "collator": "ValueError: This collator gives shards of rank 0 by ",
    }
    for rank in values:
        assert rank["refusals"].keys() == expected.keys()
        for name, sentence in expected.items():
            assert rank["refusals"][name].startswith(sentence), (name, rank["refusals"][name])
