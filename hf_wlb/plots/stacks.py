"""A picture of what amounts are made of: a bar each, its parts one after another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from hf_wlb.plots.style import INK, new_figure, save

_NARROW = 0.045  # of the longest bar: the number would not fit into such a part
_LETTER, _NOTE_LETTER = 7.2, 6.6  # points that a letter of a sum takes, and of a note
_AXES_POINTS = 520.0  # width of the axes, in points, at least
_LIGHT = 0.53  # luminance from which on dark numbers can be read


def plot_stacks(
    bars: Mapping[str, Mapping[str, float]],
    path: str | Path,
    *,
    colours: Mapping[str, str],
    xlabel: str,
    title: str,
    text: str = "{:.1f}",
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Draw a bar for each name, made of its parts from left to right, with their sum behind it.

    Args:
        bars: Name -> part -> amount, from top to bottom; all with the same parts in the same order.
        path: PNG file to write; its folder is created.
        colours: Part -> colour.
        xlabel: What the amounts are, with their unit.
        title: Heading of the picture: what it shows.
        text: Writes an amount: a format string.
        notes: Name -> what is written behind its sum.

    Returns:
        The path.

    Raises:
        ValueError: If there is no bar or all amounts are 0, one is negative, the bars' parts differ, a part has no
            colour, or a note is for no bar.
    """
    parts = list(next(iter(bars.values()), {}))
    if not any(sum(amounts.values()) > 0 for amounts in bars.values()):
        raise ValueError("There are no bars to draw: give at least one, with a part above 0.")
    for name, amounts in bars.items():
        if list(amounts) != parts or not all(amount >= 0 for amount in amounts.values()):
            raise ValueError(f"The bar {name!r} needs amounts of at least 0 for {', '.join(parts)}, in this order.")
    notes = notes or {}
    for what, keys, known in (("colour", parts, colours), ("bar", notes, bars)):
        missing = [key for key in keys if key not in known]
        if missing:
            raise ValueError(f"There is no {what} for {', '.join(missing)}.")
    figure, row = new_figure(width=9.6, height=1.55 + 0.42 * len(bars), columns=1, title=title)
    axes = row[0]
    longest = max(sum(amounts.values()) for amounts in bars.values())
    right = 0.0
    for place, (name, amounts) in enumerate(bars.items()):
        _draw_bar(axes, place, amounts, colours, _NARROW * longest, text)
        taken = _write_behind(axes, place, sum(amounts.values()), text, notes.get(name, ""))
        right = max(right, sum(amounts.values()) / (1 - min(taken / _AXES_POINTS, 0.5)))
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_xlim(0, right)
    axes.tick_params(axis="y", length=0, labelsize=10.5)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
    axes.set_xlabel(xlabel, fontsize=10.5)
    key = [Patch(facecolor=colours[part], label=part) for part in parts]
    figure.legend(handles=key, loc="outside lower center", ncols=len(key), frameon=False, fontsize=9.5)
    return save(figure, path)


def _draw_bar(
    axes: Axes, place: int, amounts: Mapping[str, float], colours: Mapping[str, str], narrow: float, text: str
) -> None:
    left = 0.0
    for part, amount in amounts.items():
        axes.barh(place, amount, left=left, height=0.7, color=colours[part], edgecolor="white", linewidth=0.8)
        if amount > narrow:
            red, green, blue = to_rgb(colours[part])
            ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT else "white"
            axes.text(left + amount / 2, place, text.format(amount), ha="center", va="center", fontsize=9.5, color=ink)
        left += amount


def _write_behind(axes: Axes, place: int, total: float, text: str, note: str) -> float:
    """The points to the right of the bar that it takes."""
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 10.5, "color": INK}
    written = text.format(total)
    axes.annotate(written, (total, place), xytext=(7, 0), fontweight="bold", **style)
    behind = 7 + _LETTER * (len(written) + 1)
    if note:
        axes.annotate(note, (total, place), xytext=(behind, 0), **style)
    return behind + _NOTE_LETTER * len(note)
