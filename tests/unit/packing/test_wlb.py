"""Algorithm 1 against a slow transcription of the paper's words, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.packing import Document, PackingConfig
from hf_wlb.packing.outliers import OutlierQueue
from tests.unit.packing.checks import WORKLOAD, indices, make_planner, observed, shape


def slow_algorithm_1(lengths, thresholds, n, s_max, tokens_per_step):
    """Steps as sets of micro-batches (sets of indices), by plain lists and full searches."""
    stream = list(enumerate(lengths))
    levels = [[] for _ in thresholds]
    bounds = [*thresholds, float("inf")]
    remained, credit, steps = [], 0, []
    while stream or remained or any(levels):
        new = []
        while True:  # read once, and again while there is nothing to place
            backlog = sum(length for _, length in remained) >= tokens_per_step
            if not backlog and all(len(level) < n for level in levels):
                credit += tokens_per_step
                while credit > 0 and stream:
                    document = stream.pop(0)
                    credit -= document[1]
                    level = [i for i in range(len(levels)) if bounds[i] <= document[1] < bounds[i + 1]]
                    (levels[level[0]] if level else new).append(document)
            for level in levels:
                leaving = n if len(level) >= n else 0
                for _ in range(leaving if stream else len(level)):
                    new.append(level.pop(0))
            if new or remained:
                break
        micro_batches = [[] for _ in range(n)]
        still = []
        for document in remained + sorted(new, key=lambda d: (-d[1], d[0])):
            tokens = [sum(length for _, length in m) for m in micro_batches]
            loads = [sum(WORKLOAD.document(length) for _, length in m) for m in micro_batches]
            least, shortest = loads.index(min(loads)), tokens.index(min(tokens))
            if tokens[least] + document[1] <= s_max:
                micro_batches[least].append(document)
            elif tokens[shortest] + document[1] <= s_max:
                micro_batches[shortest].append(document)
            else:
                still.append(document)
        remained = still
        steps.append(sorted(sorted(index for index, _ in m) for m in micro_batches))
    return steps


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.one_of(st.integers(1, 6), st.integers(1, 24)), max_size=40),
    st.sets(st.integers(1, 24), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([16, 20, 24]),
)
def test_plans_are_those_of_the_paper(lengths, thresholds, n, s_max):
    lengths = [min(length, s_max) for length in lengths]
    config = PackingConfig(16, n, packer="wlb", thresholds=tuple(sorted(thresholds)), max_tokens_per_micro_batch=s_max)
    plans = list(make_planner(lengths, config))
    expected = slow_algorithm_1(lengths, sorted(thresholds), n, s_max, 16 * n)
    assert [sorted(sorted(m) for r in indices(plan) for m in r) for plan in plans] == expected


def test_queue_is_first_in_first_out_by_level():
    queue = OutlierQueue([10, 100], release=2)
    lengths = [99, 9, 100, 10, 500, 50, 100, 20]
    assert [queue.add(Document(i, 0, n, float(n), 0)) for i, n in enumerate(lengths)] == [
        True, False, True, True, True, True, True, True,
    ]  # fmt: skip
    assert queue.has_full_level
    assert [d.index for d in queue.pop_full_levels()] == [0, 3, 2, 4]
    assert [d.index for d in queue.pop_full_levels()] == [5, 7]
    assert not queue.has_full_level and queue.pop_full_levels() == []
    assert [d.index for d in queue] == [6]
    assert [d.index for d in queue.pop_all()] == [6] and list(queue) == []


def test_outliers_leave_n_at_a_time_by_hand():
    # Two micro-batches of 10 tokens on average; documents of 6 and more wait until two of them do.
    config = PackingConfig(10, 2, packer="wlb", thresholds=(6,), max_tokens_per_micro_batch=15)
    lengths = [6, 4, 4, 3, 3, 7, 5, 5, 3, 2, 2, 2, 2, 2, 8, 4, 4, 4]
    plans, _ = observed(make_planner(lengths, config))
    assert [(shape(plan)[0], indices(plan)[0], plan.flush) for plan in plans] == [
        ([[4, 3], [4, 3]], [[1, 3], [2, 4]], False),  # read 20 tokens; 6 waits
        ([[6, 5, 3], [7, 5]], [[0, 6, 8], [5, 7]], False),  # 7 arrives: both leave, one to each; 6 waited a step
        ([[2, 2, 2, 2], [4, 2]], [[9, 10, 11, 13], [15, 12]], False),  # 8 waits; read 22 tokens
        ([[8], [4, 4]], [[14], [16, 17]], True),  # the data ends: flush
    ]
    assert {d.index: plan.step - d.arrived for plan in plans for d in plan.documents if d.length >= 6} == {
        0: 1, 5: 0, 14: 1,
    }  # fmt: skip


@pytest.mark.parametrize("packer", ["wlb", "steady"])
def test_a_document_of_exactly_s_max_is_placed(packer):
    lengths = [12, 3, 3, 3, 12, 3, 12, 3, 3, 3, 3]
    config = PackingConfig(10, 2, packer=packer, max_tokens_per_micro_batch=12, thresholds=(11,))
    planner = make_planner(lengths, config)
    plans = list(planner)
    assert planner.counts.split == 0
    assert sum(d.length == 12 and d.start == 0 for plan in plans for d in plan.documents) == 3


def test_flush_takes_as_many_steps_as_it_needs():
    config = PackingConfig(10, 2, packer="wlb", thresholds=(6, 7, 8, 9), max_tokens_per_micro_batch=10)
    plans, _ = observed(make_planner([6, 7, 8, 9, 1], config))
    assert [plan.flush for plan in plans][-1] and sum(d.length for p in plans for d in p.documents) == 31
    assert len(plans) >= 2


def test_data_full_of_outliers_does_not_pile_up():
    config = PackingConfig(100, 4, packer="wlb")
    _, metrics = observed(planner := make_planner([70] * 2000, config))
    report = metrics.report(planner)
    assert report.waiting_peak_contexts <= 8
    assert report.delay_worst <= 3
