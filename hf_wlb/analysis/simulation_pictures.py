"""Pictures of the paper's evaluation, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def draw_all(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Pictures of what ``reproduce`` found, ``simulated_*.png``.

    Args:
        found: The content of the results file.
        folder: Where to.
    """
    from hf_wlb.plots import assumptions
    from hf_wlb.plots import paper as plots

    fig12 = found["fig12"]
    drawn: dict[str, Callable[[Path], Path]] = {
        "fig12": lambda path: plots.plot_figure_12(fig12["rows"], fig12["paper"], path),
        "fig13": lambda path: plots.plot_figure_13(found["fig13"], path),
        "fig14": lambda path: plots.plot_figure_14(found["fig14"], path),
        "fig15": lambda path: plots.plot_figure_15(found["fig15"]["rows"], found["fig15"]["paper"], path),
        "sensitivity": lambda path: assumptions.plot_sensitivity(found["sensitivity"], path),
        "explanation": lambda path: assumptions.plot_explanation(
            found["explanation"], fig12["paper"]["paper"]["all"], path
        ),
    }
    return [draw(folder / f"simulated_{name}.png") for name, draw in drawn.items()]
