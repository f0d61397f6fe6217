"""A picture of document lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from hf_wlb.lengths import LengthHistogram, LengthSummary
from hf_wlb.plots.style import GREY, INK, new_figure, save, token_text

_QUANTITIES = (("documents", "#0072B2"), ("tokens", "#E69F00"), ("attention work", "#D55E00"))


def plot_length_histogram(
    summary: LengthSummary,
    path: str | Path,
    *,
    title: str = "Where the documents, the tokens and the attention work are",
    context_length: int | None = None,
) -> Path:
    """Draw the shares of documents, of tokens and of attention work by document length.

    Args:
        summary: From :func:`hf_wlb.lengths.length_summary`.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.
        context_length: Marked by a vertical line if given, in tokens.

    Returns:
        The path.

    Raises:
        ValueError: If there is no document with tokens.
    """
    histogram = summary.histogram
    if not histogram.edges:
        raise ValueError("There are no lengths to draw: every document is empty, or there is none.")
    figure, row = new_figure(width=7.6, height=4.3, columns=1, title=title)
    axes = row[0]
    edges, shares = octave_shares(histogram)
    for index, (label, colour) in enumerate(_QUANTITIES):
        places = np.arange(len(edges) - 1) + 0.5 + 0.27 * (index - 1)
        axes.bar(places, shares[index], width=0.27, color=colour, label=label)
    axes.set_xticks(range(len(edges)), [token_text(edge) for edge in edges])
    axes.set_xlim(-0.15, len(edges) - 0.85)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}%"))
    axes.set_ylim(0, shares.max() * 1.12)
    if context_length is not None:
        _mark_context(axes, context_length, edges)
    axes.set_xlabel("document length (tokens)")
    axes.set_ylabel("share between two marks")
    axes.set_title(
        f"{summary.count:,} documents, {summary.tokens:,} tokens; a token's document has "
        f"{summary.squared_over_mean:,.0f} tokens on average",
        fontsize=9.5,
        color=INK,
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    return save(figure, path)


def octave_shares(histogram: LengthHistogram) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Sum a histogram up by doublings of the length.

    The shortest documents, up to 1% of all, share the first bin.

    Args:
        histogram: At least one bin.

    Returns:
        Edges in tokens, powers of two but for the first, and percent of all documents, tokens and attention
        work in each bin, shape ``(3, len(edges) - 1)``.
    """
    octave = np.array([edge.bit_length() - 1 for edge in histogram.edges[:-1]])
    rows = (histogram.documents, histogram.tokens, histogram.attention_pairs)
    first, last = octave[0], octave[-1]
    sums = np.array([np.bincount(octave - first, weights=np.array(row, dtype=np.float64)) for row in rows])
    percent = sums / sums.sum(axis=1, keepdims=True) * 100.0
    merged = int(np.searchsorted(np.cumsum(percent[0]), 1.0, side="right"))
    if merged > 1:
        percent = np.hstack([percent[:, :merged].sum(axis=1, keepdims=True), percent[:, merged:]])
        edges = [1 << int(first), *(1 << k for k in range(int(first) + merged, int(last) + 2))]
    else:
        edges = [1 << k for k in range(int(first), int(last) + 2)]
    return edges, percent


def _mark_context(axes: Axes, context_length: int, edges: Sequence[int]) -> None:
    """Draw a line at the context length; bins are of equal width, so places are interpolated in the logarithm."""
    place = float(np.interp(np.log2(context_length), np.log2(edges), np.arange(len(edges))))
    axes.axvline(place, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"context {token_text(context_length)}",
        (place, 0.99),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color=GREY,
    )
