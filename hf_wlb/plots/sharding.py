"""A picture of shards: which context-parallel rank holds which tokens, and how long each is predicted to work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from hf_wlb.plots.style import INK, quiet, save, token_text, work_text
from hf_wlb.sharding import ShardPlan, chunk_ranks

_RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8B6508", "#7B52AB")
_LINEAR, _WAITING = "#C4C4C4", "#222222"
_HATCH = "//////"
_MOST_BOUNDARIES = 150
_NARROW = 0.004  # of the micro-batch: a white edge would hide such a piece

WORK_PARTS = ("linear work", "local attention", "sharded attention", "waiting")
"""Parts of a rank's work, in the order in which they are drawn."""


@dataclass(frozen=True)
class ShardPanel:
    """One strategy's part of the picture.

    Attributes:
        title: Its heading, over the tokens.
        result: What it comes to, over the work.
        plan: Who holds what.
        work: Part (of ``WORK_PARTS``) -> work of every rank.
    """

    title: str
    result: str
    plan: ShardPlan
    work: Mapping[str, Sequence[float]]


def plot_shard_plans(
    panels: Sequence[ShardPanel],
    path: str | Path,
    *,
    ideal: float,
    unit: str,
    title: str = "Who holds which tokens of one micro-batch",
) -> Path:
    """Draw plans of one micro-batch below one another, and what every rank works under each.

    A rank has a row and a colour. To the left its tokens, where they lie in the micro-batch: documents that are whole
    on the rank are filled, chunks of sharded documents hatched, and vertical lines are where documents begin. To the
    right its predicted work: what goes by tokens, attention over whole documents filled, of chunks hatched, then
    waiting for keys and values of others. The slowest rank's work is written out.

    Args:
        panels: From top to bottom; all of the same documents and ranks.
        path: PNG file to write; its folder is created.
        ideal: Work of every rank if all were even and nothing was lost; a dashed line.
        unit: Unit of the work.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If there is no panel, or the panels are not of one micro-batch.
    """
    if not panels:
        raise ValueError("There are no shards to draw: give at least one plan.")
    first = panels[0].plan
    if any(p.plan.cp_size != first.cp_size or p.plan.lengths.tolist() != first.lengths.tolist() for p in panels):
        raise ValueError("Plans of different documents or numbers of ranks cannot share a picture; draw them apart.")
    colours = rank_colours(first.cp_size)
    rows = max(first.cp_size, 3)
    figure = Figure(figsize=(11.5, 1.25 + len(panels) * (0.62 + 0.21 * rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=INK)
    grid = figure.add_gridspec(len(panels), 2, width_ratios=(2.15, 1))
    longest = max(float(np.sum([panel.work[part] for part in WORK_PARTS], axis=0).max()) for panel in panels)
    for index, panel in enumerate(panels):
        left, right = (figure.add_subplot(grid[index, column]) for column in range(2))
        last = index == len(panels) - 1
        _draw_tokens(left, panel, colours, last)
        _draw_work(right, panel, colours, last)
        right.axvline(ideal, color=INK, linestyle="--", linewidth=1.3, zorder=5)
        right.set_xlim(0, max(longest, ideal) * 1.17 or 1.0)
        if last:
            left.set_xlabel("token of the micro-batch (lines: where documents begin)", fontsize=9.5)
            right.set_xlabel(f"predicted work ({unit})", fontsize=9.5)
    figure.legend(handles=_key(), loc="outside lower center", ncols=3, frameon=False, fontsize=9, handlelength=1.6)
    return save(figure, path)


def rank_colours(cp_size: int) -> list[str]:
    """Give every rank its colour: a palette that colour-blind readers can tell apart, beyond it a scale.

    Example:
        >>> rank_colours(2)
        ['#0072B2', '#E69F00']
        >>> len(set(rank_colours(16)))
        16
    """
    if cp_size <= len(_RANK_COLOURS):
        return list(_RANK_COLOURS[:cp_size])
    scale = colormaps["viridis"]
    return [to_hex(scale(place)) for place in np.linspace(0, 0.9, cp_size)]


def shard_pieces(plan: ShardPlan) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (rank, first token, tokens, whether a whole document) of every piece of a plan's micro-batch.

    Example:
        >>> from hf_wlb.sharding import per_document
        >>> list(shard_pieces(per_document([4, 1], 2)))
        [(0, 0, 1, False), (1, 1, 1, False), (1, 2, 1, False), (0, 3, 1, False), (0, 4, 1, True)]
    """
    ranks = chunk_ranks(plan.cp_size).tolist()
    edges = iter(plan.edges.tolist())
    start = 0
    for length, owner in zip(plan.lengths.tolist(), plan.owner.tolist(), strict=True):
        if owner >= 0:
            yield owner, start, length, True
        else:
            cuts = next(edges)
            for rank, low, high in zip(ranks, cuts[:-1], cuts[1:], strict=True):
                if high > low:
                    yield rank, start + low, high - low, False
        start += length


def _draw_tokens(axes: Axes, panel: ShardPanel, colours: Sequence[str], last: bool) -> None:
    plan = panel.plan
    total = int(plan.lengths.sum())
    pieces = list(shard_pieces(plan))
    starts = (np.cumsum(plan.lengths) - plan.lengths)[1:]
    if len(starts) <= _MOST_BOUNDARIES:
        axes.vlines(starts, -0.5, plan.cp_size - 0.5, color="#D0D0D0", linewidth=0.7, zorder=0)
    for rank, colour in enumerate(colours):
        whole = [(first, tokens) for owner, first, tokens, local in pieces if owner == rank and local]
        chunks = [(first, tokens) for owner, first, tokens, local in pieces if owner == rank and not local]
        gaps = [0.6 if tokens > total * _NARROW else 0.0 for _, tokens in whole]
        axes.broken_barh(whole, (rank - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=gaps or 0.0)
        axes.broken_barh(chunks, (rank - 0.36, 0.72), **_hatched(colour))
    _rank_rows(axes, plan.cp_size)
    axes.set_yticks(range(plan.cp_size), [f"rank {rank}" for rank in range(plan.cp_size)])
    axes.set_xlim(0, total)
    axes.xaxis.set_major_locator(MultipleLocator(max(1, 2 ** math.ceil(math.log2(total / 10)))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: token_text(tokens)))
    axes.tick_params(axis="x", labelbottom=last)
    axes.set_title(panel.title, fontsize=10, color=INK, loc="left")


def _draw_work(axes: Axes, panel: ShardPanel, colours: Sequence[str], last: bool) -> None:
    before = np.zeros(len(colours))
    for part in WORK_PARTS:
        widths = np.asarray(panel.work[part], dtype=np.float64)
        for rank, colour in enumerate(colours):
            if widths[rank] > 0:
                axes.barh(rank, widths[rank], left=before[rank], height=0.72, **_part_style(part, colour))
        before += widths
    slowest = int(before.argmax())
    axes.annotate(
        work_text(before[slowest]),
        (before[slowest], slowest),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=6,
    )
    _rank_rows(axes, len(colours))
    axes.set_yticks(range(len(colours)), [""] * len(colours))
    axes.tick_params(axis="x", labelbottom=last)
    axes.set_title(panel.result, fontsize=10, color=INK, loc="left")


def _rank_rows(axes: Axes, cp_size: int) -> None:
    quiet(axes)
    axes.set_ylim(cp_size - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=9)


def _part_style(part: str, colour: str) -> dict[str, Any]:
    if part == "sharded attention":
        return _hatched(colour)
    fill = {"local attention": colour, "linear work": _LINEAR, "waiting": _WAITING}[part]
    return {"facecolor": fill, "edgecolor": "white", "linewidth": 0.6}


def _hatched(colour: str) -> dict[str, Any]:
    """A lighter fill with lines of the colour."""
    red, green, blue = (1 - (1 - channel) * 0.35 for channel in to_rgb(colour))
    light = to_hex((red, green, blue))
    return {"facecolor": light, "edgecolor": colour, "linewidth": 0.4, "hatch": _HATCH}


def _key() -> list[Patch | Line2D]:
    return [
        Patch(facecolor=_RANK_COLOURS[0], edgecolor="white", label="documents whole on a rank, and their attention"),
        Patch(**_hatched(_RANK_COLOURS[0]), label="chunks of documents that were cut, and theirs"),
        Patch(facecolor=_LINEAR, label="work that goes by tokens (matrix products)"),
        Patch(facecolor=_WAITING, label="waiting for other ranks' keys and values"),
        Line2D([], [], color=INK, linestyle="--", linewidth=1.3, label="ideal: shared out evenly, nothing lost"),
    ]
