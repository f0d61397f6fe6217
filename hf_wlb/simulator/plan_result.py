"""What a plan says: how to train, what that is predicted to bring, and what else was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.search_space import Candidate
from hf_wlb.simulator.split import Split


@dataclass(frozen=True)
class Training:
    """How a model is trained: all that a plan decides.

    Attributes:
        candidate: Split, and whether activations are recomputed.
        context_length: Tokens of a micro-batch on average.
        micro_batches_per_replica: Of a step.
        max_tokens_per_micro_batch: S_max.
        outlier_tokens: Documents at least this long may have to wait (packer ``steady``).
        max_time_gap: What a step may take over perfect balance when it takes outliers (packer ``steady``).
        sharding: How micro-batches are shared out over context-parallel ranks.
        schedule: Of the pipeline.
        stage_layers: Layers of every stage.
    """

    candidate: Candidate
    context_length: int
    micro_batches_per_replica: int
    max_tokens_per_micro_batch: int
    outlier_tokens: int
    max_time_gap: float
    sharding: str
    schedule: ScheduleConfig
    stage_layers: tuple[int, ...]

    @property
    def split(self) -> Split:
        """Of the GPUs."""
        return self.candidate.split

    @property
    def label(self) -> str:
        """Split and recomputation."""
        return self.candidate.label

    @property
    def memory_factor(self) -> float:
        """S_max over the context length."""
        return self.max_tokens_per_micro_batch / self.context_length

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        split = self.split
        return {
            "label": self.label,
            **{name: getattr(split, name) for name in ("tp_size", "cp_size", "pp_size", "dp_size", "fsdp")},
            "gradient_checkpointing": self.candidate.gradient_checkpointing,
            "context_length": self.context_length,
            "micro_batches_per_replica": self.micro_batches_per_replica,
            "max_tokens_per_micro_batch": self.max_tokens_per_micro_batch,
            "outlier_tokens": self.outlier_tokens,
            "max_time_gap": self.max_time_gap,
            "sharding": self.sharding,
            "schedule": asdict(self.schedule),
            "stage_layers": list(self.stage_layers),
        }


@dataclass(frozen=True)
class Prediction:
    """What training so is predicted to bring.

    Attributes:
        training: How.
        system: Key of ``SYSTEMS``: which packer, and for the baseline which sharding.
        tokens_per_second: Of all GPUs, over a whole pass.
        step_seconds: Mean of the steps.
        mfu: Model FLOPs over the GPUs' peak.
        memory_bytes: Of the GPU that needs most: what was simulated, or S_max tokens beside average micro-batches.
        delay: Mean steps that a token waits.
        imbalance: Costliest micro-batch of a step over its mean one.
        token_variation: Standard deviation over mean of the tokens of a step.
    """

    training: Training
    system: str
    tokens_per_second: float
    step_seconds: float
    mfu: float
    memory_bytes: float
    delay: float
    imbalance: float
    token_variation: float

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one GPU."""
        return self.tokens_per_second / self.training.split.gpus

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        figures = {name: value for name, value in asdict(self).items() if name != "training"}
        per_gpu = {"tokens_per_second_per_gpu": self.tokens_per_second_per_gpu}
        return {**figures, **per_gpu, "training": self.training.to_dict()}


@dataclass(frozen=True)
class Choice:
    """A way to train, and Plain-4D on the same split.

    Attributes:
        prediction: Of the way.
        plain: Of Plain-4D on the same documents.
        model: What priced both.
    """

    prediction: Prediction
    plain: Prediction
    model: StepModel

    @property
    def gain(self) -> float:
        """Tokens a second over Plain-4D's on the same split."""
        return self.prediction.tokens_per_second / self.plain.tokens_per_second


class Point(NamedTuple):
    """A candidate as it was looked at first, for a picture.

    Attributes:
        label: Its split.
        memory_bytes: Least of a GPU.
        tokens_per_second: At best.
        fits: Whether a GPU has that memory.
    """

    label: str
    memory_bytes: float
    tokens_per_second: float
    fits: bool


@dataclass(frozen=True)
class Searched:
    """What was looked at.

    Attributes:
        ways: Splits, each with and without recomputation.
        dropped: Reason -> how many of them were left out for it.
        simulated: Splits whose steps were simulated.
        all_bounded: Whether no other split could be among the best: each could reach less at best than the last of
            them does in its first, short simulation. Else the search ended at its limit.
        plain_simulated: Splits whose steps were simulated under Plain-4D.
    """

    ways: int
    dropped: Mapping[str, int]
    simulated: int
    all_bounded: bool
    plain_simulated: int


@dataclass(frozen=True)
class PlanResult:
    """A plan.

    Attributes:
        choices: The best ways to train, the fastest first.
        plain: Plain-4D on the fastest split for it that was found.
        trials: Settings tried on the best split, one changed at a time.
        schedules: Other pipeline schedules on the best split that has a pipeline; this library does not run them.
        schedule_notes: Why a schedule is not among them.
        points: Every candidate that was priced.
        searched: How many of what.
        gpus: To train on.
        micro_batches: Of a step on all replicas.
        context_length: Tokens of a micro-batch on average.
        memory_limit: Bytes that training may take of a GPU.
    """

    choices: tuple[Choice, ...]
    plain: Prediction
    trials: tuple[Prediction, ...]
    schedules: tuple[Prediction, ...]
    schedule_notes: tuple[str, ...]
    points: tuple[Point, ...]
    searched: Searched
    gpus: int
    micro_batches: int
    context_length: int
    memory_limit: float

    @property
    def best(self) -> Choice:
        """The one to take."""
        return self.choices[0]

    def gain_over_best_plain(self, choice: Choice) -> float:
        """A choice's tokens a second over those of Plain-4D on its own best split."""
        return choice.prediction.tokens_per_second / self.plain.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        choices = [
            {
                **choice.prediction.to_dict(),
                "gain_same_split": choice.gain,
                "gain_best_plain": self.gain_over_best_plain(choice),
                "plain": choice.plain.to_dict(),
            }
            for choice in self.choices
        ]
        return {
            "schema": "hf_wlb.plan/1",
            "gpus": self.gpus,
            "context_length": self.context_length,
            "micro_batches": self.micro_batches,
            "tokens_per_step": self.micro_batches * self.context_length,
            "memory_limit": self.memory_limit,
            "choices": choices,
            "plain": self.plain.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "schedules": [other.to_dict() for other in self.schedules],
            "schedule_notes": list(self.schedule_notes),
            "searched": {**asdict(self.searched), "dropped": dict(self.searched.dropped)},
            "points": [point._asdict() for point in self.points],
        }
