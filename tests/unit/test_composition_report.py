"""Composed steps beside whole ones of the same documents: which are compared, and by how much they differ."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hf_wlb.workload import AnalyticWorkload
from tests.support.source_tree import REPOSITORY
from tests.unit.test_end_to_end_benchmark import text_of
from tests.unit.test_stage_times_benchmark import lines, times_of

FOLDER = REPOSITORY / "recipes" / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {"report": "composition_report", "stages": "stage_times_report", "cases": "end_to_end_cases"}
    names |= {"whole": "end_to_end_report", "pilot": "pilot_report", "compose": "stage_times_compose"}
    return SimpleNamespace(**{name: __import__(module) for name, module in names.items()})


def stages(modules, **settings):
    """Plain-4D with one micro-batch that takes 0.5 s a layer and seven of 0.1 s, each of its own documents."""
    rows = lines(modules, rounds=1, **settings)
    for row in rows[2:]:
        row["micro_batch_lengths"] = [[[1000 + place, 24] for place in range(8)]]
    return modules.stages.read_launches(text_of(*rows))


def whole(modules, lengths, seconds=(7.0,), layers=(2, 1), kernel="flash-attn-2", **more):
    """A launch of whole steps on two stages, a step a round of both variants."""
    settings = asdict(modules.cases.Settings(kernel=kernel, pp_size=len(layers), layers=sum(layers)))
    streams = {
        name: {"pass_tokens": 8000, "pass_predicted": 24.0, "packer": packer, "sharding": "per_sequence"}
        for name, packer in (("plain-4d", "next-fit"), ("wlb", "steady"))
    }
    about = {"kind": "launch", "launch": "w", "settings": settings, "kernel": kernel, "device": "NVIDIA H200"}
    about |= {"devices": len(layers), "replicas": 1, "stage_layers": list(layers), "stage_of_rank": [0, 1]}
    about |= {"workload": AnalyticWorkload.from_crossover(20_000).to_dict(), "streams": streams, **more}
    steps = [
        {"kind": "step", "launch": "w", "variant": name, "round": number, "step": number, "predicted": 1.0}
        | {"seconds": taken, "micro_batch_lengths": [lengths if name == "plain-4d" else [[9]] * 8]}
        for number, taken in enumerate(seconds)
        for name in streams
    ]
    return modules.pilot.with_documents(modules.whole.read_launches(text_of(about, *steps)))


SAME = [[1000 + place, 24] for place in range(8)]


def test_a_step_is_composed_of_its_micro_batches_wherever_they_were_measured(modules) -> None:
    """In another order than they were measured in, on other stages; what WLB ran was not measured."""
    turned = SAME[::-1]
    (pair,) = modules.report.pairs(whole(modules, turned), stages(modules))
    about = {"stage_layers": [2, 1], "handover": {"cluster": "h100", "bytes_per_token": 0}}
    taken = times_of([0.5] + [0.1] * 7, head=0.01)  # the last one measured is the slow one, and now the first
    step = {"times": taken, "micro_batch_lengths": [[[1]] * 8]}
    mean = modules.compose.compose(about, step).seconds
    # The variants measured the same documents with 0.1 and 0.15 s a layer, or 0.5 and 0.15: means of both count.
    taken = times_of([(0.5 + 0.15) / 2] + [(0.1 + 0.15) / 2] * 7, head=0.01)
    expected = modules.compose.compose(about, {**step, "times": taken}).seconds
    assert pair.composed == pytest.approx(expected) and pair.composed != pytest.approx(mean)
    assert (pair.variant, pair.whole, pair.gpus) == ("plain-4d", 7.0, 2)
    assert pair.error == pytest.approx(expected / 7 - 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [*SAME[:7], [1007, 23]]},
        {"kernel": "flash-attn-4"},
        {"device": "NVIDIA H100 80GB HBM3"},
        {"replicas": 2},
        {"layers": (3,), "stage_layers": []},
    ],
)
def test_other_documents_kernels_devices_and_splits_are_not_compared(modules, changes) -> None:
    given = {"lengths": SAME, **changes}
    if changes.get("replicas"):
        launches = whole(modules, given.pop("lengths"), **given)
        assert launches[0].split.dp_size == 2
    else:
        launches = whole(modules, given.pop("lengths"), **given)
    assert modules.report.pairs(launches, stages(modules)) == []
    assert modules.report.pairs(whole(modules, SAME), stages(modules)) != []  # control


def test_settings_that_change_a_layer_s_time_are_not_compared(modules) -> None:
    assert modules.report.pairs(whole(modules, SAME), stages(modules, recompute=False)) == []
    assert modules.report.pairs(whole(modules, SAME), stages(modules, compiled=False)) == []


def test_figures_and_words_by_hand(modules) -> None:
    pair = modules.report.Pair
    pairs = [
        pair("a", "here", "plain-4d", 2, False, 10.0, 10.2),
        pair("a", "here", "plain-4d", 2, False, 10.0, 10.4),
        pair("a", "here", "plain-4d, cut", 2, False, 10.0, 9.9),
        pair("b", "there", "plain-4d", 4, True, 10.0, 9.5),
    ]
    assert modules.report.figures(pairs) == {"composition_error": 0.05, "composition_spread": 0.04}
    text = modules.report.table(pairs)
    assert "| here | plain-4d | 2 | 10.000 | 10.300 | +3.0% |" in text
    said = "whole as well, on 2 and 4 GPUs: of 3 without context parallelism by -1.0% to +4.0%; of 1 with it and its"
    nobody = " variants differ in that by 4.0% at most. None of them is `wlb`'s, which packs differently in each."
    for words in (text, modules.report.sentence(pairs)):
        assert said in words and nobody in words
    alone = [pair("b", "there", "wlb", 4, False, 10.0, 10.5)]
    assert modules.report.figures(alone) == {"composition_error": 0.05}
    one = "+5.0% to +5.0%. 1 of them is `wlb`'s, which packs differently in each."
    assert modules.report.table(alone).endswith(f"on 4 GPUs: of 1 without context parallelism by {one}")
    assert modules.report.figures([]) == {} and modules.report.sentence([]) == ""
    assert "No step" in modules.report.table([])


def test_launches_that_wrote_no_documents_down_are_left_out(modules) -> None:
    (launch,) = whole(modules, SAME)
    assert launch.variants[0].steps[0].seconds == 7.0
    old = modules.whole.read_launches(
        text_of(
            {"kind": "launch", "launch": "o", "streams": {"wlb": {}}},
            {"kind": "step", "launch": "o", "variant": "wlb", "round": 0},
        )
    )
    assert old[0].rounds and modules.pilot.with_documents(old) == []
    assert "so none is simulated" in modules.pilot.whole_table(old)
    assert modules.pilot.whole_figures(old) == {"whole_prediction_error": None, "whole_ranks_equal": None}


def test_the_committed_steps_are_within_a_few_per_cent(modules) -> None:
    """What README says of them, with room for steps that are measured later."""
    results = FOLDER / "results"
    texts = {
        name: (results / f"{name}.jsonl").read_text() for name in ("end_to_end", "end_to_end_pilot", "stage_times")
    }
    measured = [launch for launch, _ in modules.pilot.read_checks(texts["end_to_end_pilot"])]
    measured += modules.pilot.with_documents(modules.whole.read_launches(texts["end_to_end"]))
    found = modules.report.pairs(measured, modules.stages.read_launches(texts["stage_times"]))
    assert {(pair.gpus, pair.shared) for pair in found} >= {(2, False), (2, True), (4, False), (4, True)}
    assert any("CP2 PP1" in pair.where for pair in found)  # without a pipeline, too
    alone, shared = ([pair for pair in found if pair.shared is one] for one in (False, True))
    assert modules.report.figures(alone)["composition_error"] < 0.05
    assert modules.report.figures(shared)["composition_error"] < 0.08
