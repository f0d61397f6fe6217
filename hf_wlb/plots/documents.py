"""Micro-batches as rows of documents: equal numbers of tokens beside the unequal work that they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from hf_wlb.packing import MicroBatch
from hf_wlb.plots.style import GREY, INK, quiet, save, token_text
from hf_wlb.workload import WorkloadModel

LEVEL_COLOURS = ("#B9C6D2", "#E69F00", "#D55E00")
"""Of short documents, of those from the first threshold on, and of those from the second on."""
LINEAR_COLOUR = "#E3E3E3"


def level_of(length: int, thresholds: Sequence[int]) -> int:
    """Index of the length's colour: how many of the two thresholds it reaches.

    Example:
        >>> [level_of(length, (10, 100)) for length in (9, 10, 500)]
        [0, 1, 2]
    """
    return sum(length >= threshold for threshold in thresholds)


def plot_micro_batch_documents(
    micro_batches: Sequence[MicroBatch],
    path: str | Path,
    *,
    workload: WorkloadModel,
    thresholds: tuple[int, int],
    title: str,
) -> Path:
    """Draw micro-batches below one another: their documents to the left, their work to the right.

    A document is as wide as it has tokens, and coloured by how long it is. The work of a micro-batch is what goes by
    tokens, then the attention of its short, longer and longest documents; it is written out as a multiple of the mean.

    Args:
        micro_batches: From top to bottom; at least one with documents.
        path: PNG file to write; its folder is created.
        workload: What documents cost.
        thresholds: Tokens from which on a document counts as long, and as very long.
        title: Heading of the picture: what it shows.

    Returns:
        The path.

    Raises:
        ValueError: If there is no micro-batch with documents, or the thresholds do not ascend.
    """
    if not any(micro_batch.tokens for micro_batch in micro_batches):
        raise ValueError("There are no documents to draw: give at least one micro-batch that holds some.")
    if not 0 < thresholds[0] < thresholds[1]:
        raise ValueError(f"The thresholds must be two lengths, ascending, got {thresholds}.")
    rows = len(micro_batches)
    figure = Figure(figsize=(9.6, 1.5 + 0.36 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=INK)
    grid = figure.add_gridspec(1, 2, width_ratios=(1.7, 1))
    left, right = (figure.add_subplot(grid[0, column]) for column in range(2))
    for axes in (left, right):
        quiet(axes)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.set_yticks(range(rows), [""] * rows)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    _draw_documents(left, micro_batches, thresholds)
    _draw_work(right, micro_batches, workload, thresholds)
    names = (
        "shorter documents",
        f"from {token_text(thresholds[0])} tokens",
        f"from {token_text(thresholds[1])} tokens",
    )
    key = [Patch(facecolor=colour, label=name) for colour, name in zip(LEVEL_COLOURS, names, strict=True)]
    key.append(Patch(facecolor=LINEAR_COLOUR, label="work that goes by tokens"))
    figure.legend(handles=key, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5, handlelength=1.2)
    return save(figure, path)


def _draw_documents(axes: Axes, micro_batches: Sequence[MicroBatch], thresholds: Sequence[int]) -> None:
    most = max(micro_batch.tokens for micro_batch in micro_batches)
    for row, micro_batch in enumerate(micro_batches):
        start = 0
        for document in micro_batch.documents:
            colour = LEVEL_COLOURS[level_of(document.length, thresholds)]
            edge = 0.7 if document.length > most / 250 else 0.0  # a white edge would hide a shorter one
            axes.barh(row, document.length, 0.7, left=start, facecolor=colour, edgecolor="white", linewidth=edge)
            start += document.length
    axes.set_yticks(range(len(micro_batches)), [str(row + 1) for row in range(len(micro_batches))])
    axes.set_ylabel("micro-batch", fontsize=10.5)
    axes.set_xlim(0, most * 1.01)
    axes.xaxis.set_major_locator(MultipleLocator(max(1, 2 ** int(np.ceil(np.log2(most / 6))))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: token_text(tokens)))
    axes.set_title("tokens, document by document", fontsize=10.5, color=INK, loc="left")


def _draw_work(
    axes: Axes, micro_batches: Sequence[MicroBatch], workload: WorkloadModel, thresholds: Sequence[int]
) -> None:
    mean = float(np.mean([micro_batch.workload for micro_batch in micro_batches]))
    for row, micro_batch in enumerate(micro_batches):
        parts = [workload.linear(micro_batch.tokens) / mean, 0.0, 0.0, 0.0]
        for document in micro_batch.documents:
            parts[1 + level_of(document.length, thresholds)] += workload.attention(document.length) / mean
        left = 0.0
        for part, colour in zip(parts, (LINEAR_COLOUR, *LEVEL_COLOURS), strict=True):
            axes.barh(row, part, 0.7, left=left, facecolor=colour)
            left += part
        axes.annotate(
            f"{left:.2f}",
            (left, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            fontweight="bold" if left == max(m.workload for m in micro_batches) / mean else "normal",
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
            zorder=5,
        )
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.2, zorder=4)
    axes.set_xlim(0, max(m.workload for m in micro_batches) / mean * 1.17)
    axes.set_title("work, as a multiple of the mean", fontsize=10.5, color=INK, loc="left")
