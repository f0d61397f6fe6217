"""The end-to-end benchmark without its measurements: what is planned and sampled, and the figures of given times."""

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hf_wlb.lengths import sample_lengths
from hf_wlb.workload import AnalyticWorkload
from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"
WORKLOAD = AnalyticWorkload.from_crossover(100)
LENGTHS = sample_lengths(5_000, seed=3)
MODULES = ("end_to_end", "end_to_end_cases", "end_to_end_report", "end_to_end_timeline")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(
        **{name.removeprefix("end_to_end").lstrip("_") or "main": __import__(name) for name in MODULES}
    )


@pytest.fixture
def cases(modules):
    return modules.cases


@pytest.fixture
def report(modules):
    return modules.report


def price(sharding):
    """A step takes a second for every thousand tokens, and some more if they are shared out by sequence."""
    return lambda plan: plan.tokens * (1.1 if sharding == "per_sequence" else 1.0) / 1000


@pytest.fixture
def planned(cases):
    """(settings, streams of all variants)."""
    settings = replace(cases.QUICK, cp_size=2, window_steps=6)
    variants, _ = cases.chosen_variants(settings.cp_size)
    given = cases.documents(LENGTHS, settings, 1)
    return settings, cases.streams(variants, given, settings, 1, WORKLOAD, price)


# ---- what is run ----


def test_without_context_parallelism_only_packers_differ(cases) -> None:
    run, same = cases.chosen_variants(1)
    assert [variant.name for variant in run] == [cases.BASELINE, cases.CUT, cases.FIXED, cases.WLB]
    assert same["packing + delay alone"] == same["wlb, not placed"] == cases.WLB
    assert same["per-document alone"] == cases.BASELINE
    run, same = cases.chosen_variants(2)
    assert tuple(run) == cases.VARIANTS and not same


def test_an_unknown_variant_is_refused(cases) -> None:
    with pytest.raises(ValueError, match="no variant faster; choose of: plain-4d; "):
        cases.chosen_variants(1, ["faster", "wlb"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"pp_size": 0}, "pp_size must be at least 1"), ({"crossover": 1.0, "profile": "x"}, "crossover and profile")],
)
def test_settings_that_cannot_be_are_refused(cases, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(cases.QUICK, **change)


def test_processes_must_make_whole_replicas(cases) -> None:
    assert cases.QUICK.replicas(4) == 2
    with pytest.raises(ValueError, match="3 processes are no multiple"):
        cases.QUICK.replicas(3)


def test_all_streams_train_the_same_tokens_and_none_ends_in_the_window(planned) -> None:
    settings, streams = planned
    tokens = {stream.figures()["pass_tokens"] for stream in streams}
    assert len(tokens) == 1
    for stream in streams:
        first, last = stream.window
        assert (first, last - first) == (settings.warm_steps, settings.window_steps)
        assert not any(step.plan.flush for step in stream.steps[first:last])
        assert all(len(replica) == settings.micro_batches for step in stream.steps for replica in step.plan.replicas)
        assert min(stream.predicted[first:last]) > 0


def test_too_few_documents_are_refused(cases) -> None:
    variants, _ = cases.chosen_variants(1, ["wlb"])
    with pytest.raises(ValueError, match="The documents end before step 12 of wlb"):
        cases.streams(variants, np.full(20, 300), cases.QUICK, 1, WORKLOAD, price)


def test_the_paper_s_choice_is_the_better_of_its_two(cases) -> None:
    static, placed = (cases.Variant("x", "steady", name) for name in (cases.STATIC, "adaptive"))
    for lengths in ([400, 3, 3, 3], [30] * 20):
        both = [
            cases.sharder_of(cases.Variant("x", "steady", name), 2, WORKLOAD).plan(lengths).slowest
            for name in ("per_sequence", "per_document")
        ]
        found = cases.sharder_of(static, 2, WORKLOAD).plan(lengths)
        assert found.slowest == min(both) and found.strategy != "placed"
        assert cases.sharder_of(placed, 2, WORKLOAD).plan(lengths).slowest <= found.slowest


def test_variants_of_one_packer_are_sampled_alike(planned) -> None:
    streams = {stream.variant.name: stream for stream in planned[1]}
    plain, per_document, wlb = (streams[name] for name in ("plain-4d", "per-document alone", "wlb"))
    assert plain.sample(1) == per_document.sample(1) != wlb.sample(1)
    assert plain.sample(1) != plain.sample(2)
    assert sorted(plain.sample(1)) == list(range(*plain.window))


def test_every_round_runs_every_variant_once_and_launches_go_on(cases, planned) -> None:
    streams = planned[1]
    first, second = (cases.turns(streams, start, 3, 2, seed=5) for start in (0, 3))
    ran: dict[str, list[int]] = {}
    for found, numbers in ((first, (0, 1, 2)), (second, (3, 4, 5))):
        assert [turn.round for turn in found[:2]] == [-1, -1]
        assert Counter(turn.round for turn in found[2:]) == dict.fromkeys(numbers, len(streams))
        assert [turn.closes for turn in found[2:]] == ([False] * (len(streams) - 1) + [True]) * 3
        for turn in found[2:]:
            ran.setdefault(turn.variant, []).append(turn.step.plan.step)
    for stream in streams:
        assert ran[stream.variant.name] == stream.sample(5)
    orders = {tuple(turn.variant for turn in first if turn.round == number) for number in (0, 1, 2)}
    assert len(orders) > 1  # else a drift of the machine would go to the same ones
    with pytest.raises(ValueError, match="All 6 steps of the window have been run"):
        cases.turns(streams, 6, 1, 2, seed=5)


def test_the_warm_up_begins_with_the_extremes(cases, planned) -> None:
    plans = [turn.step.plan for turn in cases.turns(planned[1], 0, 6, 2, seed=5) if turn.round >= 0]
    pool = [m for plan in plans for m in plan.micro_batches]
    warm = cases.warm_up_plans(plans, 3)
    assert [len(plan.replicas[0]) for plan in warm] == [4, 4, 4]
    picked = [m for plan in warm for m in plan.micro_batches][:6]
    for key in (lambda m: m.tokens, lambda m: len(m.documents), lambda m: m.documents[0].length):
        values = [key(m) for m in pool]
        assert {max(values), min(values)} <= {key(m) for m in picked}


def test_the_warm_up_shares_micro_batches_out_in_every_way(cases, planned) -> None:
    found = cases.turns(planned[1], 0, 1, 4, seed=5)[:4]
    by_name = {variant.name: variant.sharding for variant in cases.VARIANTS}
    assert {by_name[turn.variant] for turn in found} == {"per_sequence", "per_document", "static", "adaptive"}


# ---- what it comes to ----

ABOUT = {
    "kind": "launch",
    "launch": "a",
    "device": "GPU",
    "devices": 2,
    "replicas": 1,
    "kernel": "flash-attn-2",
    "peak_flops": 100.0,
    "stage_of_rank": [0, 1],
    "versions": {"torch": "2"},
    "same_as": {"adaptive alone": "plain-4d"},
}


def step(variant: str, number: int, seconds: float, launch: str = "a", **more) -> dict:
    """Two micro-batches on two stages; the second one takes three times as long."""
    unit = seconds / 10
    spans = [[0, unit, unit, 4 * unit, 4 * unit, 5 * unit, 5 * unit, 8 * unit]] * 2
    if variant == "wlb":
        spans[1] = [0, unit, unit, 2 * unit, 2 * unit, 3 * unit, 3 * unit, 4 * unit]
    row = {"kind": "step", "launch": launch, "variant": variant, "round": number, "seconds": seconds, "spans": spans}
    row |= {"predicted": 2.0, "tokens": 1000, "flops": 50.0 * seconds, "plan_seconds": 0.01, "shard_seconds": 0.02}
    return {**row, "peak_gib": [3.0, 4.0], **more}


def launch_row(modules, launch: str = "a", **settings) -> dict:
    found = modules.main.asdict(modules.cases.Settings(micro_batches=2, pp_size=2, **settings))
    streams = {
        name: {"pass_tokens": 8000, "pass_predicted": predicted}
        for name, predicted in (("plain-4d", 24.0), ("wlb", 16.0))
    }
    return {**ABOUT, "launch": launch, "settings": found, "streams": streams}


def text_of(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def launched(modules, report):
    """Three rounds: Plain-4D takes 4 s a step, WLB 2 s where 2 units each were predicted."""
    rows = [step(name, number, seconds) for number in range(3) for name, seconds in (("plain-4d", 4.0), ("wlb", 2.0))]
    warm = step("plain-4d", -1, 99.0)
    return report.read_launches(text_of(launch_row(modules), warm, *rows, step("plain-4d", 3, 77.0)))[0]


def test_launches_of_other_layers_stand_beside_each_other(modules, report) -> None:
    """Each with its figures; of the same layers the one with more rounds, and none of two rounds beside another."""
    lines: list[dict] = []
    for launch, layers, rounds in (("a", 3, 4), ("b", 5, 6), ("c", 5, 3), ("d", 4, 3), ("e", 7, 2), ("f", 4, 3)):
        lines.append(launch_row(modules, launch, layers=layers))
        seconds = (("plain-4d", 4.0), ("wlb", 2.0))
        lines += [step(name, number, taken, launch) for number in range(rounds) for name, taken in seconds]
    best = report.best_launches(report.read_launches(text_of(*lines)))
    names = {label: launch.about["launch"] for label, launch in best.items()}
    assert names == {"pp2_128k_fa2_m2": "b", "pp2_128k_fa2_m2_3l": "a", "pp2_128k_fa2_m2_4l": "f"}
    assert set(report.summary(best.values())) == {"pp2_128k_fa2_m2", "pp2_128k_fa2_m2_3l", "pp2_128k_fa2_m2_4l"}


def test_rates_and_speed_ups_by_hand(report, launched) -> None:
    assert len(launched.rounds) == 3  # not the warm-up, nor the round that was broken off
    plain, wlb = (report.variant_row(launched, name) for name in ("plain-4d", "wlb"))
    assert plain["tokens_per_second_per_gpu"] == 1000 / 4 / 2
    assert plain["scale"] == 2.0 and plain["stream_seconds"] == 48.0
    assert plain["stream_tokens_per_second_per_gpu"] == pytest.approx(8000 / 48 / 2, abs=1e-4)
    assert wlb["stream_tokens_per_second_per_gpu"] == 8000 / 16 / 2
    assert (wlb["speedup"], wlb["speedup_sampled"], wlb["speedup_predicted"]) == (3.0, 2.0, 1.5)
    assert wlb["speedup_interval"] == [3.0, 3.0] and plain["speedup"] == 1.0
    assert wlb["mfu"] == 0.25 and wlb["peak_gib"] == 4.0
    assert wlb["planning_share"] == pytest.approx(0.015)


def test_busy_time_by_hand(report, launched) -> None:
    plain, wlb = (report.variant_row(launched, name) for name in ("plain-4d", "wlb"))
    # Stage 0: F0 F1 B0 B1; stage 1: F0 B0 F1 B1. Of 10 units stage 0 has 2 + 6, stage 1 has 4 + 4 in its own order.
    assert plain["busy"] == [0.8, 0.8] and plain["rank_imbalance"] == 1.0
    assert plain["imbalance"] == pytest.approx((6 / 4 + 4 / 4) / 2)
    assert wlb["busy"] == [0.8, 0.4] and wlb["rank_imbalance"] == pytest.approx(8 / 6, abs=1e-4)
    assert wlb["busy_seconds"] == [1.6, 0.8]


def test_an_interval_holds_the_value_and_widens_with_the_spread(modules, report) -> None:
    def interval(spread: float) -> list[float]:
        times = [4.0 + spread * (-1) ** number for number in range(6)]
        rows = [step(name, number, time) for number, time in enumerate(times) for name in ("plain-4d", "wlb")]
        launch = report.read_launches(text_of(launch_row(modules), *rows))[0]
        row = report.variant_row(launch, "plain-4d")
        low, high = row["tokens_per_second_per_gpu_interval"]
        assert low <= row["tokens_per_second_per_gpu"] <= high
        assert report.variant_row(launch, "wlb")["speedup_interval"] == [1.5, 1.5]  # rounds are drawn together
        return [low, high]

    narrow, wide = interval(0.1), interval(1.0)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_fewer_than_three_rounds_have_no_interval(modules, report) -> None:
    rows = [step(name, number, 4.0) for number in range(2) for name in ("plain-4d", "wlb")]
    launch = report.read_launches(text_of(launch_row(modules), *rows))[0]
    assert report.variant_row(launch, "wlb")["speedup_interval"] is None


def test_ratios_are_formed_within_one_launch(modules, report) -> None:
    slow = [step(name, number, 8.0, "a") for number in range(2) for name in ("plain-4d", "wlb")]
    fast = [step(name, number, 2.0, "b") for number in range(2, 5) for name in ("plain-4d", "wlb")]
    text = text_of(launch_row(modules, "a"), *slow, launch_row(modules, "b"), *fast)
    launches = report.read_launches(text)
    assert report.rounds_done(launches, launches[0].about["settings"], 1) == 5
    assert report.rounds_done(launches, {**launches[0].about["settings"], "seed": 1}, 1) == 0
    assert report.rounds_done(launches, launches[0].about["settings"], 2) == 0
    figures = report.summary(launches)  # of the launch with more rounds
    assert figures["pp2_128k_fa2_m2"]["wlb"]["step_seconds"] == 2.0
    assert figures["pp2_128k_fa2_m2"]["wlb"]["speedup"] == 1.5


def test_a_line_that_was_broken_off_is_left_out(modules, report) -> None:
    text = text_of(launch_row(modules), step("plain-4d", 0, 4.0), step("wlb", 0, 4.0))
    assert len(report.read_launches(text)[0].rounds) == 1
    assert len(report.read_launches(text[:-9])[0].rounds) == 0
    with pytest.raises(ValueError, match="comes before the launch itself"):
        report.read_launches(text_of(step("wlb", 0, 4.0)))


def test_the_result_line_has_the_names_that_are_asked_for(modules, report) -> None:
    labels = []
    for kernel, settings, micro_batches in (
        ("flash-attn-2", {"context_length": 131072}, 8),
        ("flash-attn-4", {"context_length": 65536, "cp_size": 2}, 8),
        ("flash-attn-2", {"context_length": 131072}, 2),
    ):
        about = {**launch_row(modules, **settings), "kernel": kernel}
        about["settings"]["micro_batches"] = micro_batches
        labels.append(report.Launch(about, []).label)
    assert labels == ["pp2_128k_fa2", "pp2cp2_64k_fa4", "pp2_128k_fa2_m2"]
    replicated = {**launch_row(modules, cp_size=2), "kernel": "flash-attn-4", "replicas": 2}
    replicated["settings"]["micro_batches"] = 8
    assert report.Launch(replicated, []).label == "pp2dp2cp2_128k_fa4"
    assert report.on_each_replica(replicated) == " on each of 2 replicas" and not report.on_each_replica(about)
    row = {"speedup": 1.3, "speedup_vs_concat_cut": 1.1, "mfu": 0.4, "planning_share": 0.01, "peak_gib": 60.0}
    worse = {**row, "speedup": 1.2, "speedup_vs_concat_cut": 1.05, "mfu": 0.5}
    few = {**row, "speedup_vs_concat_cut": 0.9}
    figures = {"pp4_128k_fa2": {"wlb": row}, "pp4_64k_fa2": {"wlb": worse}, "pp4_128k_fa2_m4": {"wlb": few}}
    assert report.result(figures) == {
        "speedup_pp4_128k_fa2": 1.3,
        "speedup_pp4_64k_fa2": 1.2,
        "speedup_pp4_128k_fa2_m4": 1.3,
        "speedup_vs_concat_cut": 1.05,
        "speedup_vs_fixed": None,
        "mfu": 0.5,
        "planning_share": 0.01,
        "peak_gib": 60.0,
    }


def test_the_tables_name_what_is_the_same(report, launched) -> None:
    table = report.results_tables([launched])
    assert "| adaptive alone (= plain-4d) | 125 | 83 | 48 |" in table
    assert "| wlb | 250 | 250 | 16 | 3.000 | 2.000 | 1.500 | - |" in table
    assert "| 128K | pp2_128k_fa2_m2 | 3.000 | - |" in table and "Fig. 13" not in table
    marked = f"a\n{report.BEGIN}\nold\n{report.END}\nb\n"
    assert "old" not in report.with_table(marked, table) and table in report.with_table(marked, table)
    with pytest.raises(ValueError, match="no launch with a whole round"):
        report.results_tables([])


def parts(modules, report, seconds: dict[str, tuple[float, ...]], **settings) -> list[str]:
    """What is said of a launch with so many seconds a step by variant; WLB's stream is half as long by prediction."""
    about = launch_row(modules, **settings)
    about["streams"] = {name: {"pass_tokens": 8000, "pass_predicted": 16.0 - 8 * (name == "wlb")} for name in seconds}
    steps = [step(name, number, taken) for name, own in seconds.items() for number, taken in enumerate(own)]
    launches = report.best_launches(report.read_launches(text_of(about, *sorted(steps, key=lambda row: row["round"]))))
    return report.paper_lines(launches, report.summary(launches.values()), "run", ", in all")


def test_parts_stand_beside_the_paper_s(modules, report) -> None:
    """Of launches in which parts ran; the paper's whole method places nothing, and ours has no figure there."""
    seconds = {"plain-4d": (4.0,) * 3, "per-document alone": (3.0,) * 3, "wlb, not placed": (2.0, 2.5, 3.0)}
    seconds["wlb"] = (2.0,) * 3
    lines = parts(modules, report, seconds)
    assert lines[:2] == ["| run | part | speed-up, in all | paper, Fig. 13 |", "|---|---|---|---|"]
    assert lines[2:4] == [
        "| pp2_128k_fa2_m2 | per-document alone | 1.333 | 1.02 |",
        "| pp2_128k_fa2_m2 | adaptive alone | 1.000 | 1.05 |",
    ]
    assert re.fullmatch(r"\| pp2_128k_fa2_m2 \| wlb, not placed \| 1\.600 \(0\.9\d\d-2\.6\d\d\) \| 1\.33 \|", lines[4])
    assert lines[5] == "| pp2_128k_fa2_m2 | wlb | 4.000 | - |"  # of the stream; of the sample 2.000
    assert "`wlb, not placed`" in lines[7]
    assert lines[9:] == [
        "| context | run | WLB over Plain-4D, in all | paper, Fig. 14 |",
        "|---|---|---|---|",
        "| 128K | pp2_128k_fa2_m2 | 4.000 | - |",
        "",
    ]
    # Of another context or model the paper says nothing there; it has an end of Fig. 14.
    other = parts(modules, report, seconds, context_length=64 * 1024)
    assert other[2] == "| pp2_64k_fa2_m2 | per-document alone | 1.333 | - |"
    assert other[-2] == "| 64K | pp2_64k_fa2_m2 | 4.000 | 1.07 |"
    assert not any("Algorithm 1" in line for line in other)
    assert parts(modules, report, seconds, model="1B")[2].endswith("| - |")
    # Nothing is said without Plain-4D.
    assert not parts(modules, report, {name: own for name, own in seconds.items() if name != "plain-4d"})


def test_a_timeline_is_drawn(modules, launched, tmp_path) -> None:
    file = modules.timeline.draw_timeline(launched, tmp_path / "timeline.png")
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5_000


# ---- the command line ----


def test_a_job_goes_on_where_the_last_one_ended(modules, tmp_path) -> None:
    output = tmp_path / "results.jsonl"
    given = ["--micro_batches", "2", "--pp_size", "2", "--processes", "2", "--output", str(output)]
    options = modules.main.arguments(given)
    settings = modules.main.settings_of(options)
    about = {**launch_row(modules), "settings": modules.main.asdict(settings)}
    output.write_text(text_of(about, step("plain-4d", 4, 1.0), step("wlb", 4, 1.0)) + '{"broken')
    job = modules.main.job_of(options, tmp_path)
    assert job.first_round == 5 and "broken" not in output.read_text()
    job.save(tmp_path / "job.json")
    assert modules.main.Job.load(tmp_path / "job.json") == replace(job, variants=[])
    others = modules.main.arguments(
        [*given, "--context_length", "65536", "--recompute", "false", "--profile", "a/b.json"]
    )
    found = modules.main.job_of(others, tmp_path)
    assert found.first_round == 0 and not found.settings.recompute
    assert found.profile.endswith("/a/b.json") and found.settings.profile == "b"  # results hold no folders


def test_no_processes_at_all_are_refused(modules, capsys) -> None:
    with pytest.raises(SystemExit):
        modules.main.arguments(["--processes", "0"])
    assert "--rounds, --warmups and --processes must be at least 1" in capsys.readouterr().err


def test_a_wrong_variant_ends_with_a_sentence(modules, capsys, tmp_path) -> None:
    assert modules.main.main(["--quick", "--only", "faster", "--output", str(tmp_path / "r.jsonl")]) == 2
    assert "Error: There is no variant faster" in capsys.readouterr().err
