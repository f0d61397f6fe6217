"""Figures of measured steps: their intervals, and what is renewed when the simulator says something else of them."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_wlb.simulator.measured import interval_of, without_each
from tests.support.measured_launch import documents, made_up_launch, text_of
from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"
NOISE = 0.03


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import end_to_end_cases
        import renew_predictions
        import step_prices

        yield SimpleNamespace(cases=end_to_end_cases, renewal=renew_predictions, prices=step_prices)


@pytest.fixture(scope="module")
def lines(modules) -> list[dict[str, Any]]:
    return made_up_launch(modules.cases, modules.prices, ("plain-4d", "wlb"), 2)


@pytest.mark.parametrize("rounds", [3, 5, 8])
def test_intervals_hold_the_truth_as_often_as_they_say(rounds) -> None:
    """Of two variants' ratio, with noise in every step; percentiles of resampled rounds, the control, do not."""
    random, trials = np.random.default_rng(rounds), 1500
    held = resampled = 0
    for _ in range(trials):
        modelled = random.uniform(5, 15, size=(2, rounds))
        seconds = modelled * (1 + NOISE * random.standard_normal((2, rounds)))
        mine, theirs = (without_each(a) / without_each(b) for a, b in zip(seconds, modelled, strict=True))
        low, high = interval_of(mine / theirs)
        held += low < 1 < high
        drawn = random.integers(0, rounds, (200, rounds))
        ratios = np.divide(
            *(a[drawn].sum(axis=1) / b[drawn].sum(axis=1) for a, b in zip(seconds, modelled, strict=True))
        )
        low, high = np.percentile(ratios, (2.5, 97.5))
        resampled += low < 1 < high
    assert 0.93 < held / trials < 0.97
    assert resampled / trials < 0.91


# ---- renewed predictions ----


def test_predictions_are_renewed_and_nothing_else(modules, lines, tmp_path) -> None:
    file = tmp_path / "made up.json"
    file.write_text(json.dumps(documents().tolist()))
    about, *steps = lines
    old = json.loads(json.dumps(about))
    for stream in old["streams"].values():
        stream["pass_predicted"] = stream["window_predicted"] = 1.0
    stale = [{**line, "predicted": 1.0} if line["round"] >= 0 else line for line in steps]
    renewed = [json.loads(line) for line in modules.renewal.renewed(text_of([old, *stale]), file).splitlines()]
    assert renewed == [{**about, "predicted_by": "the figures of 'h100-flash-attn-4'"}, *steps]
    results = tmp_path / "results.jsonl"
    results.write_text(text_of([old, *stale]))
    assert modules.renewal.main(["--lengths", str(file), str(results)]) == 0
    assert [json.loads(line) for line in results.read_text().splitlines()] == renewed


def test_predictions_of_other_documents_are_refused(modules, lines, tmp_path, capsys) -> None:
    file, other, results = tmp_path / "made up.json", tmp_path / "other.json", tmp_path / "results.jsonl"
    file.write_text(json.dumps(documents().tolist()))
    other.write_text(file.read_text())
    last = lines[-1]["micro_batch_lengths"]
    swapped = {**lines[-1], "micro_batch_lengths": [last[0][::-1]]}
    results.write_text(text_of([*lines[:-1], swapped]))
    before = results.read_text()
    for lengths, said in ((other, "trained on made up"), (file, "is packed otherwise now")):
        assert modules.renewal.main(["--lengths", str(lengths), str(results)]) == 2
        assert said in capsys.readouterr().err
    assert results.read_text() == before
    file.write_text(json.dumps((documents()[:-9] + 1).tolist()))
    results.write_text(text_of(lines))
    assert modules.renewal.main(["--lengths", str(file), str(results)]) == 2
    assert "hold other documents now" in capsys.readouterr().err and results.read_text() == text_of(lines)
    results.write_text(text_of(lines[1:]))
    assert modules.renewal.main(["--lengths", str(file), str(results)]) == 2
    assert "comes before the launch itself" in capsys.readouterr().err
