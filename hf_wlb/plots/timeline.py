"""A picture of pipelines: what every stage does, and when it waits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hf_wlb.plots.sharding import rank_colours
from hf_wlb.plots.style import GREY, INK, quiet, save
from hf_wlb.simulator.timeline import Timeline

_WIDTH = 11.5  # of the picture, in inches
_AXES_POINTS = 745.0  # about the width of the axes, in points
_FORWARD = 0.45  # of a colour in forwards; the rest is white
_NARROW = 3.0  # points; white edges would hide such a bar
_TRACK = "#F0F0F0"
_HALF = 0.41  # of a row: half a bar's height
_MOST_STAGE_NAMES = 20
_FONT_SIZES = (5.8, 8.0)  # of the numbers, smallest and largest, in points


def plot_timelines(
    named: Mapping[str, Timeline], path: str | Path, title: str = "What every stage does, and when it waits"
) -> Path:
    """Draw timelines below one another on one scale of time.

    A stage has a row: forwards light, backwards dark, waiting grey, model chunks in colours of their own. Bars say
    which micro-batch they are of where that fits, with its piece (``3.1``) where micro-batches are cut.

    Args:
        named: Heading -> timeline, from top to bottom.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no timeline, or none takes any time.
    """
    if not named:
        raise ValueError("There are no timelines to draw: give at least one.")
    longest = max(timeline.seconds for timeline in named.values())
    if not longest:
        raise ValueError("None of the timelines takes any time, so there is nothing to draw.")
    stages = [timeline.pp_size for timeline in named.values()]
    row = max(0.09, min(0.27, 3.4 / max(stages)))  # inches
    height = 1.25 + sum(0.42 + row * count for count in stages)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=INK)
    grid = figure.add_gridspec(len(named), 1, height_ratios=[count + 0.42 / row for count in stages])
    scale, unit = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
    numbers = ""
    for index, (name, timeline) in enumerate(named.items()):
        axes = figure.add_subplot(grid[index])
        _draw(axes, timeline, scale, longest * scale, 72 * row)
        busy = sum(timeline.busy) / timeline.pp_size
        axes.set_title(
            f"{name}: {_time_text(timeline.seconds)}, stages busy {busy:.0%} of the time",
            fontsize=10,
            color=INK,
            loc="left",
        )
        axes.tick_params(axis="x", labelbottom=index == len(named) - 1)
        if axes.texts and not numbers.endswith("pieces)"):
            numbers = f" (numbers: micro-batches{', and their pieces' if timeline.shape[1] > 1 else ''})"
    axes.set_xlabel(unit + numbers, fontsize=9.5)
    chunks = max(timeline.model_chunks for timeline in named.values())
    figure.legend(handles=_key(chunks), loc="outside lower center", ncols=min(3 + chunks, 7), frameon=False, fontsize=9)
    return save(figure, path)


def _time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _draw(axes: Axes, timeline: Timeline, scale: float, longest: float, row_points: float) -> None:
    """Draw one timeline, its seconds times ``scale``, in rows so many points high; ``longest`` is the axis' end."""
    quiet(axes)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, longest * 1.004)
    axes.set_ylim(timeline.pp_size - 0.5, -0.5)
    named = range(0, timeline.pp_size, -(-timeline.pp_size // _MOST_STAGE_NAMES))
    axes.set_yticks(named, [f"stage {stage}" for stage in named])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=9)
    to_points = _AXES_POINTS / longest
    colours = rank_colours(timeline.model_chunks)
    for stage, spans in enumerate(timeline.spans):
        axes.barh(stage, timeline.seconds * scale, height=2 * _HALF, color=_TRACK, zorder=1)
        bars = [(span.begin * scale, (span.end - span.begin) * scale) for span in spans]
        fills = [_fill(colours[span.op.chunk], span.op.forward) for span in spans]
        edges = [0.7 if width * to_points > _NARROW else 0.0 for _, width in bars]
        axes.broken_barh(
            bars, (stage - _HALF, 2 * _HALF), facecolor=fills, edgecolor="white", linewidth=edges or 0.0, zorder=2
        )
    _write_numbers(axes, timeline, scale, to_points, row_points)


def _write_numbers(axes: Axes, timeline: Timeline, scale: float, to_points: float, row_points: float) -> None:
    """Number the bars, unless most are too narrow for it: a few numbers alone would look like a finding."""
    spans = [span for row in timeline.spans for span in row]
    pieces = timeline.shape[1] > 1
    texts = [f"{span.op.micro_batch}.{span.op.piece}" if pieces else f"{span.op.micro_batch}" for span in spans]
    sizes = [
        _font_size(text, (span.end - span.begin) * scale * to_points, row_points)
        for text, span in zip(texts, spans, strict=True)
    ]
    if sum(size > 0 for size in sizes) * 2 < len(sizes):
        return
    colours = rank_colours(timeline.model_chunks)
    for span, text, size in zip(spans, texts, sizes, strict=True):
        if size:
            red, green, blue = _fill(colours[span.op.chunk], span.op.forward)
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else INK
            at = ((span.begin + span.end) / 2 * scale, span.stage)
            axes.text(*at, text, ha="center", va="center_baseline", fontsize=size, color=ink, zorder=3)


def _font_size(text: str, width: float, height: float) -> float:
    """Size of the letters of a number in a bar, all in points; 0.0 if it could not be read."""
    ems = sum(0.64 if letter.isdigit() else 0.32 for letter in text)
    smallest, largest = _FONT_SIZES
    size = min(largest, 0.62 * height, (width - 1.5) / ems)
    return size if size >= smallest else 0.0


def _fill(colour: str, forward: bool) -> tuple[float, float, float]:
    """The colour of a backward; of a forward a lighter one."""
    red, green, blue = to_rgb(colour)
    share = _FORWARD if forward else 1.0
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)


def _key(chunks: int) -> list[Patch]:
    colours = rank_colours(chunks)
    hue = colours[0] if chunks == 1 else GREY
    key = [
        Patch(facecolor=_fill(hue, forward=True), label="forward"),
        Patch(facecolor=_fill(hue, forward=False), label="backward"),
        Patch(facecolor=_TRACK, label="waiting"),
    ]
    if chunks > 1:
        key += [Patch(facecolor=colour, label=f"model chunk {chunk}") for chunk, colour in enumerate(colours)]
    return key
