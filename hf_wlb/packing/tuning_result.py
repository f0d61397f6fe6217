"""What tuning finds: settings with their figures, which of them beat others, and which one to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.metrics import PackingReport

#: A smaller S_max is preferred if it costs no more time than this share.
TIME_FOR_MEMORY = 0.005


@dataclass(frozen=True)
class TuningPoint:
    """One setting and what it gave.

    Attributes:
        config: The setting.
        time_gap: Modelled time over perfect balance, 1.0 is perfect.
        delay: Mean steps a token waited.
        delay_worst: The longest wait of a document, in steps.
        token_variation: Standard deviation over mean of the tokens per step.
        waiting_mean_contexts: Tokens waiting on average, in context lengths.
        waiting_peak_contexts: The most of them.
        imbalance: Mean imbalance degree.
        context_lost: Share of tokens whose document is cut before them, because it is longer than what stays whole.
    """

    config: PackingConfig
    time_gap: float
    delay: float
    delay_worst: int
    token_variation: float
    waiting_mean_contexts: float
    waiting_peak_contexts: float
    imbalance: float
    context_lost: float

    @classmethod
    def of(cls, config: PackingConfig, report: PackingReport, context_lost: float) -> TuningPoint:
        """Takes the figures that matter out of a report."""
        return cls(
            config,
            report.time_gap,
            report.delay,
            report.delay_worst,
            report.token_variation,
            report.waiting_mean_contexts,
            report.waiting_peak_contexts,
            report.imbalance,
            context_lost,
        )

    def beats(self, other: TuningPoint) -> bool:
        """Whether it is better in time or delay and in neither worse, as far as tables show it."""
        mine, others = ((round(point.time_gap, 3), round(point.delay, 2)) for point in (self, other))
        return mine != others and mine[0] <= others[0] and mine[1] <= others[1]

    @property
    def memory_factor(self) -> float:
        """S_max over the context length."""
        return self.config.s_max / self.config.context_length

    @property
    def description(self) -> str:
        """The setting in words."""
        return describe_settings(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "config": self.config.to_dict(), "description": self.description}


def describe_settings(config: PackingConfig) -> str:
    """The settings of ``wlb`` or ``steady`` in words.

    >>> describe_settings(PackingConfig(8192, micro_batches_per_replica=4))
    'steady, max_time_gap 0.03, up to 10 contexts waiting, S_max 1.25 x context'
    """
    s_max = f"S_max {config.s_max / config.context_length:.4g} x context"
    if config.packer == "wlb":
        return f"wlb, outliers from {', '.join(f'{t:,}' for t in config.outlier_levels)} tokens, {s_max}"
    waiting = config.waiting_limit / config.context_length
    return f"steady, max_time_gap {config.max_time_gap:g}, up to {waiting:g} contexts waiting, {s_max}"


@dataclass(frozen=True)
class TuningResult:
    """What ``tune`` found.

    Attributes:
        points: Every setting tried, in the order in which they were tried.
        pareto: Those that no other beats in time and delay at once, fastest first; of those that do not cut more
            documents than the settings that were given to ``tune``, unless all do.
        best: The best setting of every packer tried, by the same rule as ``recommended``.
        default: The packer ``steady`` as it is without tuning, if it was tried.
        recommended: The one to take.
        reason: Why, in a sentence.
        steps: Steps simulated with each.
        max_delay: Mean delay that was allowed, in steps.
    """

    points: tuple[TuningPoint, ...]
    pareto: tuple[TuningPoint, ...]
    best: dict[str, TuningPoint]
    default: TuningPoint | None
    recommended: TuningPoint
    reason: str
    steps: int
    max_delay: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; ``recommended.config`` of it is what ``PackingConfig.from_dict`` reads."""
        return {
            "recommended": self.recommended.to_dict(),
            "reason": self.reason,
            "steps": self.steps,
            "max_delay": self.max_delay,
            "default": None if self.default is None else self.default.to_dict(),
            "best": {packer: point.to_dict() for packer, point in self.best.items()},
            "pareto": [point.to_dict() for point in self.pareto],
            "points": [point.to_dict() for point in self.points],
        }


@dataclass(frozen=True)
class Limits:
    """What a setting may cost besides time; see ``tune`` for the arguments."""

    max_delay: float
    max_token_variation: float | None
    max_context_lost: float

    def allow(self, point: TuningPoint) -> bool:
        """Whether the setting keeps them."""
        variation = self.max_token_variation
        if self.cuts_more(point):
            return False
        return point.delay <= self.max_delay and (variation is None or point.token_variation <= variation)

    def cuts_more(self, point: TuningPoint) -> bool:
        """Whether it cuts more off documents than is allowed: less work is no better balance."""
        return point.context_lost > self.max_context_lost

    @property
    def description(self) -> str:
        """The limits in words."""
        delay = f"the mean delay within {self.max_delay:g} steps"
        variation = self.max_token_variation
        return delay if variation is None else f"{delay} and the token variation within {variation:g}"


def pareto_front(points: Iterable[TuningPoint]) -> tuple[TuningPoint, ...]:
    """Points that no other beats in both modelled time and delay, fastest first."""
    front: list[TuningPoint] = []
    for point in sorted(points, key=lambda p: (p.time_gap, p.delay, p.config.s_max)):
        if not front or point.delay < front[-1].delay:
            front.append(point)
    return tuple(front)


def choose(points: Sequence[TuningPoint], limits: Limits) -> tuple[TuningPoint, str]:
    """Least time within the limits, or a smaller S_max if that costs next to nothing; and why."""
    allowed = [point for point in points if limits.allow(point)]
    if not allowed:
        uncut = [point for point in points if not limits.cuts_more(point)] or points
        chosen = min(uncut, key=lambda p: (p.delay, p.time_gap, p.config.s_max))
        return chosen, (
            f"None of {len(points)} settings kept {limits.description}; {chosen.description} delays least, "
            f"{chosen.delay:.2f} steps on average, at {_over(chosen)} over perfect balance."
        )
    fastest = min(allowed, key=_preference)
    smallest = min(p.config.s_max for p in allowed if p.time_gap <= fastest.time_gap * (1 + TIME_FOR_MEMORY))
    chosen = min((p for p in allowed if p.config.s_max == smallest), key=_preference)
    figures = (
        f"{_over(chosen)} over perfect balance, with a mean delay of {chosen.delay:.2f} steps and a token variation of "
        f"{chosen.token_variation:.3f}"
    )
    if chosen is fastest:
        return chosen, (
            f"Of {len(points)} settings, {chosen.description} takes the least modelled time that keeps "
            f"{limits.description}: {figures}."
        )
    return chosen, (
        f"Of {len(points)} settings, {chosen.description} is within {TIME_FOR_MEMORY * 100:g}% of the least modelled "
        f"time that keeps {limits.description}, in less memory: {figures} (S_max {fastest.memory_factor:.4g} x "
        f"context brings {_over(fastest)})."
    )


def _preference(point: TuningPoint) -> tuple[float, float, int]:
    return (round(point.time_gap, 4), point.delay, point.config.s_max)


def _over(point: TuningPoint) -> str:
    return f"{(point.time_gap - 1) * 100:.1f}%"
