"""Pictures of what simulated speed-ups owe to assumptions; rows are those of the results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from hf_wlb.plots.paper import PAPER_INK, SYSTEM_COLOURS, quiet_grid
from hf_wlb.plots.style import GREY, INK, new_figure, save

Row = Mapping[str, Any]

_LIGHT, _DARK = "#9CCFE7", "#0B4F7D"


def plot_sensitivity(
    rows: Sequence[Row],
    path: str | Path,
    *,
    title: str = "Change of the mean speed-up when one constant is a fifth lower or higher",
) -> Path:
    """Draw how far every assumed constant moves the means, the one that moves them most on top.

    Args:
        rows: Of ``sensitivity``; the first is that of no change.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no constant.
    """
    if len(rows) < 2:
        raise ValueError("There are no constants to draw: give the row of no change and at least one more.")
    base, constants = rows[0]["low"], sorted(rows[1:], key=_swing)
    figure, axes_row = new_figure(width=9.6, height=1.3 + 0.36 * len(constants), columns=2, title=title)
    reach = max(abs(row[which][name] - base[name]) for row in constants for which in ("low", "high") for name in base)
    for axes, name, heading in zip(axes_row, ("paper", "placed"), ("paper's method", "ours, placed"), strict=True):
        for place, row in enumerate(constants):
            for which, colour in (("low", _LIGHT), ("high", _DARK)):
                change = row[which][name] - base[name]
                axes.barh(place, change, height=0.62, color=colour, zorder=2)
                _write_change(axes, change, place)
        axes.axvline(0, color=INK, linewidth=1, zorder=3)
        axes.set_xlim(-1.5 * reach or -1, 1.5 * reach or 1)
        axes.set_yticks(range(len(constants)), [row["constant"] for row in constants])
        axes.tick_params(axis="y", length=0)
        axes.set_title(heading, fontsize=10.5, color=INK)
        quiet_grid(axes, "x")
    axes_row[1].tick_params(labelleft=False)
    handles = [Patch(facecolor=_LIGHT, label="constant x 0.8"), Patch(facecolor=_DARK, label="constant x 1.2")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9.5)
    return save(figure, path)


def _write_change(axes: Axes, change: float, place: int) -> None:
    """A number beside a bar, unless the bar can hardly be seen."""
    if abs(change) < 0.0015:
        return
    axes.annotate(
        f"{change:+.3f}",
        (change, place),
        xytext=(4 if change > 0 else -4, 0),
        textcoords="offset points",
        ha="left" if change > 0 else "right",
        va="center",
        fontsize=8.5,
        color=INK,
    )


def _swing(row: Row) -> float:
    return float(sum(abs(row["high"][name] - row["low"][name]) for name in ("paper", "placed")))


def plot_explanation(
    rows: Sequence[Row],
    paper_mean: float,
    path: str | Path,
    *,
    title: str = "Mean speed-up of the paper's method when one assumption is swapped",
) -> Path:
    """Draw the means with every assumption swapped, over both baselines, and the paper's mean.

    Args:
        rows: Of ``explanation``; the first is that of no swap.
        paper_mean: What the paper reports.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("There are no assumptions to draw: give at least one row.")
    figure, axes_row = new_figure(width=9.6, height=1.4 + 0.32 * len(rows), columns=1, title=title)
    axes = axes_row[0]
    series = (
        ("paper", "o", SYSTEM_COLOURS["paper"], "over Plain-4D"),
        ("paper_without_550M", "s", SYSTEM_COLOURS["fixed-4d"], "over Plain-4D, 550M left out"),
        ("paper_over_cut", "D", GREY, "over Plain-4D that cuts documents"),
    )
    for place, row in enumerate(rows):
        values = [row[key] for key, *_ in series if row[key] is not None]
        axes.hlines(place, min(values), max(values), color="#C8C8C8", linewidth=2.2, zorder=1)
        for key, marker, colour, _ in series:
            if row[key] is not None:
                axes.scatter(row[key], place, s=46, marker=marker, color=colour, zorder=3)
    axes.axvline(paper_mean, color=PAPER_INK, linewidth=2, zorder=2)
    axes.annotate(
        f"the paper: {paper_mean:.2f}",
        (paper_mean, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9.5,
        color=PAPER_INK,
    )
    axes.set_yticks(range(len(rows)), [row["assumption"] for row in rows])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
    quiet_grid(axes, "x")
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=label) for _, marker, colour, label in series
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return save(figure, path)
