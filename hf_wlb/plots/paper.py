"""Pictures of the paper's evaluation, simulated, its numbers beside ours; rows are those of the results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hf_wlb.plots.style import GREY, INK, new_figure, save, token_text
from hf_wlb.simulator.comparison import SYSTEM_LABELS

Row = Mapping[str, Any]

PAPER_INK = "#C2185B"
"""Colour of what the paper prints, in all of these pictures and in no other place."""
SYSTEM_COLOURS = {
    "plain-4d, cut": "#A6A6A6",
    "fixed-4d": "#E69F00",
    "whole": "#CC79A7",
    "paper": "#0072B2",
    "placed": "#009E73",
    "wlb": "#66C2A5",
    "balanced": INK,
}


def plot_figure_12(
    rows: Sequence[Row],
    paper: Mapping[str, Mapping[str, float]],
    path: str | Path,
    *,
    title: str = "Speed-up over Plain-4D, simulated, and the paper's means",
) -> Path:
    """Draw the speed-ups of every configuration, in blocks by context with the mean of each.

    Args:
        rows: Of ``figure_12``, with all systems but ``balanced`` as bars, and that as a bound above them.
        paper: Means that the paper states, by system and group.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("There are no configurations to draw: give at least one row.")
    systems = [name for name in ("fixed-4d", "whole", "paper", "placed") if name in rows[0]["systems"]]
    figure, axes_row = new_figure(width=11.5, height=4.9, columns=1, title=title)
    axes = axes_row[0]
    groups = _groups(rows)
    width = 0.8 / len(systems)
    place, ticks, labels, tallest = 0.0, [], [], 1.0
    for label, members, key in groups:
        mean = key is not None
        if mean:
            axes.axvspan(place - 0.5, place + 0.5, color="#F3F3F3", zorder=0)
        for index, name in enumerate(systems):
            value = _mean(members, name)
            x = place + (index - (len(systems) - 1) / 2) * width
            axes.bar(x, value - 1, width=width * 0.92, bottom=1, color=SYSTEM_COLOURS[name], zorder=2)
            if name in ("paper", "placed"):
                _write_at_foot(axes, x, value, f"{value:.2f}", room=0.1, upright=True)
            stated = paper.get(name, {}).get(key or "")
            if stated is not None:
                axes.hlines(stated, x - width * 0.75, x + width * 0.75, color=PAPER_INK, linewidth=2.4, zorder=5)
            tallest = max(tallest, value)
        if "balanced" in rows[0]["systems"]:
            bound = _mean(members, "balanced")
            axes.hlines(bound, place - 0.4, place + 0.4, color=INK, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=4)
            tallest = max(tallest, bound)
        ticks.append(place)
        own = paper.get("paper", {}).get(key or "")
        labels.append(label + ("" if own is None else f"\n(paper {own:.2f})"))
        place += 1.25 if mean else 1.0
    axes.set_xticks(ticks, labels)
    axes.tick_params(axis="x", length=0)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_ylim(0.97, tallest + 0.09)
    axes.set_xlim(-0.6, ticks[-1] + 0.6)
    axes.set_ylabel("speed-up over Plain-4D, same documents")
    quiet_grid(axes, "y")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=SYSTEM_COLOURS[name], label=SYSTEM_LABELS[name]) for name in systems
    ]
    handles.append(
        Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (2, 1.5)), label="bound: attention perfectly even")
    )
    handles.append(Line2D([], [], color=PAPER_INK, linewidth=2.4, label="the paper's mean"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9.5)
    return save(figure, path)


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row], str | None]]:
    """(label, rows, key of the paper's mean or None) of every group of bars, from left to right."""
    groups: list[tuple[str, list[Row], str | None]] = []
    contexts = sorted({row["context"] for row in rows})
    for context in contexts:
        members = [row for row in rows if row["context"] == context]
        groups += [(row["configuration"].replace("-", "\n"), [row], None) for row in members]
        name = token_text(context)
        groups.append((f"mean\n{name}", members, name))
    if len(contexts) > 1:
        groups.append(("mean\nof all", list(rows), "all"))
    return groups


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row["systems"][name]["speedup"] for row in rows]))


def plot_figure_13(
    rows: Sequence[Row], path: str | Path, *, title: str = "What each part brings alone: 7B, 128K context"
) -> Path:
    """Draw the speed-ups of parts of the method, the paper's numbers beside.

    Args:
        rows: Of ``figure_13``.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("There are no parts to draw: give at least one row.")
    figure, axes_row = new_figure(width=8.2, height=0.9 + 0.42 * len(rows), columns=1, title=title)
    axes = axes_row[0]
    for place, row in enumerate(rows):
        ours = row["packer"] == "steady" or row["sharding"] == "placed"
        axes.barh(
            place,
            row["speedup"] - 1,
            left=1,
            height=0.66,
            color=SYSTEM_COLOURS["placed" if ours else "paper"],
            zorder=2,
        )
        stated = row["paper"]
        covered = stated is not None and row["speedup"] < stated < row["speedup"] + 0.045
        axes.annotate(
            f"{row['speedup']:.2f}",
            (row["speedup"], place),
            xytext=(-5 if covered else 5, 0),
            textcoords="offset points",
            ha="right" if covered else "left",
            va="center",
            fontsize=9.5,
            fontweight="bold",
            color="white" if covered else INK,
            zorder=3,
        )
        if stated is not None:
            axes.vlines(stated, place - 0.42, place + 0.42, color=PAPER_INK, linewidth=2.6, zorder=4)
            axes.annotate(
                f"{stated:.2f}",
                (1, place),
                xycoords=("axes fraction", "data"),
                va="center",
                ha="right",
                fontsize=9.5,
                color=PAPER_INK,
            )
    axes.set_yticks(range(len(rows)), [f"{row['name']}  ({row['packer']}, {row['sharding']})" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    most = max(max(row["speedup"], row["paper"] or 1.0) for row in rows)
    axes.set_xlim(1, most + 0.08)
    axes.set_xlabel("speed-up over Plain-4D (next-fit, per-sequence), same documents")
    quiet_grid(axes, "x")
    handles = [
        Patch(facecolor=SYSTEM_COLOURS["paper"], label="parts of the paper's method, simulated"),
        Patch(facecolor=SYSTEM_COLOURS["placed"], label="parts of ours"),
        Line2D([], [], color=PAPER_INK, linewidth=2.6, label="the paper (numbers at the right)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return save(figure, path)


def plot_figure_14(rows: Sequence[Row], path: str | Path, *, title: str = "Speed-up by context length: 7B") -> Path:
    """Draw speed-ups over the context length.

    Args:
        rows: Of ``figure_14``.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("There are no contexts to draw: give at least one row.")
    figure, axes_row = new_figure(width=7.6, height=4.5, columns=1, title=title)
    axes = axes_row[0]
    contexts = [row["context"] for row in rows]
    ends: list[tuple[float, str, str]] = []
    for name, text in (("placed", "ours, placed"), ("paper", "paper's method")):
        for key, line, over in (("speedup", "-", ""), ("speedup_over_cut", ":", " over cut documents")):
            values = [row["systems"][name][key] for row in rows]
            axes.plot(contexts, values, line, color=SYSTEM_COLOURS[name], marker=None if over else "o", linewidth=2)
            ends.append((values[-1], f"{text}{over}", SYSTEM_COLOURS[name]))
    stated = [(row["context"], row["paper"]) for row in rows if row.get("paper") is not None]
    if stated:
        axes.plot(*zip(*stated, strict=True), "--", color=PAPER_INK, marker="D", markersize=7, linewidth=1.2)
        ends.append((stated[-1][1], "the paper", PAPER_INK))
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(contexts, [token_text(context) for context in contexts])
    axes.margins(x=0.03)
    axes.set_xlabel("context length (tokens), split as for 7B-128K")
    axes.set_ylabel("speed-up over Plain-4D")
    quiet_grid(axes, "y")
    _write_ends(axes, ends)
    return save(figure, path)


def _write_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """What each line is, beside its end; labels that would touch are moved apart."""
    low, high = axes.get_ylim()
    apart, last = 0.045 * (high - low), float("-inf")
    for value, text, colour in sorted(ends):
        last = max(value, last + apart)
        axes.annotate(
            f"{text} {value:.2f}",
            (1, last),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colour,
            annotation_clip=False,
        )


_SHARDING_COLOURS = {
    "per_document": "#E69F00",
    "static": "#0072B2",
    "whole": "#CC79A7",
    "placed": "#009E73",
}
_SHARDING_LABELS = {
    "per_document": "per-document",
    "static": "the faster of both (paper's adaptive)",
    "whole": "whole documents",
    "placed": "placed (ours)",
}


def plot_figure_15(
    rows: Sequence[Row],
    paper: Sequence[Row],
    path: str | Path,
    *,
    title: str = "One layer of 7B on 4 context-parallel ranks: speed-up over per-sequence sharding",
) -> Path:
    """Draw what shardings bring to one layer.

    Args:
        rows: Of ``figure_15``.
        paper: What the paper prints: ``sharding``, ``over``, ``context`` (None for a mean) and ``speedup``.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("There are no layers to draw: give at least one row.")
    figure, axes_row = new_figure(width=9.2, height=4.4, columns=1, title=title)
    axes = axes_row[0]
    names = list(_SHARDING_COLOURS)
    width = 0.8 / len(names)
    for place, row in enumerate(rows):
        for index, name in enumerate(names):
            x, value = place + (index - (len(names) - 1) / 2) * width, row["speedup"][name]
            axes.bar(x, value - 1, width=width * 0.92, bottom=1, color=_SHARDING_COLOURS[name], zorder=2)
            _write_at_foot(axes, x, value, f"{value:.2f}", room=0.035)
            for stated in paper:
                fits = stated["context"] in (None, row["context"])
                if (stated["sharding"], stated["over"]) == (name, "per_sequence") and fits:
                    ends = (x - width * 0.44, x + width * 0.44)
                    axes.hlines(stated["speedup"], *ends, color=PAPER_INK, linewidth=2.4, zorder=5)
        ideal = row["speedup"]["ideal"]
        axes.hlines(ideal, place - 0.42, place + 0.42, color=INK, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=4)
    where = {1: "TP 1, ranks in one node", 8: "TP 8, ranks on 4 nodes"}
    labels = [f"{token_text(row['context'])}\n{where.get(row['tp_size'], row['tp_size'])}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.tick_params(axis="x", length=0)
    axes.axhline(1, color=GREY, linewidth=1)
    values = [value for row in rows for name, value in row["speedup"].items() if name in (*names, "ideal")]
    axes.set_ylim(min(0.98, min(values) - 0.03), max(values) + 0.04)
    axes.set_ylabel("speed-up over per-sequence")
    quiet_grid(axes, "y")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_SHARDING_COLOURS[name], label=_SHARDING_LABELS[name]) for name in names
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (2, 1.5)), label="ideal"))
    handles.append(Line2D([], [], color=PAPER_INK, linewidth=2.4, label="the paper"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return save(figure, path)


def _write_at_foot(axes: Axes, x: float, value: float, text: str, room: float, *, upright: bool = False) -> None:
    """A number inside a bar that begins at 1, at its foot; beyond its end where it is shorter than ``room``."""
    inside = abs(value - 1) > room
    up = value >= 1
    axes.annotate(
        text,
        (x, 1 if inside else value),
        xytext=(0, 3 if up else -3),
        textcoords="offset points",
        ha="center",
        va="bottom" if up else "top",
        rotation=90 if upright else 0,
        fontsize=7.6 if upright else 8.5,
        color="white" if inside else INK,
        fontweight="bold" if inside else "normal",
        zorder=6,
    )


def quiet_grid(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Lines that lead the eye and are hardly seen."""
    axes.grid(axis=axis, color="#E4E4E4", linewidth=0.7)
