"""A picture of a measured profile: how fast attention is, for documents and for chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from hf_wlb.plots.style import INK, new_figure, save, token_text
from hf_wlb.workload import Profile, ProfiledWorkload
from hf_wlb.workload.analytic import ATTENTION_BACKWARD_FLOPS
from hf_wlb.workload.base import FloatArray

_CELLS = 120


def plot_attention_rates(profile: Profile, path: str | Path, *, title: str = "How fast attention is") -> Path:
    """Draw the rate of one layer's attention, forward plus backward, over queries and keys.

    Colours are read off the profile as a workload model reads it; dots are what was measured. Documents lie on the
    diagonal, chunks above it.

    Args:
        profile: Measured; its metadata's ``model`` says ``heads``, ``head_size`` and ``value_head_size``.
        path: PNG file to write; its folder is created.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If the metadata lacks one of these.
    """
    queries, keys, rates = attention_rates(profile)
    figure, row = new_figure(width=7.2, height=5.4, columns=1, title=title)
    axes = row[0]
    most = float(np.nanmax(rates))
    unit, name = (1.0, "TFLOP/s") if most >= 0.1 else (1e-3, "GFLOP/s")
    rates, scale = rates / unit, Normalize(0, most / unit)
    mesh = axes.pcolormesh(queries, keys, rates, shading="gouraud", cmap="viridis", norm=scale, rasterized=True)
    dots = np.array([sample[:2] for sample in profile.attention])
    axes.scatter(
        dots[:, 0],
        dots[:, 1],
        s=14,
        facecolor="white",
        edgecolor=INK,
        linewidth=0.8,
        zorder=3,
        clip_on=False,
        label="measured",
    )
    _label(axes)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(f"{name}, forward plus backward", fontsize=9.5, color=INK)
    bar.outline.set_visible(False)
    metadata = profile.metadata
    axes.set_title(
        f"{metadata['device']}, {metadata['dtype']}, {metadata['model'].get('kernel', 'kernel unknown')}",
        fontsize=9.5,
        color=INK,
    )
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    return save(figure, path)


def attention_rates(profile: Profile) -> tuple[FloatArray, FloatArray, FloatArray]:
    """TFLOP/s of one layer's attention on a grid that is even in the logarithms.

    Args:
        profile: See ``plot_attention_rates``.

    Returns:
        Queries [columns], keys [rows], rates [rows, columns]; NaN where there are more queries than keys.

    Raises:
        ValueError: See ``plot_attention_rates``.
    """
    model = profile.metadata["model"]
    missing = [key for key in ("heads", "head_size", "value_head_size") if key not in model]
    if missing:
        raise ValueError(
            f"The profile's model does not say {', '.join(missing)}, so its attention has no rate. Measure it with "
            "hf-wlb profile."
        )
    layer = ProfiledWorkload.from_dict(
        {**profile.to_dict(), "layers": [{"count": 1, "window": None}], "linear": [], "head": [], "embedding": []}
    )
    shortest, longest = min(sample[0] for sample in profile.attention), max(sample[1] for sample in profile.attention)
    lengths = np.unique(np.geomspace(shortest, max(longest, shortest + 1), _CELLS).round().astype(np.int64))
    queries, keys = np.meshgrid(lengths, lengths)
    possible = queries <= keys
    rates = np.full(queries.shape, np.nan)
    q, k = queries[possible], keys[possible]
    flops = 2 * model["heads"] * (model["head_size"] + model["value_head_size"]) * (1 + ATTENTION_BACKWARD_FLOPS)
    rates[possible] = q * (k - (q - 1) / 2) * flops / layer.chunk(q, k) / 1e12
    return lengths.astype(np.float64), lengths.astype(np.float64), rates


def _label(axes: Axes) -> None:
    for axis, label in ((axes.xaxis, "queries (tokens)"), (axes.yaxis, "keys (tokens)")):
        axis.set_label_text(label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=4, numticks=20))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda tokens, _: token_text(tokens)))
