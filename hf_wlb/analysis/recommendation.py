"""Which settings to train with: what tuning found, held against the defaults on the documents that were compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hf_wlb.analysis.cases import PackerCase, comparable
from hf_wlb.analysis.comparison import Analysis, CaseResult, run_case
from hf_wlb.lengths import IntArray
from hf_wlb.packing import PackingConfig, TuningPoint, TuningResult, describe_settings
from hf_wlb.workload import WorkloadModel

LABEL = "recommended"
#: In the place of ``Recommendation.to_dict()`` where there is none.
NO_RECOMMENDATION: dict[str, Any] = {"recommended": None, "reason": None, "pareto": []}
#: So many of the fastest settings of the search take the documents of the analysis.
FINALISTS = 8
#: The defaults are preferred to what takes less time by no more than this share.
DEFAULT_PREFERRED = 0.005
_ROUNDING = 0.005  # of a delay that is printed with two decimals


@dataclass(frozen=True)
class Recommendation:
    """Settings, and why.

    Attributes:
        result: What they gave on the documents that every packer got.
        reason: Why, in sentences.
        tuning: All that was tried.
    """

    result: CaseResult
    reason: str
    tuning: TuningResult

    @property
    def description(self) -> str:
        """The settings in words."""
        return describe_settings(self.result.config)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "recommended": self.result.to_dict(),
            "reason": self.reason,
            "pareto": [point.to_dict() for point in self.tuning.pareto],
        }


def recommend(
    analysis: Analysis, workload: WorkloadModel, tuner: Callable[[IntArray], TuningResult]
) -> Recommendation | None:
    """Settings for the documents of an analysis: never such that the default ``steady`` beats.

    A search measures steps out of the middle of a stream; the analysis measures a set that is trained to its end. Here
    the best of the search and the defaults take the same set, and the fastest is recommended that keeps the mean delay.

    Args:
        analysis: The comparison.
        workload: What a document costs.
        tuner: Searches, see ``tune``.

    Returns:
        None where there is nothing to balance, see ``PackingConfig.balances``.
    """
    default = analysis.result("steady")
    if not default.config.balances:
        return None
    tuning = tuner(analysis.stream)
    tried = {describe_settings(default.config): default}  # in the search its limits are written as numbers

    def run(configs: Iterable[PackingConfig]) -> list[CaseResult]:
        for config in map(comparable, configs):
            if (settings := describe_settings(config)) not in tried:
                tried[settings] = run_case(PackerCase(LABEL, config), analysis.stream, workload)
        return [result for result in tried.values() if result.report.delay <= tuning.max_delay + _ROUNDING]

    within = run([tuning.recommended.config, *(point.config for point in [*tuning.best.values(), *_fastest(tuning)])])
    for point in tuning.pareto:  # the fastest first, with ever less delay
        if within:
            break
        within = run([point.config])
    if not within:
        best = min(tried.values(), key=lambda result: result.report.delay)
    else:
        best = min(within, key=lambda result: result.total_time)
        if default in within and default.total_time <= best.total_time * (1 + DEFAULT_PREFERRED):
            best = default
    return Recommendation(best, _reason(best, default, bool(within), len(tried), tuning), tuning)


def _fastest(tuning: TuningResult) -> list[TuningPoint]:
    allowed = [point for point in tuning.points if point.delay <= tuning.max_delay + _ROUNDING]
    return sorted(allowed, key=lambda point: point.time_gap)[:FINALISTS]


def _reason(best: CaseResult, default: CaseResult, within: bool, tried: int, tuning: TuningResult) -> str:
    limit = f"the mean delay within {tuning.max_delay:g} steps"
    searched = f"the best {tried} of {len(tuning.points)} settings searched"
    if best is default and within:
        return (
            f"These are the default settings: of {searched}, none keeps {limit} and takes less time for these "
            f"documents by {DEFAULT_PREFERRED:.1%} or more: {_figures(best)}."
        )
    others = "" if best is default else f" The default settings, steady: {_figures(default)}."
    if not within:
        return f"Of {searched}, none keeps {limit} on these documents; this one delays least: {_figures(best)}.{others}"
    return f"Of {searched}, it takes the least time for these documents that keeps {limit}: {_figures(best)}.{others}"


def _figures(result: CaseResult) -> str:
    report = result.report
    return (
        f"{_over(result)} over perfect balance, with a mean delay of {report.delay:.2f} steps, a token variation of "
        f"{report.token_variation:.3f} and S_max {result.config.s_max / result.config.context_length:.4g} x context"
    )


def _over(result: CaseResult) -> str:
    return f"{(result.time_over_perfect - 1) * 100:.1f}%"
