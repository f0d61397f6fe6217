"""Rich tables of pipeline stages, for terminals of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_wlb.analysis.stages import EQUAL, GIVEN, LayoutResult, StageAnalysis
from hf_wlb.analysis.tables import empty_table, figure, legend
from hf_wlb.staging import StageCosts

STAGE_COLUMNS = (
    ("ms", "of one micro-batch, forward and backward, embedding and head included"),
    ("share", "of what all stages cost together"),
    ("of mean", "over the mean stage"),
    ("ends", "part of the stage that is the embedding, or the final norm, head and loss"),
)
LAYOUT_COLUMNS = (
    ("largest", "costliest stage over the mean one"),
    ("step ms", "time of a step's micro-batches, all of them alike, through the pipeline (1F1B)"),
    ("waiting", "part of that time in which stages wait, the mean over all of them"),
)


def stage_tables(analysis: StageAnalysis) -> Iterator[RenderableType]:
    """Everything ``hf-wlb stages`` prints, top to bottom."""
    costs, best = analysis.costs, analysis.balanced
    kinds = list(dict.fromkeys(costs.layers))
    layers = _milliseconds(min(kinds)) + (f" to {_milliseconds(max(kinds))}" if len(kinds) > 1 else "")
    yield Text(f"Costs: {costs.source}")
    yield Text(
        f"Parts: {len(costs.layers)} layers of {layers} ms, embedding {_milliseconds(costs.before)} ms, head and loss "
        f"{_milliseconds(costs.after)} ms"
    )
    yield stage_table(best, costs)
    if GIVEN in analysis.results:
        yield stage_table(analysis.results[GIVEN], costs)
    yield legend(STAGE_COLUMNS)
    yield layout_table(analysis)
    yield legend(LAYOUT_COLUMNS)
    gain = analysis.results[EQUAL].step_seconds / best.step_seconds
    sizes = " ".join(map(str, best.layout.sizes))
    yield Text(f"Balanced: --pp_stage_layers {sizes}; {gain:.2f}x over equal layers.", "bold green")


def stage_table(result: LayoutResult, costs: StageCosts) -> Table:
    """One row per stage of a layout; see ``STAGE_COLUMNS``."""
    table = empty_table(f"Stages, {result.name}")
    for column in ("stage", "layers", "how many", "ms", "share", "of mean", "ends"):
        table.add_column(column, justify="right", no_wrap=True)
    total, stages = sum(result.seconds), len(result.seconds)
    for stage, seconds in enumerate(result.seconds):
        own = result.layout.range_of(stage)
        ends = costs.before * (stage == 0) + costs.after * (stage == stages - 1)
        table.add_row(
            str(stage),
            f"{own.start}-{own.stop - 1}" if len(own) > 1 else str(own.start),
            str(len(own)),
            _milliseconds(seconds),
            f"{seconds / total:.1%}",
            f"{seconds * stages / total:.3f}",
            f"{ends / seconds:.1%}" if ends else "",
            style="bold" if seconds == max(result.seconds) else None,
        )
    return table


def layout_table(analysis: StageAnalysis) -> Table:
    """One row per layout; see ``LAYOUT_COLUMNS``."""
    plural = "es" if analysis.micro_batches > 1 else ""
    table = empty_table(f"A step of {analysis.micro_batches} micro-batch{plural}")
    table.add_column("layout", no_wrap=True)
    table.add_column("layers of the stages")
    for column in ("largest", "step ms", "waiting"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in analysis.results.values():
        table.add_row(
            result.name,
            ",".join(map(str, result.layout.sizes)),
            f"{result.imbalance:.3f}",
            _milliseconds(result.step_seconds),
            f"{result.waiting:.1%}",
            style="bold" if result is analysis.balanced else None,
        )
    return table


def _milliseconds(seconds: float) -> str:
    return figure(seconds * 1e3)
