"""What one optimizer step takes on all GPUs of a split: sharded, through the pipeline, reduced and applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_wlb.packing import StepPlan
from hf_wlb.sharding import Sharder
from hf_wlb.sharding.types import FloatArray
from hf_wlb.simulator.costs import EndOfStep, StepModel
from hf_wlb.simulator.memory import MemoryUse, stage_memory
from hf_wlb.simulator.operations import Operations, Pricing, in_lockstep, mean_operations
from hf_wlb.simulator.placement import BalancedAttention
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.timeline import OpTimes, Timeline, run_schedule
from hf_wlb.workload.model_flops import HOPPER_BF16_PEAK, ModelFlops, check_peak

PLAIN_1F1B = ScheduleConfig()


@dataclass(frozen=True, eq=False)
class StepResult:
    """A simulated step.

    Attributes:
        seconds: Of the whole step: the slowest replica's pipeline, then ``end``.
        tokens: Trained on all replicas.
        pipeline_seconds: From the first forward to the last backward, on the slowest replica.
        end: What follows: gradients summed, clipped and applied.
        timelines: Of every replica.
        memory: Of every stage, on the replica where it needs most.
        tokens_per_second_per_gpu: What it comes to.
        mfu: Model FLOPs of the step over what its GPUs could do at their peak, see ``hf_wlb.workload.model_flops``.
        imbalance: Costliest micro-batch over the mean of all replicas' (the paper's imbalance degree), by the time
            that the slowest context-parallel ranks take through all stages.
        gpu_imbalance: Busiest GPU over the mean GPU, by what it computes of all layers (so stages count as alike), over
            replicas and context-parallel ranks.
        busy: Share of ``pipeline_seconds`` that the slowest ranks of every stage work, the mean of the replicas.
    """

    seconds: float
    tokens: int
    pipeline_seconds: float
    end: EndOfStep
    timelines: tuple[Timeline, ...]
    memory: tuple[MemoryUse, ...]
    tokens_per_second_per_gpu: float
    mfu: float
    imbalance: float
    gpu_imbalance: float
    busy: tuple[float, ...]


class StepSimulator:
    """Simulates steps of one model under one way of sharing out and one schedule.

    Every micro-batch is shared out, priced stage by stage, and sent through the pipeline of its replica in the plan's
    order. Replicas meet at the end of the step, under FSDP without a pipeline at every micro-batch. Micro-batches of
    fewer tokens than context-parallel ranks, which fill up the steps at the end of the data, cost nothing.

    Under Seq1F1B a micro-batch's tokens are cut in layout order into pieces of equal work, and the time of every rank
    is shared out over them by work; the layer at work and its exchange are reckoned to need memory for all of them.
    Under the interleaved schedule every stage's layers are cut evenly into its model chunks.

    With ``BalancedAttention`` attention, and tokens with it, are spread evenly over ranks and replicas, without an
    exchange, and also over the micro-batches, if that is faster than the plan's own order (whose lighter micro-batches
    may stand at both ends of the pipeline). So no way of sharing the same plan out is faster.

    Args:
        model: What prices micro-batches.
        sharder: Shares micro-batches out over context-parallel ranks.
        schedule: Of the pipeline.
        peak_flops: Of a GPU, for the MFU: by default an H100's or H200's in bf16.

    Raises:
        ValueError: If the sharder is for another number of ranks than the split has, a stage has fewer layers than the
            schedule has model chunks, or the peak is not above 0.
    """

    def __init__(
        self,
        model: StepModel,
        sharder: Sharder,
        schedule: ScheduleConfig = PLAIN_1F1B,
        *,
        peak_flops: float = HOPPER_BF16_PEAK,
    ) -> None:
        self._model = model
        self._schedule = schedule
        self._bound = isinstance(sharder, BalancedAttention)
        self._pricing = Pricing(model, sharder, schedule)
        self._peak_flops = check_peak(peak_flops)
        self._flops = ModelFlops.from_config(model.config)
        self._end = model.end_of_step()

    def step(self, plan: StepPlan) -> StepResult:
        """How long a planned step takes.

        Args:
            plan: Of all replicas.

        Raises:
            ValueError: If the plan is for another number of replicas than the split has, a replica has no micro-batch
                or another number of them where replicas meet at every one, or the schedule does not fit them.
        """
        split = self._model.split
        lockstep = split.fsdp and split.pp_size == 1
        if len(plan.replicas) != split.dp_size:
            raise ValueError(
                f"The step is planned for {len(plan.replicas)} replicas, but the split has dp_size={split.dp_size}: "
                "plan it for as many."
            )
        sizes = [len(replica) for replica in plan.replicas]
        if 0 in sizes:
            raise ValueError(
                f"Replica {sizes.index(0)} of step {plan.step} has no micro-batch; every replica trains at least one."
            )
        if len(set(sizes)) > 1 and (lockstep or self._bound):
            raise ValueError(
                f"The replicas of step {plan.step} have {', '.join(map(str, sizes))} micro-batches, but here they go "
                "through them together: give every replica as many."
            )
        replicas = [self._pricing.replica(replica) for replica in plan.replicas]
        if self._bound:
            even = [mean_operations(replicas, of_micro_batches=also) for also in (False, True)]
            runs = [([own] * len(replicas), [self._run(own.times)] * len(replicas)) for own in even]
            replicas, timelines = min(runs, key=lambda run: run[1][0].seconds)
        else:
            times = in_lockstep(replicas) if lockstep else [replica.times for replica in replicas]
            timelines = [self._run(own) for own in times]
        return self._result(plan, replicas, timelines)

    def sends(self, plan: StepPlan) -> list[list[float]]:
        """Seconds that every micro-batch's hidden states take from a stage to the next one.

        Args:
            plan: Of all replicas.

        Returns:
            ``[replicas][micro-batches]``, in the plan's order; under Seq1F1B of all pieces together.
        """
        replicas = [self._pricing.replica(replica) for replica in plan.replicas]
        return [replica.times.send.sum(axis=1).tolist() for replica in replicas]

    def _run(self, times: OpTimes) -> Timeline:
        return run_schedule(self._schedule, self._model.split.pp_size, times)

    def _result(self, plan: StepPlan, replicas: Sequence[Operations], timelines: Sequence[Timeline]) -> StepResult:
        pp_size, gpus = self._model.split.pp_size, self._model.split.gpus
        pipeline = max(timeline.seconds for timeline in timelines)
        seconds = pipeline + self._end.seconds
        flops = self._flops.documents([document.length for document in plan.documents])
        work = np.mean([replica.stages(pp_size) for replica in replicas], axis=0)
        return StepResult(
            seconds=seconds,
            tokens=plan.tokens,
            pipeline_seconds=pipeline,
            end=self._end,
            timelines=tuple(timelines),
            memory=_memory(self._model, replicas, timelines),
            tokens_per_second_per_gpu=plan.tokens / seconds / gpus,
            mfu=flops / (seconds * gpus * self._peak_flops),
            imbalance=_over_mean(np.concatenate([replica.micro_batches for replica in replicas])),
            gpu_imbalance=_over_mean(np.concatenate([replica.ranks for replica in replicas])),
            busy=tuple((work / pipeline).tolist()) if pipeline else (0.0,) * pp_size,
        )


def simulate_step(
    plan: StepPlan,
    model: StepModel,
    sharder: Sharder,
    schedule: ScheduleConfig = PLAIN_1F1B,
    *,
    peak_flops: float = HOPPER_BF16_PEAK,
) -> StepResult:
    """How long a planned step takes; for many steps, ``StepSimulator`` prepares but once.

    Args:
        plan: Of all replicas.
        model: What prices micro-batches.
        sharder: Shares micro-batches out over context-parallel ranks.
        schedule: Of the pipeline.
        peak_flops: Of a GPU, for the MFU: by default an H100's or H200's in bf16.

    Raises:
        ValueError: See ``StepSimulator`` and ``StepSimulator.step``.
    """
    return StepSimulator(model, sharder, schedule, peak_flops=peak_flops).step(plan)


def _over_mean(values: FloatArray) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def _memory(model: StepModel, replicas: Sequence[Operations], timelines: Sequence[Timeline]) -> tuple[MemoryUse, ...]:
    by_replica = []
    for replica, timeline in zip(replicas, timelines, strict=True):
        largest = float(replica.tokens.sum(axis=1).max())
        # Rounding must not make a micro-batch in flight smaller than itself.
        live = [max(tokens, largest) for tokens in timeline.peak_live(replica.tokens)]
        by_replica.append([stage_memory(model, stage, tokens, largest) for stage, tokens in enumerate(live)])
    return tuple(max(uses, key=lambda use: use.total) for uses in zip(*by_replica, strict=True))
