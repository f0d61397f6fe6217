"""Pictures inside a notebook: drawn by the same functions that write files, made small enough to be committed."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from PIL import Image  # Matplotlib brings it

_Parameters = ParamSpec("_Parameters")
_COLOURS = 96


@dataclass(frozen=True)
class Picture:
    """A picture that notebooks show where it is a cell's last value.

    Attributes:
        png: A PNG file's content.
        width: Pixels.
        height: Pixels.
    """

    png: bytes = field(repr=False)
    width: int
    height: int

    def _repr_png_(self) -> bytes:
        """What Jupyter asks an object for."""
        return self.png


def inline(
    plot: Callable[Concatenate[Any, Path, _Parameters], Path],
    shown: Any,
    *args: _Parameters.args,
    **kwargs: _Parameters.kwargs,
) -> Picture:
    """Draw a picture for a notebook instead of a file.

    Args:
        plot: A function of ``hf_wlb.plots`` that takes what to draw, then a path.
        shown: What to draw.
        *args: Its further arguments, after the path.
        **kwargs: Its keyword arguments.

    Returns:
        The picture in a palette of 96 colours, a third of the file's size.

    Raises:
        ValueError: As ``plot`` does.

    Example:
        >>> from hf_wlb.plots import plot_packer_bars
        >>> inline(plot_packer_bars, [("next-fit", 1.44), ("steady", 1.01)], title="Steady is faster")
        Picture(width=836, height=211)
    """
    with tempfile.TemporaryDirectory() as folder:
        path = plot(shown, Path(folder) / "picture.png", *args, **kwargs)
        with Image.open(path) as drawn:
            small = drawn.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    content = io.BytesIO()
    small.save(content, format="PNG", optimize=True)
    return Picture(content.getvalue(), *small.size)
