"""Whether simulated steps take as long as measured ones.

Every measured step of a launch is shared out as it was then, by the cost model that the launch went by, and simulated.
Measured and predicted are the same steps: what they differ by is the simulator's error and the noise of the clock, not
which documents happened to be drawn. Variants are ranked by the speed of their whole streams, as the benchmark does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hf_wlb.simulator.cluster import CLUSTERS, Cluster, on_device
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.measured import MeasuredLaunch, MeasuredVariant
from hf_wlb.simulator.step import StepSimulator
from hf_wlb.simulator.systems import sharder_of
from hf_wlb.workload import ProfiledWorkload

MOST_ERROR = 0.10
"""How far the predicted mean step time of a variant may be from the measured one."""
LEAST_APART = 0.02
"""Variants whose measured speeds differ by less are not ranked."""
CLUSTER_OF_KERNEL = {"flash-attn-4": "h100-flash-attn-4", "flash-attn-2": "h100", "torch": "h100"}
"""Cluster preset by attention kernel, as ``AttentionKernel.name`` has it; torch's has the speed of flash-attn 2."""


@dataclass(frozen=True)
class VariantCheck:
    """A variant's measured and predicted figures, over the same steps.

    Attributes:
        name: The variant.
        steps: So many.
        measured: Seconds of a step, the mean.
        predicted: Seconds of a step, the mean.
        measured_speed: Tokens per second of the whole stream, see ``MeasuredVariant.stream_speed``.
        predicted_speed: The same.
        interval: 95% interval of the measured speed; None where there are too few steps.
        composed: Seconds of a step put together of the measured spans of its forwards and backwards, the mean; None
            where there are none. Against ``measured`` it shows the error of the schedule alone.
    """

    name: str
    steps: int
    measured: float
    predicted: float
    measured_speed: float
    predicted_speed: float
    interval: tuple[float, float] | None
    composed: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class LaunchCheck:
    """A launch, measured and predicted.

    Attributes:
        label: The launch.
        variants: What was run.

    >>> slow = VariantCheck("a", 4, 2.0, 2.0, 50.0, 50.0, (49.0, 51.0))
    >>> fast = VariantCheck("b", 4, 1.0, 1.0, 100.0, 100.0, (98.0, 102.0))
    >>> check = LaunchCheck("made up", (slow, fast))
    >>> check.worst_error, check.ranks_equal, check.complaints()
    (0.0, True, [])
    """

    label: str
    variants: tuple[VariantCheck, ...]

    @property
    def worst_error(self) -> float:
        """The largest error of a variant, whichever way."""
        return max(abs(variant.error) for variant in self.variants)

    @property
    def told_apart(self) -> list[tuple[VariantCheck, VariantCheck]]:
        """Pairs of (slower, faster) variants by measured speed: intervals do not overlap, and are apart enough.

        By ``LEAST_APART``, because intervals do not hold what the simulator errs by between a sample and its stream.
        """
        ordered = sorted(self.variants, key=lambda variant: variant.measured_speed)
        return [
            (slow, fast)
            for slow, fast in combinations(ordered, 2)
            if slow.interval is not None
            and fast.interval is not None
            and slow.interval[1] < fast.interval[0]
            and fast.measured_speed >= (1 + LEAST_APART) * slow.measured_speed
        ]

    @property
    def swapped(self) -> list[tuple[VariantCheck, VariantCheck]]:
        """Those of ``told_apart`` whose slower one is predicted to be no slower."""
        return [(slow, fast) for slow, fast in self.told_apart if slow.predicted_speed >= fast.predicted_speed]

    @property
    def kendall(self) -> float | None:
        """Kendall's rank correlation over ``told_apart``: 1 if all pairs are in order; None without such pairs."""
        pairs = len(self.told_apart)
        return 1 - 2 * len(self.swapped) / pairs if pairs else None

    @property
    def ranks_equal(self) -> bool | None:
        """Whether all of ``told_apart`` are in order; None without such pairs."""
        return not self.swapped if self.told_apart else None

    def complaints(self, most_error: float = MOST_ERROR) -> list[str]:
        """What is wrong, in sentences; none if no error is above ``most_error`` and the ranking is as measured."""
        errors = [
            f"{self.label}: a step of {variant.name} is predicted to take {variant.predicted:.3f} s, "
            f"{variant.error:+.1%} off the measured {variant.measured:.3f} s; allowed are {most_error:.0%}."
            for variant in self.variants
            if abs(variant.error) > most_error
        ]
        ranks = [
            f"{self.label}: {slow.name} is predicted to be no slower than {fast.name}, but was measured at "
            f"{slow.measured_speed:,.0f} tokens/s against {fast.measured_speed:,.0f}."
            for slow, fast in self.swapped
        ]
        return errors + ranks


def cluster_of(launch: MeasuredLaunch) -> Cluster:
    """The preset with a launch's attention kernel, with the memory of the device that the launch names.

    Raises:
        ValueError: If there is none, or the device is neither H100 nor H200 SXM.
    """
    if launch.kernel not in CLUSTER_OF_KERNEL:
        raise ValueError(
            f"No cluster preset has the attention kernel of {launch.label}; known are those with "
            f"{', '.join(CLUSTER_OF_KERNEL)}. Name a cluster."
        )
    preset = CLUSTERS[CLUSTER_OF_KERNEL[launch.kernel]]
    if launch.device is None:
        return preset
    try:
        return on_device(preset, launch.device)
    except ValueError as error:
        raise ValueError(f"No cluster preset fits {launch.label}: {error} Or name a cluster.") from None


def step_model(
    launch: MeasuredLaunch, cluster: Cluster | None = None, profile: ProfiledWorkload | None = None
) -> StepModel:
    """What prices a launch's steps.

    Args:
        launch: The launch.
        cluster: Where it is said to have run; None for ``cluster_of`` it.
        profile: Measured costs; None for those that the launch was planned by, if these were measured.

    Raises:
        ValueError: If no preset fits and no cluster is given, or the profile lacks what it takes or is of layers that
            were compiled where the launch's were not, or the other way round.
    """
    if profile is None and isinstance(launch.workload, ProfiledWorkload):
        profile = launch.workload
    if profile is not None and profile.compiled != launch.compiled:
        layers = ["layers as they are", "compiled layers"]
        raise ValueError(
            f"The profile is of {layers[profile.compiled]}, but {launch.label} trained {layers[launch.compiled]}. "
            "Measure one like it: hf-wlb profile, with --torch-compile or without."
        )
    return StepModel.of(
        launch.config,
        launch.split,
        cluster or cluster_of(launch),
        context_length=launch.context_length,
        gradient_checkpointing=launch.gradient_checkpointing,
        layout=launch.layout,
        profile=profile,
        compiled=launch.compiled,
    )


def check_launch(launch: MeasuredLaunch, model: StepModel) -> LaunchCheck:
    """Predicts every measured step of a launch.

    Args:
        launch: The launch, with a step of every variant at least.
        model: What prices its steps, see ``step_model``.
    """
    return LaunchCheck(launch.label, tuple(_check_variant(variant, launch, model) for variant in launch.variants))


def _check_variant(variant: MeasuredVariant, launch: MeasuredLaunch, model: StepModel) -> VariantCheck:
    # Shared out by what the launch went by, priced by the model.
    sharder = sharder_of(variant.system.sharding, launch.split.cp_size, launch.workload)
    simulator = StepSimulator(model, sharder)
    measured = [step.seconds for step in variant.steps]
    predicted = [simulator.step(step.plan).seconds for step in variant.steps]
    return VariantCheck(
        name=variant.system.name,
        steps=len(variant.steps),
        measured=float(np.mean(measured)),
        predicted=float(np.mean(predicted)),
        measured_speed=variant.stream_speed(measured),
        predicted_speed=variant.stream_speed(predicted),
        interval=variant.speed_interval,
        composed=_composed(variant, simulator),
    )


def _composed(variant: MeasuredVariant, simulator: StepSimulator) -> float | None:
    if not all(step.spans for step in variant.steps):
        return None
    return float(np.mean([step.composed(simulator.sends(step.plan)[0]) for step in variant.steps]))
