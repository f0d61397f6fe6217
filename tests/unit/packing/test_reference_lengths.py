"""The figures that must be reached on reference lengths: 128K context, attention equals linear work at 24K tokens."""

from __future__ import annotations

import numpy as np
import pytest

from hf_wlb.lengths import load_lengths, sample_lengths
from hf_wlb.packing import ArraySource, PackingConfig, PackingReport, StepPlanner, measure
from hf_wlb.workload import AnalyticWorkload

CONTEXT = 131_072
WORKLOAD = AnalyticWorkload.from_crossover(24 * 1024)


@pytest.fixture(scope="module", params=["reference file", "built-in sampler"])
def lengths(request, shared_data) -> np.ndarray:
    if request.param == "built-in sampler":
        return sample_lengths(230_000, seed=0)
    stored = np.asarray(load_lengths(shared_data / "lengths_wlb_128k.json"))
    return np.tile(stored, -(-230_000 // len(stored)))


def report_of(lengths: np.ndarray, steps: int, micro_batches: int = 4, **settings) -> PackingReport:
    config = PackingConfig(CONTEXT, micro_batches, pp_size=4, **settings)
    report = measure(StepPlanner(ArraySource(lengths), WORKLOAD, config), steps)
    assert (report.steps, report.flush_steps, report.dropped) == (steps, 0, 0)
    return report


def test_algorithm_1_with_two_queues(lengths):
    report = report_of(
        lengths, 400, packer="wlb", thresholds=(32_768, 65_536), max_tokens_per_micro_batch=CONTEXT * 3 // 2
    )
    assert report.imbalance <= 1.05
    assert report.delay <= 0.5
    assert report.context_lost == 0


def test_steady(lengths):
    report = report_of(lengths, 400)
    assert report.imbalance <= 1.02
    assert report.token_variation <= 0.03
    assert report.delay <= 1.0
    assert report.delay_worst <= 20
    assert report.context_lost == 0 and report.split == 0


def test_steady_with_64_micro_batches(lengths):
    report = report_of(lengths, 100, micro_batches=16, dp_size=4)
    assert report.time_gap <= 1.06
    assert report.waiting_mean_contexts <= 20
    assert report.token_variation <= 0.03


def test_baselines_are_as_far_off_as_the_paper_says(lengths):
    """Negative control: the figures above are not reached by packing in order or within one global batch."""
    next_fit = report_of(lengths, 200, packer="next-fit")
    concat = report_of(lengths, 200, packer="concat-and-cut")
    greedy = report_of(lengths, 200, packer="greedy")
    assert next_fit.imbalance >= 1.3 and next_fit.delay == 0
    assert concat.imbalance >= 1.2 and concat.context_lost >= 0.05
    assert greedy.imbalance >= 1.2
    assert report_of(lengths, 60, micro_batches=16, dp_size=4, packer="next-fit").time_gap >= 1.15
