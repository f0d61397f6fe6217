"""What ways to cut a model into pipeline stages cost: every stage of them, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_wlb.staging import StageCosts, StageLayout, schedule_seconds
from hf_wlb.workload.base import is_whole_number

BALANCED, EQUAL, GIVEN = "balanced", "equal layers", "given"


@dataclass(frozen=True)
class LayoutResult:
    """One way to cut a model.

    Attributes:
        name: How it came about: ``balanced``, ``equal layers`` or ``given``.
        layout: Which layers every stage has.
        seconds: Of every stage for one micro-batch, forward plus backward, embedding and head included.
        step_seconds: From the first forward of a step to its last backward.
        micro_batches: Of the step.
    """

    name: str
    layout: StageLayout
    seconds: tuple[float, ...]
    step_seconds: float
    micro_batches: int

    @property
    def imbalance(self) -> float:
        """The costliest stage over the mean one."""
        return max(self.seconds) * len(self.seconds) / sum(self.seconds)

    @property
    def waiting(self) -> float:
        """Share of the step that stages wait, the mean over all of them."""
        return 1 - self.micro_batches * sum(self.seconds) / (len(self.seconds) * self.step_seconds)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable figures."""
        return {
            "name": self.name,
            "pp_stage_layers": list(self.layout.sizes),
            "seconds": list(self.seconds),
            "imbalance": self.imbalance,
            "step_seconds": self.step_seconds,
            "waiting": self.waiting,
        }


@dataclass(frozen=True)
class StageAnalysis:
    """Ways to cut a model into stages.

    Attributes:
        costs: Of its parts.
        pp_size: Stages.
        micro_batches: Of a step on one replica.
        results: By name, ``balanced`` first.
    """

    costs: StageCosts
    pp_size: int
    micro_batches: int
    results: Mapping[str, LayoutResult]

    @property
    def balanced(self) -> LayoutResult:
        """What the trainer would take by these costs."""
        return self.results[BALANCED]

    def to_dict(self) -> dict[str, Any]:
        """The costs as ``StageCosts.load`` reads them from a file, and what was found besides."""
        found = {
            "pp_size": self.pp_size,
            "micro_batches": self.micro_batches,
            "layouts": [result.to_dict() for result in self.results.values()],
        }
        return {**self.costs.to_dict(), "analysis": found}


def analyze_stages(
    costs: StageCosts,
    pp_size: int,
    micro_batches: int,
    *,
    given: Sequence[int] | None = None,
    gradient_checkpointing: bool = False,
) -> StageAnalysis:
    """Cut a model so that its costliest stage costs least, into as many layers a stage, and as given.

    Args:
        costs: Of the model's parts, for one micro-batch; all micro-batches of a step cost the same here.
        pp_size: Stages.
        micro_batches: Of a step on one replica.
        given: Layers of every stage of an own cut.
        gradient_checkpointing: Whether backwards take three times as long as forwards instead of twice.

    Raises:
        ValueError: If there are fewer layers than stages, or no micro-batch, or the given layers are not the model's.

    >>> costs = StageCosts((1.0,) * 8, before=0.0, after=2.0, source="by hand")
    >>> analysis = analyze_stages(costs, pp_size=2, micro_batches=3)
    >>> [(name, result.layout.sizes, result.step_seconds) for name, result in analysis.results.items()]
    [('balanced', (5, 3), 20.0), ('equal layers', (4, 4), 22.0)]
    """
    layers = len(costs.layers)
    layouts = {BALANCED: costs.layout(pp_size)}
    if not is_whole_number(micro_batches) or micro_batches < 1:
        raise ValueError(f"A step must have at least 1 micro-batch, got {micro_batches!r}.")
    size, more = divmod(layers, pp_size)
    layouts[EQUAL] = StageLayout.from_sizes([size + (stage < more) for stage in range(pp_size)], layers, pp_size)
    if given is not None:
        layouts[GIVEN] = StageLayout.from_sizes(given, layers, pp_size)
    forward_share = 1 / 4 if gradient_checkpointing else 1 / 3
    results = {}
    for name, layout in layouts.items():
        seconds = costs.per_stage(layout)
        forward = [[cost * forward_share] * micro_batches for cost in seconds]
        backward = [[cost * (1 - forward_share)] * micro_batches for cost in seconds]
        step = schedule_seconds(forward, backward)
        results[name] = LayoutResult(name, layout, seconds, step, micro_batches)
    return StageAnalysis(costs, pp_size, micro_batches, results)
