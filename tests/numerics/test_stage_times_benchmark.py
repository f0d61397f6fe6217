"""The stage-times benchmark's whole way through, tiny, on the CPU; and what it runs is what a stage runs."""

import json
import math
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_wlb.attention.kernels import KERNELS
from hf_wlb.presets import MODEL_PRESETS
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.measured import read_measured
from hf_wlb.simulator.systems import sharder_of
from hf_wlb.simulator.validation import check_launch, step_model
from hf_wlb.workload import load_workload
from tests.support.scripts import run_script
from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"
LABELS = (
    *("pp2_0.5k_reference_m4", "pp2_0.5k_reference", "pp2cp2_0.5k_reference_m4"),
    "pp2dp2cp2_0.5k_reference_m4",
)
NAMES = ("quick", "quick_m8", "quick_cp2", "quick_dp2cp2")


def benchmark(output, *words):
    """One launch on the CPU: it has ended."""
    words = ["--quick", "--use-cpu", "--output", output, *words]
    return run_script("recipes/benchmarks/stage_times.py", *words, environment={"ACCELERATE_USE_CPU": "true"})


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Two launches into one file: (what the second printed, the file)."""
    output = tmp_path_factory.mktemp("stage_times") / "results.jsonl"
    for rounds in ("1", "2"):
        done = benchmark(output, "--rounds", rounds, "--only", "plain-4d", "wlb", "--recompute", "true")
        assert done.returncode == 0, done.stderr
    return done.stdout, output


@pytest.fixture(scope="module")
def rows(launched):
    return [json.loads(line) for line in launched[1].read_text().splitlines()]


def test_configurations_take_turns_and_launches_go_on(rows) -> None:
    launches = {row["launch"]: row["first_round"] for row in rows if row["kind"] == "launch"}
    assert [name.split("-", 1)[1] for name in launches] == [*NAMES] * 2
    assert list(launches.values()) == [0] * 4 + [1] * 4
    steps = [row for row in rows if row["kind"] == "step"]
    assert Counter(row["variant"] for row in steps if row["round"] >= 0) == {"plain-4d": 12, "wlb": 12}
    second = [row for row in steps if launches[row["launch"]] == 1]
    assert [row["launch"].split("-", 1)[1] for row in second if row["round"] < 0] == [*NAMES]
    turns = [(row["round"], row["launch"].split("-", 1)[1]) for row in second if row["round"] >= 0]
    expected = [(number, name) for number in (1, 2) for name in NAMES for _ in range(2)]
    assert turns == expected


def test_every_micro_batch_has_its_times(rows) -> None:
    entropy = math.log(MODEL_PRESETS["tiny"].vocab_size)
    for row in (row for row in rows if row["kind"] == "step"):
        replicas = row["micro_batch_lengths"]
        assert len(replicas) == (2 if row["launch"].endswith("dp2cp2") else 1) and row["composed"] is True
        assert sum(sum(map(sum, replica)) for replica in replicas) == row["tokens"]
        assert len(row["times"]) == 6
        shared = row["launch"].endswith("cp2")
        for times in row["times"].values():
            for replica, seconds in zip(replicas, times, strict=True):
                assert np.shape(seconds) == ((2, len(replica)) if shared else (len(replica),)) and np.min(seconds) > 0
        assert row["loss"] == pytest.approx(entropy, rel=0.1)  # of random tokens and random weights
        for place in range(len(replicas)):
            layers = [np.array(row["times"][f"layer_{way}"][place]) for way in ("forward", "backward")]
            assert sum((own.max(axis=0) if shared else own).sum() for own in layers) < row["seconds"]
        assert ("shards" in row) == (row["shard_seconds"] > 0) == shared
    about = [row for row in rows if row["kind"] == "launch"]
    assert all(row["composed"] and row["stage_layers"] == [1, 1] and row["devices"] == 1 for row in about)
    assert {row["handover"]["bytes_per_token"] for row in about} == {4 * MODEL_PRESETS["tiny"].hidden_size}


def test_plans_of_shards_are_those_that_the_trainer_would_make(rows) -> None:
    abouts = {row["launch"]: row for row in rows if row["kind"] == "launch" and row["launch"].endswith("cp2")}
    steps = [row for row in rows if row["kind"] == "step" and row["launch"] in abouts and row["round"] >= 0]
    assert len(steps) == 12 and {row["variant"] for row in steps} == {"plain-4d", "wlb"}
    for row in steps:
        about, others = abouts[row["launch"]], set()
        workload = load_workload(about["workload"])
        sharders = {name: sharder_of(name, 2, workload) for name in ("per_sequence", "per_document", "adaptive")}
        pairs = [
            (lengths, kept)
            for own in zip(row["micro_batch_lengths"], row["shards"], strict=True)
            for lengths, kept in zip(*own, strict=True)
        ]
        for lengths, kept in pairs:
            made = {name: sharder.plan(lengths) for name, sharder in sharders.items()}
            plan = made[about["streams"][row["variant"]]["sharding"]]
            assert (kept["owner"], kept["edges"]) == (plan.owner.tolist(), plan.edges.tolist())
            others |= {name for name, other in made.items() if other.edges.tolist() != kept["edges"]}
        assert "per_document" in others  # control
    assert {about["exchange"]["cluster"] for about in abouts.values()} == {"h100"}


def test_the_last_line_is_the_result_and_a_picture_is_there(launched) -> None:
    printed, output = launched
    result = json.loads(printed.rstrip().splitlines()[-1].removeprefix("RESULT "))
    assert all(result[f"composed_speedup_{label}"] > 0 for label in LABELS)
    assert result["composed_prediction_error"] is None and "Not predicted: No cluster preset" in printed
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_simulator_reads_what_is_written(launched) -> None:
    launches = read_measured(launched[1].read_text())
    splits = [launch.split.label for launch in launches]
    assert splits == [f"TP1 CP{cp_size} PP2 DP{dp_size}" for cp_size, dp_size in ((1, 1), (1, 1), (2, 1), (2, 2))] * 2
    for launch in launches:
        check = check_launch(launch, step_model(launch, CLUSTERS["h100"]))
        assert all(0 < variant.predicted < variant.measured for variant in check.variants)  # on an H100


def test_settings_that_cannot_be_are_a_sentence(tmp_path) -> None:
    done = benchmark(tmp_path / "r.jsonl", "--stage_layers", "1,1,1")
    assert done.returncode == 2 and done.stderr.startswith("Error: pp_stage_layers=[1, 1, 1] names 3 stages, but ")


def test_a_configuration_that_fails_is_told_and_the_others_go_on(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import stage_times
    import stage_times_run

    words = ["--quick", "--use-cpu", "--rounds", "2", "--only", "wlb", "--output", str(tmp_path / "r.jsonl")]
    first, second = stage_times.jobs_of(stage_times.arguments([*words, "--configurations", *NAMES[:2]]), tmp_path)
    first = replace(first, settings=replace(first.settings, kernel="flash-attn-2"))
    assert stage_times_run.run([first, second], time.perf_counter()) == ["quick"]
    printed = capsys.readouterr()
    assert "Error: configuration quick: " in printed.err and "quick_m8, round 1, wlb: a step of" in printed.out
    launches = [json.loads(line)["launch"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert set(launches) == {second.launch}


def test_no_round_begins_that_would_end_too_late(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import stage_times
    import stage_times_run

    words = ["--quick", "--use-cpu", "--rounds", "2", "--only", "wlb", "--output", str(tmp_path / "r.jsonl")]
    jobs = stage_times.jobs_of(stage_times.arguments([*words, "--seconds", "100"]), tmp_path)
    assert stage_times_run.run(jobs, time.perf_counter() - 100) == []
    printed = capsys.readouterr().out
    assert "quick_m8, warm-up" in printed and "round" not in printed


# ---- what is run is what a stage runs ----


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Makes parts of the quick model: (parts, context, how often attention ran forward) for given settings."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import end_to_end
    import stage_times_run
    from end_to_end_cases import QUICK

    kernel = KERNELS["reference"]
    calls: list[int] = []
    forward = type(kernel).forward
    monkeypatch.setattr(
        type(kernel), "forward", lambda self, *args, **kwargs: calls.append(1) or forward(self, *args, **kwargs)
    )

    def make(**changes):
        settings = replace(QUICK, **changes)
        job = end_to_end.Job(settings, "", "", str(tmp_path), "", "a-quick", use_cpu=True)
        args = stage_times_run.arguments(job, 1)
        parts = stage_times_run.Parts(stage_times_run.model_config(settings), args, 1024)
        return SimpleNamespace(parts=parts, context=parts.context(args)[0], calls=calls)

    return make


@pytest.mark.parametrize(("recompute", "each"), [(True, 2), (False, 1)])
def test_recomputation_runs_the_layer_s_forward_twice(made, recompute, each) -> None:
    found = made(recompute=recompute)
    found.calls.clear()
    found.parts.step([[100, 28], [64], [5, 5]], found.context)
    assert len(found.calls) == 3 * each


def test_the_loss_is_that_of_the_head_over_what_came(made) -> None:
    found = made()
    measured = found.parts.step([[300, 20]], found.context)
    head = found.parts._head.model
    hidden = head.model.norm(found.parts._received[:320])
    logits = head.lm_head(hidden)
    drawn = np.random.default_rng(0)  # as ``micro_batch`` draws tokens
    size = MODEL_PRESETS["tiny"].vocab_size
    labels = torch.cat([torch.tensor(drawn.integers(size, size=length)) for length in (300, 20)])
    targets = torch.cat([labels[1:300], labels[301:320]])
    kept = torch.cat([logits[:299], logits[300:319]])
    expected = torch.nn.functional.cross_entropy(kept, targets, reduction="sum") / 320
    assert measured.loss == pytest.approx(float(expected.detach()), rel=1e-4)
    across = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum") / 320
    assert measured.loss != pytest.approx(float(across.detach()), rel=1e-4)  # control: documents not kept apart


def test_weights_are_float32_and_gradients_add_up_over_a_step_only(made) -> None:
    found = made()
    layer = found.parts._layer.model
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    found.parts.step([[64], [64]], found.context)
    twice = [parameter.grad.clone() for parameter in parameters]
    found.parts.step([[64]], found.context)
    for both, once in zip(twice, (parameter.grad for parameter in parameters), strict=True):
        torch.testing.assert_close(both, 2 * once, rtol=1e-3, atol=1e-4)


def test_computed_in_is_what_the_trainer_computes_in(made) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    found = made(recompute=True)
    found.parts._dtype = torch.bfloat16
    projection = found.parts._layer.model.get_submodule("model.layers.1.self_attn.q_proj")
    projection.register_forward_hook(lambda module, given, out: seen.append((given[0].dtype, out.dtype)))
    measured = found.parts.step([[64, 3]], found.context)
    assert seen == [(torch.float32, torch.bfloat16)] * 2 and math.isfinite(measured.loss)


def test_hidden_states_of_another_type_are_refused(made) -> None:
    found = made()
    found.parts._embedding.model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"Hidden states are torch.bfloat16, but layers were measured with"):
        found.parts.step([[16]], found.context)
