"""Maps: a table whose cells are coloured, with what they hold written into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from hf_wlb.plots.style import INK, new_figure, save

_DEEP = "#0B5C91"  # of the scale that Okabe and Ito's blue is in
_PALE = "#EDF3F8"


@dataclass(frozen=True)
class MapPanel:
    """One panel of ``plot_maps``.

    Attributes:
        title: Its heading.
        texts: What cells say, [rows][columns].
        shades: How deep their colour is, 0 to 1, the same shape.
        colours: The colour at its deepest, the same shape; one blue for all if None.
    """

    title: str
    texts: Sequence[Sequence[str]]
    shades: Sequence[Sequence[float]]
    colours: Sequence[Sequence[str]] | None = None


def plot_maps(
    panels: Sequence[MapPanel],
    path: str | Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    ylabel: str,
    xlabel: str,
    title: str,
) -> Path:
    """Draw one or more tables side by side whose cells are coloured by what they hold.

    Args:
        panels: From left to right; all with the same rows and columns.
        path: PNG file to write; its folder is created.
        rows: Names of the rows, from top to bottom.
        columns: Names of the columns.
        ylabel: What the rows are.
        xlabel: What the columns are.
        title: Heading of the picture: what it shows.

    Returns:
        The path.

    Raises:
        ValueError: If there is no panel or no cell, a panel has another shape, or a shade is not within 0 to 1.
    """
    if not panels or not rows or not columns:
        raise ValueError("There is no map to draw: give at least one panel, one row and one column.")
    shape = (len(rows), len(columns))
    for panel in panels:
        given = [panel.texts, panel.shades, *([panel.colours] if panel.colours is not None else [])]
        if any(len(part) != shape[0] or any(len(row) != shape[1] for row in part) for part in given):
            raise ValueError(
                f"The panel {panel.title!r} needs {shape[0]} rows of {shape[1]} cells in each of its parts."
            )
        if not all(0 <= shade <= 1 for row in panel.shades for shade in row):
            raise ValueError(f"The shades of {panel.title!r} must be within 0 to 1.")
    height = 1.65 + 0.46 * len(rows)
    figure, row = new_figure(width=9.6, height=height, columns=len(panels), title=title)
    for index, (axes, panel) in enumerate(zip(row, panels, strict=True)):
        _draw(axes, panel)
        axes.set_yticks(range(len(rows)), rows if index == 0 else [""] * len(rows))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_xlabel(xlabel, fontsize=10.5)
        if index == 0:
            axes.set_ylabel(ylabel, fontsize=10.5)
    return save(figure, path)


def shades_of(values: Sequence[Sequence[float]], low: float, high: float) -> list[list[float]]:
    """Depths of colour for values: 0 at ``low`` and below, 1 at ``high`` and above.

    Example:
        >>> shades_of([[1.0, 1.5, 3.0]], 1.0, 2.0)
        [[0.0, 0.5, 1.0]]
    """
    scaled: list[list[float]] = np.clip((np.asarray(values, dtype=np.float64) - low) / (high - low), 0, 1).tolist()
    return scaled


def _draw(axes: Axes, panel: MapPanel) -> None:
    colours = panel.colours or [[_DEEP] * len(row) for row in panel.shades]
    cells = [
        [_mix(colour, shade) for colour, shade in zip(row, shades, strict=True)]
        for row, shades in zip(colours, panel.shades, strict=True)
    ]
    axes.imshow(np.array(cells), aspect="auto", interpolation="nearest")
    for y, row in enumerate(panel.texts):
        for x, text in enumerate(row):
            ink = "white" if _luminance(cells[y][x]) < 0.58 else INK
            axes.text(x, y, text, ha="center", va="center", fontsize=10.5, color=ink)
    axes.set_title(panel.title, fontsize=11, color=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelsize=10)
    for x in np.arange(len(cells[0]) - 1) + 0.5:
        axes.axvline(x, color="white", linewidth=2)
    for y in np.arange(len(cells) - 1) + 0.5:
        axes.axhline(y, color="white", linewidth=2)


def _mix(colour: str, shade: float) -> tuple[float, float, float]:
    pale, deep = to_rgb(_PALE), to_rgb(colour)
    red, green, blue = (a + (b - a) * shade for a, b in zip(pale, deep, strict=True))
    return (red, green, blue)


def _luminance(colour: tuple[float, float, float]) -> float:
    red, green, blue = to_rgb(to_hex(colour))
    return 0.299 * red + 0.587 * green + 0.114 * blue
