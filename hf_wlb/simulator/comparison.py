"""Systems side by side: the same documents, model, split and cluster for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.lengths import IntArray, fingerprint_lengths
from hf_wlb.packing import PackingConfig
from hf_wlb.packing.config import DEFAULT_MEMORY_FACTOR
from hf_wlb.simulator.cluster import Cluster
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.memory import stages_memory
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.step import PLAIN_1F1B, simulate_step
from hf_wlb.simulator.stream import PlanCache, PlannedPass, StreamResult, simulate_stream
from hf_wlb.simulator.systems import System, sharder_of
from hf_wlb.simulator.timeline import Timeline
from hf_wlb.workload import ProfiledWorkload, WorkloadModel

BASELINE, CUT = "plain-4d", "plain-4d, cut"
"""What speed-ups are over: documents as they come and whole, and documents cut at every context boundary."""

SYSTEM_LABELS: Mapping[str, str] = {
    BASELINE: "Plain-4D",
    CUT: "Plain-4D, cut",
    "fixed-4d": "Fixed-4D",
    "whole": "whole documents",
    "paper": "paper's method",
    "paper, placed": "its packing, placed",
    "wlb": "ours, adaptive",
    "placed": "ours, placed",
    "balanced": "bound",
}
"""What tables and pictures call the systems, slowest first as a rule."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What systems make of the same documents.

    Attributes:
        model: What priced them.
        results: By name of the system.
    """

    model: StepModel
    results: Mapping[str, StreamResult]

    def speedup(self, name: str, over: str = BASELINE) -> float:
        """Time of ``over`` over that of the system, for the same documents.

        Raises:
            KeyError: If one of them was not simulated.
        """
        return self.results[name].speedup_over(self.results[over])

    def regular_speedup(self, name: str, over: str = BASELINE) -> float:
        """The same by tokens a second of the steps before the data ended, as in a run without an end."""
        return _regular_rate(self.results[name]) / _regular_rate(self.results[over])

    def figures(self) -> dict[str, dict[str, Any]]:
        """What tables and files hold of every system, in plain JSON types; see ``FIGURES``."""
        found = {}
        for name, result in self.results.items():
            found[name] = {
                "seconds": result.seconds,
                "steps": len(result.passes.plans),
                "step_seconds": result.mean_step_seconds,
                "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
                "sharding": result.sharding,
                "mfu": result.mfu,
                "imbalance": result.imbalance,
                "gpu_imbalance": result.gpu_imbalance,
                "delay": result.delay,
                "token_variation": result.token_variation,
                "busy": float(np.mean(result.busy)),
                "memory_gb": result.peak_memory_bytes / 1e9,
            }
            if BASELINE in self.results:
                found[name]["speedup"] = self.speedup(name)
            if CUT in self.results:
                found[name]["speedup_over_cut"] = self.speedup(name, CUT)
        return found


FIGURES: Mapping[str, str] = {
    "seconds": "of the whole pass over the documents, steps after the end of the data included",
    "steps": "of that pass",
    "step_seconds": "mean of a step",
    "tokens_per_second_per_gpu": "whole pass",
    "sharding": "how micro-batches were shared out; of fixed-4d the static strategy that was faster",
    "speedup": f"time of {BASELINE} over this, for the same documents",
    "speedup_over_cut": f"the same over {CUT}, which does less attention for the same tokens",
    "mfu": "model FLOPs over 989 TFLOP/s a GPU",
    "imbalance": "costliest micro-batch over the mean one, slowest context-parallel ranks, regular steps",
    "gpu_imbalance": "busiest GPU's computation over the mean one's, regular steps",
    "delay": "mean steps that a token waited",
    "token_variation": "standard deviation over mean of the tokens of a step",
    "busy": "share of the pipeline's time in which a stage computes, mean of the stages",
    "memory_gb": "of the GPU that needs most, 10^9 bytes",
}


class SortedPlans(PlanCache):
    """Planned passes with their steps in ascending order of modelled time.

    So steps at even distances are a fair sample of quick and slow ones, and what a pass takes is estimated with less
    than half the error that steps at even distances in time have.
    """

    def plan(self, documents: IntArray, workload: WorkloadModel, config: PackingConfig) -> PlannedPass:
        """The pass; see ``PlanCache.plan``."""
        found = super().plan(documents, workload, config)
        model = config.step_time
        return replace(found, plans=tuple(sorted(found.plans, key=lambda plan: model.step_time(plan.workloads()))))


class FixedPlans(SortedPlans):
    """Keeps the pass that was planned first for documents and settings, whatever workload later comes with them.

    So that what another constant changes is told apart from what other plans happen to do: a packer's plans change a
    little with every constant, and a mean of few steps by chance with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[tuple[PackingConfig, str], PlannedPass] = {}

    def plan(self, documents: IntArray, workload: WorkloadModel, config: PackingConfig) -> PlannedPass:
        """The pass; see ``PlanCache.plan``."""
        key = (config, fingerprint_lengths(documents))
        if key not in self._first:
            self._first[key] = super().plan(documents, workload, config)
        return self._first[key]


def compare(
    documents: NDArray[Any],
    systems: Iterable[System],
    model: StepModel,
    *,
    micro_batches_per_replica: int,
    schedule: ScheduleConfig = PLAIN_1F1B,
    steps: int | None = None,
    whole: Collection[str] = (),
    max_tokens_per_micro_batch: int | None = None,
    plans: SortedPlans | None = None,
    tell: Callable[[str], None] | None = None,
) -> Comparison:
    """Simulates systems on the same documents; those that share a packer share its plans.

    Args:
        documents: Lengths in reading order, see ``documents_for``.
        systems: What to compare.
        model: What prices micro-batches.
        micro_batches_per_replica: Of a step.
        schedule: Of the pipeline.
        steps: Simulate only so many steps of the pass, see ``simulate_stream``; a fair sample, see ``SortedPlans``.
        whole: Names of systems of which all steps are simulated nevertheless: those without balance need it most.
        max_tokens_per_micro_batch: S_max, 1.25 x the context length by default.
        plans: Keeps planned passes, except those of ``whole``; by default for this comparison alone.
        tell: Called with the name of every system before it is simulated.

    Raises:
        ValueError: As ``simulate_stream`` does.
    """
    in_time, by_time = PlanCache(), SortedPlans() if plans is None else plans
    results = {}
    for system in systems:
        own = None if system.name in whole else steps
        if tell is not None:
            tell(system.name)
        results[system.name] = simulate_stream(
            documents,
            system,
            model,
            micro_batches_per_replica=micro_batches_per_replica,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            schedule=schedule,
            steps=own,
            cache=in_time if own is None else by_time,
        )
    return Comparison(model, results)


def model_that_fits(
    config: Any,
    split: Split,
    cluster: Cluster,
    *,
    context_length: int,
    gradient_checkpointing: bool | None = None,
    profile: ProfiledWorkload | None = None,
    compiled: bool = True,
    stream_bytes: int | None = None,
) -> StepModel:
    """A model without gradient checkpointing if it fits so, else with it, whether or not that suffices.

    It fits if every stage can hold as many micro-batches as 1F1B puts there, one of S_max = 1.25 contexts and the
    others of a context.

    Args:
        config: A Transformers config, or any object with its attributes.
        split: How many GPUs each kind of parallelism takes.
        cluster: Its GPUs' memory counts.
        context_length: Tokens of a micro-batch on average.
        gradient_checkpointing: Decided by memory if None.
        profile: Measured costs of one rank.
        compiled: Whether element-wise work is counted for fused kernels.
        stream_bytes: See ``StepModel.of``.

    Raises:
        ValueError: As ``StepModel.of`` does.
    """

    def model(checkpointing: bool) -> StepModel:
        return StepModel.of(
            config,
            split,
            cluster,
            context_length=context_length,
            gradient_checkpointing=checkpointing,
            profile=profile,
            compiled=compiled,
            stream_bytes=stream_bytes,
        )

    found = model(bool(gradient_checkpointing))
    if gradient_checkpointing is None and memory_needed(found) > cluster.memory_bytes:
        return model(True)
    return found


def memory_needed(model: StepModel) -> float:
    """Bytes of the stage that needs most, with micro-batches as ``model_that_fits`` says."""
    return max(use.total for use in stages_memory(model, DEFAULT_MEMORY_FACTOR))


def _regular_rate(result: StreamResult) -> float:
    """Tokens a second of the simulated steps before the data ended; of all of them if there are none."""
    plans = result.passes.plans
    steps = [step for at, step in zip(result.simulated, result.steps, strict=True) if not plans[at].flush]
    steps = steps or list(result.steps)
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def typical_timelines(found: Comparison, schedule: ScheduleConfig = PLAIN_1F1B) -> dict[str, Timeline]:
    """The slowest replica's pipeline in a step of median speed, by system and the step's tokens.

    Args:
        found: What was compared.
        schedule: Of the pipeline, as it was then.
    """
    timelines = {}
    for name, result in found.results.items():
        order = sorted(range(len(result.steps)), key=lambda at: result.steps[at].tokens / result.steps[at].seconds)
        plan = result.passes.plans[result.simulated[order[len(order) // 2]]]
        split, workload = found.model.split, found.model.workload
        sharder = sharder_of(result.sharding, split.cp_size, workload, result.passes.config.s_max)
        step = simulate_step(plan, found.model, sharder, schedule)
        timelines[f"{name}, {plan.tokens:,} tokens"] = max(step.timelines, key=lambda timeline: timeline.seconds)
    return timelines
