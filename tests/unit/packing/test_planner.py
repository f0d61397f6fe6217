"""Every packer: each document exactly once, resume at any step, equal shapes, errors in sentences."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.lengths import RandomOrder
from hf_wlb.packing import PACKER_NAMES, ArraySource, PackingConfig, StepPlanner
from hf_wlb.workload import AnalyticWorkload
from tests.unit.packing.checks import (
    WORKLOAD,
    check_counts,
    check_exactly_once,
    check_plans,
    check_resume,
    make_planner,
    run_and_save,
)

QUICK_PACKERS = tuple(name for name in PACKER_NAMES if name != "solver")


@st.composite
def configs(draw, packer: str) -> PackingConfig:
    solver = packer == "solver"
    context = draw(st.integers(1, 24))
    thresholds = draw(st.none() | st.sets(st.integers(1, 40), min_size=1, max_size=3))
    s_max = context * draw(st.sampled_from([100, 101, 125, 150, 200, 500])) // 100
    return PackingConfig(
        context_length=context,
        micro_batches_per_replica=draw(st.integers(1, 2 if solver else 5)),
        dp_size=draw(st.integers(1, 2 if solver else 4)),
        pp_size=draw(st.integers(1, 4)),
        sharded_parameters=draw(st.booleans()),
        packer=packer,  # type: ignore[arg-type]
        max_tokens_per_micro_batch=draw(st.none() | st.just(s_max)),
        oversize=draw(st.sampled_from(["split", "truncate"])),
        empty="skip",
        thresholds=None if thresholds is None else tuple(sorted(thresholds)),
        outlier_tokens=draw(st.none() | st.integers(1, 40)),
        max_time_gap=draw(st.sampled_from([0.0, 0.03, 1.0])),
        max_wait_steps=draw(st.integers(1, 6)),
        max_waiting_contexts=draw(st.none() | st.floats(0.1, 5)),
        window_steps=draw(st.integers(1, 2 if solver else 3)),
        solver_seconds=5.0,
    )


@st.composite
def lengths_for(draw, config: PackingConfig, most: int = 60) -> list[int]:
    """From all kinds of data: short, long, equal, bursts; with 0, 1, S_max, S_max + 1 and huge ones among them."""
    s_max, context = config.s_max, config.context_length
    special = st.sampled_from([0, 1, context, context + 1, s_max, s_max + 1, 2 * s_max, 7 * s_max + 3])
    kinds = [
        st.integers(1, max(1, context // 4)),
        st.integers(1, s_max),
        st.integers(max(1, context * 6 // 10), s_max),
        st.just(draw(st.integers(1, s_max))),
        st.one_of(st.integers(1, 2), special),
        special,
    ]
    parts = draw(st.lists(st.sampled_from(range(len(kinds))), max_size=3))
    return [n for kind in parts for n in draw(st.lists(kinds[kind], max_size=most // 3))]


@settings(deadline=None, max_examples=120)
@given(st.data(), st.sampled_from(QUICK_PACKERS))
def test_every_document_once_and_resume_at_every_step(data, packer):
    config = data.draw(configs(packer))
    lengths = data.draw(lengths_for(config))
    plans = check_resume(lengths, config)
    check_plans(lengths, plans, config)
    check_counts(lengths, run_and_save(lengths, config)[2])


@settings(deadline=None, max_examples=250)
@given(st.data(), st.sampled_from(["steady", "steady", "wlb", "greedy"]))
def test_every_document_once_in_longer_data(data, packer):
    config = data.draw(configs(packer))
    lengths = data.draw(lengths_for(config)) * data.draw(st.integers(1, 6))
    plans, _, planner = run_and_save(lengths, config)
    check_plans(lengths, plans, config)
    check_counts(lengths, planner)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_every_document_once_with_the_solver(data):
    config = data.draw(configs("solver"))
    lengths = data.draw(lengths_for(config, most=15))[:12]
    plans = check_resume(lengths, config)
    check_plans(lengths, plans, config)
    check_counts(lengths, run_and_save(lengths, config)[2])


@pytest.mark.parametrize("packer", PACKER_NAMES)
def test_no_documents_give_no_steps(packer):
    planner = make_planner([], PackingConfig(8, 2, packer=packer))
    assert list(planner) == []
    check_counts([], planner)
    assert list(make_planner([0, 0], PackingConfig(8, 2, packer=packer, empty="skip"))) == []


@pytest.mark.parametrize("packer", PACKER_NAMES)
@pytest.mark.parametrize("length", [1, 10, 11, 1000])
def test_one_document(packer, length):
    config = PackingConfig(8, 2, dp_size=2, packer=packer, max_tokens_per_micro_batch=10)
    plans = check_resume([length], config)
    check_plans([length], plans, config)


# ---- negative controls: the checkers notice what they are there to notice ----


def edited(plans, change):
    """The plans with the documents of the first non-empty micro-batch changed."""
    first, *rest = plans
    replicas = [list(replica) for replica in first.replicas]
    place = next((r, m) for r, replica in enumerate(replicas) for m, mb in enumerate(replica) if mb.documents)
    old = replicas[place[0]][place[1]]
    replicas[place[0]][place[1]] = dataclasses.replace(old, documents=tuple(change(list(old.documents))))
    return [dataclasses.replace(first, replicas=tuple(map(tuple, replicas))), *rest]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda documents: documents[1:], "tokens planned of"),
        (lambda documents: [*documents, documents[0]], "a piece starts at"),
        (lambda documents: [documents[0]._replace(length=documents[0].length - 1), *documents[1:]], "planned of"),
        (lambda documents: [documents[0]._replace(start=1), *documents[1:]], "a piece starts at 1"),
        (lambda documents: [*documents, documents[0]._replace(index=99)], "unknown documents"),
    ],
)
def test_control_a_wrong_plan_is_noticed(change, message):
    lengths = [5, 3, 8, 2, 7]
    plans = list(make_planner(lengths, PackingConfig(8, 2)))
    check_exactly_once(lengths, plans)
    with pytest.raises(AssertionError, match=message):
        check_exactly_once(lengths, edited(plans, change))


def test_control_a_lost_waiting_document_is_noticed():
    config = PackingConfig(32, 2, packer="wlb", thresholds=(16,))
    lengths = [20, 3, 4, 5, 9, 7, 8, 8, 8, 8, 8, 8, 8]
    planner = make_planner(lengths, config)
    plans = [next(planner)]
    state = planner.state_dict()
    assert len(state["packer"]["queue"][0]) == 1
    state["packer"]["queue"][0] = []
    planner.load_state_dict(state)
    with pytest.raises(AssertionError, match="tokens planned of"):
        check_exactly_once(lengths, plans + list(planner))


# ---- determinism and digests ----


@pytest.mark.parametrize("packer", PACKER_NAMES)
def test_two_planners_agree_on_every_digest(packer):
    lengths = np.random.default_rng(1).integers(1, 30, 24).tolist()
    config = PackingConfig(32, 2, dp_size=2, pp_size=2, packer=packer)
    first, second = (list(make_planner(lengths, config)) for _ in range(2))
    assert [plan.digest() for plan in first] == [plan.digest() for plan in second]
    assert all(0 <= plan.digest() < 2**63 for plan in first)
    assert len({plan.digest() for plan in first}) == len(first)


def test_the_digest_depends_on_every_document_place_and_length():
    plans = list(make_planner([5, 3, 8, 2, 7, 4], PackingConfig(16, 2, dp_size=2)))
    plan = plans[0]
    changes = [
        lambda documents: [documents[0]._replace(length=documents[0].length + 1), *documents[1:]],
        lambda documents: [documents[0]._replace(start=1), *documents[1:]],
        lambda documents: [documents[0]._replace(index=77), *documents[1:]],
        lambda documents: documents[1:],
    ]
    others = [edited([plan], change)[0] for change in changes]
    first, second = plan.replicas
    others.append(dataclasses.replace(plan, replicas=(second, first)))
    others.append(dataclasses.replace(plan, replicas=(first[::-1], second)))
    others.append(dataclasses.replace(plan, replicas=(first + second,)))
    others.append(dataclasses.replace(plan, step=1))
    digests = {plan.digest(), *(other.digest() for other in others)}
    assert len(digests) == 1 + len(others)


# ---- states that belong to something else ----

LENGTHS = np.array([5, 3, 8, 2, 7, 4, 6, 1] * 4)
CONFIG = PackingConfig(16, 2)


def saved_state() -> dict:
    planner = StepPlanner(ArraySource(LENGTHS), WORKLOAD, CONFIG)
    next(planner)
    return json.loads(json.dumps(planner.state_dict()))


@pytest.mark.parametrize(
    ("source", "config", "workload", "message"),
    [
        (ArraySource(LENGTHS[:-1]), CONFIG, WORKLOAD, "another data set.*pass the data set, seed and epoch"),
        (ArraySource(LENGTHS[::-1].copy()), CONFIG, WORKLOAD, "another data set, or .* another order"),
        (ArraySource(np.where(LENGTHS == 8, 9, LENGTHS)), CONFIG, WORKLOAD, "another data set"),
        (ArraySource(LENGTHS, RandomOrder(32, seed=0, epoch=0)), CONFIG, WORKLOAD, "another order"),
        (
            ArraySource(LENGTHS),
            dataclasses.replace(CONFIG, dp_size=2, micro_batches_per_replica=1),
            WORKLOAD,
            "other packing settings.*micro_batches_per_replica: 2 -> 1; dp_size: 1 -> 2.*same settings, or start anew",
        ),
        (ArraySource(LENGTHS), CONFIG, AnalyticWorkload.from_crossover(17), "another workload model.*Resume with that"),
    ],
)
def test_a_state_of_something_else_is_refused(source, config, workload, message):
    with pytest.raises(ValueError, match=message):
        StepPlanner(source, workload, config).load_state_dict(saved_state())
    StepPlanner(ArraySource(LENGTHS), WORKLOAD, CONFIG).load_state_dict(saved_state())  # its own is taken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "hf_wlb.planner/0"}, "has schema 'hf_wlb.planner/0'.*reads 'hf_wlb.planner/1'; resume with"),
        ({"schema": None}, "has schema None"),
        ({"reader": ...}, "is incomplete: it lacks reader; pass all of what"),
    ],
)
def test_a_state_of_another_version_is_refused(change, message):
    state = {key: value for key, value in {**saved_state(), **change}.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        StepPlanner(ArraySource(LENGTHS), WORKLOAD, CONFIG).load_state_dict(state)


def test_the_epoch_is_part_of_the_state():
    lengths = np.arange(1, 41)
    planner = StepPlanner(ArraySource(lengths, RandomOrder(40, seed=3, epoch=0)), WORKLOAD, CONFIG)
    next(planner)
    other = StepPlanner(ArraySource(lengths, RandomOrder(40, seed=3, epoch=1)), WORKLOAD, CONFIG)
    with pytest.raises(ValueError, match="seed and epoch"):
        other.load_state_dict(planner.state_dict())
    check_exactly_once(lengths.tolist(), list(other))
