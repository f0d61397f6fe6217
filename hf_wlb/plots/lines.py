"""Lines with their names written at their ends, one or more panels of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from hf_wlb.plots.style import GREY, INK, new_figure, packer_colours, save, token_text

Points = Sequence[tuple[float, float]]

_LABEL_POINTS = 13.0  # from one label's middle to the next, at least


@dataclass(frozen=True)
class LinePanel:
    """One panel of ``plot_lines``.

    Attributes:
        lines: Name -> points (x, y), joined in the order of x. A packer has its own colour.
        xlabel: What x is, with its unit.
        ylabel: What y is, with its unit.
        title: Heading of the panel.
        dots: Name -> points that are not joined, such as measurements; in the colour of the line of that name.
        colours: Name -> colour, for names that shall not get theirs in turn.
        name_at: Name -> x at which the name is written, above the line there; at the line's right end without.
        notes: Text -> the point that it is written beside.
        marks: Text -> x of a vertical line.
        x_scale: ``linear``; ``tokens``: logarithmic, marks at powers of two; ``percent``: logarithmic, 100 at the end.
        y_text: Writes a value of the y axis.
        y_from: Least y shown; None leaves it to the points.
        steps: Draw lines as steps, a value held from one x up to the next.
    """

    lines: Mapping[str, Points]
    xlabel: str
    ylabel: str
    title: str = ""
    dots: Mapping[str, Points] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    name_at: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    x_scale: str = "linear"
    y_text: Callable[[float], str] | None = None
    y_from: float | None = 0.0
    steps: bool = False


def plot_lines(panels: Sequence[LinePanel], path: str | Path, *, title: str, height: float = 4.2) -> Path:
    """Draw lines, each with its name at its right end instead of a key.

    Args:
        panels: From left to right.
        path: PNG file to write; its folder is created.
        title: Heading of the picture: what it shows.
        height: Of the picture, in inches.

    Returns:
        The path.

    Raises:
        ValueError: If there is no panel, or a panel has no point, or an unknown ``x_scale``.
    """
    if not panels or not all(any(len(points) for points in panel.lines.values()) for panel in panels):
        raise ValueError("There are no lines to draw: give at least one panel, and each at least one point.")
    figure, row = new_figure(width=9.6, height=height, columns=len(panels), title=title)
    for axes, panel in zip(row, panels, strict=True):
        _draw(axes, panel)
    figure.draw_without_rendering()  # settles the layout, so that places on the page are known
    for axes, panel in zip(row, panels, strict=True):
        _name_lines(axes, panel)
    return save(figure, path)


def _colours(panel: LinePanel) -> dict[str, str]:
    return {
        **packer_colours([*panel.lines, *(name for name in panel.dots if name not in panel.lines)]),
        **panel.colours,
    }


def _draw(axes: Axes, panel: LinePanel) -> None:
    colours = _colours(panel)
    for name, points in panel.lines.items():
        ordered = np.array(sorted(points)).reshape(-1, 2)
        style = "steps-mid" if panel.steps else "default"
        width = 1.9 if panel.steps else 2.4
        axes.plot(*ordered.T, color=colours[name], linewidth=width, drawstyle=style, solid_capstyle="round", zorder=3)
    for name, points in panel.dots.items():
        dots = np.array(points).reshape(-1, 2)
        axes.scatter(dots[:, 0], dots[:, 1], s=48, color=colours[name], edgecolor="white", linewidth=1.2, zorder=4)
    if panel.title:
        axes.set_title(panel.title, fontsize=11, color=INK)
    axes.set_xlabel(panel.xlabel, fontsize=10.5)
    axes.set_ylabel(panel.ylabel, fontsize=10.5)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    _scale_x(axes, panel)
    axes.margins(x=0.02, y=0.08)
    if panel.y_from is not None:
        axes.set_ylim(bottom=panel.y_from)
    if panel.y_text is not None:
        text = panel.y_text
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    _write_beside(axes, panel)


def _write_beside(axes: Axes, panel: LinePanel) -> None:
    offset: Any = {"textcoords": "offset points"}
    for text, place in panel.marks.items():
        axes.axvline(place, color=GREY, linestyle="--", linewidth=1.1, zorder=1)
        at: Any = {"xycoords": ("data", "axes fraction"), "xytext": (4, 0)}
        axes.annotate(text, (place, 0.02), fontsize=9, color=GREY, **at, **offset)
    for text, point in panel.notes.items():
        nearest = min(panel.lines.values(), key=lambda points: abs(_height(points, point[0]) - point[1]))
        rising = _rises(nearest, point[0])
        at = {"xytext": (9, -3), "va": "top"} if rising else {"xytext": (5, 6), "va": "bottom"}
        axes.annotate(text, point, fontsize=10, color=INK, **at, **offset)


def _height(points: Points, place: float) -> float:
    return float(np.interp(place, *np.array(sorted(points)).T)) if len(points) else float("inf")


def _rises(points: Points, place: float) -> bool:
    """Whether a line is higher just after ``place`` than just before; there its upper left is free, else its right.

    >>> _rises([(0, 0), (1, 2), (4, 1)], 1), _rises([(0, 0), (1, 2), (4, 1)], 2)
    (True, False)
    """
    ordered = np.array(sorted(points), dtype=np.float64)
    after = min(max(int(np.searchsorted(ordered[:, 0], place)), 1), len(ordered) - 1)
    return len(ordered) > 1 and bool(ordered[after, 1] > ordered[after - 1, 1])


def _scale_x(axes: Axes, panel: LinePanel) -> None:
    if panel.x_scale == "tokens":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: token_text(tokens)))
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.x_scale == "percent":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}%"))
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.x_scale != "linear":
        raise ValueError(f"x_scale must be linear, tokens or percent, got {panel.x_scale!r}.")


def _name_lines(axes: Axes, panel: LinePanel) -> None:
    """Write each name at its line's end, moved up or down where two would overlap."""
    colours = _colours(panel)
    ends = {name: max(points) for name, points in panel.lines.items() if len(points) and name not in panel.name_at}
    scale = 72.0 / axes.figure.dpi
    wanted = {name: float(axes.transData.transform(end)[1]) * scale for name, end in ends.items()}
    places = _spread(wanted)
    for name, end in ends.items():
        axes.annotate(
            name,
            end,
            xytext=(7, places[name] - wanted[name]),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            fontweight="bold",
            color=colours[name],
            annotation_clip=False,
        )
    for name, place in panel.name_at.items():
        height = _height(panel.lines[name], place)
        side: Any = {"ha": "right", "xytext": (-5, 4)} if _rises(panel.lines[name], place) else {"xytext": (5, 4)}
        axes.annotate(
            name,
            (place, height),
            textcoords="offset points",
            fontsize=10.5,
            fontweight="bold",
            color=colours[name],
            path_effects=[withStroke(linewidth=3, foreground="white")],  # where it crosses another line
            zorder=5,
            **side,
        )


def _spread(wanted: Mapping[str, float]) -> dict[str, float]:
    """Heights close to those wanted, at least ``_LABEL_POINTS`` apart.

    >>> _spread({"a": 10.0, "b": 12.0, "c": 60.0})
    {'a': 4.5, 'b': 17.5, 'c': 60.0}
    """
    groups: list[list[str]] = []
    for name in sorted(wanted, key=lambda name: wanted[name]):
        groups.append([name])
        while len(groups) > 1 and _lowest(groups[-1], wanted) - _highest(groups[-2], wanted) < _LABEL_POINTS:
            last = groups.pop()
            groups[-1] += last
    return {
        name: _lowest(group, wanted) + place * _LABEL_POINTS for group in groups for place, name in enumerate(group)
    }


def _lowest(group: Sequence[str], wanted: Mapping[str, float]) -> float:
    return float(np.mean([wanted[name] for name in group])) - (len(group) - 1) / 2 * _LABEL_POINTS


def _highest(group: Sequence[str], wanted: Mapping[str, float]) -> float:
    return _lowest(group, wanted) + (len(group) - 1) * _LABEL_POINTS
