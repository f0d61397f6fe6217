"""A picture of a plan: every way to train, by the memory it takes and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from hf_wlb.plots.style import INK, new_figure, save

OURS_COLOUR, PLAIN_COLOUR, LIMIT_COLOUR = "#009E73", "#D55E00", "#B22222"
_CROWDED = 200  # points from which on they are small and light
_WIDEST = 1.6  # of the memory limit: what is further to the right is counted instead of drawn


@dataclass(frozen=True)
class PlanPoint:
    """A way to train.

    Attributes:
        memory_gb: Of a GPU, in 10^9 bytes.
        tokens_per_second: Of all GPUs.
        label: Its split.
    """

    memory_gb: float
    tokens_per_second: float
    label: str = ""


def plot_plan(
    bounds: Sequence[PlanPoint],
    ours: Sequence[tuple[PlanPoint, PlanPoint]],
    plain: PlanPoint,
    path: str | Path,
    *,
    limit_gb: float,
    title: str = "Ways to train, by memory and speed",
) -> Path:
    """Draw ways to train as points, tokens a second over memory, with a line where memory ends.

    Args:
        bounds: Ways that were priced by means: what they could reach at best, and the least memory.
        ours: Ways that were simulated, each with Plain-4D on the same split, which a line joins; the best first, which
            is written out.
        plain: Plain-4D on its own best split; written out.
        path: PNG file to write; its folder is created.
        limit_gb: Memory of a GPU that training may take.
        title: Heading of the picture.

    Returns:
        The path.

    Raises:
        ValueError: If nothing was simulated, or the limit is not above 0.
    """
    if not ours:
        raise ValueError("There is no plan to draw: give at least one simulated way.")
    if not limit_gb > 0:
        raise ValueError(f"The memory limit must be above 0 GB, got {limit_gb}.")
    figure, row = new_figure(width=8.6, height=5.4, columns=1, title=title)
    axes = row[0]
    right = _WIDEST * limit_gb
    drawn = [point for point in bounds if point.memory_gb <= right]
    fitting = [point for point in drawn if point.memory_gb <= limit_gb]
    ways, others = [way for way, _ in ours], [plain, *(same for _, same in ours)]
    for way, same in ours:
        ends = ((way.memory_gb, same.memory_gb), (way.tokens_per_second, same.tokens_per_second))
        axes.plot(*ends, color="#B8B8B8", linewidth=0.9, zorder=2)
    _dots(axes, [point for point in drawn if point.memory_gb > limit_gb], s=18, facecolor="#E3E3E3", edgecolor="none")
    size, edge = (18, "#A8A8A8") if len(fitting) <= _CROWDED else (9, "#C2C2C2")
    _dots(axes, fitting, s=size, facecolor="white", edgecolor=edge, linewidth=0.8)
    _dots(axes, others, s=46, facecolor=PLAIN_COLOUR, edgecolor="white", linewidth=0.8, marker="D", zorder=4)
    _dots(axes, ways, s=58, facecolor=OURS_COLOUR, edgecolor="white", linewidth=0.8, zorder=5)
    _dots(axes, ways[:1], s=230, facecolor=OURS_COLOUR, edgecolor=INK, linewidth=1.0, marker="*", zorder=6)
    axes.set_xlim(0, right)
    axes.set_ylim(0, max(point.tokens_per_second for point in (*fitting, *ways, *others)) * 1.15)
    _draw_limit(axes, limit_gb, right, sum(point.memory_gb > right for point in bounds))
    best = ways[0]
    gain = f"{best.tokens_per_second / plain.tokens_per_second:.2f}x"
    texts = (
        (best, f"{best.label}\n{speed_text(best.tokens_per_second)} tokens/s, {gain}", OURS_COLOUR),
        (plain, f"Plain-4D: {plain.label}\n{speed_text(plain.tokens_per_second)} tokens/s", PLAIN_COLOUR),
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda gigabytes, _: f"{gigabytes:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tokens, _: speed_text(tokens)))
    axes.set_xlabel("memory of a GPU (GB)")
    axes.set_ylabel("tokens a second, all GPUs")
    axes.grid(color="#EDEDED", linewidth=0.7)
    figure.legend(handles=_key(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.draw_without_rendering()  # settles the layout, so that places on the page are known
    _write_out(axes, texts, [*drawn, *ways, *others], limit_gb)
    return save(figure, path)


def speed_text(tokens_per_second: float) -> str:
    """Write tokens a second the short way.

    Example:
        >>> [speed_text(speed) for speed in (0, 850, 55_491, 409_858, 3_272_345)]
        ['0', '850', '55.5K', '410K', '3.27M']
    """
    for unit, name in ((1e6, "M"), (1e3, "K")):
        if tokens_per_second >= unit:
            return f"{tokens_per_second / unit:.3g}{name}"
    return f"{tokens_per_second:.3g}"


def _dots(axes: Axes, points: Sequence[PlanPoint], **style: object) -> None:
    axes.scatter([p.memory_gb for p in points], [p.tokens_per_second for p in points], **style)  # type: ignore[arg-type]


def _draw_limit(axes: Axes, limit_gb: float, right: float, beyond: int) -> None:
    axes.axvspan(limit_gb, right, color=LIMIT_COLOUR, alpha=0.05, linewidth=0, zorder=0)
    axes.axvline(limit_gb, color=LIMIT_COLOUR, linewidth=1.3, zorder=1)
    text = f"too much memory: above {limit_gb:.3g} GB"
    if beyond:
        text += f"\n({beyond:,} more ways further to the right)"
    axes.text(
        limit_gb,
        0.985,
        f"  {text.replace(chr(10), chr(10) + '  ')}",
        transform=axes.get_xaxis_transform(),
        va="top",
        fontsize=8.5,
        color=LIMIT_COLOUR,
    )


def _write_out(
    axes: Axes, texts: Sequence[tuple[PlanPoint, str, str]], drawn: Sequence[PlanPoint], limit_gb: float
) -> None:
    """Write (point, text, colour) beside the points, where the fewest others are covered."""
    scale = 72.0 / axes.figure.dpi
    dots = axes.transData.transform([(p.memory_gb, p.tokens_per_second) for p in drawn]) * scale
    frame, limit = axes.get_window_extent(), float(axes.transData.transform((limit_gb, 0.0))[0]) * scale
    taken: list[tuple[float, float, float, float]] = []
    for point, text, colour in texts:
        at = axes.transData.transform((point.memory_gb, point.tokens_per_second)) * scale
        width, height = 7.0 * max(map(len, text.split("\n"))), 28.0
        best: tuple[float, tuple[float, float], tuple[float, float, float, float]] | None = None
        for far, (dx, dy) in product((14.0, 32.0, 60.0, 95.0), product((-1, 0, 1), (-1, 1))):
            left = at[0] + dx * far * 0.6 - width * (1 - dx) / 2
            bottom = at[1] + dy * far - height * (dy < 0)
            box = (left, bottom, left + width, bottom + height)
            inside = (dots[:, 0] > box[0]) & (dots[:, 0] < box[2]) & (dots[:, 1] > box[1]) & (dots[:, 1] < box[3])
            cost = float(inside.sum()) + far / 100
            cost += 50 * any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken)
            cost += 20 * (box[0] < limit < box[2])
            cost += 50 * (box[0] < frame.x0 * scale or box[2] > frame.x1 * scale)
            cost += 50 * (box[1] < frame.y0 * scale or box[3] > frame.y1 * scale)
            if best is None or cost < best[0]:
                best = cost, (left - at[0], bottom - at[1]), box
        assert best is not None
        taken.append(best[2])
        axes.annotate(
            text,
            (point.memory_gb, point.tokens_per_second),
            xytext=best[1],
            textcoords="offset points",
            va="bottom",
            fontsize=9.5,
            fontweight="bold",
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.9},
            zorder=7,
        )


def _key() -> list[Line2D]:
    def dot(marker: str, fill: str, edge: str, size: float, label: str) -> Line2D:
        return Line2D(
            [],
            [],
            linestyle="",
            marker=marker,
            markersize=size,
            markerfacecolor=fill,
            markeredgecolor=edge,
            label=label,
        )

    return [
        dot("o", "white", "#9A9A9A", 5, "at best, by means"),
        dot("o", OURS_COLOUR, "white", 8, "simulated"),
        dot("*", OURS_COLOUR, INK, 13, "best"),
        dot("D", PLAIN_COLOUR, "white", 7, "Plain-4D, simulated"),
        Line2D([], [], color="#B8B8B8", linewidth=0.9, label="the same split"),
    ]
