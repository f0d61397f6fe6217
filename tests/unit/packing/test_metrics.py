"""The report by hand: every figure of a small pass, and each of the traps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.packing import Document, MicroBatch, PackingConfig, PackingMetrics, StepPlan, measure
from tests.unit.packing.checks import make_planner

CONFIG = PackingConfig(context_length=10, micro_batches_per_replica=2, pp_size=3)


def document(index, length, workload, arrived, start=0):
    return Document(index, start, length, float(workload), arrived)


def plan_of(step, *micro_batches, flush=False):
    return StepPlan(step, (tuple(MicroBatch.of(list(m)) for m in micro_batches),), flush)


class Finished:
    """Stands in for a planner: what ``report`` asks of one."""

    def __init__(self, step, waiting=()):
        self.step, self.waiting = step, list(waiting)
        self.counts = make_planner([], CONFIG).counts


def hand_made():
    metrics = PackingMetrics(CONFIG)
    late = document(3, 4, 8, arrived=0)
    figures = [
        metrics.observe(plan_of(0, [document(0, 6, 6, 0)], [document(1, 10, 10, 0)]), [late], seconds=0.002),
        metrics.observe(
            plan_of(1, [document(2, 4, 4, 1), late], [document(4, 6, 12, 1, start=3)]), [document(5, 5, 5, 1)]
        ),
        metrics.observe(plan_of(2, [document(5, 5, 5, 1)], [], flush=True), []),
    ]
    return metrics, figures


def test_every_figure_by_hand():
    metrics, figures = hand_made()
    assert figures[0] == {
        "imbalance": 10 * 2 / 16,
        "time_gap": (16 + 2 * 10) / (8 * 4),
        "delay": 0.0,
        "tokens": 16,
        "waiting_contexts": 0.4,
        "plan_ms": 2.0,
    }
    assert "plan_ms" not in figures[2]
    assert figures[1]["delay"] == 4 * 1 / 14
    report = metrics.report(Finished(step=3))
    assert (report.steps, report.flush_steps) == (2, 1)
    assert report.imbalance == pytest.approx((1.25 + 1.0) / 2)
    assert report.imbalance_worst == 1.25
    assert report.step_time == (16 + 2 * 10) + (24 + 2 * 12)
    assert report.time_gap == (36 + 48) / (8 * 4 + 12 * 4)
    assert report.delay == 4 / (16 + 14)
    assert report.delay_worst == 1
    assert report.waiting_peak_contexts == 0.5
    assert report.waiting_mean_contexts == pytest.approx((4 + 5 + 0) / 3 / 10)
    assert report.tokens == 30 and report.tokens_per_step == 15
    assert report.token_variation == pytest.approx(1 / 15)
    assert report.context_lost == 6 / 35
    assert (report.flush_delay, report.flush_imbalance) == (1.0, 2.0)
    assert report.plan_ms == pytest.approx(2, rel=0.01) and report.plan_ms_p99 == pytest.approx(2, rel=0.01)
    assert report.to_dict()["packer"] == "steady"


def test_documents_still_waiting_count_at_their_present_age():
    metrics, _ = hand_made()
    report = metrics.report(Finished(step=3, waiting=[document(9, 20, 1, arrived=1)]))
    assert report.delay == pytest.approx((4 * 1 + 20 * 2) / (30 + 20))  # tokens, not documents
    assert report.delay_worst == 2
    # Negative control: leaving them out would flatter a packer that holds documents back.
    assert report.delay > metrics.report(Finished(step=3)).delay


def test_the_delay_weighs_tokens():
    metrics = PackingMetrics(CONFIG)
    metrics.observe(plan_of(5, [document(0, 1, 1, arrived=0)], [document(1, 9, 9, arrived=5)]), [])
    assert metrics.report(Finished(step=6)).delay == 0.5  # a mean over documents would give 2.5
    assert metrics.report(Finished(step=6)).delay_worst == 5


def test_a_packer_that_only_waits_shows_it():
    """Outliers that never leave within the steps measured still raise the mean delay."""
    lengths = [8] * 4 + [1] * 100
    planner = make_planner(lengths, PackingConfig(10, 8, packer="wlb", thresholds=(8,)))
    report = measure(planner, max_steps=1)
    assert report.steps == 1 and report.waiting_peak_contexts == 3.2
    assert report.delay == pytest.approx(32 / (32 + report.tokens))
    assert report.delay_worst == 1


def test_an_empty_pass_has_a_report_without_nan():
    report = measure(make_planner([], CONFIG))
    assert (report.steps, report.flush_steps, report.tokens, report.documents) == (0, 0, 0, 0)
    assert report.time_gap == 1.0 and report.context_lost == 0
    assert not any(math.isnan(v) for v in report.to_dict().values() if isinstance(v, float))


def test_measure_stops_at_max_steps_and_goes_on():
    planner = make_planner([5] * 100, CONFIG)
    assert measure(planner, max_steps=3).steps == planner.step == 3
    rest = measure(planner)
    assert 3 + rest.steps + rest.flush_steps == planner.step == 25


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 25), max_size=80), st.sampled_from(["steady", "wlb", "greedy", "next-fit"]))
def test_figures_agree_with_the_plans(lengths, packer):
    config = PackingConfig(10, 2, dp_size=2, pp_size=2, packer=packer, max_tokens_per_micro_batch=15)
    plans = list(make_planner(lengths, config))
    report = measure(make_planner(lengths, config))
    regular = [plan for plan in plans if not plan.flush]
    tokens = [plan.tokens for plan in regular]
    waited = sum(d.length * (plan.step - d.arrived) for plan in regular for d in plan.documents)
    degrees = [
        max(m.workload for m in plan.micro_batches) * 4 / sum(m.workload for m in plan.micro_batches)
        for plan in regular
    ]
    assert report.steps == len(regular) and report.flush_steps == len(plans) - len(regular)
    assert report.delay == pytest.approx(waited / sum(tokens) if tokens else 0.0)
    assert report.imbalance == pytest.approx(np.mean(degrees) if degrees else 0.0)
    assert report.token_variation == pytest.approx(np.std(tokens) / np.mean(tokens) if tokens else 0.0, abs=1e-7)
    assert report.time_gap >= 1 - 1e-9
    pieces = [d for plan in plans for d in plan.documents]
    cut = sum(d.length for d in pieces if d.start)
    assert report.context_lost == pytest.approx(cut / max(1, sum(d.length for d in pieces)))
    assert report.source_tokens == sum(lengths) and report.dropped == 0
