import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import hf_wlb
from hf_wlb.analysis import (
    PackerCase,
    analyze,
    choose_workload,
    comparable,
    equal_documents,
    read_lengths,
    recommend,
    run_case,
)
from hf_wlb.analysis.tables import histogram_rows
from hf_wlb.cli import app, base
from hf_wlb.lengths import holds_lengths, length_summary, sample_lengths
from hf_wlb.packing import PackingConfig, tune
from hf_wlb.workload import AnalyticWorkload

WORKLOAD = AnalyticWorkload.from_crossover(1536)
SMALL = ["--context", "8192", "--crossover", "1536", "--workers", "1"]
CONFIG = PackingConfig(8192, micro_batches_per_replica=4, pp_size=4)


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(np.maximum(sample_lengths(3000) // 16, 1).tolist()))
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def text_of(result) -> str:
    """What was printed, in one line: where prose wraps depends on the terminal."""
    return " ".join(result.stdout.split())


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0 and result.stdout.strip() == f"hf-wlb {hf_wlb.__version__}"


def test_analyze_prints_every_packer_and_writes_json(lengths_file, tmp_path) -> None:
    written = tmp_path / "analysis.json"
    result = run("analyze", lengths_file, *SMALL, "--steps", 12, "--no-recommend", "--json", written)
    assert result.exit_code == 0, result.output
    for packer in ("concat-and-cut", "next-fit", "greedy, window 8", "wlb", "steady"):
        assert packer in text_of(result)
    assert "Note: concat-and-cut cuts documents" in text_of(result)
    assert "over next-fit" in text_of(result) and "over concat-and-cut (which does less attention)" in text_of(result)
    content = json.loads(written.read_text())
    assert content["schema"] == "hf_wlb.analysis/1" and content["source"] == "lengths in lengths.json"
    assert content["speedup"]["over_next_fit"] > 1.05


def test_analyze_recommends(lengths_file) -> None:
    result = run("analyze", lengths_file, *SMALL, "--steps", 5, "--tune-steps", 2, "--solver-windows", 0)
    assert result.exit_code == 0, result.output
    assert "Recommended: " in text_of(result) and "The solver was left out" in text_of(result)


def test_what_is_recommended_becomes_settings(lengths_file, tmp_path) -> None:
    written, report = tmp_path / "settings.yaml", tmp_path / "analysis.json"
    given = [*SMALL, "--steps", 8, "--tune-steps", 8, "--solver-windows", 0]
    result = run("analyze", lengths_file, *given, "--yaml", written, "--json", report)
    assert result.exit_code == 0, result.output
    settings = yaml.safe_load(written.read_text())
    content = json.loads(report.read_text())
    assert settings == content["arguments"]
    assert "# for 1 replica of 4 micro-batches a step, 4 pipeline stages" in written.read_text()
    assert settings["packer"] == content["recommended"]["config"]["packer"]
    assert (settings["context_length"], settings["max_document_tokens"]) == (8192, 8192)
    assert all(f"{name}: " in result.stdout for name in settings)
    assert f"Expected gain of {content['speedup']['of']} on" in text_of(result)


def test_the_note_that_data_repeat_comes_first(lengths_file) -> None:
    text = text_of(run("analyze", lengths_file, *SMALL, "--steps", 100, "--no-recommend", "--solver-windows", 0))
    assert text.index("Note: The data have") < text.index("Every packer gets the same")


def test_a_layout_without_anything_to_balance_gets_no_recommendation(lengths_file) -> None:
    for layout in (["--pp", 1], ["--micro-batches", 1]):
        result = run("analyze", lengths_file, *SMALL, *layout, "--steps", 4, "--solver-windows", 0)
        assert result.exit_code == 0, result.output
        assert "there is nothing to balance between micro-batches" in text_of(result)
        assert "Recommended" not in result.output
        assert run("analyze", lengths_file, *SMALL, *layout, "--dp", 2, "--steps", 4, "--no-recommend").exit_code == 0
        result = run("tune", lengths_file, *SMALL, *layout)
        assert result.exit_code == 2 and "there is nothing to tune for" in result.stderr


def test_both_commands_split_documents_alike(tmp_path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([20_000, 9_000, 500, 3_000] * 40))
    given = [tmp_path / "lengths.json", *SMALL, "--packer", "steady", "--steps", 4]
    result = run("tune", *given)
    assert "Note: 80 documents are longer than 8,192 tokens" in text_of(result)
    assert "max_document_tokens: 8192" in result.stdout
    whole = run("tune", *given, "--s-max", 20_000, "--max-document-tokens", 20_000)
    assert "Note" not in text_of(whole) and "max_document_tokens: 20000" in whole.stdout
    refused = run("tune", *given, "--max-document-tokens", 20_000)
    assert refused.exit_code == 2 and "Raise --s-max, or lower --max-document-tokens" in refused.stderr
    compared = text_of(run("analyze", given[0], *SMALL, "--steps", 4, "--no-recommend", "--solver-windows", 0))
    assert "are longer than 8,192 tokens and were split there for every packer" in compared


def test_without_data_the_sampler_is_named() -> None:
    result = run("analyze", "--steps", 4, "--no-recommend", "--solver-windows", 0)
    assert result.exit_code == 0, result.output
    assert "built-in sampler" in text_of(result) and "no data given" in text_of(result)
    assert "24,576 tokens, an assumption" in text_of(result)


def test_tune_writes_packing_settings(lengths_file, tmp_path) -> None:
    settings, report = tmp_path / "settings.json", tmp_path / "report.json"
    result = run(
        "tune", lengths_file, *SMALL, "--steps", 5, "--packer", "steady", "--json", settings, "--report", report
    )
    assert result.exit_code == 0, result.output
    config = PackingConfig.from_dict(json.loads(settings.read_text()))
    assert config.packer == "steady" and config.context_length == 8192
    assert json.loads(report.read_text())["recommended"]["config"] == config.to_dict()


def test_a_pool_of_workers_finds_the_same(lengths_file, tmp_path) -> None:
    given = ["tune", lengths_file, "--context", 8192, "--crossover", 1536, "--steps", 3, "--packer", "steady"]
    assert run(*given, "--workers", 1).stdout == run(*given, "--workers", 2).stdout


def test_pictures_are_written(lengths_file, tmp_path) -> None:
    picture = tmp_path / "packers.png"
    result = run(
        "analyze", lengths_file, *SMALL, "--steps", 4, "--no-recommend", "--solver-windows", 0, "--png", picture
    )
    assert result.exit_code == 0, result.output
    for file in (picture, tmp_path / "packers-lengths.png"):
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 150_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--context", "0"], "context_length must be a whole number of at least 1"),
        (["--s-max", "4096"], "max_tokens_per_micro_batch=4,096 is below context_length"),
        (["--crossover", "1000", "--model", "7B"], "model and crossover were given"),
        (["--crossover", "0"], "The crossover length must be above 0"),
        (["--profile", "nowhere.json"], "nowhere.json"),
        (["--steps", "0", "--no-recommend"], "at least 1 step"),
        (["--json", "no/such/folder/a.json"], "there is no folder"),
    ],
)
def test_analyze_errors_are_one_sentence(lengths_file, arguments, sentence) -> None:
    context = [] if "--context" in arguments else ["--context", "8192"]
    result = run("analyze", lengths_file, *context, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("bad.json", "[3, -1]", "Entry 1 of bad.json is -1"),
        ("bad.txt", "12\nx\n", "Line 2 of bad.txt is 'x'"),
        ("empty.json", "[]", "no document with tokens"),
        ("zeros.txt", "0\n0\n", "no document with tokens"),
    ],
)
def test_bad_lengths_are_one_sentence(tmp_path, name, content, sentence) -> None:
    (tmp_path / name).write_text(content)
    for command in ("analyze", "tune"):
        result = run(command, tmp_path / name, *SMALL)
        assert result.exit_code == 2 and sentence in result.stderr and "Traceback" not in result.output


def test_progress_in_a_file_is_a_line_now_and_then(monkeypatch, capsys) -> None:
    """As in the log of a batch job, where a bar that draws itself over and over says nothing."""
    now = iter([100.0, 100.5, 109.9, 110.5, 115.0, 121.0])
    monkeypatch.setattr(base.time, "monotonic", lambda: next(now))
    with base.progress("reading") as show:
        for what in ("one", "two", "three", "four", "five [of 5]"):
            show(what)
    assert capsys.readouterr().err == "10 s: three\n21 s: five [of 5]\n"


def test_a_missing_file_is_one_sentence() -> None:
    result = run("analyze", "./nowhere.json", *SMALL)
    assert result.exit_code == 2 and "no file or folder" in result.stderr


def test_unknown_packer_to_tune(lengths_file) -> None:
    result = run("tune", lengths_file, *SMALL, "--packer", "greedy")
    assert result.exit_code == 2 and "packers to tune are wlb and steady" in result.stderr


def test_starting_the_command_loads_no_torch() -> None:
    script = "import sys, hf_wlb.cli; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", " [1, 2]", True),
        ("a.json", "[]", True),
        ("a.json", '[{"text": "x"}]', False),
        ("a.json", '{"text": "x"}', False),
        ("a.json", '{"text": "x", "lengths": [1]}', True),
        ("a.json", '{"text": "the JSON {\\"lengths\\": [1]}"}', False),
        ("a.jsonl", '{"length": 1}\n{"length": 2}\n', False),
        ("a.jsonl", '{"input_ids": [1], "length": 1}\n', False),
        ("a.csv", "length\n12\n", True),
        ("a.txt", "12\n13\n", True),
        ("a.txt", "12 monkeys is a film\n", True),
        ("a.txt", "Some text\n12\n", False),
        ("a.txt", "", False),
    ],
)
def test_lengths_are_told_from_text(tmp_path, name, content, expected) -> None:
    (tmp_path / name).write_text(content)
    assert holds_lengths(tmp_path / name) is expected


def test_lengths_of_npy_stay_mapped(tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 4]))
    assert isinstance(read_lengths(str(tmp_path / "a.npy")).lengths, np.memmap)


def test_a_saved_workload_is_read(tmp_path) -> None:
    WORKLOAD.save(tmp_path / "w.json")
    assert choose_workload(profile=str(tmp_path / "w.json"))[0] == WORKLOAD


@pytest.mark.parametrize("max_delay", [0.2, 1.0, 3.0])
def test_what_is_recommended_is_not_beaten_by_the_default(max_delay) -> None:
    lengths = np.minimum(np.maximum(sample_lengths(3000) // 16, 1), CONFIG.context_length)
    analysis = analyze(lengths, WORKLOAD, CONFIG, steps=30, solver_windows=0)
    config = comparable(CONFIG)
    found = recommend(analysis, WORKLOAD, lambda stream: tune(stream, WORKLOAD, config, max_delay=max_delay, steps=20))
    default = analysis.result("steady")
    assert found is not None
    worst = max(found.tuning.points, key=lambda point: point.time_gap)
    wrong = replace(found.tuning, recommended=worst, best={worst.config.packer: worst}, points=(worst,), pareto=())
    corrected = recommend(analysis, WORKLOAD, lambda stream: wrong)
    assert corrected is not None
    if default.report.delay <= max_delay:  # else nothing else keeps the delay
        assert corrected.result is default
    assert run_case(PackerCase("", comparable(worst.config)), analysis.stream, WORKLOAD).total_time > default.total_time
    if default.report.delay <= max_delay:
        assert found.result.total_time <= default.total_time
    assert found.result.report.delay <= max_delay + 0.005 or "kept the mean delay within" in found.reason
    assert found.result.total_tokens == default.total_tokens


def test_every_packer_trains_the_same_tokens() -> None:
    documents = equal_documents(np.maximum(sample_lengths(3000) // 16, 1), CONFIG, 20)
    assert 0 <= documents.sum() - 20 * CONFIG.tokens_per_step < documents.max()
    analysis = analyze(documents, WORKLOAD, CONFIG, steps=20, stored_order=True, solver_windows=0)
    for result in analysis.results:
        assert result.total_tokens == documents.sum()
        assert result.report.documents == len(documents)
        assert result.time_over_perfect >= result.work_share * (1 - 1e-9)
        if result.label != "concat-and-cut":
            assert result.work_share == pytest.approx(1.0) and result.report.context_lost == 0
    cut = analysis.result("concat-and-cut")
    assert cut.work_share < 1 and cut.report.context_lost > 0


def test_documents_beyond_the_context_are_cut_alike_so_that_the_work_is_equal() -> None:
    documents = np.array([3000, 20_000, 500, 9000, 4000, 12_000] * 12)
    analysis = analyze(documents, WORKLOAD, CONFIG, steps=8, stored_order=True, solver_windows=0)
    assert any("were split there for every packer" in note for note in analysis.notes)
    whole = [result for result in analysis.results if result.label != "concat-and-cut"]
    assert all(result.work_share == pytest.approx(1.0) for result in whole)
    assert len({result.report.split for result in whole}) == 1 and whole[0].report.split > 0
    assert all(result.time_over_perfect >= 1 - 1e-9 for result in whole)
    # Control: kept whole up to S_max they would do more work than next-fit can.
    uncut = run_case(PackerCase("steady", CONFIG), equal_documents(documents, CONFIG, 8, stored_order=True), WORKLOAD)
    assert uncut.report.split < whole[0].report.split


def test_the_whole_set_costs_what_its_steps_cost_by_hand() -> None:
    # Next-fit, 2 micro-batches of 10 tokens: [[6], [7, 3]], [[8], []]; W(d) = d + d (d + 1) / 10.
    config = PackingConfig(10, micro_batches_per_replica=2, pp_size=3, packer="next-fit")
    workload = AnalyticWorkload.from_crossover(9)
    w = {d: d + d * (d + 1) / 10 for d in (3, 6, 7, 8)}
    result = run_case(PackerCase("next-fit", config), np.array([6, 7, 3, 8]), workload)
    first, second = w[6] + w[7] + w[3] + 2 * (w[7] + w[3]), 3 * w[8]
    assert result.total_steps == 2 and result.report.flush_steps == 1
    assert result.total_time == pytest.approx(first + second)
    assert result.time_over_perfect == pytest.approx((first + second) / (sum(w.values()) / 2 * 4))


def test_documents_waiting_at_the_end_count_at_their_age_then() -> None:
    # The document of 9 tokens waits in its queue until the data end: read in step 0, it is 2 steps old then.
    config = PackingConfig(10, micro_batches_per_replica=2, packer="wlb", thresholds=(9,))
    seen = []
    result = run_case(
        PackerCase("wlb", config),
        np.array([9, 5, 6, 5, 5, 5, 5, 5, 5]),
        AnalyticWorkload.from_crossover(9),
        seen.append,
    )
    last = max(plan.step for plan in seen if not plan.flush) + 1
    trained = [(d.length, p.step - d.arrived) for p in seen if not p.flush for d in p.documents]
    held = [(d.length, last - d.arrived) for p in seen if p.flush for d in p.documents if d.arrived < last]
    assert (9, last) in held
    tokens = sum(n for n, _ in trained + held)
    assert result.report.delay == pytest.approx(sum(n * age for n, age in trained + held) / tokens)


def test_histogram_shares_add_up() -> None:
    rows = histogram_rows(length_summary(sample_lengths(5000)))
    for column in range(3):
        assert sum(shares[column] for _, shares in rows) == pytest.approx(1.0)
    assert rows[0][0] == "0 - 256" and rows[-1][0] == "64K - 128K"
