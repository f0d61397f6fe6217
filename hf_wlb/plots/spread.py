"""Many values of a few kinds, each a dot, with their means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from hf_wlb.plots.style import INK, new_figure, save

_ROOM = 0.26  # of a row, above and below its middle
_BAR = 0.33  # half a mean's height


def plot_spread(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    path: str | Path,
    *,
    colours: Mapping[str, str],
    xlabel: str,
    title: str,
    text: Callable[[float], str] = "{:.2f}".format,
    limits: tuple[float, float] | None = None,
) -> Path:
    """Draw every value as a dot in the row of its kind, and the row's mean as a bar that is written out.

    Args:
        panels: Heading -> kind -> values; every panel has the same kinds.
        path: PNG file to write; its folder is created.
        colours: Kind -> colour.
        xlabel: What the values are, with their unit.
        title: Heading of the picture: what it shows.
        text: Writes a value.
        limits: Least and largest value shown; chosen from the values if None.

    Returns:
        The path.

    Raises:
        ValueError: If there is no panel, a kind has no values or no colour, or the panels' kinds differ.
    """
    if not panels:
        raise ValueError("There are no values to draw: give at least one panel.")
    kinds = list(next(iter(panels.values())))
    for heading, panel in panels.items():
        if not kinds or list(panel) != kinds or not all(len(values) for values in panel.values()):
            raise ValueError(f"The panel {heading!r} needs values for each of {', '.join(kinds) or 'some kinds'}.")
    missing = [kind for kind in kinds if kind not in colours]
    if missing:
        raise ValueError(f"There is no colour for {', '.join(missing)}.")
    figure, row = new_figure(width=9.6, height=1.5 + 0.7 * len(kinds), columns=len(panels), title=title)
    for index, (axes, (heading, panel)) in enumerate(zip(row, panels.items(), strict=True)):
        for place, kind in enumerate(kinds):
            _draw_row(axes, place, np.asarray(panel[kind], dtype=np.float64), colours[kind], text)
        axes.set_ylim(len(kinds) - 0.5, -0.7)
        axes.set_yticks(range(len(kinds)), kinds if index == 0 else [""] * len(kinds))
        axes.tick_params(axis="y", length=0, labelsize=10.5)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
        if limits is not None:
            axes.set_xlim(*limits)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
        axes.set_xlabel(xlabel, fontsize=10.5)
        if heading:
            axes.set_title(heading, fontsize=11, color=INK)
    return save(figure, path)


def _draw_row(axes: Axes, place: int, values: NDArray[np.float64], colour: str, text: Callable[[float], str]) -> None:
    axes.scatter(values, place + _offsets(values), s=20, color=colour, alpha=0.55, linewidth=0, zorder=3)
    mean = float(values.mean())
    axes.plot([mean, mean], [place - _BAR, place + _BAR], color=INK, linewidth=2.2, zorder=4)
    axes.annotate(
        text(mean),
        (mean, place - _BAR),
        xytext=(0, 1),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=10.5,
        fontweight="bold",
        color=INK,
    )


def _offsets(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Heights that keep neighbours apart: in the order of the values, by the golden ratio, which never repeats."""
    turn = np.arange(len(values)) * 0.6180339887498949 % 1.0
    heights = np.empty(len(values))
    heights[np.argsort(values, kind="stable")] = (turn - 0.5) * 2 * _ROOM
    return heights
