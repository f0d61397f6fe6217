"""The context-parallel benchmark without its measurements: what is drawn, and the figures made of given times."""

import json
import math

import numpy as np
import pytest

from hf_wlb.sharding import Sharder, ShardingConfig
from hf_wlb.workload import AnalyticWorkload
from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"
RESULTS = FOLDER / "results" / "context_parallel.json"
LENGTHS = np.array([300, 900, 2500, 7000, 12_000, 40_000])
WORKLOAD = AnalyticWorkload.from_crossover(5000)


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import context_parallel
    import context_parallel_cases
    import context_parallel_report

    return context_parallel, context_parallel_cases, context_parallel_report


@pytest.fixture
def main(modules):
    return modules[0]


@pytest.fixture
def cases(modules):
    return modules[1]


@pytest.fixture
def report(modules):
    return modules[2]


# ---- what is drawn ----


def test_a_draw_fills_the_context_and_depends_on_its_seed(cases) -> None:
    draws = cases.Draws(LENGTHS)
    first, again, other = (draws.draw(65_536, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sum(first) == 65_536 and set(first[:-1]) <= set(LENGTHS.tolist())
    assert max(draws.draw(65_536, 1, cap=900)) <= 900


def test_cases_are_of_the_kind_that_they_say(cases) -> None:
    found = cases.Draws(LENGTHS).cases(quick=False)
    assert len(found) == len({case.name for case in found}) == len({case.lengths for case in found}) == 14
    for case in found:
        assert sum(case.lengths) == case.context in cases.CONTEXTS
        assert (max(case.lengths) >= 16_384) == (case.kind == "long")
    kinds = [(case.context, case.kind) for case in found]
    assert all(kinds.count((context, kind)) >= 3 for context in cases.CONTEXTS for kind in ("short", "long"))
    quick = cases.Draws(LENGTHS).cases(quick=True)
    assert {case.name for case in quick} < {case.name for case in found}
    assert {case.kind for case in quick} == {"short", "long"}


def test_random_cases_keep_their_caps_and_sizes(cases) -> None:
    found = cases.Draws(LENGTHS).random_cases(40, seed=3)
    assert len({case.lengths for case in found}) == 40
    for number, case in enumerate(found):
        cap = cases.CAPS[number % 4]
        assert 32_768 <= sum(case.lengths) == case.context <= 131_072
        assert cap is None or max(case.lengths) <= cap
    assert cases.Draws(LENGTHS).random_cases(40, seed=4)[0].lengths != found[0].lengths


def test_shrinking_divides_everything(cases) -> None:
    found = cases.Draws(LENGTHS, shrink=256).cases(quick=False)
    assert {sum(case.lengths) for case in found} == {256, 512}
    assert all((max(case.lengths) >= 64) == (case.kind == "long") for case in found)
    assert min(cases.Draws(LENGTHS, shrink=256).check_lengths()) >= 1
    assert cases.Draws(LENGTHS).check_lengths() == [1, 7, 137, 2041, 1910]


def test_lengths_that_cannot_make_the_cases_get_a_sentence(cases) -> None:
    with pytest.raises(ValueError, match="No document has 2,048 tokens or fewer"):
        cases.Draws(np.array([5000, 70_000]))
    with pytest.raises(ValueError, match="fewer than 2 had a document of at least 16,384 tokens"):
        cases.Draws(np.array([100, 200])).cases(quick=False)
    with pytest.raises(ValueError, match="--shrink must be from 1 to 256, got 0"):
        cases.Draws(LENGTHS, shrink=0)


def test_strategies_are_all_there_and_equal_plans_are_found(cases) -> None:
    strategies = cases.configs(4, 1)
    assert list(strategies) == [
        *("per_sequence", "per_document", "placed 1K", "placed 2K", "placed 4K", "placed 8K", "placed 16K"),
        *("placed", "adaptive"),
    ]
    found = cases.plans([900] * 40, WORKLOAD, strategies)
    first = cases.distinct(found)
    assert first["placed 2K"] == first["placed 4K"] == "placed 1K" and first["per_document"] == "per_document"
    assert first["adaptive"] != "adaptive"  # it is one of the others


# ---- figures from times ----


def times_of(first, rank_ms):
    """Seconds [ranks, samples] of 2 ranks and 3 samples: rank 1 is the slower one, the last sample an outlier."""
    return {
        label: np.array([[0.5, 0.5, 0.5], [1.0, 1.1, 9.0]]) * rank_ms[label] / 1000
        for label in {"ideal", *first.values()}
    }


@pytest.fixture
def made_up(cases):
    """A case, its plans on 2 ranks, and times under which "placed 1K" is best."""
    case = cases.Draws(LENGTHS).cases(quick=True)[0]
    found = cases.plans(case.lengths, WORKLOAD, cases.configs(2, 1))
    first = cases.distinct(found)
    rank_ms = {label: 10.0 + number for number, label in enumerate(found)} | {"ideal": 8.0, "placed 1K": 8.0}
    return case, found, first, times_of(first, rank_ms), rank_ms


def test_a_row_holds_medians_of_the_slowest_rank(report, made_up) -> None:
    case, found, first, times, rank_ms = made_up
    row = report.case_row(case, found, first, times, plan_ms=1.0)
    # All 6 ideals: 4, 4, 4, 8, 8.8, 72 ms on one device, halved for 2 ranks.
    assert row["ideal_ms"] == pytest.approx((4 + 8) / 2 / 2)
    for label, figures in row["strategies"].items():
        assert figures["ms"] == pytest.approx(1.1 * rank_ms[first[label]])
        assert figures["share"] == pytest.approx(3.0 / figures["ms"], abs=1e-4)
        assert ("same_as" in figures) == (first[label] != label) != ("samples_ms" in figures)
    assert row["strategies"]["per_sequence"]["samples_ms"] == pytest.approx([10.0, 11.0, 90.0])
    assert row["best_fixed"] == "placed 1K"
    assert row["regret"] == pytest.approx(rank_ms[first["adaptive"]] / 8.0 - 1, abs=1e-4)


def test_a_choice_agrees_within_the_tolerance_only(report, made_up, cases) -> None:
    case, _, _, _, _ = made_up
    found = {
        label: Sharder(ShardingConfig(2, label), WORKLOAD).plan(case.lengths)
        for label in ("per_sequence", "per_document", "placed")
    }
    first = cases.distinct(found)
    predicted = min(found, key=lambda label: found[label].predicted.max())
    for ahead, agrees in ((0.0, True), (0.009, True), (0.02, False)):
        rank_ms = {label: 10.0 for label in found} | {"ideal": 8.0, predicted: 10.0 * (1 + ahead)}
        row = report.choice_row(case, found, first, times_of(first, rank_ms))
        assert (row["choice"], row["agrees"]) == (predicted, agrees)
        assert row["regret"] == pytest.approx(ahead, abs=1e-4)
    summary = report.choice_summary([row, {**row, "agrees": True, "regret": 0.0}])
    assert summary["agreement"] == 0.5 and summary["regret_max"] == row["regret"] and summary["tie_tolerance"] == 0.01


@pytest.fixture
def results(report, cases):
    """A whole results file of made-up times for 8 and 32 KV heads."""
    draws = cases.Draws(LENGTHS)
    parts = {}
    for kv_heads, factor in (("8", 1.0), ("32", 1.25)):
        rows = []
        for number, case in enumerate(draws.cases(quick=False)):
            found = cases.plans(case.lengths, WORKLOAD, cases.configs(2, 1))
            first = cases.distinct(found)
            rank_ms = {label: factor * (10.0 + number) for label in found} | {"ideal": 16.0}
            rank_ms["per_sequence"] *= 2
            rank_ms["per_document"] *= 4
            rows.append(report.case_row(case, found, first, times_of(first, rank_ms), 1.0))
        found = {label: found[label] for label in cases.COMPARED}
        first = cases.distinct(found)
        choice = report.choice_summary([report.choice_row(case, found, first, times_of(first, rank_ms))])
        memory = {report.context_label(None, True): {"ratio": 0.9 * factor, "peak_mib": 1.0}}
        parts[kv_heads] = {
            "errors": {"ratio": factor},
            "cases": rows,
            "choice": choice,
            "contexts": {"ms": {}, "memory": memory},
        }
    settings = {"kv_head_groups": None, "regather": True, "cp_size": 2, "kernel": "made-up", "heads": 32}
    settings |= {"head_size": 128, "dtype": "bfloat16", "lengths": "made_up", "samples": 3}
    environment = {"device": "none", "versions": {"torch": "0"}, "date": "today", "command": "none"}
    made = {"kv_heads": parts, "settings": settings, "environment": environment}
    return {**made, "result": report.result_line(made)}


def test_the_result_line(report, results) -> None:
    line = results["result"]
    assert set(line) >= {
        *(f"share_{kv_heads}kv_{kind}" for kv_heads in (8, 32) for kind in ("short", "long")),
        *("regret_max", "choice_agreement", "token_skew", "speedup_over_per_sequence", "speedup_over_per_document"),
        *("memory_ratio", "error_ratio"),
    }
    for kv_heads in ("8", "32"):
        for kind in ("short", "long"):
            rows = [r for r in results["kv_heads"][kv_heads]["cases"] if r["kind"] == kind and r["context"] == 131_072]
            assert line[f"share_{kv_heads}kv_{kind}"] == min(r["strategies"]["adaptive"]["share"] for r in rows)
    assert line["speedup_over_per_sequence"] == pytest.approx(2.0, rel=1e-3)
    assert line["speedup_over_per_document"] == pytest.approx(4.0, rel=1e-3)
    assert line["memory_ratio"] == pytest.approx(1.125) and line["error_ratio"] == 1.25


def test_a_cut_run_still_has_a_line(report, results) -> None:
    cut = {**results, "kv_heads": {"8": {"cases": results["kv_heads"]["8"]["cases"]}, "32": {}}}
    line = report.result_line(cut)
    assert line["share_8kv_short"] == results["result"]["share_8kv_short"] and line["share_32kv_short"] is None
    assert line["choice_agreement"] is None and line["memory_ratio"] is None


def test_the_table_is_made_of_the_results_alone(report, results) -> None:
    table, short = (made(json.loads(json.dumps(results))) for made in (report.results_tables, report.readme_table))
    assert table.count("\n| 8 | ") == table.count("\n| 32 | ") == 14
    results["kv_heads"]["32"]["cases"][3]["strategies"]["adaptive"]["ms"] += 0.1
    assert report.results_tables(results) != table
    for row in results["kv_heads"]["32"]["cases"]:
        row["strategies"]["adaptive"]["share"] += 0.1
    assert report.readme_table(results) != short


def test_the_committed_results_are_whole_small_and_name_no_machine() -> None:
    text = RESULTS.read_text()
    assert len(text) < 500_000 and "/home/" not in text and "/work" not in text and "hostname" not in text
    assert json.loads(text)["complete"]


def test_the_table_goes_between_its_marks(report) -> None:
    page = f"# Title\n{report.BEGIN}\nold\n{report.END}\nrest\n"
    assert report.with_table(page, "new") == f"# Title\n{report.BEGIN}\nnew\n{report.END}\nrest\n"
    with pytest.raises(ValueError, match=r"docs/results.md has no place for the table"):
        report.with_table("# Title\n", "new")
    with pytest.raises(ValueError, match=r"README.md has no place for the table"):
        report.with_summary("# Title\n", "new")


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (1.5, 0), (1.51, 1), (math.nan, 1)])
def test_a_large_error_is_a_failure(main, ratio, code) -> None:
    assert main.verdict({"error_ratio": ratio}, main.Log()) == code


def test_the_file_is_json_with_short_lists_on_one_line(main, results, tmp_path) -> None:
    file = tmp_path / "results" / "file.json"
    main.save(results, file)
    assert json.loads(file.read_text()) == json.loads(json.dumps(results))
    assert '"samples_ms": [20.0, 22.0, 180.0]' in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == ["file.json"]


def test_some_parts_do_not_overwrite_a_whole_run(main, tmp_path) -> None:
    assert main.arguments(["--lengths", "file"]).output == RESULTS
    some = main.arguments(["--lengths", "file", "--parts", "contexts", "errors"])
    assert some.parts == ["errors", "contexts"] and some.output is None
    everything = main.arguments(["--lengths", "file", "--parts", *reversed(main.PARTS)])
    assert everything.parts == list(main.PARTS) and everything.output == RESULTS
    with pytest.raises(SystemExit):
        main.arguments(["--lengths", "file", "--parts", "memory"])


def test_pages_are_not_made_of_some_parts(main, results, tmp_path, capsys) -> None:
    file = tmp_path / "some.json"
    main.save({**results, "complete": False}, file)
    assert main.main(["--write-readme", "--output", str(file)]) == 2
    assert "some.json holds some of the parts errors, profile, cases, choice, contexts only" in capsys.readouterr().err


def test_tables_of_the_parts_that_ran_are_printed(main, results, capsys) -> None:
    part = results["kv_heads"]["8"]
    part["errors"] |= {"plain": {"dq": 0.25}, "plans": {}}
    some = {**results, "kv_heads": {"8": {"errors": part["errors"]}}, "seconds": 1.0}
    main.print_tables(some)
    assert "8 KV heads, error of the plain kernel: dq 2.50e-01" in capsys.readouterr().out
    assert main.verdict(main.show.result_line({**some, "kv_heads": {"8": {}}}), main.Log()) == 0


def test_lengths_are_asked_for(main, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main([])
    assert caught.value.code == 2 and "--lengths FILE is required" in capsys.readouterr().err


def test_a_missing_file_is_a_sentence(main, capsys) -> None:
    assert main.main(["--lengths", "nowhere.json"]) == 2
    assert "Error: There is no file 'nowhere.json'" in capsys.readouterr().err
