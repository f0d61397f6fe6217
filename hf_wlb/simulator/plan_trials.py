"""Simulates ways to train: splits at first settings, settings one after the other, and Plain-4D beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_wlb.lengths import IntArray
from hf_wlb.packing.config import DEFAULT_MEMORY_FACTOR, PackingConfig
from hf_wlb.packing.steady import HEAVY_SHARE
from hf_wlb.sharding import SHARDING_STRATEGIES, ShardingConfig
from hf_wlb.simulator.memory import stage_memory
from hf_wlb.simulator.plan_result import Prediction, Training
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.search_space import Bounded
from hf_wlb.simulator.stream import PlanCache, SharderCache, StreamResult, documents_for, simulate_stream
from hf_wlb.simulator.systems import SYSTEMS, System
from hf_wlb.workload.model_flops import HOPPER_BF16_PEAK, ModelFlops

_CLEARLY = 0.8  # of a length from which on documents have to wait: what is below it changes nothing
PLAIN, OURS = "plain-4d", "wlb"
MEMORY_FACTORS = (1.0, 1.125, 1.25, 1.5)
"""S_max over the context length, the values tried."""
OUTLIER_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""``outlier_tokens`` over the context length, the values tried as far as they make a difference."""
TIME_GAPS = (0.01, 0.03, 0.08)
"""``max_time_gap``, the values tried."""
WORTH_IT = 1.005
"""A setting takes the place of another one if it is faster by this factor."""
MAX_DELAY = 1.0
"""Mean steps that a token may wait, for a setting to take the place of the first one."""
OTHER_SCHEDULES = (ScheduleConfig("interleaved", model_chunks=2), ScheduleConfig("seq1f1b", pieces=2))
"""Predicted for comparison."""


@dataclass(frozen=True)
class Stretch:
    """How much is simulated, in micro-batches of all replicas; steps are as many as hold them.

    Attributes:
        planned: To be packed.
        simulated: Of these.
        least_planned: Steps to pack at least.
        least_simulated: Steps to simulate at least.
    """

    planned: int
    simulated: int
    least_planned: int
    least_simulated: int

    def steps(self, micro_batches: int) -> tuple[int, int]:
        """Steps to pack, and to simulate.

        >>> SHORT.steps(32), LONG.steps(64)
        ((16, 3), (20, 4))
        """
        packed, simulated = -(-self.planned // micro_batches), -(-self.simulated // micro_batches)
        return max(packed, self.least_planned), max(simulated, self.least_simulated)


SHORT = Stretch(512, 96, 10, 2)
LONG = Stretch(1_280, 224, 20, 4)


@dataclass(frozen=True, eq=False)
class Documents:
    """A stretch's documents.

    Attributes:
        lengths: In reading order, int64 of shape ``(documents,)``.
        simulated: Steps to simulate.
    """

    lengths: IntArray
    simulated: int

    @classmethod
    def of(cls, lengths: Any, stretch: Stretch, context_length: int, micro_batches: int, seed: int) -> Documents:
        """Drawn from ``lengths``."""
        packed, simulated = stretch.steps(micro_batches)
        drawn = documents_for(lengths, packed, context_length=context_length, micro_batches=micro_batches, seed=seed)
        return cls(drawn, simulated)


@dataclass(frozen=True)
class Trials:
    """What simulations of one plan have in common.

    Attributes:
        context_length: Tokens of a micro-batch on average.
        micro_batches: Of a step on all replicas.
        memory_limit: Bytes that training may take of a GPU.
        sharders: Keeps how micro-batches are shared out, for all simulations.
    """

    context_length: int
    micro_batches: int
    memory_limit: float
    sharders: SharderCache = field(default_factory=SharderCache, compare=False)

    def factors(self, found: Bounded) -> list[float]:
        """S_max over the context length, the values that fit into memory, ascending."""
        return [factor for factor in MEMORY_FACTORS if self.memory(found, factor) <= self.memory_limit]

    def memory(self, found: Bounded, factor: float) -> float:
        """Bytes of the GPU that needs most, when a micro-batch of S_max tokens is in flight beside average ones.

        Args:
            found: The split.
            factor: S_max over the context length.
        """
        split, own = found.candidate.split, self.micro_batches // found.candidate.split.dp_size
        mean = self.context_length / split.cp_size
        skew = ShardingConfig(split.cp_size).max_token_skew if split.cp_size > 1 else 0.0
        largest = factor * mean * (1 + skew)
        return max(
            stage_memory(found.model, stage, (min(split.pp_size - stage, own) - 1) * mean + largest, largest).total
            for stage in range(split.pp_size)
        )

    def first_settings(self, found: Bounded, factor: float) -> Training:
        """The library's defaults, with S_max of so many contexts."""
        own = self.micro_batches // found.candidate.split.dp_size
        s_max = int(factor * self.context_length)
        default = PackingConfig(self.context_length, own, max_tokens_per_micro_batch=s_max)
        return Training(
            found.candidate,
            self.context_length,
            own,
            s_max,
            default.least_outlier,
            default.max_time_gap,
            SYSTEMS[OURS].sharding,
            ScheduleConfig(),
            found.model.layout.sizes,
        )

    def first(self, found: Bounded, documents: Documents, most: float = DEFAULT_MEMORY_FACTOR) -> Prediction | None:
        """At first settings, with the largest S_max that fits; None if no simulation does.

        Args:
            found: The split.
            documents: To simulate.
            most: The largest S_max over the context length.
        """
        for factor in reversed([factor for factor in self.factors(found) if factor <= most]):
            prediction = self.ours(found, self.first_settings(found, factor), documents)
            if prediction.memory_bytes <= self.memory_limit:
                return prediction
        return None

    def ours(
        self, found: Bounded, training: Training, documents: Documents, cache: PlanCache | None = None
    ) -> Prediction:
        """This library's packer and sharding, under given settings."""
        result = simulate_stream(
            documents.lengths,
            planned_system(training),
            found.model,
            micro_batches_per_replica=training.micro_batches_per_replica,
            max_tokens_per_micro_batch=training.max_tokens_per_micro_batch,
            schedule=training.schedule,
            steps=documents.simulated,
            cache=cache,
            sharders=self.sharders,
        )
        least = self.memory(found, training.memory_factor) if training.schedule == ScheduleConfig() else 0.0
        return _prediction(found, training, OURS, result, least)

    def plain(self, found: Bounded, documents: Documents) -> Prediction:
        """Plain-4D on a split."""
        training = replace(
            self.first_settings(found, 1.0), sharding=SYSTEMS[PLAIN].sharding, outlier_tokens=0, max_time_gap=0.0
        )
        result = simulate_stream(
            documents.lengths,
            SYSTEMS[PLAIN],
            found.model,
            micro_batches_per_replica=training.micro_batches_per_replica,
            max_tokens_per_micro_batch=self.context_length,
            steps=documents.simulated,
            sharders=self.sharders,
        )
        return _prediction(found, training, PLAIN, result, 0.0)

    def tune(
        self, found: Bounded, first: Prediction, documents: Documents, tell: Callable[[str], None]
    ) -> tuple[Prediction, list[Prediction]]:
        """Changes one setting after the other, each to the value that is fastest by more than noise.

        Returns:
            The best, and all that were tried, ``first`` in front.
        """
        best, tried, cache = first, [first], PlanCache()
        s_max = [int(factor * self.context_length) for factor in self.factors(found)]
        shardings = SHARDING_STRATEGIES if found.candidate.split.cp_size > 1 else ()
        values: dict[str, Any] = {
            "max_tokens_per_micro_batch": s_max,
            "outlier_tokens": self._outlier_tokens(found, first.training.outlier_tokens, documents),
            "max_time_gap": TIME_GAPS,
            "sharding": shardings,
        }
        for name, choices in values.items():
            tell(f"trying {name.replace('_', ' ')} on {found.candidate.label}")
            start = best
            for value in choices:
                if value == getattr(start.training, name):
                    continue
                training = replace(start.training, **{name: value})
                tried.append(self.ours(found, training, documents, cache))
                if self.worth_it(tried[-1], best, start):
                    best = tried[-1]
        return best, tried

    def worth_it(self, new: Prediction, best: Prediction, start: Prediction) -> bool:
        """Whether a setting is to take the place of the best one so far."""
        better = new.tokens_per_second > best.tokens_per_second * (WORTH_IT if best is start else 1.0)
        return better and new.memory_bytes <= self.memory_limit and new.delay <= max(MAX_DELAY, start.delay)

    def _outlier_tokens(self, found: Bounded, first: int, documents: Documents) -> list[int]:
        """Values that change something: whatever their length, light documents never have to wait."""
        work, lengths = found.model.workload.document(documents.lengths), documents.lengths
        short = lengths < first
        if not short.any():
            return []
        light = work <= HEAVY_SHARE * work[short].sum() / lengths[short].sum() * self.context_length
        heaviest = int(lengths[light].max(initial=0))  # of those that never have to wait
        values = [max(1, int(share * self.context_length)) for share in OUTLIER_SHARES]
        return [value for value in values if max(value, first) > _CLEARLY * heaviest]

    def with_settings(
        self, found: Bounded, own: Prediction, first: Prediction, tuned: Prediction, documents: Documents
    ) -> Prediction:
        """What was changed on another split, changed on this one, if that is worth it; S_max as far as it fits.

        Args:
            found: This split.
            own: Of it, at first settings.
            first: Of the other one, at first settings.
            tuned: Of the other one, at its best settings.
            documents: To simulate.
        """
        names = ("outlier_tokens", "max_time_gap", "sharding", "max_tokens_per_micro_batch")
        pairs = {name: (getattr(first.training, name), getattr(tuned.training, name)) for name in names}
        changes = {name: new for name, (old, new) in pairs.items() if new != old}
        if "max_tokens_per_micro_batch" in changes:
            fitting = [int(factor * self.context_length) for factor in self.factors(found)]
            wanted = changes["max_tokens_per_micro_batch"]
            changes["max_tokens_per_micro_batch"] = max([size for size in fitting if size <= wanted] or fitting[:1])
        training = replace(own.training, **changes)
        if training == own.training:
            return own
        other = self.ours(found, training, documents)
        return other if self.worth_it(other, own, own) else own

    def schedules(self, found: Bounded, own: Prediction, documents: Documents) -> tuple[list[Prediction], list[str]]:
        """Other schedules in the place of 1F1B, and why one is not possible."""
        predictions, notes, cache = [], [], PlanCache()
        for schedule in OTHER_SCHEDULES:
            try:
                predictions.append(self.ours(found, replace(own.training, schedule=schedule), documents, cache))
            except ValueError as error:
                notes.append(str(error))
        return predictions, notes


def planned_system(training: Training) -> System:
    """This library's packer and sharding with a plan's settings."""
    return replace(
        SYSTEMS[OURS],
        sharding=training.sharding,
        packing={"outlier_tokens": training.outlier_tokens, "max_time_gap": training.max_time_gap},
    )


def _prediction(found: Bounded, training: Training, system: str, result: StreamResult, least: float) -> Prediction:
    """Its MFU is of the whole pass, as its tokens a second are, and not of the steps that were simulated."""
    lengths = np.array([document.length for plan in result.passes.plans for document in plan.documents])
    flops = ModelFlops.from_config(found.model.config).documents(lengths)
    return Prediction(
        training,
        system,
        result.tokens_per_second,
        result.mean_step_seconds,
        flops / (result.seconds * result.gpus * HOPPER_BF16_PEAK),
        max(result.peak_memory_bytes, least),
        result.delay,
        result.imbalance,
        result.token_variation,
    )
