"""What every packer must keep, checked from outside: exactly once, capacity, shape, progress, resume."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from hf_wlb.packing import ArraySource, MicroBatch, PackingConfig, PackingMetrics, StepPlan, StepPlanner
from hf_wlb.workload import AnalyticWorkload

WORKLOAD = AnalyticWorkload.from_crossover(16)


def make_planner(lengths: Sequence[int], config: PackingConfig, **others) -> StepPlanner:
    return StepPlanner(ArraySource(np.array(lengths, dtype=np.int64)), others.get("workload", WORKLOAD), config)


def shape(plan: StepPlan) -> list[list[list[int]]]:
    """Lengths, ``[replica][micro-batch][document]``."""
    return [[[d.length for d in m.documents] for m in replica] for replica in plan.replicas]


def indices(plan: StepPlan) -> list[list[list[int]]]:
    """Document indices, ``[replica][micro-batch][document]``."""
    return [[[d.index for d in m.documents] for m in replica] for replica in plan.replicas]


def micro(*workloads: float) -> list[MicroBatch]:
    """Micro-batches of given workloads."""
    return [MicroBatch((), 0, float(w)) for w in workloads]


def check_exactly_once(lengths: Sequence[int], plans: Iterable[StepPlan], longest: int | None = None) -> None:
    """Pieces tile every document from its first to its last token; ``longest`` is where truncation cuts."""
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for plan in plans:
        for document in plan.documents:
            pieces[document.index].append((document.start, document.length))
    for index, length in enumerate(lengths):
        end = 0
        for start, size in sorted(pieces.pop(index, [])):
            assert size > 0, f"document {index} has an empty piece"
            assert start == end, f"document {index}: a piece starts at {start}, the one before ends at {end}"
            end += size
        wanted = length if longest is None else min(length, longest)
        assert end == wanted, f"document {index}: {end} tokens planned of {wanted}"
    assert not pieces, f"unknown documents {sorted(pieces)}"


def check_plans(lengths: Sequence[int], plans: Sequence[StepPlan], config: PackingConfig) -> None:
    truncates = config.oversize == "truncate"
    check_exactly_once(lengths, plans, config.longest_document if truncates else None)
    for step, plan in enumerate(plans):
        assert plan.step == step
        assert [len(replica) for replica in plan.replicas] == [config.micro_batches_per_replica] * config.dp_size
        assert plan.tokens > 0, f"step {step} holds no document"
        for micro_batch in plan.micro_batches:
            assert micro_batch.tokens == sum(d.length for d in micro_batch.documents) <= config.capacity
            assert micro_batch.workload == sum(d.workload for d in micro_batch.documents)
        for document in plan.documents:
            assert document.workload == WORKLOAD.document(document.length)
            assert 0 <= document.arrived <= step


def check_counts(lengths: Sequence[int], planner: StepPlanner) -> None:
    """After the last step."""
    counts, config, longest = planner.counts, planner.config, planner.config.longest_document
    too_long = 0 if longest is None else sum(length > longest for length in lengths)
    assert counts.documents == len(lengths)
    assert counts.source_tokens == sum(lengths)
    assert counts.dropped == 0
    assert counts.empty == sum(length == 0 for length in lengths)
    assert counts.split == (too_long if config.oversize == "split" else 0)
    assert counts.truncated == (too_long if config.oversize == "truncate" else 0)
    if config.oversize == "truncate" and longest is not None:
        assert counts.truncated_tokens == sum(max(length - longest, 0) for length in lengths)
    assert planner.waiting == []


def run_and_save(lengths: Sequence[int], config: PackingConfig) -> tuple[list[StepPlan], list[str], StepPlanner]:
    """All plans of a pass, and the state before every one of them and at the end, as JSON."""
    planner = make_planner(lengths, config)
    states = [json.dumps(planner.state_dict())]
    plans = []
    most = 10 + 4 * sum(lengths)
    for plan in planner:
        plans.append(plan)
        states.append(json.dumps(planner.state_dict()))
        assert len(plans) <= most, "the pass does not end"
    assert next(planner, None) is None  # and stays at its end
    return plans, states, planner


def check_resume(lengths: Sequence[int], config: PackingConfig) -> list[StepPlan]:
    """Continues from every state with a fresh planner; every figure must be that of the uninterrupted run."""
    plans, states, finished = run_and_save(lengths, config)
    for step, text in enumerate(states):
        planner = make_planner(lengths, config)
        state = json.loads(text)
        planner.load_state_dict(state)
        assert json.dumps(planner.state_dict()) == text
        for plan in plans[step : step + 3]:  # the states after that are compared as text
            again = next(planner)
            assert (again.digest(), again) == (plan.digest(), plan)
            assert json.dumps(planner.state_dict()) == states[again.step + 1]
        if step + 3 >= len(plans):
            assert next(planner, None) is None
            assert planner.counts == finished.counts
        assert json.dumps(state) == text, "continuing changed the state that it was given"
    return plans


def observed(planner: StepPlanner) -> tuple[list[StepPlan], PackingMetrics]:
    metrics = PackingMetrics(planner.config)
    plans = []
    for plan in planner:
        metrics.observe(plan, planner.waiting)
        plans.append(plan)
    return plans, metrics
