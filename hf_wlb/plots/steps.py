"""Steps one behind the other, as small pictures: what is trained, what waits, and who had to wait how long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from hf_wlb.packing import Document, MicroBatch, PackingConfig, WatchedStep
from hf_wlb.plots.documents import LEVEL_COLOURS, level_of
from hf_wlb.plots.style import GREY, INK, save, token_text

_WORK, _LINE = "#5A6570", "#8A8A8A"
_COLUMNS = 3
_BOXES = 8  # of waiting documents in a row
_QUEUE_GAP = 1.4  # rows between micro-batches and queues


def plot_steps(
    steps: Sequence[WatchedStep],
    path: str | Path,
    *,
    config: PackingConfig,
    thresholds: tuple[int, int],
    title: str,
    unit: str = " tokens",
) -> Path:
    """Draw steps as small pictures, to be read like the frames of a film.

    Above, the step's micro-batches with their documents, each as wide as it has tokens and coloured by its length, and
    to their right the micro-batches' work. Below, what waits after the step: the levels of an outlier queue, with as
    many places as must be filled before the level's documents leave, or a pool. Documents that waited have a dark edge,
    and the steps that they waited in brackets.

    Args:
        steps: From ``hf_wlb.packing.watch``.
        path: PNG file to write; its folder is created.
        config: The planner's, for the context and S_max, which vertical lines mark.
        thresholds: Tokens from which on documents have the second and the third colour.
        title: Heading of the picture: what it shows.
        unit: Written after numbers of tokens.

    Returns:
        The path.

    Raises:
        ValueError: If there is no step.
    """
    if not steps:
        raise ValueError("There are no steps to draw: give at least one.")
    places = config.micro_batches if config.packer == "wlb" else 0
    queue_rows = max(_queue_rows(step, places) for step in steps)
    rows = config.micro_batches + (queue_rows + _QUEUE_GAP if queue_rows else 0)
    lines = -(-len(steps) // _COLUMNS)
    figure = Figure(figsize=(10.4, 0.9 + lines * (0.34 + 0.21 * rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=INK)
    heaviest = max(m.workload for step in steps for m in step.plan.micro_batches)
    for number, step in enumerate(steps):
        axes = figure.add_subplot(lines, min(_COLUMNS, len(steps)), number + 1)
        axes.set_axis_off()
        axes.set_xlim(-0.01 * config.s_max, config.s_max * 1.42)
        axes.set_ylim(rows - 0.3, -0.6)
        heading = f"step {step.plan.step + 1}: {step.plan.tokens:,}{unit}, imbalance {step.figures['imbalance']:.2f}"
        axes.set_title(heading, fontsize=10.5, color=INK, loc="left")
        _draw_step(axes, step, config, thresholds, heaviest)
        _draw_queues(axes, step, config, thresholds, places)
    key = _key(config, thresholds, unit)
    columns = len(key) if config.fixed_length else 4
    figure.legend(handles=key, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)
    return save(figure, path)


def _key(config: PackingConfig, thresholds: Sequence[int], unit: str) -> list[Patch | Line2D]:
    names = ("shorter documents", f"from {token_text(thresholds[0])}{unit}", f"from {token_text(thresholds[1])}{unit}")
    lengths = [Patch(facecolor=colour, label=name) for colour, name in zip(LEVEL_COLOURS, names, strict=True)]
    work = Patch(facecolor=_WORK, label="work of the micro-batch")
    context = Line2D([], [], color=_LINE, linewidth=1.2, label="context length")
    if config.fixed_length:
        return [*lengths, work, context]
    waited = Patch(facecolor="white", edgecolor=INK, linewidth=1.5, label="waited (so many steps)")
    room = Line2D([], [], color=_LINE, linewidth=1.2, linestyle=":", label="most that fits (S_max)")
    return [*lengths, waited, work, context, room]


def _draw_step(
    axes: Axes, step: WatchedStep, config: PackingConfig, thresholds: Sequence[int], heaviest: float
) -> None:
    micro_batches: list[MicroBatch] = list(step.plan.micro_batches)
    below = len(micro_batches) - 0.5
    lines = [(config.context_length, "-"), *([] if config.fixed_length else [(config.s_max, ":")])]
    for place, style in lines:
        axes.plot([place, place], [-0.5, below], color=_LINE, linestyle=style, linewidth=1.0, zorder=0)
    for row, micro_batch in enumerate(micro_batches):
        start = 0
        for document in micro_batch.documents:
            wait = step.plan.step - document.arrived
            text = f"{token_text(document.length)} ({wait})" if wait else token_text(document.length)
            level = level_of(document.length, thresholds)
            _box(axes, start, row, document.length, LEVEL_COLOURS[level], text if level else "", dark_edge=wait > 0)
            start += document.length
        left, width = config.s_max * 1.05, config.s_max * 0.36
        axes.barh(row, micro_batch.workload / heaviest * width, 0.62, left=left, facecolor=_WORK)


def _queue_rows(step: WatchedStep, places: int) -> int:
    if places:
        return len(step.queues)
    return max(1, -(-len(step.queues[0]) // _BOXES)) if step.queues else 0


def _draw_queues(axes: Axes, step: WatchedStep, config: PackingConfig, thresholds: Sequence[int], places: int) -> None:
    top = config.micro_batches - 0.5 + _QUEUE_GAP
    width = config.s_max / _BOXES
    others = f"waiting, and {len(step.left_over)} that found no room:" if step.left_over else "waiting:"
    if step.queues or step.left_over:
        axes.text(0, top - 0.62, others, fontsize=8.5, color=GREY, va="bottom")
    for level, queue in enumerate(step.queues):
        row = top + level
        for place in range(places):
            outline = Rectangle(
                (place * width, row - 0.4),
                width * 0.94,
                0.8,
                facecolor="none",
                edgecolor="#B0B0B0",
                linestyle=(0, (2, 2)),
            )
            axes.add_patch(outline)
        for place, document in enumerate(queue):
            _box(
                axes,
                place % _BOXES * width,
                row + place // _BOXES,
                width * 0.94,
                LEVEL_COLOURS[level_of(document.length, thresholds)],
                token_text(document.length),
                dark_edge=_waits(document, step),
            )


def _waits(document: Document, step: WatchedStep) -> bool:
    return document.arrived < step.plan.step


def _box(axes: Axes, left: float, row: float, width: float, colour: str, text: str, dark_edge: bool) -> None:
    axes.add_patch(
        Rectangle(
            (left, row - 0.4),
            width,
            0.8,
            facecolor=colour,
            edgecolor=INK if dark_edge else "white",
            linewidth=1.4 if dark_edge else 0.8,
            zorder=3 if dark_edge else 2,
        )
    )
    if text:
        axes.text(left + width / 2, row + 0.02, text, ha="center", va="center", fontsize=8, color=INK, zorder=4)
