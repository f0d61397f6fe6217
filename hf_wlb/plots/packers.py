"""Pictures of micro-batches and packers: their workloads, their times, and what balance costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hf_wlb.plots.style import GREY, INK, new_figure, packer_colours, save

_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def plot_micro_batch_workloads(
    panels: Mapping[str, Sequence[Sequence[float]]],
    path: str | Path,
    *,
    title: str = "Work of each micro-batch, step by step",
    unit: str = "relative units",
    max_steps: int = 32,
) -> Path:
    """Draw the workloads of the micro-batches of each step, one panel per packer, on a common scale.

    A dot is a micro-batch; a line joins the lightest and the heaviest of a step; the short bar is the step's
    mean, which everybody would work if the step were balanced. The heaviest dot, which everybody waits for,
    is filled.

    Args:
        panels: Packer -> steps -> workloads of the step's micro-batches. The imbalance in a panel's
            heading, the mean of max / mean, is over all of its steps.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.
        unit: Unit of the workloads.
        max_steps: Draw only so many steps from the first on; beyond about 40 the dots touch.

    Returns:
        The path.

    Raises:
        ValueError: If there is no panel, a panel has no step, a step no work, or ``max_steps`` is below 1.
    """
    if not panels:
        raise ValueError("There are no workloads to draw: give at least one packer's steps.")
    if max_steps < 1:
        raise ValueError(f"max_steps={max_steps} was given; draw 1 step or more.")
    figure, row = new_figure(width=max(6.4, 4.9 * len(panels)), height=3.9, columns=len(panels), title=title)
    colours = packer_colours(panels)
    tallest = 0.0
    for axes, (name, steps) in zip(row, panels.items(), strict=True):
        imbalance = mean_imbalance(steps, name)
        drawn = steps[:max_steps]
        tallest = max(tallest, max(max(step) for step in drawn))
        _draw_steps(axes, drawn, colours[name])
        axes.set_title(f"{name}: imbalance {imbalance:.2f} (heaviest / mean)", fontsize=10.5, color=INK)
        shown = "" if len(drawn) == len(steps) else f" (the first {len(drawn)} of {len(steps)} are shown)"
        axes.set_xlabel(f"step{shown}")
    for axes in row:
        axes.set_ylim(0, tallest * 1.06)
    for axes in row[1:]:
        axes.tick_params(labelleft=False)
    row[0].set_ylabel(f"work ({unit})")
    key = [
        Line2D([], [], linestyle="", marker="o", color=GREY, markerfacecolor="white", label="micro-batch"),
        Line2D([], [], linestyle="", marker="o", color=GREY, label="heaviest: all others wait for it"),
        Line2D([], [], color=INK, linewidth=1.4, label="mean of the step"),
    ]
    figure.legend(handles=key, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save(figure, path)


def mean_imbalance(steps: Sequence[Sequence[float]], name: str = "The packer") -> float:
    """Return the mean over steps of max / mean of the micro-batches' workloads; 1.0 is perfect balance.

    Example:
        >>> mean_imbalance([[1.0, 3.0], [2.0, 2.0]])
        1.25
    """
    if not steps or any(not step or sum(step) <= 0 for step in steps):
        raise ValueError(f"{name} has no steps, or a step without work, so there is no imbalance to speak of.")
    return float(np.mean([max(step) * len(step) / sum(step) for step in steps]))


def _draw_steps(axes: Axes, steps: Sequence[Sequence[float]], colour: str) -> None:
    place = np.arange(1, len(steps) + 1)
    heaviest = np.array([max(step) for step in steps])
    mean = np.array([sum(step) / len(step) for step in steps])
    axes.vlines(place, [min(step) for step in steps], heaviest, color=colour, alpha=0.35, linewidth=2.2)
    flat_place = np.repeat(place, [len(step) for step in steps])
    flat = np.concatenate([np.asarray(step, dtype=np.float64) for step in steps])
    axes.scatter(flat_place, flat, s=15, facecolor="white", edgecolor=colour, linewidth=1)
    axes.scatter(place, heaviest, s=26, color=colour, zorder=4)
    half = min(0.36, 0.1 + 0.012 * len(steps))
    axes.hlines(mean, place - half, place + half, color=INK, linewidth=1.4, zorder=5)
    axes.set_xlim(0.2, len(steps) + 0.8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)


def plot_frontier(
    series: Mapping[str, Sequence[tuple[float, float, str]]],
    path: str | Path,
    xlabel: str,
    ylabel: str,
    title: str,
) -> Path:
    """Draw what one quantity costs in another, one line of labelled points per packer.

    Args:
        series: Packer -> points ``(x, y, label)``; joined in the order of x. An empty label writes nothing.
        path: PNG file to write; its folder is created.
        xlabel: What x is, with its unit.
        ylabel: What y is, with its unit.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no point at all.
    """
    if not any(series.values()):
        raise ValueError("There are no points to draw: give at least one packer's (x, y, label).")
    figure, row = new_figure(width=7.6, height=4.8, columns=1, title=title)
    axes = row[0]
    colours = packer_colours(series)
    for index, (name, points) in enumerate(series.items()):
        ordered = sorted(points)
        axes.plot(
            [x for x, _, _ in ordered],
            [y for _, y, _ in ordered],
            color=colours[name],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=6,
            linewidth=1.6,
            label=name,
        )
    axes.margins(0.07)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.legend(frameon=False, fontsize=10, loc="best")
    figure.draw_without_rendering()  # settles the layout, so that places on the page are known
    _place_labels(axes, series, colours)
    return save(figure, path)


_Box = tuple[float, float, float, float]
_SIDES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))


def _place_labels(
    axes: Axes, series: Mapping[str, Sequence[tuple[float, float, str]]], colours: Mapping[str, str]
) -> None:
    """Write each point's label on the side where it covers the fewest lines, points and other labels."""
    to_points = axes.transData.transform
    scale = 72.0 / axes.figure.dpi
    ink: list[npt.NDArray[np.float64]] = []  # places along the drawn lines, in points
    for named in series.values():
        corners = np.array([to_points((x, y)) for x, y, _ in sorted(named)]).reshape(-1, 2) * scale
        for a, b in itertools.pairwise(corners):
            ink.append(a + (b - a) * np.linspace(0, 1, 2 + int(np.hypot(*(b - a)) / 3))[:, None])
        ink.append(np.repeat(corners, 8, axis=0))  # to cover a marker is worse than to cross a line
    drawn = np.concatenate(ink)
    taken: list[_Box] = []
    for name, named in series.items():
        for x, y, label in sorted(named):
            if not label:
                continue
            at_x, at_y = to_points((x, y)) * scale
            boxes = [_label_box(at_x, at_y, side, label) for side in _SIDES]
            costs = [_covered(box, drawn, taken) + 0.1 * order for order, box in enumerate(boxes)]
            best = int(np.argmin(costs))
            taken.append(boxes[best])
            dx, dy = _SIDES[best]
            axes.annotate(
                label,
                (x, y),
                xytext=(6 * dx, 5 * dy),
                textcoords="offset points",
                ha=("right", "center", "left")[dx + 1],
                va="bottom" if dy > 0 else "top",
                fontsize=8.5,
                color=colours[name],
            )


def _label_box(x: float, y: float, side: tuple[int, int], label: str) -> _Box:
    """Estimate the place of a label beside a point, all in points (1/72 inch)."""
    dx, dy = side
    width, height = 5.0 * len(label), 10.0
    left = x + 6 * dx - width * (1 - dx) / 2
    bottom = y + 5 * dy - (height if dy < 0 else 0.0)
    return (left, bottom, left + width, bottom + height)


def _covered(box: _Box, drawn: npt.NDArray[np.float64], taken: Sequence[_Box]) -> float:
    left, bottom, right, top = box
    inside = (drawn[:, 0] > left) & (drawn[:, 0] < right) & (drawn[:, 1] > bottom) & (drawn[:, 1] < top)
    labels = sum(left < other[2] and other[0] < right and bottom < other[3] and other[1] < top for other in taken)
    return float(inside.sum()) + 20.0 * labels


def plot_packer_bars(
    rows: Sequence[tuple[str, float]],
    path: str | Path,
    *,
    title: str = "Modelled step time above perfect balance",
) -> Path:
    """Draw how much longer than a perfectly balanced step every packer's step takes.

    Args:
        rows: ``(packer, modelled step time / time of the same work in perfect balance)``, from top to bottom.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there are no rows, or a time is not a number above 0.
    """
    if not rows:
        raise ValueError("There are no packers to draw: give at least one (packer, time over perfect balance).")
    for name, ratio in rows:
        if not 0 < ratio < float("inf"):
            raise ValueError(f"The time of {name!r} over perfect balance is {ratio}; it is a number above 0.")
    figure, only = new_figure(width=7.6, height=1.2 + 0.36 * len(rows), columns=1, title=title)
    axes = only[0]
    names = [name for name, _ in rows]
    colours = packer_colours(names)
    excess = [round((ratio - 1.0) * 100.0, 6) + 0.0 for _, ratio in rows]  # + 0.0: a label of -0.0 goes to the left
    bars = axes.barh(range(len(rows)), excess, color=[colours[name] for name in names], height=0.68)
    axes.bar_label(bars, [f" {ratio:.3f} x" for _, ratio in rows], fontsize=9, color=INK, padding=2)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    high = max([5.0, *excess]) * 1.16
    low = min(excess)
    axes.set_xlim(low - 0.16 * (high - low) if low < 0 else 0.0, high)  # room for the labels of bars to the left
    axes.xaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+g}%" if percent else "0"))
    axes.set_xlabel("longer than the work of whole documents in perfect balance")
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
    axes.tick_params(axis="y", length=0)
    return save(figure, path)
