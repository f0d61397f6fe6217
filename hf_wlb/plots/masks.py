"""A picture of attention masks: which context-parallel rank computes which scores of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator
from numpy.typing import NDArray

from hf_wlb.plots.sharding import rank_colours, shard_pieces
from hf_wlb.plots.style import GREY, INK, quiet, save, token_text
from hf_wlb.sharding import ShardPlan

NOBODY = -1
"""Rank of scores that nobody computes: of later tokens, or of another document."""

_PIXELS = 420
_UNEVEN = 1.005  # of an even share: worth pointing at


def plot_masks(plans: Mapping[str, ShardPlan], path: str | Path, *, title: str) -> Path:
    """Draw the attention mask of one micro-batch under several plans, coloured by the rank that computes it.

    A row of a square is a query, a column a key; coloured is what the query attends to: its own document up to itself.
    The rank that holds the query computes it. Below, how many scores each rank computes, as a multiple of an even
    share.

    Args:
        plans: Heading -> plan; all of the same documents and ranks.
        path: PNG file to write; its folder is created.
        title: Heading of the picture: what it shows.

    Returns:
        The path.

    Raises:
        ValueError: If there is no plan, or the plans are not of one micro-batch.
    """
    if not plans:
        raise ValueError("There are no masks to draw: give at least one plan.")
    first = next(iter(plans.values()))
    if any(p.cp_size != first.cp_size or p.lengths.tolist() != first.lengths.tolist() for p in plans.values()):
        raise ValueError("Plans of different documents or numbers of ranks cannot share a picture; draw them apart.")
    pairs = {name: pairs_by_rank(plan) for name, plan in plans.items()}
    most = max(float(counts.max() / counts.mean()) for counts in pairs.values())
    columns = len(plans)
    bars = 0.35 + 0.2 * first.cp_size
    figure = Figure(figsize=(10.4, 10.4 / max(columns, 2) + 0.75 + bars), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=INK)
    grid = figure.add_gridspec(2, columns, height_ratios=(10.4 / max(columns, 2) - 0.35, bars))
    for column, (name, plan) in enumerate(plans.items()):
        _draw_mask(figure.add_subplot(grid[0, column]), plan, name, column == 0)
        _draw_pairs(figure.add_subplot(grid[1, column]), pairs[name], most, column == 0)
    return save(figure, path)


def mask_ranks(plan: ShardPlan, pixels: int) -> NDArray[np.int64]:
    """Rank that computes the scores of a raster of queries and keys.

    Args:
        plan: Who holds which tokens.
        pixels: Rows and columns of the raster; each stands for the token in its middle.

    Returns:
        int64 array [pixels, pixels], queries by keys; ``NOBODY`` where a query does not attend to a key.

    Example:
        >>> from hf_wlb.sharding import per_document
        >>> mask_ranks(per_document([4, 1], 2), 5)
        array([[ 0, -1, -1, -1, -1],
               [ 1,  1, -1, -1, -1],
               [ 1,  1,  1, -1, -1],
               [ 0,  0,  0,  0, -1],
               [-1, -1, -1, -1,  0]])
    """
    stops = np.cumsum(plan.lengths)
    tokens = ((np.arange(pixels) + 0.5) * stops[-1] / pixels).astype(np.int64)
    document = np.searchsorted(stops, tokens, side="right")
    pieces = sorted(shard_pieces(plan), key=lambda piece: piece[1])
    starts = np.array([first for _, first, _, _ in pieces])
    holder = np.array([rank for rank, *_ in pieces])[np.searchsorted(starts, tokens, side="right") - 1]
    seen = (document[:, None] == document[None, :]) & (tokens[:, None] >= tokens[None, :])
    return np.where(seen, holder[:, None], NOBODY).astype(np.int64)


def pairs_by_rank(plan: ShardPlan) -> NDArray[np.int64]:
    """Scores that every rank computes, exactly: (query, key) pairs under the mask, shape [cp_size].

    Example:
        >>> from hf_wlb.sharding import per_document
        >>> pairs_by_rank(per_document([4, 1], 2)).tolist()
        [6, 5]
    """
    starts = np.cumsum(plan.lengths) - plan.lengths
    pairs = np.zeros(plan.cp_size, dtype=np.int64)
    for rank, first, tokens, _ in shard_pieces(plan):
        document = int(np.searchsorted(starts, first, side="right")) - 1
        stop = first + tokens - int(starts[document])  # keys of the piece's last query
        pairs[rank] += tokens * stop - tokens * (tokens - 1) // 2
    return pairs


def _draw_mask(axes: Axes, plan: ShardPlan, name: str, leftmost: bool) -> None:
    total = int(plan.lengths.sum())
    pixels = min(total, _PIXELS)
    colours = np.array([to_rgb(colour) for colour in (*rank_colours(plan.cp_size), "white")])
    axes.imshow(colours[mask_ranks(plan, pixels)], extent=(0, total, total, 0), interpolation="nearest")
    quiet(axes)
    for edge in np.cumsum(plan.lengths)[:-1]:
        axes.plot([edge, edge], [edge, total], color="#D5D5D5", linewidth=0.6, zorder=1)
        axes.plot([0, edge], [edge, edge], color="#D5D5D5", linewidth=0.6, zorder=1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(max(1, 2 ** int(np.ceil(np.log2(total / 5))))))
        axis.set_major_formatter(FuncFormatter(lambda tokens, _: token_text(tokens)))
    axes.set_title(name, fontsize=11, color=INK)
    axes.set_xlabel("key", fontsize=10)
    if leftmost:
        axes.set_ylabel("query", fontsize=10)
    else:
        axes.tick_params(labelleft=False)


def _draw_pairs(axes: Axes, pairs: NDArray[np.int64], most: float, leftmost: bool) -> None:
    quiet(axes)
    shares = pairs / pairs.mean()
    ranks = np.arange(len(pairs))
    axes.barh(ranks, shares, 0.78, color=rank_colours(len(pairs)))
    for rank, share in enumerate(shares.tolist()):
        axes.annotate(
            f"{share:.2f}",
            (share, rank),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold" if share == shares.max() and share > _UNEVEN else "normal",
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
            zorder=5,
        )
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.1)
    axes.set_ylim(len(pairs) - 0.45, -0.55)
    axes.set_xlim(0, most * 1.16)
    axes.set_yticks(ranks, [f"rank {rank}" if leftmost else "" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=9)
    axes.xaxis.set_major_locator(MultipleLocator(0.5 if most < 3 else 1.0))
    axes.set_xlabel("scores computed (1: an even share)", fontsize=9.5)
