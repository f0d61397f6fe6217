"""What all pictures share: size, ink, packers' colours, writing the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 110
GREY = "#707070"
INK = "#222222"
_PACKER_COLOURS = {
    "concat": "#8C8C8C",
    "next-fit": "#D55E00",
    "sequential": "#D55E00",
    "greedy": "#E69F00",
    "solver": "#CC79A7",
    "wlb": "#0072B2",
    "steady": "#009E73",
}
_OTHER_COLOURS = ("#56B4E9", "#8B6508", "#000000", "#7B52AB")


def packer_colours(names: Iterable[str]) -> dict[str, str]:
    """Give every packer its colour.

    Args:
        names: Labels that start with a packer's name, such as ``"greedy, 4 global batches"``; other labels
            get the remaining colours in turn.

    Returns:
        Label -> colour, ``#RRGGBB``.

    Example:
        >>> packer_colours(["steady", "wlb, 2 queues"])
        {'steady': '#009E73', 'wlb, 2 queues': '#0072B2'}
    """
    colours: dict[str, str] = {}
    unknown = 0
    for name in names:
        key = name.lower().replace("_", "-")
        known = [colour for packer, colour in _PACKER_COLOURS.items() if key.startswith(packer)]
        if known:
            colours[name] = known[0]
        else:
            colours[name] = _OTHER_COLOURS[unknown % len(_OTHER_COLOURS)]
            unknown += 1
    return colours


def token_text(tokens: float) -> str:
    """Write a number of tokens the short way.

    Example:
        >>> [token_text(tokens) for tokens in (512, 1024, 131072, 1500)]
        ['512', '1K', '128K', '1,500']
    """
    whole = round(tokens)
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if whole >= unit and whole % unit == 0:
            return f"{whole // unit}{name}"
    return f"{whole:,}"


def work_text(work: float) -> str:
    """Write an amount of work in as many digits as matter.

    Example:
        >>> [work_text(work) for work in (0.01234, 9.87654, 1137.04, 262144.0)]
        ['0.01234', '9.877', '1,137', '262,144']
    """
    return f"{work:,.0f}" if work >= 1000 else f"{work:.4g}"


def new_figure(width: float, height: float, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    """Make a figure with a heading and a row of axes; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=INK)
    row = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for axes in row:
        quiet(axes)
    return figure, row


def quiet(axes: Axes) -> None:
    """Leave only the axes' left and bottom lines, in grey."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#B0B0B0")
    axes.tick_params(colors=INK, labelsize=9.5)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG file whose bytes depend on the picture alone; its folder is created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
    return path
