"""The stage-times benchmark without its measurements: what is asked for, steps put together, and the figures."""

import argparse
import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from hf_wlb.analysis.simulation import committed_results
from hf_wlb.simulator.measured import read_measured
from hf_wlb.simulator.validation import MOST_ERROR
from hf_wlb.staging import pipeline_seconds
from hf_wlb.workload import AnalyticWorkload
from tests.support.source_tree import REPOSITORY
from tests.unit.test_end_to_end_benchmark import launch_row as whole_launch
from tests.unit.test_end_to_end_benchmark import step as whole_step
from tests.unit.test_end_to_end_benchmark import text_of

FOLDER = REPOSITORY / "recipes" / "benchmarks"
NOTHING_SENT = {"cluster": "h100", "bytes_per_token": 0}


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {"main": "stage_times", "report": "stage_times_report", "compose": "stage_times_compose"}
    names |= {"cases": "end_to_end_cases", "whole": "end_to_end", "measured": "measured_report"}
    return SimpleNamespace(**{name: __import__(module) for name, module in names.items()})


@pytest.fixture
def main(modules):
    return modules.main


@pytest.fixture
def report(modules):
    return modules.report


def times_of(layer: list[float], head: float = 0.0, embedding: float = 0.0) -> dict:
    """A forward takes what is given, a backward twice as long."""
    count = len(layer)
    parts = {"layer": layer, "embedding": [embedding] * count, "head": [head] * count}
    return {
        f"{part}_{way}": [[factor * second for second in seconds]]
        for part, seconds in parts.items()
        for factor, way in ((1, "forward"), (2, "backward"))
    }


def about_of(layers: list[int], bytes_per_token: int = 0) -> dict:
    return {"stage_layers": layers, "handover": {"cluster": "h100", "bytes_per_token": bytes_per_token}}


def step_row(times: dict, each: int = 100, **more) -> dict:
    count = len(times["layer_forward"][0])
    return {"times": times, "micro_batch_lengths": [[[each // 2, each // 2]] * count], **more}


# ---- composition ----


def test_even_micro_batches_by_hand(modules) -> None:
    timeline = modules.compose.compose(about_of([1, 1, 1, 1]), step_row(times_of([1.0] * 8)))
    assert timeline.seconds == (8 + 3) * 3
    assert timeline.busy == pytest.approx((8 / 11,) * 4)


def test_a_step_by_hand(modules) -> None:
    """Two stages of 2 and 1 layers: a forward of 2.1 and 1.5 s, a backward of twice as long.

    Stage 0: F0 0-2.1, F1 -4.2; stage 1: F0 2.1-3.6, B0 -6.6, F1 -8.1, B1 -11.1; stage 0: B0 6.6-10.8, B1 11.1-15.3.
    """
    times = times_of([1.0, 1.0], head=0.5, embedding=0.1)
    timeline = modules.compose.compose(about_of([2, 1]), step_row(times))
    assert timeline.seconds == pytest.approx(15.3)
    assert timeline.begins[1].tolist() == pytest.approx([2.1, 3.6, 6.6, 8.1])
    assert timeline.begins[0].tolist() == pytest.approx([0, 2.1, 6.6, 11.1])


@pytest.mark.parametrize("layer", [[1.0, 3.0, 1.0, 2.0], [0.5] * 4, [4.0, 1.0, 1.0, 1.0]])
def test_stages_alike_are_what_the_planner_reckons_with(modules, layer) -> None:
    composed = modules.compose.compose(about_of([1] * 4), step_row(times_of(layer))).seconds
    assert composed == pytest.approx(pipeline_seconds([3 * cost for cost in layer], 4, 2.0))


def test_the_slower_replica_counts(modules) -> None:
    slow, fast = times_of([2.0, 2.0]), times_of([1.0, 1.0])
    both = {name: slow[name] + fast[name] for name in slow}
    row = {**step_row(fast), "times": both, "micro_batch_lengths": [[[10], [10]]] * 2}
    assert (
        modules.compose.compose(about_of([1, 1]), row).seconds
        == modules.compose.compose(about_of([1, 1]), step_row(slow)).seconds
    )


def test_hidden_states_are_on_their_way(modules) -> None:
    row = step_row(times_of([1.0, 1.0]), each=100_000)
    about = about_of([1, 1], bytes_per_token=16_384)
    once = modules.compose.handover_seconds(about, 100_000)
    assert 0.003 < once < 0.01  # 1.6 GB by NVLink
    assert modules.compose.compose(about, row).seconds > modules.compose.compose(about_of([1, 1]), row).seconds
    nine = about_of([1] * 9, bytes_per_token=16_384)
    assert modules.compose.handover_seconds(nine, 100_000) > 3 * once  # over the network


# ---- figures ----


def launch_row(modules, name: str = "a", kernel: str = "flash-attn-2", **settings) -> dict:
    """PP4, 128K, two variants whose streams hold the same tokens."""
    found = asdict(modules.cases.Settings(kernel=kernel, **settings))
    streams = {
        variant: {"pass_tokens": 8_000_000, "pass_predicted": predicted, "packer": packer, "sharding": "per_sequence"}
        for variant, packer, predicted in (("plain-4d", "next-fit", 24.0), ("wlb", "steady", 16.0))
    }
    return {
        **{"kind": "launch", "launch": name, "composed": True, "device": "NVIDIA H200", "devices": 1, "kernel": kernel},
        **{"peak_flops": 989e12, "replicas": 1, "stage_of_rank": [0, 1, 2, 3], "stage_layers": [3, 3, 3, 2]},
        **{"versions": {"torch": "2"}, "same_as": {"per-document alone": "plain-4d"}, "handover": NOTHING_SENT},
        **{"workload": AnalyticWorkload.from_crossover(20_000).to_dict(), "settings": found, "streams": streams},
    }


def line(variant: str, number: int, layer: list[float], launch: str = "a", tokens: int = 100_000) -> dict:
    times = times_of(layer, head=0.01)
    row = {"kind": "step", "launch": launch, "composed": True, "variant": variant, "round": number, "step": number}
    row |= {"seconds": 1.0, "predicted": 2.0, "tokens": tokens * len(layer), "documents": 2 * len(layer)}
    row |= {"longest": tokens // 2, "flops": 1e15, "plan_seconds": 0.01, "shard_seconds": 0.0, "peak_gib": [30.0]}
    return step_row(times, tokens, **row)


def lines(modules, rounds: int = 3, name: str = "a", **settings) -> list[dict]:
    """Plain-4D with one micro-batch that takes longer, WLB without."""
    count = settings.get("micro_batches", 8)
    uneven, even = [0.1] * (count - 1) + [0.5], [0.15] * count
    turns = [
        (variant, layer, number) for number in range(rounds) for variant, layer in (("plain-4d", uneven), ("wlb", even))
    ]
    warm = line("plain-4d", -1, [9.0] * count, name)
    return [
        launch_row(modules, name, **settings),
        warm,
        *(line(variant, number, layer, name) for variant, layer, number in turns),
    ]


@pytest.fixture
def launches(modules, report):
    return report.read_launches(text_of(*lines(modules)))


def test_a_launch_is_as_if_it_had_run_on_as_many_gpus_as_stages(modules, report, launches) -> None:
    (launch,) = launches
    assert launch.label == "pp4_128k_fa2" and launch.about["devices"] == 4
    rows = report.rows_of(launch)
    whole = modules.compose.compose(launch.about, line("wlb", 0, [0.15] * 8)).seconds
    wlb = rows["wlb"]
    assert wlb["step_seconds"] == pytest.approx(whole, abs=1e-4)
    assert wlb["tokens_per_second_per_gpu"] == pytest.approx(800_000 / whole / 4, rel=1e-4)
    assert wlb["stream_tokens_per_second_per_gpu"] == pytest.approx(8_000_000 / (16 * whole / 2) / 4, rel=1e-4)
    assert wlb["mfu"] == pytest.approx(1e15 / whole / 4 / 989e12, abs=1e-4)
    assert wlb["slowest"] == 1.0 and wlb["rounds"] == 3
    assert wlb["bubble"] == pytest.approx(1 - sum(wlb["busy"]) / 4, abs=1e-3)


def test_replicas_wait_for_the_slower_one(modules, report) -> None:
    """Two of two stages, a forward of 1 and 2 s: the slower has (2 + 1) * 6 s, in which the faster works 12 of 36."""
    slow, fast = times_of([2.0, 2.0]), times_of([1.0, 1.0])
    about = launch_row(modules, pp_size=2, micro_batches=2, layers=2)
    about |= {"replicas": 2, "stage_layers": [1, 1], "stage_of_rank": [0, 1] * 2}
    (launch,) = report.read_launches(
        text_of(
            about,
            *(
                {
                    **line(variant, number, [1.0, 1.0]),
                    "times": {name: fast[name] + slow[name] for name in slow},
                    "micro_batch_lengths": [[[10], [10]]] * 2,
                }
                for number in range(3)
                for variant in ("plain-4d", "wlb")
            ),
        )
    )
    assert launch.label == "pp2dp2_128k_fa2_m2" and launch.about["devices"] == 4
    row = report.rows_of(launch)["wlb"]
    assert row["step_seconds"] == 18 and row["tokens_per_second_per_gpu"] == pytest.approx(200_000 / 18 / 4, rel=1e-4)
    assert row["bubble"] == pytest.approx(1 - (24 + 12) / 72, abs=1e-3)
    assert row["busy"] == pytest.approx([(6 + 12) / 36] * 2, abs=1e-3)
    assert row["slowest"] == pytest.approx(2 / 1.5, abs=1e-3)
    assert "2 micro-batches of 131,072 tokens a step on each of 2 replicas, measured on 1 x" in (
        report.configuration_tables([launch])
    )


def test_speed_ups_and_imbalance_by_hand(modules, report, launches) -> None:
    rows = report.rows_of(launches[0])
    plain, wlb = rows["plain-4d"], rows["wlb"]
    assert wlb["speedup"] == pytest.approx(plain["step_seconds"] / wlb["step_seconds"] * 24 / 16, rel=1e-3)
    assert wlb["speedup_interval"] == [wlb["speedup"]] * 2 and plain["speedup"] == 1.0
    # 11 layers and the head, 3 s for 1 s of forward.
    assert plain["slowest"] == pytest.approx((11 * 0.5 + 0.01) / (11 * 1.2 / 8 + 0.01), abs=1e-4)
    assert plain["bubble"] > wlb["bubble"] > 0
    few = report.read_launches(text_of(*lines(modules, rounds=2)))
    assert report.rows_of(few[0])["wlb"]["speedup_interval"] is None


def test_seconds_in_the_file_are_never_believed(modules, report, launches) -> None:
    rows = lines(modules)
    other = [{**row, "seconds": 77.0} if row["kind"] == "step" else row for row in rows]
    assert report.summary(report.read_launches(text_of(*other))) == report.summary(launches)


def test_the_simulator_predicts_the_same_span(modules, report) -> None:
    rows = lines(modules)
    found = report.rows_of(report.read_launches(text_of(*rows))[0])
    (measured,) = read_measured(text_of(*rows))
    assert measured.layout.sizes == (3, 3, 3, 2) and measured.split.label == "TP1 CP1 PP4 DP1"
    for row in found.values():
        assert row["prediction_error"] == pytest.approx(row["predicted_seconds"] / row["step_seconds"] - 1, abs=1e-3)
    assert 10.0 < found["wlb"]["predicted_seconds"] < 40.0  # 8 x 100,000 tokens through 11 layers of 7B
    kernel = [{**rows[0], "kernel": "reference"}, *rows[1:]]
    (launch,) = report.read_launches(text_of(*kernel))
    assert {row["prediction_error"] for row in report.rows_of(launch).values()} == {None}
    assert "Not predicted: No cluster preset has the attention kernel" in report.configuration_tables([launch])


def test_the_result_line_has_the_names_that_are_asked_for(modules, report) -> None:
    text = text_of(
        *lines(modules), *lines(modules, name="b", micro_batches=4), *lines(modules, name="c", kernel="flash-attn-4")
    )
    figures = report.summary(report.read_launches(text))
    found = report.result(figures)
    assert {name for name in found if not name.endswith("_interval")} == {
        *(f"composed_speedup_pp4_128k_{name}" for name in ("fa2", "fa2_m4", "fa4")),
        *("composed_prediction_error", "composed_ranks_equal"),
    }
    errors = [abs(row["prediction_error"]) for rows in figures.values() for row in rows.values()]
    assert found["composed_prediction_error"] == max(errors)
    assert found["composed_speedup_pp4_128k_fa2_interval"] == [found["composed_speedup_pp4_128k_fa2"]] * 2
    row = {"speedup": 1.3, "speedup_vs_concat_cut": 1.1, "speedup_vs_fixed": 1.2, "prediction_error": -0.2}
    row |= {f"{name}_interval": None for name in tuple(row)} | {"ranks_equal": True}
    found = report.result({"x": {"wlb": row}})
    names = ("composed_speedup_x", "composed_speedup_vs_concat_cut_x", "composed_speedup_vs_fixed_x")
    assert [found[name] for name in names] == [1.3, 1.1, 1.2] and found["composed_prediction_error"] == 0.2
    assert found["composed_ranks_equal"] is True
    wrong = report.result({"x": {"wlb": row}, "y": {"wlb": {**row, "ranks_equal": False}}})
    assert wrong["composed_ranks_equal"] is False
    assert report.result({}) == {"composed_prediction_error": None, "composed_ranks_equal": None}


def test_committed_stages_are_predicted_and_ranked_as_measured(main, report) -> None:
    """Within 10%; and the check is one that slower steps of one variant fail."""
    launches = report.read_launches(main.RESULTS.read_text(encoding="utf-8"))
    figures = report.summary(launches)
    found = report.result(figures)
    assert len(figures) >= 4 and found["composed_prediction_error"] <= MOST_ERROR
    assert found["composed_ranks_equal"] is True
    (launch,) = (one for one in launches if one.label == "pp4_128k_fa2")
    slow = [
        {name: {**step, "seconds": step["seconds"] * (1.5 if name == "wlb" else 1.0)} for name, step in steps.items()}
        for steps in launch.rounds
    ]
    check, _ = report.checked(replace(launch, rounds=slow))
    assert check is not None and check.ranks_equal is False and check.worst_error > MOST_ERROR


# ---- whole steps and composed ones are told apart ----


def test_whole_steps_are_refused(modules, report) -> None:
    about = whole_launch(SimpleNamespace(main=modules.whole, cases=modules.cases))
    with pytest.raises(ValueError, match=r"has whole steps, which end_to_end\.py shows"):
        report.read_launches(text_of(about, whole_step("plain-4d", 0, 4.0)))


def test_no_report_of_whole_steps_takes_the_results(main) -> None:
    assert main.RESULTS.name == "stage_times.jsonl" and main.RESULTS not in committed_results()
    assert not re.match(r"end_to_end.*\.json", main.RESULTS.name)


# ---- shown ----


def test_the_tables_say_what_is_measured_and_what_is_not(report, launches) -> None:
    text = report.results_tables(launches)
    for words in ("Measured on one GPU: one decoder layer", "not measured: sends", "clocks of 4 GPUs", "optimizer"):
        assert words in text
    assert "Whole steps on as many GPUs are a separate benchmark" in text
    assert "**pp4_128k_fa2**, 3 rounds, composed" in text and "measured on 1 x NVIDIA H200" in text
    assert "Predicted by `profile_7B_flash-attn-2.json`, measured in a run of its own" in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("step_prices.committed_profile", lambda launch: None)
        assert "Predicted by the figures of 'h100" in report.results_tables(launches)
    row = report.rows_of(launches[0])["wlb"]
    assert f"| {row['speedup']:.3f} | - | - | 1.000 | {row['bubble']:.1%} |" in text
    assert f"| 128K | pp4_128k_fa2 | {row['speedup']:.3f} | - |" in text
    marked = "\n".join(["a", report.MARKS[0], "outdated", report.MARKS[1], "b"])
    assert "outdated" not in report.with_table(marked, text) and text in report.with_table(marked, text)
    with pytest.raises(ValueError, match="no launch with a whole round"):
        report.results_tables([])


def test_a_picture_is_drawn(report, modules, tmp_path) -> None:
    launches = report.read_launches(text_of(*lines(modules), *lines(modules, name="b", micro_batches=4)))
    shown = report.drawn_speedups(report.summary(launches))
    assert list(shown) == ["pp4_128k_fa2", "pp4_128k_fa2_m4"]
    file = report.draw(launches, tmp_path / "stage_times.png")
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5_000
    with pytest.raises(ValueError, match="no configuration in which WLB"):
        report.draw([], tmp_path / "none.png")


# ---- the command line ----


def options_of(main, *words: str) -> argparse.Namespace:
    return main.arguments([*words])


def test_configurations_are_called_by_their_labels(modules, main) -> None:
    assert set(main.DEFAULT) <= set(main.CONFIGURATIONS)
    for name, given in main.CONFIGURATIONS.items():
        settings = modules.cases.Settings(**{key: value for key, value in given.items() if key != "processes"})
        replicas = settings.replicas(given.get("processes", settings.replica_size))
        about = {"settings": asdict(settings), "kernel": settings.kernel, "replicas": replicas}
        assert modules.report.Launch(about, []).label == name


def test_a_configuration_says_how_many_replicas_there_are(main, tmp_path) -> None:
    names = ("pp4_128k_fa2", "pp4cp2_128k_fa4", "pp2dp2cp2_128k_fa4")
    jobs = main.jobs_of(options_of(main, "--configurations", *names, "--output", str(tmp_path / "r.jsonl")), tmp_path)
    assert [job.replicas for job in jobs] == [1, 1, 2] and [job.processes for job in jobs] == [4, 8, 8]


def test_jobs_have_names_of_their_own_and_profiles_by_kernel(main, tmp_path) -> None:
    output = tmp_path / "r.jsonl"
    words = ["--profile", "flash-attn-2=a/two.json", "flash-attn-4=b/four.json", "--output", str(output), "--seed", "5"]
    jobs = main.jobs_of(options_of(main, *words), tmp_path)
    assert [job.launch.split("-", 1)[1] for job in jobs] == list(main.DEFAULT)
    assert [job.settings.profile for job in jobs] == ["two", "four"] * 2
    assert jobs[1].profile.endswith("/b/four.json") and {job.settings.seed for job in jobs} == {5}
    assert {(job.settings.model, job.settings.layers, job.settings.pp_size) for job in jobs} == {("7B", 11, 4)}
    assert all(job.about["command"].startswith("python recipes/benchmarks/stage_times.py") for job in jobs)


def test_a_job_goes_on_where_its_configuration_ended(main, tmp_path, modules) -> None:
    output = tmp_path / "r.jsonl"
    options = options_of(main, "--output", str(output), "--configurations", "pp4_128k_fa2", "pp4_64k_fa2")
    first = main.jobs_of(options, tmp_path)
    about = {**launch_row(modules), "settings": asdict(first[0].settings)}
    output.write_text(text_of(about, line("plain-4d", 4, [0.1] * 8), line("wlb", 4, [0.1] * 8)) + '{"broken')
    again = main.jobs_of(options, tmp_path)
    assert [job.first_round for job in again] == [5, 0] and "broken" not in output.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--configurations", "pp4_1m_fa2"], "There is no configuration pp4_1m_fa2; choose of: pp4_128k_fa2, "),
        (["--cp_size", "2", "--tp_size", "2"], "tp_size=2: ranks that share every matrix talk to one another"),
        (["--pp_size", "1"], "pp_size must be at least 2: without a pipeline there are no stages"),
        (["--profile", "costs.json"], "--profile takes KERNEL=FILE, such as flash-attn-2=costs.json, not 'costs.json'"),
        (["--profile", "torch=a.json"], "--profile names torch, which no configuration attends with"),
        (["--only", "faster"], "There is no variant faster"),
        (["--show", "--output", "missing.jsonl"], "No such file"),
    ],
)
def test_what_cannot_be_is_a_sentence(main, capsys, tmp_path, monkeypatch, words, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(words if "--output" in words else [*words, "--output", str(tmp_path / "r.jsonl")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("Error: ") and sentence in printed.err and printed.err.count("\n") == 1


def test_several_processes_are_refused(main, modules, monkeypatch) -> None:
    main.check_split(modules.cases.QUICK)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, but all is measured on one GPU"):
        main.check_split(replace(modules.cases.QUICK, seed=1))


def test_results_are_shown_and_the_last_line_is_the_result(main, modules, tmp_path, capsys) -> None:
    output = tmp_path / "r.jsonl"
    output.write_text(text_of(*lines(modules)))
    assert main.main(["--show", "--output", str(output)]) == 0
    printed = capsys.readouterr().out.rstrip().splitlines()
    result = json.loads(printed[-1].removeprefix("RESULT "))
    assert result["composed_speedup_pp4_128k_fa2"] > 1 and printed[0] == "**pp4_128k_fa2**, 3 rounds, composed"
    assert (tmp_path / "r.png").is_file()
