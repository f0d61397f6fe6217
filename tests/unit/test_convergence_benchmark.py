"""The convergence benchmark without training: figures, table and picture of given losses, files, documents' folder."""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from hf_wlb.packing import ArraySource, PackingConfig, StepPlanner, measure
from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import convergence
    import convergence_cases
    import convergence_report

    return SimpleNamespace(main=convergence, cases=convergence_cases, report=convergence_report)


@pytest.fixture
def report(modules):
    return modules.report


def made_up_run(factor, name, delay=0.0, steps=40):
    """Losses that fall like a power of the tokens, times a factor."""
    tokens = [100] * steps
    losses = [factor * 10 * (step + 1) ** -0.3 for step in range(steps)]
    evaluations = [[step, 100 * step, losses[step - 1]] for step in (10, 20, 30, steps)]
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
        "tokens": tokens,
        "loss": losses,
    }


@pytest.fixture
def results(modules):
    factors = {
        "sequential": (1.0, 0.0),
        "steady": (0.997, 1.0),
        "wlb": (1.004, 0.5),
        "sequential, seed 1": (1.001, 0.0),
        "sequential, seed 2": (0.998, 0.0),
    }
    runs = {name: made_up_run(factor, name, delay) for name, (factor, delay) in factors.items()}
    found = {
        "schema": modules.cases.SCHEMA,
        "columns": modules.report.COLUMNS,
        "environment": {"date": "2026-01-01", "commit": "abc", "command": "python convergence.py"},
        "settings": asdict(modules.cases.Settings()),
        "documents": {
            "documents": 12_345,
            "tokens": 4_000,
            "median": 2_000,
            "longest": 90_000,
            "held_out": [200, 1_000],
            "sequential_context": 10_944,
        },
        "runs": {name: modules.report.without_repetition(run) for name, run in runs.items()},
    }
    return {**found, "result": modules.report.result(found)}


# ---- figures ----


def test_differences_and_noise_are_those_of_the_losses(results) -> None:
    found = results["result"]
    assert found["convergence_diff"] == pytest.approx(0.003, abs=1e-6)
    assert found["convergence_diff_wlb"] == pytest.approx(0.004, abs=1e-6)
    assert found["noise"] == pytest.approx(0.002, abs=1e-6)
    assert found["convergence_diff_training"] == pytest.approx(0.003, abs=1e-6)
    assert (found["delay_mean"], found["delay_mean_wlb"], found["delayed_share"]) == (1.0, 0.5, 0.25)
    assert (found["tokens"], found["steps"], found["runs"]) == (4_000, 40, 5)


def test_without_some_runs_their_figures_are_none(results, report) -> None:
    del results["runs"]["steady"], results["runs"]["sequential, seed 1"]
    found = report.result(results)
    assert found["convergence_diff"] is None and found["delay_mean"] is None
    assert found["convergence_diff_wlb"] is not None and found["noise"] == pytest.approx(0.002, abs=1e-6)
    assert report.is_complete(results)
    assert not report.is_complete({"runs": {"sequential": {}}})
    assert not report.is_complete({"runs": {"steady": {}}})
    assert report.result({"runs": {}})["noise"] is None


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
    plain["evaluations"] = [[1, 100, 4.0], [4, 400, 2.0]]
    results["runs"]["wlb"]["evaluations"] = [[2, 200, 3.0], [3, 400, 2.2]]
    tokens, values = report.differences(results["runs"], "wlb")
    assert tokens.tolist() == [200.0, 400.0]
    assert values == pytest.approx([0.0, 10.0])  # 200 is half-way from 100 to 400 in logarithms


# ---- shown ----


def test_the_json_reads_back_and_has_a_line_a_run(results, report) -> None:
    text = report.json_text(results)
    assert json.loads(text) == json.loads(json.dumps(results))
    assert sum(line.startswith('  "') for line in text.splitlines()) == 5
    assert '"fingerprint"' not in text and len(text) < 600_000


def test_the_table_has_a_row_a_run_and_says_whether_it_holds(results, report) -> None:
    table = report.results_table(results)
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == ["run", *results["runs"]]
    assert "| -0.30% |" in rows[2] and "| +0.40% |" in rows[3]
    assert (
        "loss at the end: `steady` 0.30% below and `wlb` 0.40% above that of sequential packing, within 0.5%;" in table
    )
    assert "up to 0.20% apart" in table and rows[1].startswith("| sequential | 40 | 4,000 | ")
    results["runs"]["wlb"]["evaluations"][-1][2] *= 1.01
    assert ", not within 0.5%;" in report.results_table(results)
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
    for name in ("sequential, seed 1", "sequential, seed 2", "wlb"):
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


def test_both_panels_begin_at_no_tokens_and_legends_cover_nothing(results, report, tmp_path, monkeypatch) -> None:
    from hf_wlb.plots import style

    figures = []
    monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure))
    report.draw(results, tmp_path / "a.png")
    for axes in figures[0].axes:
        figures[0].canvas.draw()
        assert axes.get_xlim() == pytest.approx((0, 4.08)) and axes.get_xlabel() == "tokens trained, thousands"
        assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0


# ---- settings, files ----


def test_settings_that_cannot_be_are_refused(modules) -> None:
    with pytest.raises(ValueError, match="lower --warmup"):
        modules.cases.Settings(steps=100)
    with pytest.raises(ValueError, match="evaluations must be at least 1, got 0"):
        modules.cases.Settings(evaluations=0)


def test_an_unknown_run_is_refused(modules) -> None:
    assert [run.name for run in modules.cases.chosen_runs([])][:3] == ["sequential", "steady", "wlb"]
    assert [run.seed_offset for run in modules.cases.chosen_runs(["wlb", "sequential, seed 2"])] == [0, 2]
    with pytest.raises(ValueError, match="There is no run 'greedy'; there are sequential; steady"):
        modules.cases.chosen_runs(["greedy"])


def test_files_of_other_settings_or_documents_are_refused(modules, tmp_path) -> None:
    cases = modules.cases
    settings, file = cases.QUICK, tmp_path / "steady.json"
    cases.write_json(file, {"schema": cases.SCHEMA, "settings": asdict(settings), "fingerprint": "a"})
    assert cases.read_json(file, settings, "a")["fingerprint"] == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["steady.json"]
    with pytest.raises(ValueError, match=r"other settings: steps 20 there, 30 now\. Remove it .* another --folder"):
        cases.read_json(file, replace(settings, steps=30), "a")
    with pytest.raises(ValueError, match="trained other documents"):
        cases.read_json(file, settings, "b")
    with pytest.raises(ValueError, match="another --documents"):
        cases.read_json(file, replace(settings, seed=1))
    file.write_text('{"schema": "something else"}')
    with pytest.raises(ValueError, match="not a file of this benchmark's version"):
        cases.read_json(file, settings, "a")
    file.write_text(file.read_text()[:9])
    with pytest.raises(ValueError, match="cannot be read"):
        cases.read_json(file, settings, "a")


# ---- packing ----


def test_documents_come_back_as_they_were_written(modules, tmp_path) -> None:
    written = [np.arange(n, dtype=np.uint16) + n for n in (3, 1, 5)]
    assert modules.cases.Documents.save(written, tmp_path / "new") == 9
    read = modules.cases.Documents(tmp_path / "new")
    assert len(read) == 3 and [row["length"] for row in read] == [3, 1, 5]
    assert all((row["input_ids"] == document).all() for row, document in zip(read, written, strict=True))


def test_sequential_packing_gets_room_for_as_many_tokens_a_step(modules) -> None:
    cases = modules.cases
    settings = replace(cases.Settings(), context_length=512, crossover=96.0)
    lengths = np.maximum(np.random.default_rng(1).lognormal(4.5, 1.5, 4_000), 1).astype(np.int64)
    steps = int(lengths.sum()) // settings.tokens_per_step

    def tokens_per_step(packer, context):
        config = PackingConfig(context, settings.micro_batches, packer=packer, pp_size=4, max_document_tokens=512)
        return measure(StepPlanner(ArraySource(lengths), settings.workload, config))

    context = cases.matched_context(lengths, settings, steps)
    matched, steady = tokens_per_step("next-fit", context), tokens_per_step("steady", 512)
    assert matched.tokens_per_step == pytest.approx(steady.tokens_per_step, rel=0.01)
    assert tokens_per_step("next-fit", 512).tokens_per_step < 0.97 * steady.tokens_per_step
    assert matched.delay == 0 and steady.delay > 0 and tokens_per_step("wlb", 512).delay > 0


# ---- the command ----


def test_the_shown_command_says_file_for_files_and_folder_for_folders(modules) -> None:
    given = ["--text", "/a/b", "c", "--output", "/d/e.json", "--folder=/f/g", "--doc", "h/i", "--out=x/y", "--quick"]
    shown = "--text FOLDER c --output FILE --folder=FOLDER --doc FOLDER --out=FILE --quick"
    assert " ".join(modules.main.shown_words(given)) == shown
    assert modules.main.shown_words(["--commit", "fix/it", "--use-cpu"]) == ["--commit", "fix/it", "--use-cpu"]


def test_ctrl_c_is_a_sentence_and_ends_the_runs(modules, tmp_path, monkeypatch, capsys) -> None:
    main = modules.main
    script = tmp_path / "endless.py"
    script.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1] + '.on').touch()\ntime.sleep(60)\n")
    monkeypatch.setattr(main, "RUN", script)
    about = {"fingerprint": "x", "steps": 20, "tokens": 1}
    monkeypatch.setattr(main, "documents", lambda *given: about)
    monkeypatch.setattr(main, "environment", lambda *given: {"commit": "abc"})
    started = []
    start = main.start
    monkeypatch.setattr(main, "start", lambda *given: started.append(start(*given)) or started[-1])
    folder = tmp_path / "runs"

    def interrupt() -> None:
        for _ in range(600):
            if len(list(folder.glob("*.on"))) == 2:
                break
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    words = ["--quick", "--use-cpu", "--gpus", "2", "--folder", str(folder)]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    try:
        thread.start()
        assert main.main(words) == 130
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    assert printed.err == "interrupted; the same command goes on\n" and "RESULT" not in printed.out
    assert len(started) == 2 and all(one.process.returncode == -signal.SIGTERM for one in started)


def test_what_a_quick_call_without_a_folder_did_is_lost(modules, monkeypatch, capsys) -> None:
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(modules.main, "benchmark", interrupted)
    assert modules.main.main(["--quick"]) == 130
    assert "begins anew (--folder keeps the runs that are finished)" in capsys.readouterr().err
