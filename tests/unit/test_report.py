"""Pages and committed results say the same; what is not measured is said to be, and never invented."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.pages import pages, read_page
from tests.support.source_tree import REPOSITORY
from tests.unit.test_end_to_end_benchmark import launch_row, step, text_of
from tests.unit.test_stage_times_benchmark import lines as stage_time_lines
from tests.unit.test_trainer_report import trainer_results, two_gpus

FOLDER = REPOSITORY / "recipes" / "benchmarks"
MODULES = (
    *("report", "measured_report", "trainer_report", "contexts_report", "stage_times_report"),
    *("end_to_end", "end_to_end_cases"),
)
LABEL = "pp2_128k_fa2"
WANTED = {
    *("speedup_pp4_128k_fa2", "speedup_pp4_128k_fa4", "speedup_pp2cp2_128k_fa4", "speedup_pp4_64k_fa2"),
    *("speedup_vs_concat_cut", "mfu", "planning_share", "convergence_diff", "mfu_best", "overhead"),
    *("composed_speedup_pp4_128k_fa2", "composed_speedup_pp4_64k_fa4", "composed_prediction_error"),
}


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    found = {name: __import__(name) for name in MODULES}
    return SimpleNamespace(main=found["end_to_end"], cases=found["end_to_end_cases"], **found)


@pytest.fixture
def report(modules):
    return modules.report


@pytest.fixture
def copy(report, tmp_path):
    """The pages and the results, with empty pictures, somewhere else."""
    for page in (report.README, report.PAGE):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / page, tmp_path / page)
    (tmp_path / report.RESULTS).mkdir(parents=True)
    for benchmark in report.BENCHMARKS:
        source = REPOSITORY / report.RESULTS / benchmark.file
        if source.is_file():
            shutil.copy(source, tmp_path / report.RESULTS)
    for picture in (REPOSITORY / report.RESULTS).glob("*.png"):
        (tmp_path / report.RESULTS / picture.name).touch()
    return tmp_path


@pytest.fixture
def small(report, copy):
    """The pages and the results that tables are quickly made from, without those of training steps."""
    for file in (copy / report.RESULTS).glob("*.jsonl"):
        file.unlink()
    for page, tables in report.generated(report.load(copy / report.RESULTS)).items():
        (copy / page).write_text(report.renewed((copy / page).read_text(), tables, page))
    return copy


@pytest.fixture
def bare(report, copy):
    """The pages without any results."""
    for file in (copy / report.RESULTS).iterdir():
        file.unlink()
    return copy


def whole_steps(modules, micro_batches: int = 8, rounds: int = 3) -> str:
    """A launch in which WLB is 3 times as fast as Plain-4D: a results file's text."""
    about = launch_row(modules)
    about["settings"]["micro_batches"] = micro_batches
    units = {"spans": [[0.1 * number for number in range(4 * micro_batches)]] * 2}
    turns = [(number, *variant) for number in range(rounds) for variant in (("plain-4d", 4.0), ("wlb", 2.0))]
    return text_of(about, *(step(name, number, seconds, **units) for number, name, seconds in turns))


# ---- pages and results ----


def differences(report, folder) -> list[str]:
    results = report.load(folder / report.RESULTS)
    return report.differences(folder, report.generated(results, report.composition(results)))


def test_every_mark_is_one_that_tables_are_generated_for(report) -> None:
    made = {(page, name) for page, tables in report.generated({}).items() for name in tables}
    found = [(page, name) for page in pages() for name in re.findall(r"<!-- (\S+?):\w+ -->", read_page(page))]
    assert sorted(found) == sorted([*made, *made])  # each has a beginning and an end
    sources = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert set(re.findall(r'"<!-- ([\w-]+):begin -->"', sources)) <= {name for _, name in made}


def test_control_a_changed_page_is_named_and_left_alone(report, small, capsys) -> None:
    page = small / report.PAGE
    before = page.read_text()
    page.write_text(before.replace("| steady |  | 1.012 |", "| steady |  | 1.011 |"))
    changed = page.read_text()
    assert changed != before and report.main(["--check"], small) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("docs/results.md differs from recipes/benchmarks/results in packing-table: run python")
    assert sum("differs" in line for line in printed) == 1 and page.read_text() == changed
    page.write_text(before)
    assert report.main(["--check"], small) == 0 and "differs" not in capsys.readouterr().out


def test_control_a_changed_result_is_noticed_on_both_pages(report, small) -> None:
    file = small / report.RESULTS / "packing.json"
    results = json.loads(file.read_text())
    results["sources"][results["result"]["lengths"]]["table"][1]["imbalance"] += 0.01
    file.write_text(json.dumps(results))
    found = differences(report, small)
    assert [sentence.split()[0] for sentence in found] == ["README.md", "docs/results.md"]
    assert "packing-summary: run" in found[0] and "packing-table: run" in found[1]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("<!-- packing-table:end -->", "", "docs/results.md has no place for the table"),
        ("# Results\n", "# Results\n<!-- other:begin -->\n", "docs/results.md has marks that nothing is generated for"),
    ],
)
def test_wrong_marks_are_one_sentence_and_nothing_is_written(report, small, capsys, old, new, sentence) -> None:
    page, readme = small / report.PAGE, small / report.README
    page.write_text(page.read_text().replace(old, new, 1))
    readme.write_text(readme.read_text().replace("| steady |  | 1.012 |", "| steady |  | 1.011 |"))
    for given in ([], ["--check"]):
        before = page.read_text(), readme.read_text()
        assert report.main(given, small) == 2
        assert f"Error: {sentence}" in capsys.readouterr().err and before == (page.read_text(), readme.read_text())


# ---- RESULT ----


def last_line(capsys) -> tuple[list[str], dict]:
    """(sentences, RESULT)."""
    *sentences, last = capsys.readouterr().out.rstrip().splitlines()
    return sentences, json.loads(last.removeprefix("RESULT "))


def test_the_pages_show_the_committed_results_and_result_has_their_figures(report, capsys) -> None:
    assert report.main(["--check"]) == 0
    sentences, result = last_line(capsys)
    committed = json.loads((REPOSITORY / report.RESULTS / "context_parallel.json").read_text())["result"]
    assert set(result) >= WANTED | set(committed) and committed.items() <= result.items()
    missing = {sentence.split("; ")[0].removeprefix("not measured: ") for sentence in sentences}
    assert missing == {key for key, value in result.items() if value is None}


def test_without_results_everything_is_null_and_said(report, bare, capsys) -> None:
    assert report.main([], bare) == 0
    sentences, result = last_line(capsys)
    assert set(result) >= WANTED and set(result.values()) == {None}
    said = [sentence for sentence in sentences if sentence.startswith("not measured: ")]
    assert len(said) == len(result)
    kernel = "--kernel flash-attn-4` measures it"
    assert any(line.startswith("not measured: speedup_pp2cp2_128k_fa4; ") and line.endswith(kernel) for line in said)
    page, readme = (bare / report.PAGE).read_text(), (bare / report.README).read_text()
    assert page.count("is committed in this version.") == 10
    assert "No `trainer.json`, the results of `trainer.py`, is committed" in page
    assert "Not measured in this version: whole steps against Plain-4D (`pp4_128k_fa2`, " in readme
    assert report.main(["--check"], bare) == 0


def test_results_that_come_later_are_shown_without_a_word(modules, report, bare, capsys, monkeypatch) -> None:
    folder = bare / report.RESULTS
    (folder / "end_to_end.jsonl").write_text(whole_steps(modules))
    (folder / "trainer.json").write_text(json.dumps(trainer_results(modules, two_gpus(modules))))
    run, other = ({"device": "GPU", "evaluations": [[1, 1, loss]]} for loss in (2.0, 2.025))
    made_up = {"difference": 0.0125, "runs": {"sequential": run, "steady": other, "sequential, seed 1": run}}
    (folder / "convergence.json").write_text(json.dumps(made_up))
    figures = {"noise": 0.02, "steps": 7}
    monkeypatch.setattr(
        report.convergence_report, "result", lambda found: {"convergence_diff": found["difference"], **figures}
    )
    table = (report.PAGE, "convergence-table", lambda found: f"| losses | {found['difference']} |")
    drawn: list[str] = []
    recorded = [
        replace(
            benchmark,
            draw=lambda found, place, file=benchmark.file: drawn.append(file),
            tables=(table,) if benchmark.file == report.CONVERGENCE else benchmark.tables,
        )
        for benchmark in report.BENCHMARKS
    ]
    monkeypatch.setattr(report, "BENCHMARKS", tuple(recorded))
    assert report.main([], bare) == 0
    sentences, result = last_line(capsys)
    assert {"renewed: README.md", "renewed: docs/results.md"} <= set(sentences)
    assert (result[f"speedup_{LABEL}"], result["convergence_diff"], result["overhead"]) == (3.0, 0.0125, 0.02)
    assert result["convergence_noise"] == 0.02 and "steps" not in result
    assert (result["mfu"], result["mfu_best"], result["speedup_vs_concat_cut"]) == (0.25, 0.5, None)
    assert result["tokens_per_second_per_gpu_cp2"] == 250 and result["loss_difference_pipelines"] == 0.002
    assert drawn == ["end_to_end.jsonl", "trainer.json", "convergence.json"]
    page, readme = (bare / report.PAGE).read_text(), (bare / report.README).read_text()
    assert f"**{LABEL}**, 3 rounds" in page and "| losses | 0.0125 |" in page and "| pp2 | 50.0% |" in page
    chance = "1 sequential run with other initial weights: up to 0.00% off the first at the end, up to 0.0% on the way"
    assert f"after `steady` against sequential packing | +1.25% |  | 1 x GPU a run; {chance} |" in readme
    (folder / "convergence.png").touch()  # the recorder draws nothing
    assert report.main(["--check"], bare) == 0


def test_stage_times_are_shown_for_whole_steps_that_are_not_measured(modules, report, bare, capsys) -> None:
    folder = bare / report.RESULTS
    (folder / "stage_times.jsonl").write_text(text_of(*stage_time_lines(modules)))
    assert report.main([], bare) == 0
    _, result = last_line(capsys)
    speedup = result["composed_speedup_pp4_128k_fa2"]
    assert speedup > 1 and result["composed_prediction_error"] > 0 and result["speedup_pp4_128k_fa2"] is None
    assert (folder / "stage_times.png").read_bytes().startswith(b"\x89PNG")
    page, readme = (bare / report.PAGE).read_text(), (bare / report.README).read_text()
    assert "**pp4_128k_fa2**, 3 rounds, composed" in page
    made = "stages measured on one NVIDIA H200, put together by 1F1B"
    row = f"| WLB over Plain-4D, `pp4_128k_fa2`, {made} | {speedup:.3f}x |"
    assert row in readme and "1 x NVIDIA H200, 3 rounds |" in readme
    assert "Measured. Rows that are *put together by 1F1B* come from" in readme
    assert "Not measured in this version: whole steps against Plain-4D (`pp4_128k_fa2`, " in readme
    assert report.main(["--check"], bare) == 0
    capsys.readouterr()
    (folder / "stage_times.png").unlink()
    assert report.main(["--check"], bare) == 1 and "stage_times.png, drawn from" in capsys.readouterr().out


def test_stage_times_make_room_for_whole_steps(modules, report) -> None:
    text = text_of(*stage_time_lines(modules), *stage_time_lines(modules, name="b", kernel="flash-attn-4"))
    launches = modules.stage_times_report.read_launches(text)
    rows = modules.measured_report.composed_rows(modules.measured_report.WlbSteps.of(launches))
    assert list(rows) == ["pp4_128k_fa2", "pp4_128k_fa4"]
    about, *steps = map(json.loads, whole_steps(modules).splitlines())
    about = {**about, "stage_of_rank": [0, 1, 2, 3], "settings": {**about["settings"], "pp_size": 4}}
    steps = [{**row, "spans": row["spans"] * 2} for row in steps]
    launches = report.end_to_end_report.read_launches(text_of(about, *steps))
    shown = modules.measured_report.summary(launches, None, None, rows)
    assert "| WLB over Plain-4D, `pp4_128k_fa2` | 3.000x |" in shown
    assert "`pp4_128k_fa2`, stages measured" not in shown and "`pp4_128k_fa4`, stages measured" in shown
    others = modules.measured_report.summary(None, None, None, {"pp4_32k_fa2": rows["pp4_128k_fa2"]})
    assert others == modules.measured_report.summary(None, None, None)


def test_two_figures_of_one_name_are_refused(report, small, monkeypatch, capsys) -> None:
    other = replace(report.BENCHMARKS[1], file="other.json", tables=())
    monkeypatch.setattr(report, "BENCHMARKS", (*report.BENCHMARKS, other))
    assert report.main(["--check"], small) == 2
    assert "other.json and another results file both have choice_agreement" in capsys.readouterr().err


def test_timelines_are_renewed_where_there_are_some(modules, report, tmp_path) -> None:
    launches = modules.report.end_to_end_report.read_launches(whole_steps(modules, micro_batches=2))
    report.draw_timelines(launches, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"end_to_end_{LABEL}_m2.png").touch()
    report.draw_timelines(launches, tmp_path)
    assert [path.read_bytes()[:4] for path in tmp_path.iterdir()] == [b"\x89PNG"]


# ---- README's summary ----


def test_the_summary_by_hand(modules, report) -> None:
    launches = report.end_to_end_report.read_launches(whole_steps(modules))
    trainer = trainer_results(modules, two_gpus(modules))
    convergence = {"changes": {"steady": -0.003}, "noise": "", "on": "1 x GPU"}
    text = modules.measured_report.summary(launches, trainer, convergence)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == [
        "measured",
        f"WLB over Plain-4D, `{LABEL}`",
        f"highest MFU of WLB's steps, `{LABEL}`",
        "highest MFU of a split, `pp2`",
        f"packing and planning, largest share of WLB's steps, `{LABEL}`",
        "a step of `WLBTrainer` against a bare loop's",
        "held-out loss after `steady` against sequential packing",
    ]
    assert rows[1][1:] == ["3.000x", "3.000 to 3.000", "2 x GPU, 3 rounds, 11 layers"]
    assert [row[1].strip() for row in rows[2:]] == ["25.0%", "50.0%", "1.500%", "+2.0%", "-0.30%"]
    assert [row[-1] for row in rows[2:]] == ["2 x GPU", "2 x NVIDIA H100", "2 x GPU", "1 x NVIDIA H100", "1 x GPU"]
    last = text.splitlines()[-1]  # two stages are none of the launches that are asked for
    assert last.startswith("Not measured in this version: whole steps")
    assert last.endswith("`pp2cp2tp2_128k_fa4`); convergence with `wlb`.")


def test_the_summary_has_no_interval_for_few_rounds_and_says_what_is_missing(modules, report) -> None:
    launches = report.end_to_end_report.read_launches(whole_steps(modules, rounds=2))
    text = modules.measured_report.summary(launches, None, None)
    assert f"| WLB over Plain-4D, `{LABEL}` | 3.000x |  | 2 x GPU, 2 rounds, 11 layers |" in text
    assert text.endswith("; what `WLBTrainer` adds to a bare loop; convergence.")
    nothing = {"changes": {}, "noise": "", "on": ""}
    alone = modules.measured_report.summary(None, None, None)
    assert modules.measured_report.summary(None, None, nothing) == alone
    trainer = modules.measured_report.summary(None, trainer_results(modules, two_gpus(modules)), None)
    assert trainer.startswith("Measured:\n\n| measured |") and text.startswith("Measured. Speed-ups: tokens per second")
    assert "\n" not in alone and alone.startswith("Not measured in this version: ") and "; MFU; " in alone


# ---- groups of KV heads ----


def test_the_part_about_groups_of_kv_heads_is_shown(report, modules) -> None:
    results = json.loads((REPOSITORY / report.RESULTS / "context_parallel.json").read_text())
    table = modules.contexts_report.contexts_table(results)
    assert "4 x NVIDIA H200" in table and "| 8 | automatic groups, kept | 8.05 | 104.18 | 1.695 | 2,866 |" in table
    assert table.count("\n| 8 | ") == table.count("\n| 32 | ") == 10
    figures = modules.contexts_report.result(results)
    assert figures == {"memory_ratio_gathered_again": 0.9845, "memory_ratio_kept": 1.6953}
    for part in results["kv_heads"].values():
        part["contexts"]["memory"] = None
    assert "| 8 | automatic groups, kept | 8.05 | 104.18 |  |  |" in modules.contexts_report.contexts_table(results)
    assert set(modules.contexts_report.result(results).values()) == {None}
    results["kv_heads"] = {"8": {}}
    with pytest.raises(ValueError, match="hold no contexts: run the benchmark with --parts contexts"):
        modules.contexts_report.contexts_table(results)


# ---- what is damaged or missing ----


@pytest.mark.parametrize("content", ["half", "", "\n", "{}", "[]", "3", '{"a": 1}', '["a"]'])
def test_a_damaged_results_file_is_one_sentence_with_its_name_and_command(report, small, capsys, content) -> None:
    folder = small / report.RESULTS
    if content != "half":  # beside results that are whole once only: their tables take a while
        for file in folder.glob("*.json*"):
            file.unlink()
    for benchmark in report.BENCHMARKS:
        file, committed = folder / benchmark.file, REPOSITORY / report.RESULTS / benchmark.file
        before = file.read_text() if file.is_file() else None
        whole = committed.read_text() if committed.is_file() else '{"a": 1}'
        # Of lines of JSON, a last one that was broken off is left out: so half of the first.
        whole = whole.split("\n")[0] if file.suffix == ".jsonl" else whole
        file.write_text(whole[: len(whole) // 2] if content == "half" else content)
        for given in (["--check"], []):
            assert report.main(given, small) == 2
            printed = capsys.readouterr()
            assert printed.out == "" and printed.err.count("\n") == 1
            assert printed.err.startswith(f"Error: recipes/benchmarks/results/{benchmark.file} is damaged or not what ")
            assert printed.err.endswith(f"renew it with `{benchmark.command}`\n")
        if before is None:
            file.unlink()
        else:
            file.write_text(before)
    if content == "half":
        assert differences(report, small) == []


def test_a_results_file_without_one_of_its_parts_is_never_a_traceback(report, modules, small, capsys) -> None:
    (small / report.RESULTS / "trainer.json").write_text(json.dumps(trainer_results(modules, two_gpus(modules))))
    named = 0
    for file in sorted((small / report.RESULTS).glob("*.json")):
        before = file.read_text()
        whole = json.loads(before)
        for part in whole:
            file.write_text(json.dumps({name: value for name, value in whole.items() if name != part}))
            if report.main(["--check"], small) == 2:
                assert f"results/{file.name} is damaged" in capsys.readouterr().err
                named += 1
        file.write_text(before)
    assert named >= 10


def test_a_missing_page_is_a_sentence(report, small, capsys) -> None:
    (small / report.PAGE).unlink()
    before = (small / report.README).read_text()
    for given in (["--check"], []):
        assert report.main(given, small) == 2
        assert capsys.readouterr().err.startswith("Error: docs/results.md is missing: restore it, ")
    assert (small / report.README).read_text() == before and not (small / report.PAGE).exists()


def test_a_missing_picture_is_named(report, small, capsys) -> None:
    for name in ("time_against_waiting_64.png", "simulated_fig14.png"):
        (small / report.RESULTS / name).unlink()
    assert report.main(["--check"], small) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if ".png" in line]
    assert [line.split(" is missing")[0] for line in lines] == [
        "recipes/benchmarks/results/time_against_waiting_64.png, drawn from packing.json,",
        "recipes/benchmarks/results/simulated_fig14.png, drawn from simulated_paper.json,",
    ]
    assert all(line.endswith(": run python recipes/benchmarks/report.py") for line in lines)


def test_without_sweeps_their_pictures_need_not_be_there(report) -> None:
    results = json.loads((REPOSITORY / report.RESULTS / "packing.json").read_text())
    assert len(report.packing_pictures(results)) == 4
    results["sources"][results["result"]["lengths"]]["sweeps"] = {}
    assert report.packing_pictures(results) == ["packing_time.png"]


def test_pictures_that_have_to_be_there_are_those_that_are_drawn(report, tmp_path) -> None:
    for benchmark in report.BENCHMARKS:
        file = REPOSITORY / report.RESULTS / benchmark.file
        if file.is_file() and benchmark.pictures(found := benchmark.read_file(file)):
            (folder := tmp_path / benchmark.script).mkdir()
            benchmark.draw(found, folder)
            assert sorted(path.name for path in folder.iterdir()) == sorted(benchmark.pictures(found))
