"""The trainer's book-keeping by itself."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

from hf_wlb.accounting import LogWindow, TokenMean, read_planner_state, save_planner_state

STEP = {
    "imbalance": 1.2,
    "time_gap": 1.1,
    "delay": 0.5,
    "tokens": 100.0,
    "waiting_contexts": 2.0,
    "plan_ms": 0.5,
    "more": 7.0,
}


def test_token_mean_weighs_means_by_their_tokens() -> None:
    mean = TokenMean()
    mean.add(torch.tensor(1.0), 10)
    mean.add(torch.tensor(0.0), 0)  # a micro-batch without targets
    mean.add(torch.tensor(0.9), 1000)
    assert mean.tokens == 1010
    assert mean.value() == pytest.approx(0.901, abs=5e-4)
    assert mean.value() == pytest.approx(910 / 1010, rel=1e-7)


def test_token_mean_of_nothing_is_nan() -> None:
    mean = TokenMean()
    assert math.isnan(mean.value())
    mean.add(torch.tensor(0.0), 0)
    assert math.isnan(mean.value())


def test_token_mean_adds_up_in_double_precision() -> None:
    mean = TokenMean()
    for _ in range(20_000):
        mean.add(torch.tensor(2.0), 100_003)
    assert mean.value() == 2.0


def test_an_empty_window_says_nothing() -> None:
    assert LogWindow().means() == {}


def test_a_window_gives_means_and_tokens_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    window = LogWindow()
    window.add(STEP)
    now[0] = 102.0
    window.leave_out(1.5)  # an evaluation between the two steps
    window.add({**STEP, "imbalance": 1.4, "tokens": 300.0, "delay": 0.0})
    now[0] = 104.0
    means = window.means()
    assert means.pop("tokens_per_second") == pytest.approx(400 / 2.5)
    assert means.pop("tokens_per_step") == 200.0
    assert means == pytest.approx(
        {"imbalance": 1.3, "time_gap": 1.1, "delay": 0.25, "waiting_contexts": 2.0, "plan_ms": 0.5}
    )


def test_a_planner_state_comes_back(tmp_path: Path) -> None:
    save_planner_state(str(tmp_path), 7, {"epoch": 1})
    assert read_planner_state(str(tmp_path), 7) == {"epoch": 1}
    assert json.loads((tmp_path / "planner_state.json").read_text()) == {"global_step": 7, "data": {"epoch": 1}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "holds no planner_state.json"),
        ("", "cannot be read .JSONDecodeError.*the checkpoint is damaged"),
        ("\udc80", "cannot be read .UnicodeDecodeError.*the checkpoint is damaged"),
        ("[]", "cannot be read .TypeError.*the checkpoint is damaged"),
        ('{"data": {}}', "cannot be read .KeyError: 'global_step'.*the checkpoint is damaged"),
        ('{"global_step": 7, "data": 1}', "cannot be read .TypeError.*the checkpoint is damaged"),
        ('{"global_step": 6, "data": {}}', "was written at step 6 but the checkpoint is of step 7"),
    ],
)
def test_a_state_that_cannot_be_read_is_named(text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "planner_state.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=sentence):
        read_planner_state(str(tmp_path), 7)
