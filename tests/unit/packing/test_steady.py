"""steady: constant tokens per step, bounded waiting, and data that a packer of outliers finds hard."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.lengths import sample_lengths
from hf_wlb.packing import PackingConfig, measure, outlier_pool
from hf_wlb.packing.outlier_pool import oldest_first
from hf_wlb.packing.steady import OVERFULL
from hf_wlb.workload import AnalyticWorkload
from tests.unit.packing.checks import check_plans, make_planner, observed
from tests.unit.packing.test_planner import configs, lengths_for


def report_of(lengths, config, steps=None):
    lengths = [int(length) for length in lengths]
    plans, metrics = observed(planner := make_planner(lengths, config))
    check_plans(lengths, plans, config)
    return metrics.report(planner), plans


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_due_document_waits_only_for_older_due_ones(data):
    config = data.draw(configs("steady"))
    lengths = data.draw(lengths_for(config)) * data.draw(st.integers(1, 4))
    planner = make_planner(lengths, config)
    for plan in planner:
        latest = plan.step - config.max_wait_steps
        gone = [oldest_first(d) for d in plan.documents if d.arrived <= latest]
        for document in planner.waiting:
            if document.arrived <= latest:
                older = sum(key < oldest_first(document) for key in gone)
                assert older >= config.micro_batches


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_waiting_is_bounded_whatever_the_data(data):
    config = data.draw(configs("steady"))
    lengths = data.draw(lengths_for(config)) * data.draw(st.integers(1, 6))
    planner = make_planner(lengths, config)
    step_holds = config.micro_batches * config.s_max
    for _ in planner:
        pool, remained = planner._packer._pool, planner._packer._remained
        assert pool.tokens == sum(d.length for d in pool) <= OVERFULL * config.waiting_limit + config.s_max
        # Before the last document was read the step still had room and the pool was not overfull.
        total = pool.tokens + sum(d.length for d in remained)
        assert total <= OVERFULL * config.waiting_limit + step_holds + config.s_max


@pytest.mark.parametrize(
    "layout", [{"pp_size": 4}, {"dp_size": 2, "pp_size": 2}, {"dp_size": 2, "sharded_parameters": True}]
)
def test_tokens_per_step_are_constant(layout):
    lengths = -(-sample_lengths(20_000, seed=0) // 16)
    workload = AnalyticWorkload.from_crossover(1536)
    config = PackingConfig(8192, 4, **layout)
    _, metrics = observed(planner := make_planner(lengths, config, workload=workload))
    report = metrics.report(planner)
    assert report.steps >= 60
    assert report.token_variation <= 0.03
    assert report.tokens_per_step == pytest.approx(config.tokens_per_step, rel=0.01)
    assert report.delay_worst <= config.max_wait_steps
    assert report.waiting_peak_contexts <= 1.5 * config.waiting_limit / config.context_length
    baseline = measure(make_planner(lengths, PackingConfig(8192, 4, packer="next-fit", **layout), workload=workload))
    assert report.time_gap < 1.06 < baseline.time_gap


HARD = {
    "all 0.7 of the context": [70] * 1000,
    "all above half the context": list(range(60, 125)) * 10,
    "all outliers of all lengths": list(range(13, 125)) * 10,
    "one giant document": [5] * 50 + [50_000] + [5] * 500,
    "a burst of outliers": [5] * 1000 + [90] * 100 + [5] * 2000,
    "outliers first": [120] * 8 + [5] * 2000,
    "half of the tokens in outliers": ([110] + [4] * 27) * 60,
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_hard_data_neither_starves_nor_piles_up(name, micro_batches):
    config = PackingConfig(100, micro_batches, pp_size=2)
    report, plans = report_of(HARD[name], config)
    assert report.waiting_peak_contexts <= 1.5 * config.waiting_limit / 100 + 2.5 * micro_batches
    at_once = (report.waiting_peak_contexts * 100) / (0.5 * micro_batches * config.s_max)
    assert report.delay_worst <= config.max_wait_steps + at_once
    # What cannot be packed well is packed as well as it can be: one document of 0.7 contexts to a micro-batch.
    assert sum(HARD[name]) / len(plans) >= (0.69 if "above half" not in name and "0.7" not in name else 0.6) * (
        config.tokens_per_step
    )


def test_equal_documents_need_not_wait():
    report, plans = report_of([10] * 3000, PackingConfig(100, 4))
    assert len(plans) == 75 and report.delay == 0 and report.imbalance == 1.0 and report.token_variation == 0


def test_a_step_of_one_micro_batch_waits_for_room_only():
    """Documents as long as the context met left-overs there, and waited 5 steps on average and 24 at worst."""
    lengths = np.maximum(np.minimum(sample_lengths(4_000, seed=0), 8192) // 16, 1)
    report, _ = report_of(lengths, PackingConfig(context_length=512, micro_batches_per_replica=1))
    assert report.delay < 0.3
    assert report.delay_worst <= 8
    assert report.tokens / report.steps == pytest.approx(512, rel=0.02)


def test_a_left_over_document_does_not_starve_behind_longer_ones():
    config = PackingConfig(10, 1, max_tokens_per_micro_batch=12, outlier_tokens=100, max_wait_steps=4)
    report, plans = report_of([7, 6, *[7] * 100], config)
    trained = next(plan.step for plan in plans for d in plan.documents if d.index == 1)
    assert trained == 4
    assert report.delay_worst <= 5


def test_much_more_memory_than_context_loses_nothing():
    """A document of several steps' tokens leaves a debt; the pass must not end on a step without room."""
    config = PackingConfig(4, 1, max_tokens_per_micro_batch=40, outlier_tokens=100)
    _, plans = report_of([40, 1, 2, 3, 40, 1, 1], config)
    assert len(plans) >= 3


def test_fewer_documents_than_micro_batches_on_uneven_replicas():
    """An empty micro-batch that should stay light has nothing that the local search could move."""
    config = PackingConfig(2, 2, dp_size=4, pp_size=4, max_tokens_per_micro_batch=4, max_time_gap=0.0, max_wait_steps=1)
    _, plans = report_of([3] * 6, config)
    assert len(plans) <= 2


def test_context_of_one_token():
    report, plans = report_of([1] * 20 + [3], PackingConfig(1, 2))
    assert [plan.tokens for plan in plans] == [2] * 11 + [1]
    assert report.split == 1 and report.pieces == 3


def test_outliers_of_similar_workload_leave_together():
    """Two that differ wait for their like, and the step that takes them is balanced."""
    config = PackingConfig(100, 2, pp_size=4, max_time_gap=0.001)
    lengths = [4] * 100 + [100] + [4] * 100 + [100] + [4] * 100
    _, plans = report_of(lengths, config)
    steps = [plan.step for plan in plans for d in plan.documents if d.length == 100]
    assert steps[0] == steps[1]
    both = plans[steps[0]]
    assert [sum(d.length == 100 for d in m.documents) for m in both.micro_batches] == [1, 1]


def test_trying_every_nth_window_only_loses_nothing(monkeypatch):
    """With many micro-batches and replicas the cheapest window is sought among some of them."""
    lengths = np.random.default_rng(5).choice([3, 5, 40, 90, 120, 125], 1500, p=[0.4, 0.4, 0.05, 0.05, 0.05, 0.05])
    config = PackingConfig(100, 4, dp_size=2, pp_size=4, max_wait_steps=4, max_waiting_contexts=6)
    full, _ = report_of(lengths, config)
    monkeypatch.setattr(outlier_pool, "WINDOW_WORK", 16)
    thinned, _ = report_of(lengths, config)
    assert thinned.tokens + 2 * config.tokens_per_step >= full.tokens
    assert thinned.delay_worst <= 6 and thinned.waiting_peak_contexts <= 1.5 * 6 + 4
    assert thinned.time_gap <= full.time_gap * 1.1


def test_a_large_step_is_planned_in_reasonable_time():
    lengths = (np.random.default_rng(0).pareto(1.1, 40_000) * 300 + 20).clip(1, 8192).astype(int)
    planner = make_planner(lengths, PackingConfig(8192, 128, dp_size=4, packer="greedy"))
    assert len(next(planner).replicas[0]) == 128
    planner = make_planner(lengths, PackingConfig(8192, 512, pp_size=4))
    assert next(planner).tokens >= 500 * 8192


def test_parameters_that_only_context_parallel_ranks_share_change_no_plan() -> None:
    lengths = np.minimum(np.random.default_rng(3).lognormal(6, 1.5, 2000).astype(int) + 1, 8192)

    def plans(dp_size: int, sharded: bool) -> list[list[list[int]]]:
        config = PackingConfig(8192, 4, dp_size=dp_size, sharded_parameters=sharded)
        return [[[d.length for d in m.documents] for m in plan.micro_batches] for plan in make_planner(lengths, config)]

    assert plans(1, True) == plans(1, False)  # one replica waits for no other
    assert plans(2, True) != plans(2, False)
