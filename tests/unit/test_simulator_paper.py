"""The paper's evaluation, simulated: its configurations, comparisons on equal documents, swapped assumptions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hf_wlb.analysis import simulation
from hf_wlb.lengths import sample_lengths
from hf_wlb.presets import MODEL_PRESETS
from hf_wlb.simulator import assumptions
from hf_wlb.simulator.assumptions import explanation, least_gain, sensitivity, summary, swaps
from hf_wlb.simulator.cluster import ASSUMED, CLUSTERS, all_gather_seconds, changed
from hf_wlb.simulator.comparison import (
    BASELINE,
    CUT,
    FIGURES,
    SYSTEM_LABELS,
    FixedPlans,
    compare,
    memory_needed,
    model_that_fits,
    typical_timelines,
)
from hf_wlb.simulator.measured import read_measured
from hf_wlb.simulator.paper import CONFIGURATIONS, FIGURE_12, JOB_8192, MAIN, TABLE_2, K, shape_of
from hf_wlb.simulator.reproduction import (
    FIGURE_12_SYSTEMS,
    FIGURE_15_SHARDINGS,
    MAIN_SYSTEMS,
    MIXED,
    PAPER,
    PLACED,
    Setup,
    figure_12,
    figure_13,
    figure_15,
    job_8192,
    mean_speedups,
    split_of,
    table_2,
)
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.step import simulate_step
from hf_wlb.simulator.stream import documents_for
from hf_wlb.simulator.systems import SYSTEMS
from hf_wlb.simulator.validation import LaunchCheck, VariantCheck
from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"
LENGTHS = sample_lengths(20_000, seed=3)
FEW = Setup(LENGTHS, steps=12)
SMALL, SEVEN = CONFIGURATIONS[0], MAIN


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import simulated_paper

    return simulated_paper


@cache
def everything() -> list[dict]:
    """All systems on 7B-128K."""
    return figure_12(FEW, configurations=[SEVEN])


# ---- what the paper says ----


def test_the_configurations_are_the_papers() -> None:
    assert [(c.name, c.tp_size, c.cp_size, c.pp_size, c.dp_size) for c in CONFIGURATIONS] == [
        ("550M-64K", 2, 2, 4, 2),
        ("550M-128K", 2, 4, 4, 1),
        ("7B-64K", 4, 2, 4, 1),
        ("7B-128K", 8, 2, 4, 1),
        ("30B-64K", 8, 2, 4, 1),
        ("30B-128K", 8, 4, 4, 1),
        ("70B-64K", 16, 4, 4, 1),
        ("70B-128K", 16, 4, 4, 1),
    ]
    assert split_of(JOB_8192).label == "TP8 CP16 PP16 DP4" and JOB_8192.gpus == 8192
    assert MAIN.name == "7B-128K" and max(c.gpus for c in CONFIGURATIONS) == 256


def test_shapes_are_the_presets() -> None:
    for name, preset in MODEL_PRESETS.items():
        shape = shape_of(name)
        assert (shape.model_type, shape.hidden_size, shape.vocab_size) == (
            "llama",
            preset.hidden_size,
            preset.vocab_size,
        )
    with pytest.raises(ValueError, match="There is no model preset '8B'; the presets are tiny, 550M"):
        shape_of("8B")


@pytest.mark.parametrize("configuration", [*CONFIGURATIONS, JOB_8192], ids=lambda c: c.name)
def test_every_configuration_fits_its_gpus(configuration) -> None:
    model = FEW.model(configuration)
    assert memory_needed(model) <= CLUSTERS["h100"].memory_bytes
    without = FEW.model(configuration) if not model.gradient_checkpointing else None
    if without is None:  # with checkpoints only where it must be
        other = replace(FEW, gradient_checkpointing=False).model(configuration)
        assert memory_needed(other) > CLUSTERS["h100"].memory_bytes
    assert model.gradient_checkpointing == (configuration.model != "550M")


def test_checkpointing_can_be_asked_for() -> None:
    split = Split(cp_size=2)
    for asked in (True, False):
        model = model_that_fits(
            shape_of("1B"), split, CLUSTERS["h100"], context_length=4096, gradient_checkpointing=asked
        )
        assert model.gradient_checkpointing is asked


# ---- comparisons ----


def test_all_systems_train_the_same_documents() -> None:
    found = FEW.compare(SEVEN, [FIGURE_12_SYSTEMS[name] for name in FIGURE_12_SYSTEMS])
    documents = FEW.documents(SEVEN)
    assert {result.tokens for result in found.results.values()} == {int(documents.sum())}
    assert set(found.results) == set(FIGURE_12_SYSTEMS) <= set(SYSTEM_LABELS)
    for name, figures in found.figures().items():
        assert set(figures) == set(FIGURES)
        result = found.results[name]
        assert figures["speedup"] == pytest.approx(found.results[BASELINE].seconds / result.seconds)
        assert figures["speedup_over_cut"] == pytest.approx(found.results[CUT].seconds / result.seconds)
    assert found.figures()[BASELINE]["speedup"] == 1.0
    json.dumps(found.figures(), allow_nan=False)


def test_systems_with_a_packer_in_common_share_its_plans() -> None:
    found = FEW.compare(SEVEN, [SYSTEMS[name] for name in ("plain-4d", "wlb", "placed", "whole")])
    passes = [found.results[name].passes for name in ("wlb", "placed", "whole")]
    assert passes[0] is passes[1] is passes[2] is not found.results["plain-4d"].passes


def test_steady_has_room_for_as_many_documents_a_micro_batch_everywhere() -> None:
    for configuration, factor, contexts in ((SEVEN, 1, 10.0), (SMALL, 1, 20.0), (SEVEN, 2, 20.0)):
        setup = replace(FEW, micro_batches=factor, steps=2)
        config = setup.compare(configuration, [SYSTEMS["placed"]]).results["placed"].passes.config
        assert config.max_waiting_contexts == contexts
    default = replace(FEW, steps=2, waiting_contexts=None).compare(SMALL, [SYSTEMS["placed"], SYSTEMS["paper"]])
    assert {result.passes.config.max_waiting_contexts for result in default.results.values()} == {None}


def test_a_setup_keeps_its_documents_whatever_else_changes() -> None:
    usual = FEW.documents(SEVEN)
    for other in (replace(FEW, cluster=CLUSTERS["h100-flash-attn-4"]), replace(FEW, gradient_checkpointing=True)):
        assert other.documents(SEVEN).tolist() == usual.tolist()
    assert replace(FEW, seed=1).documents(SEVEN).tolist() != usual.tolist()
    assert replace(FEW, micro_batches=2).documents(SEVEN).sum() == pytest.approx(2 * usual.sum(), rel=0.01)


def test_steps_that_are_picked_are_a_fair_sample_and_fixed_plans_stay() -> None:
    few, fixed = replace(FEW, steps=20, simulated=5, whole=(BASELINE,)), FixedPlans()
    found = replace(few, plans=fixed).compare(SEVEN, [SYSTEMS["plain-4d"], SYSTEMS["placed"]])
    assert len(found.results["plain-4d"].simulated) == len(found.results["plain-4d"].passes.plans)
    placed = found.results["placed"]
    assert len(placed.steps) == 5
    predicted = [placed.passes.config.step_time.step_time(plan.workloads()) for plan in placed.passes.plans]
    assert predicted == sorted(predicted)
    whole = replace(few, simulated=None).compare(SEVEN, [SYSTEMS["placed"]]).results["placed"]
    assert placed.seconds == pytest.approx(whole.seconds, rel=0.05) and placed.tokens == whole.tokens
    # Another workload packs otherwise; fixed plans are those of the first.
    other = replace(few, cluster=changed(CLUSTERS["h100"], "matmul", 0.3))
    kept = replace(other, plans=fixed).compare(SEVEN, [SYSTEMS["placed"]]).results["placed"]
    anew = other.compare(SEVEN, [SYSTEMS["placed"]]).results["placed"]
    assert kept.passes is placed.passes and kept.seconds > placed.seconds
    digests = [{plan.digest() for plan in result.passes.plans} for result in (kept, anew)]
    assert digests[0] != digests[1]


def test_the_typical_step_is_of_median_speed() -> None:
    found = FEW.compare(SEVEN, [SYSTEMS["plain-4d"], SYSTEMS["balanced"], SYSTEMS["fixed-4d"]])
    timelines = typical_timelines(found)
    assert [name.split(", ")[0] for name in timelines] == ["plain-4d", "balanced", "fixed-4d"]
    for (name, result), timeline in zip(found.results.items(), timelines.values(), strict=True):
        speeds = sorted(step.tokens / step.seconds for step in result.steps)
        (place,) = (at for at, s in enumerate(result.steps) if s.tokens / s.seconds == speeds[len(speeds) // 2])
        assert timeline.seconds == pytest.approx(result.steps[place].pipeline_seconds), name
        assert f"{result.steps[place].tokens:,} tokens" in " ".join(timelines)


# ---- figures ----


def test_placed_sharding_is_above_the_papers_method_in_every_configuration() -> None:
    rows = figure_12(
        Setup(sample_lengths(100_000), steps=100, simulated=20, whole=()), (BASELINE, PAPER, MIXED, PLACED)
    )
    assert [row["configuration"] for row in rows] == [configuration.name for configuration in CONFIGURATIONS]
    for name in (MIXED, PLACED):
        gains = {
            row["configuration"]: row["systems"][PAPER]["seconds"] / row["systems"][name]["seconds"] for row in rows
        }
        assert min(gains.values()) > 1, (name, gains)
        assert least_gain(rows, name) == min(gains.values())


def test_nothing_is_above_the_bound() -> None:
    (row,) = everything()
    systems = row["systems"]
    assert max(systems, key=lambda name: systems[name]["speedup"]) == "balanced"
    assert systems[BASELINE]["speedup"] == 1.0 < systems[PAPER]["speedup"]
    assert systems[CUT]["speedup_over_cut"] == 1.0
    assert row["split"] == "TP8 CP2 PP4 DP1" and row["gpus"] == 64 and row["gradient_checkpointing"]


def test_means_by_hand() -> None:
    rows = [
        {"configuration": name, "systems": {"placed": {"speedup": speedup, "speedup_over_cut": speedup - 1}}}
        for name, speedup in (("550M-64K", 3.0), ("7B-64K", 2.0), ("7B-128K", 4.0))
    ]
    assert mean_speedups(rows, "placed") == {"all": 3.0, "64K": 2.5, "without 550M": 3.0, "128K": 4.0}
    assert mean_speedups(rows, "placed", "speedup_over_cut")["all"] == 2.0


def test_parts_alone_bring_less_than_all() -> None:
    rows = {row["name"]: row for row in figure_13(replace(FEW, steps=30))}
    assert BASELINE not in rows and rows["all"]["paper"] == 1.33 and rows["steady + placed"]["paper"] is None
    speedups = {name: row["speedup"] for name, row in rows.items()}
    assert max(speedups, key=speedups.get) in ("all", "steady + placed")
    assert speedups["per-document alone"] < speedups["adaptive alone"] < speedups["placed alone"]
    # The parts are the systems of the other figures.
    whole = figure_12(replace(FEW, steps=30), MAIN_SYSTEMS, [SEVEN])[0]["systems"]
    assert speedups["all"] == whole[PAPER]["speedup"] and speedups["steady + placed"] == whole[PLACED]["speedup"]


def test_one_layer_under_every_sharding() -> None:
    rows = figure_15(replace(FEW, steps=6))
    assert [(row["context"], row["tp_size"]) for row in rows] == [(64 * K, 1), (64 * K, 8), (128 * K, 1), (128 * K, 8)]
    for row in rows:
        times = row["ms"]
        assert set(times) == {*FIGURE_15_SHARDINGS, "ideal"}
        assert min(times, key=times.get) == "ideal"
        assert times["static"] <= min(times["per_sequence"], times["per_document"]) * (1 + 1e-9)
        assert times["adaptive"] <= min(times["static"], times["placed"]) * (1 + 2e-3)  # so close it stops looking
        assert row["speedup"]["per_sequence"] == 1.0
    # With ranks on nodes of their own the exchange weighs more, and less of it is needed where documents lie whole.
    assert rows[1]["speedup"]["placed"] > rows[0]["speedup"]["placed"]


def test_table_2_has_the_papers_rows_and_ours() -> None:
    rows = {row["packer"]: row for row in table_2(replace(FEW, steps=24), {1: (2, 0.3)})}
    assert set(TABLE_2) - set(rows) == {"solver, 2 global batches", "solver, 4 global batches"}
    assert set(rows) - set(TABLE_2) == {"steady"}
    assert (rows["wlb, 2 queues"]["paper"], rows["wlb, 2 queues"]["paper_ms"]) == (1.05, "20")
    assert rows["solver, 1 global batch"]["steps"] == 2  # as many windows as asked for, none at the end of the data
    ordered = ("next-fit", "greedy, 1 global batch", "greedy, 4 global batches", "steady")
    imbalance = [rows[name]["imbalance"] for name in ordered]
    assert imbalance == sorted(imbalance, reverse=True) and imbalance[-1] < 1.1 < 1.4 < imbalance[0]
    assert rows["concat-and-cut"]["context_lost"] > 0.02 and rows["next-fit"]["context_lost"] == 0


def test_the_job_on_8192_gpus() -> None:
    job = job_8192(replace(FEW, steps=1, simulated=1), (BASELINE,))
    assert job["split"] == "TP8 CP16 PP16 DP4" and job["seconds_8192"] > 0
    assert job["systems"][BASELINE]["gpu_imbalance"] > 1.1


# ---- assumptions ----


def test_faster_attention_leaves_less_to_gain_and_faster_products_more() -> None:
    rows = {row["constant"]: row for row in sensitivity(replace(FEW, steps=8), [SEVEN])}
    assert set(rows) == {"as assumed", *ASSUMED}
    for name in (PAPER, PLACED):
        base = rows["as assumed"]["low"][name]
        assert rows["attention backward"]["low"][name] > base > rows["attention backward"]["high"][name]
        assert rows["matmul"]["low"][name] < base < rows["matmul"]["high"][name]


def test_swaps_change_what_they_say() -> None:
    labels = [swap.label for swap in swaps(LENGTHS)]
    assert len(set(labels)) == len(labels) and "lengths of the built-in sampler" in labels
    assert len(swaps()) == len(labels) - 1
    usual = {name: getattr(FEW, name) for name in Setup.__dataclass_fields__}
    for swap in swaps(LENGTHS[::2]):
        own = swap.change(FEW)
        others = [name for name, value in usual.items() if getattr(own, name) is not value]
        assert len(others) == (2 if "micro-batches" in swap.label else 1), swap.label
        assert any(swap.concerns(configuration) for configuration in CONFIGURATIONS)
    found = {swap.label: swap for swap in swaps()}
    assert [c.name for c in CONFIGURATIONS if found["550M: matrix products at half the rate"].concerns(c)] == [
        "550M-64K",
        "550M-128K",
    ]
    twice = found["2 x PP micro-batches a step"].change(FEW)
    assert twice.documents(SEVEN).tolist() == FEW.documents(SEVEN).tolist() and twice.micro_batches == 2
    room = found[assumptions.DEFAULT_ROOM]
    assert [c.name for c in CONFIGURATIONS if room.concerns(c)] == ["550M-64K"]


def test_links_can_be_free_or_all_inside() -> None:
    cluster, group = CLUSTERS["h100"], split_of(CONFIGURATIONS[-1]).cp_group
    usual = all_gather_seconds(cluster, group, 1e9)
    inside = all_gather_seconds(assumptions.one_node(cluster), group, 1e9)
    assert (
        usual > inside > all_gather_seconds(assumptions.free_links(cluster), group, 1e9) == pytest.approx(0, abs=1e-9)
    )


def test_swapping_nothing_changes_nothing() -> None:
    few, where = replace(FEW, steps=4), [SMALL, SEVEN]
    rows = figure_12(few, MAIN_SYSTEMS, where)
    same = [
        assumptions.Swap("few", lambda own: own),
        assumptions.Swap("whole", lambda own: own, whole=True),
        assumptions.Swap("nobody's", lambda own: replace(own, seed=9), lambda _: False, whole=True),
    ]
    found = explanation(rows, few, few, same, {"known": rows}, where)
    assert [row["assumption"] for row in found] == ["as assumed", "known", "few", "whole", "nobody's"]
    assert [row["few"] for row in found] == [False, False, True, False, False]
    for row in found:
        for key, value in summary(rows).items():
            if row["few"] and key == "least_placed_over_paper":
                assert row[key] is None
            else:
                assert row[key] == pytest.approx(value), (row["assumption"], key)


def test_control_a_swap_that_matters_is_noticed() -> None:
    few, where = replace(FEW, steps=4), [SEVEN]
    rows = figure_12(few, MAIN_SYSTEMS, where)
    base, free = explanation(
        rows, few, few, [swap for swap in swaps() if swap.label == "communication free"], {}, where
    )
    assert free["paper"] > 1.02 * base["paper"]


# ---- results ----


def test_flatter_lengths_are_the_samplers_cut() -> None:
    flat, usual = simulation.flat_lengths(None, 0), simulation.read_lengths(None, seed=0)
    assert flat.lengths.max() == simulation.FLAT_LIMIT and flat.lengths.sum() == usual.lengths.sum()
    assert flat.lengths.min() >= 1 and "cut at 32K" in flat.description


def test_the_prediction_error_is_the_largest_of_all_launches(monkeypatch, tmp_path: Path) -> None:
    assert simulation.prediction_error([]) is None
    checks = {
        error: LaunchCheck("made up", (VariantCheck("wlb", 3, 1.0, 1.0 + error, 1.0, 1.0, None),))
        for error in (0.02, -0.07)
    }
    monkeypatch.setattr(simulation, "read_measured", lambda text: json.loads(text))
    monkeypatch.setattr(simulation, "committed_profile", lambda launch: None)
    monkeypatch.setattr(simulation, "step_model", lambda launch, profile: None)
    monkeypatch.setattr(simulation, "check_launch", lambda launch, model: checks[launch])
    for name, errors in (("a", [0.02]), ("b", [0.02, -0.07])):
        (tmp_path / name).write_text(json.dumps(errors))
    assert simulation.prediction_error([tmp_path / "a"]) == pytest.approx(0.02)
    assert simulation.prediction_error([tmp_path / "a", tmp_path / "b"]) == pytest.approx(0.07)


def test_a_committed_profile_is_of_the_launchs_model_kernel_layers_and_device() -> None:
    """Each of them in turn is another one as a control."""
    (launch, *_) = read_measured((FOLDER / "results" / "end_to_end_pilot.jsonl").read_text())
    found = simulation.committed_profile(launch)
    assert found is not None and found.profile.metadata["model"]["kernel"] == launch.kernel
    for other in ({"model": "30B"}, {"kernel": "torch"}, {"compiled": False}, {"device": "NVIDIA A100"}):
        assert simulation.committed_profile(replace(launch, **other)) is None
    split = replace(launch.split, tp_size=2)
    assert simulation.committed_profile(replace(launch, split=split)) is None


def test_committed_results_of_the_benchmark_are_found() -> None:
    found = simulation.committed_results()
    assert found == sorted((FOLDER / "results").glob("end_to_end*.json*"))


def test_the_committed_results_are_small_name_no_machine_and_keep_their_word() -> None:
    for file in (FOLDER / "results").glob(simulation.FILE):
        text = file.read_text()
        found = json.loads(text)
        assert not re.search(r"/home/|/work|/root|/tmp", text) and file.stat().st_size < 500_000
        assert found["schema"] == simulation.SCHEMA and found["result"]["paper_fig12_mean"] == FIGURE_12["paper"]["all"]
        for name in ("fig12", "fig13", "fig14", "fig15", "sensitivity", "explanation"):
            assert (file.parent / f"simulated_{name}.png").stat().st_size < 150_000
        assert found["result"]["least_placed_over_paper_method"] > 1
        assert found["result"]["seconds_8192"] < 1


def test_pages_without_marks_are_one_sentence(recipe) -> None:
    with pytest.raises(ValueError, match=r"README.md has no place for the table"):
        recipe.with_summary("# Title\n", "table")
    with pytest.raises(ValueError, match=r"docs/results.md has no place for the table"):
        recipe.with_tables("# Title\n", "table")


def test_compare_refuses_what_cannot_be() -> None:
    model = FEW.model(SEVEN)
    documents = documents_for(LENGTHS, 1, context_length=SEVEN.context_length, micro_batches=4)
    with pytest.raises(ValueError, match="micro_batches_per_replica must be a whole number"):
        compare(documents, [SYSTEMS[BASELINE]], model, micro_batches_per_replica=0)
    with pytest.raises(ValueError, match="There are no documents to simulate"):
        compare(np.zeros(0, dtype=np.int64), [SYSTEMS[BASELINE]], model, micro_batches_per_replica=4)


def test_a_mixed_system_is_the_papers_packing_with_our_sharding() -> None:
    system = FIGURE_12_SYSTEMS[MIXED]
    assert (system.packer, system.sharding) == (SYSTEMS[PAPER].packer, SYSTEMS[PLACED].sharding)
    found = replace(FEW, steps=3).compare(SEVEN, [SYSTEMS[PAPER], system])
    assert found.results[MIXED].passes is found.results[PAPER].passes
    plan = found.results[MIXED].passes.plans[0]
    sharder = system.sharders(SEVEN.cp_size, found.model.workload, found.results[MIXED].passes.config.s_max)[0]
    assert found.results[MIXED].steps[0].seconds == pytest.approx(simulate_step(plan, found.model, sharder).seconds)
