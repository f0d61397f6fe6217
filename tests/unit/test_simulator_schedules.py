"""Pipeline schedules: orders and times by hand, the textbooks' bubbles, and properties seen in the spans alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.simulator.schedules import SCHEDULES, Op, ScheduleConfig, stage_orders
from hf_wlb.simulator.timeline import OpTimes, Timeline, run_orders, run_schedule, to_trace
from hf_wlb.staging import schedule_seconds

PLAIN = ScheduleConfig()


def interleaved(chunks):
    return ScheduleConfig("interleaved", model_chunks=chunks)


def cut(pieces):
    return ScheduleConfig("seq1f1b", pieces=pieces)


def even_times(config, pp_size, micro_batches, forward=1.0, backward=2.0, send=0.0):
    """A micro-batch takes the given times on a stage, all of its chunks and pieces together."""
    shape = (pp_size * config.model_chunks, micro_batches, config.pieces)
    share = config.model_chunks * config.pieces
    return OpTimes(np.full(shape, forward / share), np.full(shape, backward / share), np.full(shape[1:], send))


@st.composite
def cases(draw, low=0):
    """A schedule, a number of stages, and random whole times, which add up without rounding."""
    name = draw(st.sampled_from(SCHEDULES))
    pp_size = draw(st.integers(1, 5))
    several = draw(st.integers(2, 4))
    micro_batches = draw(st.integers(1, 6))
    if name == "interleaved":
        config, micro_batches = interleaved(several), pp_size * draw(st.integers(1, 3))
    else:
        config = cut(several) if name == "seq1f1b" else PLAIN
    shape = (pp_size * config.model_chunks, micro_batches, config.pieces)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    times = OpTimes(random.integers(low, 9, shape), random.integers(low, 9, shape), random.integers(0, 5, shape[1:]))
    return config, pp_size, times


def text(op, config):
    """F1: the forward of micro-batch 1; F1b: in the stage's second model chunk; F1.2: its piece 2."""
    chunk = "abcdefgh"[op.chunk] if config.model_chunks > 1 else ""
    return f"{'F' if op.forward else 'B'}{op.micro_batch}{chunk}{f'.{op.piece}' if config.pieces > 1 else ''}"


def op_of(written):
    kind, micro_batch, chunk, piece = re.fullmatch(r"([FB])(\d+)([a-h]?)\.?(\d*)", written).groups()
    return Op(int(micro_batch), int(piece or 0), "abcdefgh".index(chunk or "a"), kind == "F")


def drawn(timeline, config):
    return [[(text(span.op, config), span.begin, span.end) for span in row] for row in timeline.spans]


# ---- orders, written out ----

BY_HAND = {
    ("1f1b", PLAIN, 3, 4): """
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3""",
    ("fewer micro-batches than stages", PLAIN, 3, 1): """
        F0 B0
        F0 B0
        F0 B0""",
    ("interleaved", interleaved(2), 2, 4): """
        F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a
        F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a""",
    ("interleaved, as many micro-batches as stages", interleaved(2), 2, 2): """
        F0a F1a F0b F1b B0b B1b B0a B1a
        F0a F1a F0b B0b F1b B1b B0a B1a""",
    ("seq1f1b", cut(2), 2, 2): """
        F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0
        F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0""",
    ("seq1f1b, three pieces", cut(3), 2, 2): """
        F0.0 F0.1 F0.2 F1.0 B0.2 F1.1 B0.1 F1.2 B0.0 B1.2 B1.1 B1.0
        F0.0 F0.1 F0.2 B0.2 F1.0 B0.1 F1.1 B0.0 F1.2 B1.2 B1.1 B1.0""",
}


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case[0])
def test_orders_are_those_drawn_by_hand(case):
    _, config, pp_size, micro_batches = case
    orders = stage_orders(config, pp_size, micro_batches)
    by_hand = [line.split() for line in BY_HAND[case].strip().splitlines()]
    assert [[text(op, config) for op in order] for order in orders] == by_hand
    assert [[op_of(each) for each in line] for line in by_hand] == orders


def test_warm_ups_are_those_of_the_formulas():
    for pp_size, stage in ((4, 0), (4, 3), (8, 5)):
        for config, warm_up in (
            (PLAIN, pp_size - stage - 1),
            (cut(4), pp_size - stage - 2 + 4),
            (interleaved(3), 2 * (pp_size - stage - 1) + 2 * pp_size),
        ):
            order = stage_orders(config, pp_size, 4 * pp_size)[stage]
            assert [op.forward for op in order].index(False) == warm_up + 1


# ---- times ----


def test_two_stages_with_transfers_by_hand():
    timeline = run_schedule(PLAIN, 2, even_times(PLAIN, 2, 2, send=0.5))
    assert drawn(timeline, PLAIN) == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 8, 10)],
        [("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 4.5, 5.5), ("B1", 5.5, 7.5)],
    ]
    assert (timeline.seconds, timeline.busy, timeline.waiting) == (10, (0.6, 0.6), (4, 4))
    assert (timeline.pp_size, timeline.shape) == (2, (2, 1))
    assert [span.stage for row in timeline.spans for span in row] == [0] * 4 + [1] * 4


def test_pieces_by_hand():
    timeline = run_schedule(cut(2), 2, even_times(cut(2), 2, 1, forward=2, backward=4))
    assert drawn(timeline, cut(2)) == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.1", 5, 7), ("B0.0", 7, 9)],
        [("F0.0", 1, 2), ("F0.1", 2, 3), ("B0.1", 3, 5), ("B0.0", 5, 7)],
    ]


def test_model_chunks_by_hand():
    timeline = run_schedule(interleaved(2), 2, even_times(interleaved(2), 2, 2, forward=2, backward=2))
    assert [[(name, begin) for name, begin, _ in row] for row in drawn(timeline, interleaved(2))] == [
        [("F0a", 0), ("F1a", 1), ("F0b", 2), ("F1b", 3), ("B0b", 5), ("B1b", 7), ("B0a", 8), ("B1a", 9)],
        [("F0a", 1), ("F1a", 2), ("F0b", 3), ("B0b", 4), ("F1b", 5), ("B1b", 6), ("B0a", 7), ("B1a", 8)],
    ]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 6), st.integers(0, 8))
def test_1f1b_takes_the_time_that_staging_says(data, pp_size, micro_batches):
    row = st.lists(st.floats(0, 10), min_size=micro_batches, max_size=micro_batches)
    forward, backward = (data.draw(st.lists(row, min_size=pp_size, max_size=pp_size)) for _ in range(2))
    shape = (pp_size, micro_batches, 1)
    times = OpTimes(np.reshape(forward, shape), np.reshape(backward, shape), np.zeros(shape[1:]))
    assert run_schedule(PLAIN, pp_size, times).seconds == schedule_seconds(forward, backward)


def test_control_another_order_takes_another_time():
    forward, backward = [[1, 8, 1]] * 2, [[2, 2, 2]] * 2
    times = OpTimes(*(np.reshape(each, (2, 3, 1)) for each in (forward, backward)), np.zeros((3, 1)))
    forwards_first = [[Op(i, 0, 0, forward) for forward in (True, False) for i in range(3)]] * 2
    assert run_orders(forwards_first, times).seconds != schedule_seconds(forward, backward)
    assert run_schedule(PLAIN, 2, times).seconds == schedule_seconds(forward, backward)


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_bubbles_of_equal_times_are_the_textbooks(pp_size, groups, backward):
    micro_batches = pp_size * groups
    for config, part in ((PLAIN, 1), (interleaved(2), 2), (interleaved(4), 4), (cut(2), 2), (cut(4), 4)):
        timeline = run_schedule(config, pp_size, even_times(config, pp_size, micro_batches, 1.0, backward))
        ideal = micro_batches * (1 + backward)
        assert timeline.seconds / ideal - 1 == pytest.approx((pp_size - 1) / (part * micro_batches), abs=1e-12)
        assert timeline.busy == pytest.approx([ideal / timeline.seconds] * pp_size)


def test_nothing_is_sent_within_a_stage():
    config = interleaved(3)
    times = even_times(config, 1, 4, send=100.0)
    assert run_schedule(config, 1, times).seconds == pytest.approx(12.0)
    assert run_schedule(config, 2, even_times(config, 2, 4, send=100.0)).seconds > 100


# ---- properties, from the spans alone ----


def faults(timeline, times, pp_size, chunks):
    """What a timeline breaks: an operation not run once, two at a time, one before what it needs, one idly late."""
    virtual, micro_batches, pieces = times.forward.shape
    begin, end, found = {}, {}, []
    for stage, row in enumerate(timeline.spans):
        for span in row:
            key = (span.op.chunk * pp_size + stage, span.op.micro_batch, span.op.piece, span.op.forward)
            if key in begin:
                found.append(f"{key} runs twice")
            begin[key], end[key] = span.begin, span.end
            took = (times.forward if span.op.forward else times.backward)[key[:3]]
            if span.end - span.begin != took:
                found.append(f"{key} takes another time")
        found += [f"stage {stage} overlaps" for one, two in itertools.pairwise(row) if two.begin < one.end]
    everything = itertools.product(range(virtual), range(micro_batches), range(pieces), (True, False))
    if set(begin) != set(everything):
        return [*found, "not every operation runs"]
    idle = {(0, 0, 0, True): 0.0}  # when each could begin at the earliest
    for key in begin:
        part, i, piece, forward = key
        needs = []
        if forward and part:
            needs.append(((part - 1, i, piece, True), 0 if pp_size == 1 else times.send[i, piece]))
        if forward and piece:
            needs.append(((part, i, piece - 1, True), 0))
        if not forward:
            needs.append(((part, i, piece, True), 0))
            if part + 1 < virtual:
                needs.append(((part + 1, i, piece, False), 0 if pp_size == 1 else times.send[i, piece]))
            if piece + 1 < pieces:
                needs.append(((part, i, piece + 1, False), 0))
        idle[key] = max((end[need] + send for need, send in needs), default=0)
        found += [f"{key} comes before {need}" for need, send in needs if begin[key] < end[need] + send]
    for row in timeline.spans:
        for before, span in itertools.pairwise([None, *row]):
            free = before.end if before else 0
            earliest = idle[span.op.chunk * pp_size + span.stage, span.op.micro_batch, span.op.piece, span.op.forward]
            if span.begin > max(free, earliest):
                found.append(f"{span} waits for nothing")
    return found


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_operation_runs_once_when_it_can_and_no_sooner(case):
    config, pp_size, times = case
    timeline = run_schedule(config, pp_size, times)
    assert faults(timeline, times, pp_size, config.model_chunks) == []
    assert timeline.seconds == max(span.end for row in timeline.spans for span in row)
    orders = [[span.op for span in row] for row in timeline.spans]
    assert orders == stage_orders(config, pp_size, times.forward.shape[1])
    np.testing.assert_array_equal(run_orders(orders, times).begins, timeline.begins)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda begins, ends: (begins - 0.25 * (begins > 0), ends - 0.25 * (begins > 0)), "comes before"),
        (lambda begins, ends: (begins + 1, ends + 1), "waits for nothing"),
        (lambda begins, ends: (begins, ends + 0.25), "takes another time"),
        (lambda begins, ends: (begins * 0, ends - begins), "overlaps"),
    ],
)
def test_control_faults_are_found(change, words):
    for config in (PLAIN, interleaved(2), cut(2)):
        times = even_times(config, 2, 4, forward=4.0, backward=8.0)
        good = run_schedule(config, 2, times)
        begins, ends = change(good.begins, good.ends)
        found = faults(dataclasses.replace(good, begins=begins, ends=ends), times, 2, config.model_chunks)
        assert any(words in fault for fault in found)
        twice = good.ops.copy()
        twice[0, 1] = twice[0, 0]
        found = faults(dataclasses.replace(good, ops=twice), times, 2, config.model_chunks)
        assert "not every operation runs" in found and any("runs twice" in fault for fault in found)


@settings(deadline=None, max_examples=100)
@given(cases(low=1), st.integers(0, 2**32 - 1))
def test_peak_live_is_what_a_look_at_every_moment_finds(case, seed):
    config, pp_size, times = case
    timeline = run_schedule(config, pp_size, times)
    tokens = np.random.default_rng(seed).integers(0, 1000, times.forward.shape[1:])
    for row, peak in zip(timeline.spans, timeline.peak_live(tokens), strict=True):
        forwards = [span for span in row if span.op.forward]
        ends = {span.op[:3]: span.end for span in row if not span.op.forward}
        most = max(
            sum(tokens[span.op[:2]] for span in forwards if span.begin <= moment.begin < ends[span.op[:3]])
            for moment in row
        )
        assert peak == most / config.model_chunks


def test_stages_hold_what_the_textbooks_say():
    tokens = np.full((8, 1), 10)
    assert run_schedule(PLAIN, 4, even_times(PLAIN, 4, 8)).peak_live(tokens) == [40, 30, 20, 10]
    # Megatron's first stage: pp_size (1 + (pp_size - 1) / (pp_size chunks)) micro-batches.
    config = interleaved(2)
    assert run_schedule(config, 4, even_times(config, 4, 8)).peak_live(tokens)[0] == 10 * (4 + 3 / 2)
    halves = np.full((8, 2), 5)
    assert run_schedule(cut(2), 4, even_times(cut(2), 4, 8)).peak_live(halves) == [25, 20, 15, 10]


def test_a_step_without_micro_batches_takes_no_time():
    for config in (PLAIN, interleaved(2), cut(2)):
        timeline = run_schedule(config, 2, even_times(config, 2, 0))
        assert (timeline.seconds, timeline.busy, timeline.waiting) == (0, (0, 0), (0, 0))
        assert timeline.spans == ((), ()) and timeline.shape[0] == 0
        assert timeline.peak_live(np.zeros(timeline.shape)) == [0, 0]


def test_micro_batches_that_cost_nothing_take_no_time():
    timeline = run_schedule(PLAIN, 2, even_times(PLAIN, 2, 3, 0.0, 0.0))
    assert timeline.seconds == 0 and timeline.busy == (0, 0)


@pytest.mark.parametrize("config", [PLAIN, interleaved(4), cut(4)], ids=lambda config: config.name)
def test_sixteen_stages_and_64_micro_batches_are_quick(config):
    times = even_times(config, 16, 64)
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        run_schedule(config, 16, times).peak_live(np.ones((64, config.pieces)))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.05


# ---- orders of one's own ----


def written(*lines):
    return [[op_of(each) for each in line.split()] for line in lines]


def test_orders_that_wait_for_one_another_are_refused():
    times = even_times(PLAIN, 2, 2)
    ahead, at_once = "F0 F1 B0 B1", "F0 B0 F1 B1"
    for orders in ((ahead, at_once), (ahead, ahead), (at_once, at_once)):
        assert run_orders(written(*orders), times).seconds >= 9
    with pytest.raises(ValueError, match="the step never ends") as refused:
        run_orders(written(at_once, ahead), times)
    for words in (
        r"stage 0 waits to begin the backward of micro-batch 0 \(piece 0, model chunk 0\) until the backward of "
        r"micro-batch 0 \(piece 0, model chunk 0\) ends on stage 1",
        "stage 1 waits to begin the forward of micro-batch 1 .* ends on stage 0. Change the order.",
    ):
        refused.match(words)
    with pytest.raises(ValueError, match=r"ends on stage 4, 2 more stages wait\. Change the order"):
        run_orders(written(*[at_once] * 5, ahead), even_times(PLAIN, 6, 2))


@pytest.mark.parametrize(
    ("config", "good", "bad"),
    [
        (PLAIN, "F0 F1 B1 B0", "F0 B1 F1 B0"),
        (cut(2), "F0.0 F0.1 B0.1 B0.0", "F0.1 F0.0 B0.1 B0.0"),
        (cut(2), "F0.0 F0.1 B0.1 B0.0", "F0.0 F0.1 B0.0 B0.1"),
        (cut(2), "F0.0 F0.1 B0.1 B0.0", "F0.0 B0.0 F0.1 B0.1"),
        (interleaved(2), "F0a F0b B0b B0a", "F0b F0a B0b B0a"),
        (interleaved(2), "F0a F0b B0b B0a", "F0a F0b B0a B0b"),
    ],
)
def test_a_stage_that_runs_things_before_what_they_need_is_refused(config, good, bad):
    times = even_times(config, 1, 1 + ("F1" in good))
    assert faults(run_orders(written(good), times), times, 1, config.model_chunks) == []
    with pytest.raises(ValueError, match=r"the step never ends: stage 0 waits to begin .* ends on stage 0"):
        run_orders(written(bad), times)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("F0 B0 F1", r"Stage 1 must run each of 4 operations once .* but of the 3 given the backward of micro-batch 1"),
        ("F0 B0 F1 F1", r"backward of micro-batch 1 \(piece 0, model chunk 0\) is missing"),
        ("F0 B0 F1 B1 F2", r"of the 5 given the forward of micro-batch 2 \(.*\) is none of them"),
        ("F0 B0 F1 B1b", r"micro-batch 1 .* is missing and the backward .* model chunk 1\) is none of them"),
        ("F0 B0 F1 B1 F1", "of the 5 given some stand there twice"),
    ],
)
def test_a_stage_must_run_everything_once(order, words):
    with pytest.raises(ValueError, match=words):
        run_orders(written("F0 F1 B0 B1", order), even_times(PLAIN, 2, 2))


# ---- refusals ----


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ScheduleConfig("gpipe"), "no schedule 'gpipe'; choose one of 1f1b, interleaved, seq1f1b"),
        (lambda: ScheduleConfig("interleaved"), "interleaved schedule needs model_chunks of at least 2, but 1"),
        (lambda: ScheduleConfig("seq1f1b"), "seq1f1b schedule needs pieces of at least 2, but 1"),
        (lambda: ScheduleConfig(model_chunks=2), "model_chunks=2 was given with the 1f1b .* only the interleaved"),
        (lambda: ScheduleConfig("interleaved", 2, 2), "pieces=2 was given with the interleaved .* only the seq1f1b"),
        (lambda: ScheduleConfig("seq1f1b", pieces=2.0), "pieces must be a whole number of at least 1, got 2.0"),
        (lambda: ScheduleConfig(model_chunks=0), "model_chunks must be a whole number of at least 1, got 0"),
        (lambda: stage_orders(PLAIN, 0, 4), "pp_size must be a whole number of at least 1, got 0"),
        (lambda: stage_orders(PLAIN, 2, -1), "micro_batches must be a whole number of at least 0, got -1"),
        (lambda: stage_orders(interleaved(2), 4, 6), "groups of pp_size=4, but 6 a step were given; give a multiple"),
        (lambda: OpTimes(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(3)), r"shapes \(2, 3\) and \(2, 3\)"),
        (lambda: OpTimes(np.zeros((2, 3, 1)), np.zeros((2, 4, 1)), np.zeros((3, 1))), r"\(2, 4, 1\) were given"),
        (lambda: OpTimes([[[1.0]]], [[[1.0]]], [[0.0, 0.0]]), r"send must be .* \(1, 1\), .* \(1, 2\) was given"),
        (lambda: OpTimes([[[-1.0]]], [[[1.0]]], [[0.0]]), "finite and at least 0, but forward holds -1.0"),
        (lambda: OpTimes([[[1.0]]], [[[1.0]]], [[float("nan")]]), "finite and at least 0, but send holds nan"),
        (lambda: run_schedule(PLAIN, 4, even_times(PLAIN, 2, 2)), "needs times of 4 virtual stages and 1 pieces .* 2"),
        (lambda: run_schedule(cut(3), 2, even_times(cut(2), 2, 2)), "and 3 pieces a micro-batch, but .* of 2 and 2"),
        (lambda: run_schedule(PLAIN, 0, even_times(PLAIN, 2, 2)), "pp_size must be a whole number of at least 1"),
        (lambda: run_orders([], even_times(PLAIN, 2, 2)), "pp_size must be a whole number of at least 1, got 0"),
        (lambda: run_orders([[]] * 2, even_times(PLAIN, 3, 2)), "3 virtual stages, which 2 stages cannot share"),
        (
            lambda: run_schedule(PLAIN, 2, even_times(PLAIN, 2, 3)).peak_live(np.ones(3)),
            r"in shape \(3, 1\), but shape \(3,\) was given",
        ),
    ],
)
def test_what_cannot_run_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- traces ----


def test_traces_hold_every_span():
    timelines = {
        "plain": run_schedule(PLAIN, 2, even_times(PLAIN, 2, 2, send=0.5)),
        "cut": run_schedule(cut(2), 3, even_times(cut(2), 3, 2)),
    }
    trace = json.loads(json.dumps(to_trace(timelines)))
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert named["process_name", 0, 0] == "plain" and named["process_name", 1, 0] == "cut"
    assert named["thread_name", 1, 2] == "stage 2" and len(named) == 2 + 2 + 3
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * 4 + 3 * 8
    last = spans[7]
    assert (last["name"], last["cat"], last["pid"], last["tid"]) == ("backward 1", "backward", 0, 1)
    assert (last["ts"], last["dur"]) == (5.5e6, 2e6)
    assert spans[8]["args"] == {"micro-batch": 0, "piece": 0, "model chunk": 0}
    for process, timeline in enumerate(timelines.values()):
        ends = [event["ts"] + event["dur"] for event in spans if event["pid"] == process]
        assert max(ends) == pytest.approx(timeline.seconds * 1e6)
    unnamed = to_trace(list(timelines.values()))["traceEvents"]
    assert [e["args"]["name"] for e in unnamed if e["name"] == "process_name"] == ["replica 0", "replica 1"]


def test_timelines_of_one_schedule_share_nothing_that_can_be_changed():
    timeline = run_schedule(PLAIN, 2, even_times(PLAIN, 2, 2))
    with pytest.raises(ValueError, match="read-only"):
        timeline.ops[0, 0, 0] = 1
    assert isinstance(timeline, Timeline)
