"""How the convergence benchmark is shown: figures, table and picture of given losses."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import convergence_cases
    import convergence_report

    return SimpleNamespace(cases=convergence_cases, report=convergence_report)


@pytest.fixture
def report(modules):
    return modules.report


def made_up_run(factor, name, delay=0.0, steps=40):
    """Losses that fall like a power of the tokens, times a factor."""
    tokens = [100] * steps
    losses = [factor * 10 * (step + 1) ** -0.3 for step in range(steps)]
    evaluations = [[step, 100 * step, losses[step - 1]] for step in (10, 20, 30, steps) if step <= steps]
    packing = {"delay": delay, "delay_worst": 2 * delay, "token_variation": 0.02, "imbalance": 1.1}
    return {
        "schema": "x",
        "settings": {},
        "fingerprint": "y",
        "run": {"name": name},
        "device": "a device",
        "attention_kernel": "reference",
        "parameters": 13_000_000,
        "versions": {"torch": "2.11"},
        "packing": packing,
        "delayed_share": delay / 4,
        "evaluations": evaluations,
        "copying": [[step, 100 * step, 9.0, 9.0 - step / 10] for step in (10, steps)],
        "tokens": tokens,
        "loss": losses,
    }


@pytest.fixture
def results(modules):
    factors = {
        "sequential": (1.0, 0.0),
        "steady": (0.997, 1.0),
        "wlb": (1.004, 0.5),
        "sequential, order 1": (1.001, 0.0),
        "sequential, order 2": (0.998, 0.0),
    }
    runs = {name: made_up_run(factor, name, delay) for name, (factor, delay) in factors.items()}
    for run in runs.values():
        run["evaluations"].insert(0, [0, 0, 8.5])
    base = made_up_run(1.2, "base", steps=20)
    base["evaluations"].pop()
    settings = asdict(modules.cases.Settings())
    found = {
        "schema": modules.cases.SCHEMA,
        "columns": modules.report.COLUMNS,
        "environment": {"date": "2026-01-01", "commit": "abc", "command": "python convergence.py"},
        "settings": settings,
        "documents": {
            "documents": 12_345,
            "tokens": 4_000,
            "median": 2_000,
            "longest": 90_000,
            "held_out": [200, 1_000],
            "base": [3_210, 2_000],
            "sequential_context": 10_944,
        },
        "base": {**modules.report.without_repetition(base), "settings": settings, "weights": "z"},
        "runs": {name: modules.report.without_repetition(run) for name, run in runs.items()},
    }
    return {**found, "result": modules.report.result(found)}


# ---- figures ----


def test_differences_and_noise_are_those_of_the_losses(results) -> None:
    found = results["result"]
    assert found["convergence_diff"] == pytest.approx(0.003, abs=1e-6)
    assert found["convergence_diff_wlb"] == pytest.approx(0.004, abs=1e-6)
    assert abs(found["convergence_change"]) == found["convergence_diff"]
    assert found["convergence_change"] < 0 and found["convergence_change_wlb"] == pytest.approx(0.004, abs=1e-6)
    assert found["noise"] == pytest.approx(0.002, abs=1e-6)
    assert found["convergence_diff_training"] == pytest.approx(0.003, abs=1e-6)
    assert (found["delay_mean"], found["delay_mean_wlb"], found["delayed_share"]) == (1.0, 0.5, 0.25)
    assert (found["tokens"], found["steps"], found["runs"]) == (4_000, 40, 5)
    assert (found["base_tokens"], found["base_steps"], found["loss_start"]) == (2_000, 20, 8.5)
    assert (found["copy_loss_base"], found["copy_loss_base_string"], found["copy_loss_sequential"]) == (7.0, 9.0, 5.0)


def test_noise_is_said_of_the_end_and_of_the_way_there(results, report) -> None:
    way = "up to 0.20% off the first at the end, up to {} on the way"
    expected = f"2 sequential runs with the documents in other orders: {way}"
    assert report.noise_words(results) == report.summary(results)["noise"] == expected.format("0.2%")
    results["runs"]["sequential, order 2"]["evaluations"][1][2] *= 0.97  # runs that meet at the end
    assert report.noise_words(results) == expected.format("3.2%")
    runs = {name: run for name, run in results["runs"].items() if "order" not in name}
    assert report.noise_words({**results, "runs": runs}) == ""


@pytest.fixture
def from_scratch(results):
    """The same without a base."""
    named = {name.replace("order", "seed"): run for name, run in results["runs"].items()}
    for run in named.values():
        del run["evaluations"][0]
    return {**results, "base": None, "runs": named}


def test_runs_from_scratch_have_no_base(from_scratch, report, tmp_path) -> None:
    found = report.result(from_scratch)
    assert found["base_steps"] is None and found["copy_loss_base"] is None and found["loss_start"] is None
    assert found["noise"] == pytest.approx(0.002, abs=1e-6) and found["copy_loss_sequential"] == 5.0
    table = report.results_table(from_scratch)
    assert (
        "2 sequential runs with other initial weights: up to 0.20% off the first at the end" in table
        and "a base of" not in table
    )
    assert report.draw(from_scratch, tmp_path / "a.png").is_file()


def test_without_some_runs_their_figures_are_none(results, report) -> None:
    del results["runs"]["steady"], results["runs"]["sequential, order 1"]
    found = report.result(results)
    assert found["convergence_diff"] is None and found["delay_mean"] is None
    assert found["convergence_diff_wlb"] is not None and found["noise"] == pytest.approx(0.002, abs=1e-6)
    assert report.is_complete(results)
    assert not report.is_complete({"runs": {"sequential": {}}})
    assert not report.is_complete({"runs": {"steady": {}}})
    assert report.result({"runs": {}})["noise"] is None
    assert report.result({"runs": {}, "base": results["base"]})["base_tokens"] == 2_000


def test_the_final_training_loss_is_a_mean_over_tokens(report) -> None:
    run = {"tokens": [900, 30, 70], "loss": [5.0, 2.0, 3.0]}
    assert report.training_loss(run) == pytest.approx((30 * 2 + 70 * 3) / 100)


def test_smoothing_keeps_the_mean_over_tokens(report) -> None:
    generator = np.random.default_rng(0)
    run = {"tokens": generator.integers(50, 150, 600).tolist(), "loss": generator.random(600).tolist()}
    curve = report.smoothed(run, points=20)
    ends = np.array([0.0, *(tokens for tokens, _ in curve)])
    mean = np.dot(np.diff(ends), [loss for _, loss in curve]) / ends[-1]
    assert mean == pytest.approx(np.average(run["loss"], weights=run["tokens"]))
    assert len(curve) == 20 and ends[-1] == sum(run["tokens"])


def test_evaluations_are_compared_at_as_many_tokens(results, report) -> None:
    plain = results["runs"]["sequential"]
    plain["evaluations"] = [[0, 0, 5.0], [1, 100, 4.0], [4, 400, 2.0]]
    results["runs"]["wlb"]["evaluations"] = [[2, 200, 3.0], [3, 400, 2.2]]
    tokens, values = report.differences(results["runs"], "wlb")
    assert tokens.tolist() == [200.0, 400.0]
    assert values == pytest.approx([0.0, 10.0])  # 200 is half-way from 100 to 400 in logarithms


# ---- shown ----


def test_the_json_reads_back_and_has_a_line_a_run(results, report) -> None:
    text = report.json_text(results)
    assert json.loads(text) == json.loads(json.dumps(results))
    assert sum(line.startswith('  "') for line in text.splitlines()) == 5
    assert sum(line.startswith(' "base": {') for line in text.splitlines()) == 1
    assert '"fingerprint"' not in text and len(text) < 600_000


def test_the_table_has_a_row_a_run_and_says_whether_it_holds(results, report) -> None:
    table = report.results_table(results)
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == ["run", *results["runs"]]
    assert "| -0.30% |" in rows[2] and "| +0.40% |" in rows[3]
    assert (
        "loss at the end: `steady` 0.30% below and `wlb` 0.40% above that of sequential packing; "
        "the aim is at most 0.5% either way, which is kept;" in table
    )
    way = "up to 0.20% off the first at the end, up to 0.2% on the way."
    assert f"; 2 sequential runs with the documents in other orders: {way}" in table
    assert "a base of 20 steps from scratch over 3,210 other files (2,000 tokens," in table
    assert "it is 8.5000 before the first step. Copy loss," in table
    assert "7.00 at the base's end, where the string itself has 9.00; 5.00 at the ends of the runs." in table
    assert rows[1].startswith("| sequential | 40 | 4,000 | ")
    results["runs"]["wlb"]["evaluations"][-1][2] *= 1.01
    assert "at most 0.5% either way, `wlb` is worse by more;" in report.results_table(results)
    results["runs"]["wlb"]["evaluations"][-1][2] *= 0.98
    assert "either way, `wlb` is better by more;" in report.results_table(results)
    del results["runs"]["sequential"]
    with pytest.raises(ValueError, match="no run 'sequential'"):
        report.results_table(results)


def test_the_table_takes_its_place_in_the_page(report) -> None:
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.with_table(page, "new") == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="no place for the table"):
        report.with_table("a page", "new")


def test_the_picture_is_drawn_with_and_without_noise(results, report, tmp_path) -> None:
    whole = report.draw(results, tmp_path / "a.png").read_bytes()
    assert whole.startswith(b"\x89PNG") and whole == report.draw(results, tmp_path / "again.png").read_bytes()
    for name in ("sequential, order 1", "sequential, order 2", "wlb"):
        del results["runs"][name]
    assert report.draw(results, tmp_path / "b.png").read_bytes() != whole
    del results["runs"]["steady"]
    with pytest.raises(ValueError, match="with another to compare"):
        report.draw(results, tmp_path / "c.png")


def test_numbers_and_differences_read_well(report) -> None:
    counts = (512, 40_960, 999_999, 1_000_000, 49_152_000, 2_345_000_000)
    assert [report.count_text(count) for count in counts] == ["512", "40,960", "999,999", "1.0M", "49.2M", "2,345.0M"]
    shown = [report.apart_text(value) for value in (-0.0022, 0.0024, -0.00001, 0.00004)]
    assert shown == ["0.22% below", "0.24% above", "level with", "level with"]


def test_panels_begin_at_no_tokens_and_legends_cover_nothing(results, report, tmp_path, monkeypatch) -> None:
    from hf_wlb.plots import style

    figures = []
    monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure))
    report.draw(results, tmp_path / "a.png")
    words = ("tokens trained, thousands", "tokens trained since the runs part, thousands")
    for axes, most, label in zip(figures[0].axes, (6.12, 4.08), words, strict=True):
        figures[0].canvas.draw()
        assert axes.get_xlim() == pytest.approx((0, most)) and axes.get_xlabel() == label
        assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0
    base, *others = (line for line in figures[0].axes[0].lines if len(line.get_xdata()) > 2)
    assert max(base.get_xdata()) == 2.0 and len(others) == 5
    assert all(min(line.get_xdata()) > 2.0 and max(line.get_xdata()) == 6.0 for line in others)
