"""A picture of one step of every variant of a launch: what every rank does, and when. No torch."""

from __future__ import annotations

from pathlib import Path

from end_to_end_cases import VARIANTS
from end_to_end_report import Launch, rank_spans
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from hf_wlb.plots.style import INK, quiet, save

_LIGHT, _DARK = to_rgba("#56B4E9"), to_rgba("#0072B2")
_LEAST_SHARE = 0.012  # of the axis; numbers do not fit into shorter bars


def draw_timeline(launch: Launch, file: Path) -> Path:
    """Writes the step of every variant in the launch's first complete round, all on one scale.

    Raises:
        ValueError: If there is no complete round.
    """
    if not launch.rounds:
        raise ValueError(f"Launch {launch.about['launch']} has no complete round to draw.")
    steps = launch.rounds[0]
    ranks = len(launch.about["stage_of_rank"])
    height = 0.9 + len(steps) * (0.55 + 0.24 * ranks)
    figure = Figure(figsize=(11, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(f"One step, {launch.label}: forwards light, backwards dark", fontsize=12.5, color=INK)
    longest = max(step["seconds"] for step in steps.values())
    for place, name in enumerate(variant.name for variant in VARIANTS if variant.name in steps):
        step = steps[name]
        axes = figure.add_subplot(len(steps), 1, place + 1)
        quiet(axes)
        axes.set_title(
            f"{name}: {step['seconds']:.2f} s, {step['tokens']:,} tokens", fontsize=10, loc="left", color=INK
        )
        axes.set_xlim(0, longest)
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_yticks(
            range(ranks), [f"rank {rank}, stage {stage}" for rank, stage in enumerate(launch.about["stage_of_rank"])]
        )
        for rank in range(ranks):
            _draw_rank(axes, launch, step, rank, longest)
        axes.axvline(step["seconds"], color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds", color=INK)
    return save(figure, file)


def _draw_rank(axes: Axes, launch: Launch, step: dict, rank: int, longest: float) -> None:  # type: ignore[type-arg]
    for number, forward, begin, end in rank_spans(launch, step, rank):
        colour = _LIGHT if forward else _DARK
        axes.barh(rank, end - begin, left=begin, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
        if end - begin > _LEAST_SHARE * longest:
            ink = INK if forward else "white"
            axes.text((begin + end) / 2, rank, str(number), ha="center", va="center", fontsize=7, color=ink)
