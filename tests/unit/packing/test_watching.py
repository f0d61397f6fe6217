from dataclasses import replace

import numpy as np
import pytest

from hf_wlb.lengths import sample_lengths
from hf_wlb.packing import ArraySource, PackingConfig, StepPlanner, measure, tokens_by_wait, watch
from hf_wlb.workload import AnalyticWorkload

LENGTHS = sample_lengths(3000, seed=1)
WORKLOAD = AnalyticWorkload.from_crossover(32_768)
CONFIG = PackingConfig(131_072, micro_batches_per_replica=4, pp_size=2, max_document_tokens=131_072)


def planner(packer: str, **settings) -> StepPlanner:
    return StepPlanner(ArraySource(LENGTHS), WORKLOAD, replace(CONFIG, packer=packer, **settings))


@pytest.mark.parametrize("packer", ["steady", "wlb", "greedy", "next-fit", "concat-and-cut"])
def test_watching_changes_nothing_and_shows_all_that_waits(packer: str) -> None:
    alone = [plan.digest() for plan in planner(packer)]
    watched_planner = planner(packer)
    steps = watch(watched_planner)
    assert [step.plan.digest() for step in steps] == alone
    again = planner(packer)
    for step in steps:
        next(again)
        shown = [*(document for queue in step.queues for document in queue), *step.left_over]
        assert sorted(shown) == sorted(again.waiting)
    assert watch(watched_planner) == []


def test_queues_are_the_packers_own() -> None:
    thresholds = (32_768, 65_536)
    for step in watch(planner("wlb", thresholds=thresholds)):
        low, high = step.queues
        assert all(thresholds[0] <= document.length < thresholds[1] for document in low)
        assert all(document.length >= thresholds[1] for document in high)
        assert step.plan.flush or max(len(low), len(high)) < 2 * CONFIG.micro_batches
    pools = [step.queues for step in watch(planner("steady"))]
    assert all(len(queues) == 1 for queues in pools) and any(queues[0] for queues in pools)
    assert all(list(pool) == sorted(pool, key=lambda d: -d.workload) for (pool,) in pools)
    assert all(step.queues == () for step in watch(planner("next-fit")))


def test_only_so_many_steps_are_taken() -> None:
    source = planner("steady")
    first, second = watch(source, 3), watch(source, 2)
    assert [step.plan.step for step in (*first, *second)] == [0, 1, 2, 3, 4]
    assert watch(source, 0) == []


@pytest.mark.parametrize("packer", ["steady", "wlb"])
def test_figures_and_waits_agree_with_the_report(packer: str) -> None:
    report = measure(planner(packer))
    steps = watch(planner(packer))
    regular = [step for step in steps if not step.plan.flush]
    assert len(regular) == report.steps < len(steps)
    assert np.mean([step.figures["imbalance"] for step in regular]) == pytest.approx(report.imbalance)
    waits = tokens_by_wait(steps)
    assert sum(waits) == sum(step.plan.tokens for step in regular) == report.tokens
    mean = sum(wait * tokens for wait, tokens in enumerate(waits)) / sum(waits)
    assert mean == pytest.approx(report.delay)  # nothing waits at the end: the data were watched to their last step
    assert waits[-1] > 0 and len(waits) > 1


def test_control_of_nothing_waiting() -> None:
    assert tokens_by_wait([]) == [0]
    assert len(tokens_by_wait(watch(planner("next-fit")))) == 1
