"""What a whole pass over documents takes, system by system: the same documents for all, so times compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.lengths import IntArray, fingerprint_lengths
from hf_wlb.packing import (
    ArraySource,
    PackingConfig,
    PackingMetrics,
    PackingReport,
    StepPlan,
    StepPlanner,
    length_stream,
)
from hf_wlb.sharding import Sharder, ShardingConfig, ShardPlan
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.memory import MemoryUse
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.step import PLAIN_1F1B, StepResult, StepSimulator
from hf_wlb.simulator.systems import System
from hf_wlb.workload import WorkloadModel
from hf_wlb.workload.base import is_whole_number


def documents_for(
    lengths: NDArray[Any] | Sequence[int], steps: int, *, context_length: int, micro_batches: int, seed: int = 0
) -> IntArray:
    """Documents for so many steps: passes over ``lengths``, each in a random order of its own, until there are enough.

    Args:
        lengths: Tokens of every document at hand, integers of shape ``(documents,)``; empty ones are left out.
        steps: Steps' worth of tokens.
        context_length: Tokens of a micro-batch on average.
        micro_batches: Of a step, on all replicas.
        seed: Of the orders.

    Returns:
        int64 lengths in reading order, at least ``steps * micro_batches * context_length`` tokens.

    Raises:
        ValueError: If a number is below 1, or there is no document with tokens.

    >>> documents_for([3, 0, 3], 1, context_length=4, micro_batches=2).tolist()
    [3, 3, 3]
    """
    for name, value in (("steps", steps), ("context_length", context_length), ("micro_batches", micro_batches)):
        if not is_whole_number(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return length_stream(np.asarray(lengths), steps * micro_batches * context_length, seed)


@dataclass(frozen=True, eq=False)
class PlannedPass:
    """A packer's pass over documents.

    Attributes:
        config: How it was planned.
        plans: Every step, those after the end of the data included.
        report: Imbalance, delay and more, by the cost model that it was planned with.
    """

    config: PackingConfig
    plans: tuple[StepPlan, ...]
    report: PackingReport

    @classmethod
    def of(cls, documents: IntArray, workload: WorkloadModel, config: PackingConfig) -> PlannedPass:
        """Plans it.

        Raises:
            ValueError: As ``StepPlanner`` does, for documents that cannot be read.
        """
        planner = StepPlanner(ArraySource(documents), workload, config)
        metrics = PackingMetrics(config)
        plans = []
        for plan in planner:
            metrics.observe(plan, planner.waiting)
            plans.append(plan)
        return cls(config, tuple(plans), metrics.report(planner))


class PlanCache:
    """Keeps planned passes for systems that share a packer and its settings, and so its plans."""

    def __init__(self) -> None:
        self._passes: dict[tuple[PackingConfig, str, str], PlannedPass] = {}

    def plan(self, documents: IntArray, workload: WorkloadModel, config: PackingConfig) -> PlannedPass:
        """The pass, planned at the first call with equal documents, workload and settings."""
        key = (config, workload.fingerprint, fingerprint_lengths(documents))
        if key not in self._passes:
            self._passes[key] = PlannedPass.of(documents, workload, config)
        return self._passes[key]


class _Remembering(Sharder):
    """Shares a micro-batch out once, however often it comes."""

    def __init__(self, config: ShardingConfig, workload: WorkloadModel) -> None:
        super().__init__(config, workload)
        self._plans: dict[bytes, ShardPlan] = {}

    def plan(self, lengths: Sequence[int] | NDArray[Any]) -> ShardPlan:
        key = np.asarray(lengths, dtype=np.int64).tobytes()
        if key not in self._plans:
            self._plans[key] = super().plan(lengths)
        return self._plans[key]


class SharderCache:
    """Keeps how micro-batches were shared out, for simulations in which the same ones come again.

    They do under another schedule, and on splits that differ in what does not concern sharding. A plan takes some KB.
    """

    def __init__(self) -> None:
        self._sharders: dict[tuple[ShardingConfig, str], _Remembering] = {}

    def remembering(self, sharder: Sharder) -> Sharder:
        """What shares out as ``sharder`` does, and remembers it; those of other kinds come back as they are."""
        if type(sharder) is not Sharder:
            return sharder
        key = (sharder.config, sharder.workload.fingerprint)
        if key not in self._sharders:
            self._sharders[key] = _Remembering(sharder.config, sharder.workload)
        return self._sharders[key]


@dataclass(frozen=True, eq=False)
class StreamResult:
    """A system's pass over documents.

    Attributes:
        system: Which.
        sharding: What shared its micro-batches out, a key of ``SHARDINGS``; of "fixed" the one that was faster.
        gpus: So many.
        passes: The planned pass.
        simulated: Indices of the steps that were simulated, ascending.
        steps: Their results, without timelines.
        seconds: Of the whole pass; estimated where not all steps were simulated, see ``simulate_stream``.
    """

    system: System
    sharding: str
    gpus: int
    passes: PlannedPass
    simulated: tuple[int, ...]
    steps: tuple[StepResult, ...]
    seconds: float

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Of every simulated step."""
        return tuple(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        """Of the whole pass."""
        return sum(plan.tokens for plan in self.passes.plans)

    @property
    def tokens_per_second(self) -> float:
        """On all GPUs."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """On one GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def regular_tokens_per_second(self) -> float:
        """On all GPUs, of the simulated steps before the end of the data.

        Long runs come near to it. But it does not charge documents that are held back, of which more wait at the end.
        """
        return sum(step.tokens for step in self._regular) / sum(step.seconds for step in self._regular)

    @property
    def mean_step_seconds(self) -> float:
        """Over all steps of the pass."""
        return self.seconds / len(self.passes.plans)

    @property
    def imbalance(self) -> float:
        """Mean of the steps' imbalance degree, see ``StepResult``; steps after the end of the data left out."""
        return float(np.mean([step.imbalance for step in self._regular]))

    @property
    def gpu_imbalance(self) -> float:
        """Mean of the steps' busiest GPU over the mean GPU, see ``StepResult``; steps after the end left out."""
        return float(np.mean([step.gpu_imbalance for step in self._regular]))

    @property
    def busy(self) -> tuple[float, ...]:
        """Share of the steps' pipeline time that every stage works, of all simulated steps."""
        seconds = sum(step.pipeline_seconds for step in self.steps)
        work = np.sum([np.multiply(step.busy, step.pipeline_seconds) for step in self.steps], axis=0)
        return tuple((work / seconds).tolist())

    @property
    def delay(self) -> float:
        """Mean steps that a token waited between being read and being trained, see ``PackingReport``."""
        return self.passes.report.delay

    @property
    def token_variation(self) -> float:
        """Standard deviation over mean of the tokens of a step, see ``PackingReport``."""
        return self.passes.report.token_variation

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs could do at their peak, of all simulated steps."""
        return sum(step.mfu * step.seconds for step in self.steps) / sum(self.step_seconds)

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Of every stage, in the step in which it needs most."""
        by_stage = zip(*(step.memory for step in self.steps), strict=True)
        return tuple(max(uses, key=lambda use: use.total) for uses in by_stage)

    @property
    def peak_memory_bytes(self) -> float:
        """Of the stage that needs most."""
        return max(use.total for use in self.memory)

    def speedup_over(self, other: StreamResult) -> float:
        """The other's time over this one's, for the same documents.

        Raises:
            ValueError: If the two passes do not have as many tokens.
        """
        if self.tokens != other.tokens:
            raise ValueError(
                f"{self.system.name} trained {self.tokens:,} tokens and {other.system.name} {other.tokens:,}: times "
                "compare only of passes over the same documents."
            )
        return other.seconds / self.seconds

    @property
    def _regular(self) -> list[StepResult]:
        plans = self.passes.plans
        regular = [step for at, step in zip(self.simulated, self.steps, strict=True) if not plans[at].flush]
        return regular or list(self.steps)


def packing_config(
    system: System,
    model: StepModel,
    micro_batches_per_replica: int,
    max_tokens_per_micro_batch: int | None = None,
) -> PackingConfig:
    """How a system packs; documents above the context length are split at it, for all systems alike.

    Raises:
        ValueError: For settings that cannot work, see ``PackingConfig``.
    """
    return PackingConfig(
        context_length=model.context_length,
        micro_batches_per_replica=micro_batches_per_replica,
        dp_size=model.split.dp_size,
        pp_size=model.split.pp_size,
        sharded_parameters=model.split.fsdp,
        packer=system.packer,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        max_document_tokens=model.context_length,
        **system.packing,
    )


def simulate_stream(
    documents: NDArray[Any],
    system: System,
    model: StepModel,
    *,
    micro_batches_per_replica: int,
    max_tokens_per_micro_batch: int | None = None,
    schedule: ScheduleConfig = PLAIN_1F1B,
    steps: int | None = None,
    packing_options: Mapping[str, Any] | None = None,
    cache: PlanCache | None = None,
    sharders: SharderCache | None = None,
) -> StreamResult:
    """Plans one whole pass over documents and says how long it takes.

    Whoever holds long documents back is fast at first and pays at the end: so the whole pass counts, the steps after
    the end of the data included, and with few steps these weigh more than in a real run. Some 100 steps' worth of
    documents leave them a percent or two.

    Args:
        documents: Lengths in tokens in reading order, integers of shape ``(documents,)``; see ``documents_for``.
        system: Packer and sharding.
        model: What prices micro-batches under a split; its context length is also where long documents are split.
        micro_batches_per_replica: Of one step.
        max_tokens_per_micro_batch: S_max, 1.25 x the context length by default; packers of fixed length stay below the
            context length anyway.
        schedule: Of the pipeline.
        steps: Simulate only so many steps, at even distances over the pass. The pass's time is then theirs, times what
            the packer's step-time model says for the pass, over what it says for them. With 20 steps it is off by about
            1% where sharding is even, by 5% where it is not.
        packing_options: Settings of the packer on top of ``system.packing``.
        cache: Passes planned before are taken from it, and this one is put there.
        sharders: The same of micro-batches shared out; None keeps nothing.

    Raises:
        ValueError: If there is no document, for settings that cannot work, or as ``simulate_step`` says.
    """
    if steps is not None and (not is_whole_number(steps) or steps < 1):
        raise ValueError(f"steps must be a whole number of at least 1, or None for all of the pass, got {steps!r}.")
    if packing_options:
        system = replace(system, packing={**system.packing, **packing_options})
    config = packing_config(system, model, micro_batches_per_replica, max_tokens_per_micro_batch)
    passes = (PlanCache() if cache is None else cache).plan(np.asarray(documents), model.workload, config)
    if not passes.plans:
        raise ValueError("There are no documents to simulate; give at least one.")
    simulated = _spread(len(passes.plans), steps)
    found = None
    for sharder in system.sharders(model.split.cp_size, model.workload, config.s_max):
        kept = sharder if sharders is None else sharders.remembering(sharder)
        results = _simulated(passes, simulated, model, kept, schedule)
        taken = sum(result.seconds for result in results)
        if found is None or taken < found[0]:
            found = taken, results, sharder
    assert found is not None, "every system has a sharder"
    taken, results, sharder = found
    return StreamResult(
        system,
        sharder.config.strategy if system.sharding == "fixed" else system.sharding,
        model.split.gpus,
        passes,
        simulated,
        results,
        taken * _whole_over(passes, simulated),
    )


def _simulated(
    passes: PlannedPass, simulated: Sequence[int], model: StepModel, sharder: Sharder, schedule: ScheduleConfig
) -> tuple[StepResult, ...]:
    """The steps' results without timelines, which would fill the memory."""
    simulator = StepSimulator(model, sharder, schedule)
    return tuple(replace(simulator.step(passes.plans[at]), timelines=()) for at in simulated)


def _spread(count: int, wanted: int | None) -> tuple[int, ...]:
    """So many of ``count`` steps, at even distances.

    >>> _spread(10, 3), _spread(2, None), _spread(2, 5)
    ((1, 5, 8), (0, 1), (0, 1))
    """
    wanted = count if wanted is None else min(wanted, count)
    return tuple((2 * place + 1) * count // (2 * wanted) for place in range(wanted))


def _whole_over(passes: PlannedPass, simulated: Sequence[int]) -> float:
    """How much longer the pass takes than the simulated steps, by the packer's step-time model."""
    if len(simulated) == len(passes.plans):
        return 1.0
    predicted = [passes.config.step_time.step_time(plan.workloads()) for plan in passes.plans]
    return sum(predicted) / sum(predicted[at] for at in simulated)
