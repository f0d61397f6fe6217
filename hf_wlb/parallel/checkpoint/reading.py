"""Reading parts of the tensors in a folder's safetensors files; no communication."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_wlb.parallel.checkpoint.files import Naming
from hf_wlb.parallel.checkpoint.regions import Ranges, take

_HINT = "the checkpoint is damaged, or was not copied completely. Take another one."


class TensorFiles:
    """What a folder's files of one naming hold.

    Opening them reads only what is where, and finds out whether a file is missing or was cut.

    Args:
        folder: The checkpoint.
        naming: Of the files.

    Attributes:
        index: The index as it was written; empty for a single file.
        files: The file of every tensor.

    Raises:
        ValueError: If something is missing or cannot be read; says what.
    """

    def __init__(self, folder: str, naming: Naming) -> None:
        self.folder = folder
        self.index: dict[str, Any] = {}
        path = os.path.join(folder, naming.index)
        single = naming.files(1)[0]
        self._open: dict[str, Any] = {}
        if os.path.isfile(path):
            self.index = _read_index(path)
            self.files: dict[str, str] = self.index["weight_map"]
        elif naming.single and os.path.isfile(os.path.join(folder, single)):
            self.files = dict.fromkeys(self._opened(single).keys(), single)
        else:
            raise ValueError(f"{folder} holds no {naming.index}" + (f" and no {single}." if naming.single else "."))
        for file in sorted(set(self.files.values())):
            expected = {name for name, of in self.files.items() if of == file}
            differing = sorted(expected ^ set(self._opened(file).keys()))
            if differing:
                raise ValueError(
                    f"{path} and {file} do not agree on {listed(differing)}: they are of different checkpoints. Take "
                    "another one."
                )

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._opened(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that has elements."""
        one = self.read(name, [[(0, 1)] for _ in self.shape(name)])
        assert one is not None
        return one.dtype

    def read(self, name: str, ranges: Sequence[Ranges] | None = None) -> torch.Tensor | None:
        """A part of a tensor, or all of it, on the CPU; None for a part of no elements."""
        file = self._opened(self.files[name])
        if ranges is None or not ranges:
            return torch.as_tensor(file.get_tensor(name))
        return take(file.get_slice(name), ranges)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = os.path.join(self.folder, file)
            if not os.path.isfile(path):
                raise ValueError(f"{path} is missing: {_HINT}")
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read ({error}): {_HINT}") from error
        return self._open[file]


def _read_index(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        if not isinstance(index["weight_map"], dict):
            raise TypeError("weight_map is no table")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}): {_HINT}") from error
    return dict(index)


def listed(names: Sequence[str], most: int = 5) -> str:
    """Some names, and how many more.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
