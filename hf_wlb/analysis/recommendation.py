"""Which settings to train with: what tuning found, held against the defaults on the documents that were compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hf_wlb.analysis.cases import PackerCase, comparable
from hf_wlb.analysis.comparison import Analysis, CaseResult, run_case
from hf_wlb.argument_names import as_arguments
from hf_wlb.lengths import IntArray
from hf_wlb.packing import PackingConfig, TuningResult, describe_settings
from hf_wlb.workload import WorkloadModel

LABEL = "recommended"
#: In the place of ``Recommendation.to_dict()`` where there is none.
NO_RECOMMENDATION: dict[str, Any] = {"recommended": None, "arguments": None, "reason": None, "pareto": []}
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
            "arguments": as_arguments(self.result.config),
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
    tried = {default.config: default}

    def run(configs: Iterable[PackingConfig]) -> list[CaseResult]:
        for config in map(comparable, configs):
            if config not in tried:
                tried[config] = run_case(PackerCase(LABEL, config), analysis.stream, workload)
        return [result for result in tried.values() if result.report.delay <= tuning.max_delay + _ROUNDING]

    within = run([tuning.recommended.config, *(point.config for point in tuning.best.values())])
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
    return Recommendation(best, _reason(best, default, bool(within), tuning), tuning)


def _reason(best: CaseResult, default: CaseResult, within: bool, tuning: TuningResult) -> str:
    figures = f"{_over(best)} over perfect balance, with a mean delay of {best.report.delay:.2f} steps"
    if not within:
        return (
            f"None of {len(tuning.points)} settings kept the mean delay within {tuning.max_delay:g} steps on these "
            f"documents; this one delays least: {figures}."
        )
    if best is default:
        return (
            f"These are the default settings: of {len(tuning.points)} that were tried none takes less time for these "
            f"documents by {DEFAULT_PREFERRED * 100:g}% or more and keeps the mean delay within {tuning.max_delay:g} "
            f"steps: {figures}."
        )
    kept = "" if default.report.delay <= tuning.max_delay + _ROUNDING else ", which is more than allowed"
    return (
        f"Of {len(tuning.points)} settings it takes the least time for these documents that keeps the mean delay "
        f"within {tuning.max_delay:g} steps: {figures}. The default settings take {_over(default)} over perfect "
        f"balance, with a mean delay of {default.report.delay:.2f} steps{kept}."
    )


def _over(result: CaseResult) -> str:
    return f"{(result.time_over_perfect - 1) * 100:.1f}%"
