"""MFU and times of ranks in the logs of a run: the figures, and that every tracker gets them."""

import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hf_wlb.trainer import throughput
from hf_wlb.trainer.throughput import ComputeTimer, Throughput, flops_of, peak_of
from hf_wlb.workload.model_flops import ModelFlops
from tests.support.tiny_llama import tiny_llama
from tests.support.training import rows_of, train

CPU = torch.device("cpu")
PEAK = 1e9
LOGGED = {
    "mfu",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "rank_seconds_max",
    "rank_seconds_mean",
    "rank_imbalance",
    "rank_seconds_rank_0",
    "nonfinite_steps",
    "imbalance",
    "delay",
    "tokens_per_step",
}


def window_of(flops: ModelFlops | None, peak: float | None, *steps: float) -> Throughput:
    window = Throughput(flops, peak, CPU)
    window.timer = SimpleNamespace(begin_step=lambda: None, take=lambda: list(steps))  # type: ignore[assignment]
    return window


def test_figures_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "process_count", lambda: 2)
    monkeypatch.setattr(throughput, "gather_figures", lambda own: [list(own), [3.0, 1.0]])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: 100.0)
    window = window_of(ModelFlops(6.0, ((12.0, None),)), 50.0, 1.0, 2.0)
    window.add([4])
    window.add([3, 1])
    window.leave_out(-7.0)  # 10 seconds of training, 3 of them an evaluation
    window.leave_out(-3.0)
    window.leave_out(3.0)
    assert window.figures() == pytest.approx(
        {
            "tokens_per_second_per_gpu": 8 / 7 / 2,
            "mfu": (6 * 8 + 12 * (10 + 6 + 1)) / (7 * 2 * 50),
            "rank_seconds_max": (3 + 2) / 2,
            "rank_seconds_mean": (1.5 + 2) / 2,
            "rank_imbalance": 5 / 3.5,
            "rank_seconds_rank_0": 1.5,
            "rank_seconds_rank_1": 2.0,
        }
    )


def test_many_ranks_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "gather_figures", lambda own: [list(own)] * 17)
    window = window_of(None, PEAK, 1.0)
    window.add([4])
    found = window.figures()
    assert found["rank_seconds_max"] == found["rank_seconds_mean"] == found["rank_imbalance"] == 1
    assert not any(name.startswith("rank_seconds_rank_") or name == "mfu" for name in found)


def test_no_steps_no_figures() -> None:
    assert Throughput(None, None, CPU).figures() == {}


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass, on a clock that nothing else moves: a busy machine sleeps longer than it is told to."""
    now = [0.0]
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.append(now.pop() + seconds)


def test_the_timer_stops_at_the_lowest_gradient(sleep: Callable[[float], None]) -> None:
    class Waiting(torch.autograd.Function):
        """Stands for what data parallel does once all gradients are there."""

        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
            sleep(0.25)
            return grad

    model = torch.nn.Linear(3, 2)
    timer = ComputeTimer(CPU)
    seconds = {}
    for watched in (True, False):
        timer.watch(model) if watched else timer.unwatch()
        timer.begin_step()
        with timer.measure():
            # The weight comes first, as an embedding does; the input's gradient is made after its.
            inputs = torch.ones(1, 3, requires_grad=True)
            model(Waiting.apply(inputs)).sum().backward()
        seconds[watched] = timer.take()[0]
    assert seconds == {True: 0.0, False: 0.25}  # else it would be counted: the control


def test_a_step_sums_its_micro_batches(sleep: Callable[[float], None]) -> None:
    timer = ComputeTimer(CPU)
    with timer.measure():  # of no step: an evaluation, say
        pass
    for micro_batches in (1, 3):
        timer.begin_step()
        for _ in range(micro_batches):
            with timer.measure():
                sleep(0.25)
    assert timer.take() == [0.25, 0.75]


def test_a_model_is_counted_whole_frozen_or_with_adapters(caplog: pytest.LogCaptureFixture) -> None:
    import peft

    model = tiny_llama()
    whole = flops_of(model)
    assert whole == ModelFlops.from_config(model.config)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
    adapted = flops_of(peft.get_peft_model(tiny_llama(), config))
    assert whole is not None and adapted is not None
    assert adapted.per_token == whole.per_token * 4 / 6 + 6 * 2 * (2 * 32 + 2 * 32)  # layers, A and B of rank 2
    assert adapted.per_pair == whole.per_pair
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    half = flops_of(model)
    assert half is not None and whole.per_token * 4 / 6 < half.per_token < whole.per_token
    model.config.model_type = "unheard"
    with caplog.at_level(logging.WARNING):
        assert flops_of(model) is None
    assert "The logs will hold no MFU." in caplog.text


def test_peaks() -> None:
    assert peak_of(CPU) is None and peak_of(CPU, 2e12) == 2e12
    with pytest.raises(ValueError, match="The peak must be above 0"):
        peak_of(CPU, -1)


def test_every_log_has_them_and_they_are_consistent(tmp_path: Path) -> None:
    _, recorder = train(tmp_path, rows_of(), peak_flops_per_second=PEAK, logging_steps=2)
    logs = [log for log in recorder.logs if "loss" in log]
    assert logs and all(log.keys() >= LOGGED for log in logs)
    counted, done = flops_of(tiny_llama()), 0
    assert counted is not None
    for log in logs:
        plans = recorder.plans[done : done + 2]
        done += 2
        flops = sum(counted.documents([d.length for d in plan.documents]) for plan in plans)
        tokens = sum(plan.tokens for plan in plans)
        assert log["mfu"] / log["tokens_per_second_per_gpu"] == pytest.approx(flops / tokens / PEAK)
        assert log["tokens_per_second_per_gpu"] == pytest.approx(log["tokens_per_second"], rel=0.05)
        seconds = tokens / len(plans) / log["tokens_per_second_per_gpu"]
        assert 0 < log["rank_seconds_mean"] <= seconds
    _, unknown = train(tmp_path, rows_of())
    assert not any("mfu" in log for log in unknown.logs)


def test_tensorboard_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    _, recorder = train(tmp_path, rows_of(), peak_flops_per_second=PEAK, report_to="tensorboard", max_steps=2)
    found = accumulators.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert {f"train/{name}" for name in LOGGED} <= set(found.Tags()["scalars"])
    for name in LOGGED:
        events = found.Scalars(f"train/{name}")
        assert [event.step for event in events] == [1, 2]
        assert [event.value for event in events] == pytest.approx([log[name] for log in recorder.logs[:2]], rel=1e-5)


def test_weights_and_biases_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    wandb: Any = MagicMock(run=MagicMock())
    errors = types.ModuleType("wandb.sdk.lib.config_util")
    errors.ConfigError = KeyError  # type: ignore[attr-defined]
    for name, module in (("wandb", wandb), ("wandb.sdk.lib.config_util", errors)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("wandb.sdk", "wandb.sdk.lib"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    train(
        tmp_path,
        rows_of(),
        peak_flops_per_second=PEAK,
        callbacks=[integration_utils.WandbCallback()],
        max_steps=2,
    )
    logs = [call.args[0] for call in wandb.log.call_args_list if "train/loss" in call.args[0]]
    assert [log["train/global_step"] for log in logs] == [1, 2]
    for log in logs:
        assert all(isinstance(log[f"train/{name}"], (int, float)) for name in LOGGED)
