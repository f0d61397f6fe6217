"""A picture of delay: how many steps tokens waited before they were trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hf_wlb.plots.style import INK, new_figure, packer_colours, save


def plot_waits(tokens_by_wait: Mapping[str, Sequence[float]], path: str | Path, *, title: str) -> Path:
    """Draw the shares of tokens that waited one step, two, and so on, below one another for each packer.

    What did not wait is nearly all and would hide the others; it is written into each panel's heading.

    Args:
        tokens_by_wait: Packer -> tokens that waited 0, 1, 2, ... steps, see ``hf_wlb.packing.tokens_by_wait``.
        path: PNG file to write; its folder is created.
        title: Heading of the picture: what it shows.

    Returns:
        The path.

    Raises:
        ValueError: If there is no packer, or one has no tokens.
    """
    if not tokens_by_wait or any(sum(tokens) <= 0 for tokens in tokens_by_wait.values()):
        raise ValueError("There is nothing to draw: give at least one packer, and each some tokens.")
    figure, row = new_figure(width=9.6, height=3.5, columns=len(tokens_by_wait), title=title)
    colours = packer_colours(tokens_by_wait)
    shares = {name: np.asarray(tokens, dtype=np.float64) / sum(tokens) * 100 for name, tokens in tokens_by_wait.items()}
    tallest = max(float(share[1:].max(initial=0.0)) for share in shares.values())
    longest = max(len(share) for share in shares.values())
    for index, (axes, (name, share)) in enumerate(zip(row, shares.items(), strict=True)):
        axes.bar(np.arange(1, len(share)), share[1:], width=0.78, color=colours[name])
        mean = float(share @ np.arange(len(share))) / 100
        axes.set_title(
            f"{name}: {share[0]:.0f}% leave at once, mean wait {mean:.2f} steps",
            fontsize=10.5,
            color=INK,
        )
        axes.set_xlim(0.3, max(longest, 3) - 0.3)
        axes.set_ylim(0, tallest * 1.08 or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:g}%"))
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
        axes.set_xlabel("steps waited", fontsize=10.5)
        if index == 0:
            axes.set_ylabel("share of all tokens", fontsize=10.5)
        else:
            axes.tick_params(labelleft=False)
    return save(figure, path)
