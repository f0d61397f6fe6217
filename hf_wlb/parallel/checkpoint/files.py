"""Writing whole tensors into safetensors files of bounded size, several processes at a time.

Files appear under their own names only when all of them are written, and the index that names them comes last: what
was cut in the middle does not look complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hf_wlb.parallel.agreement import failing_together, verify_agreement
from hf_wlb.parallel.collectives import gather_objects, process_count

MOST_BYTES_PER_FILE = 5 * 10**9
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Part:
    """Tensors that are made whole together.

    Attributes:
        tensors: By their names in the file, without data (on the meta device).
        gather: Called by all processes together; returns the tensors, on the CPU, where its argument is True.
    """

    tensors: Mapping[str, torch.Tensor]
    gather: Callable[[bool], Mapping[str, torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())


@dataclass(frozen=True)
class Naming:
    """What files are called.

    Attributes:
        stem: What all begin with.
        single: Whether one file alone goes without number and index.

    >>> Naming("model", single=True).files(1), Naming("model", single=True).files(2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """

    stem: str
    single: bool

    @property
    def index(self) -> str:
        """The index's name."""
        return f"{self.stem}.safetensors.index.json"

    def files(self, count: int) -> list[str]:
        """Names of ``count`` files."""
        if count == 1 and self.single:
            return [f"{self.stem}.safetensors"]
        return [f"{self.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def matches(self, file: str) -> bool:
        """Whether a file is one of these, however many they were, finished or not."""
        pattern = rf"{self.stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?({re.escape(_PARTIAL)})?"
        return re.fullmatch(pattern, file) is not None


@dataclass(frozen=True)
class _Team:
    """The processes that write into one folder together: those that see the same files.

    Attributes:
        place: Of this process among them, the one in the lead first; None if it sees nobody's files.
        writers: Processes that every team has.
    """

    place: int | None
    writers: int

    @classmethod
    def meet(cls, folder: str, leads: bool) -> _Team:
        token = f"{uuid.uuid4().hex}{_PARTIAL}" if leads else None
        with failing_together():
            if token is not None:
                os.makedirs(folder, exist_ok=True)
                with open(os.path.join(folder, token), "x"):
                    pass
        tokens = gather_objects(token)
        seen = (rank for rank, of in enumerate(tokens) if of is not None and os.path.exists(os.path.join(folder, of)))
        home = next(seen, None)
        homes = gather_objects(home)
        if token is not None:
            os.remove(os.path.join(folder, token))
        sizes = [homes.count(rank) for rank in set(homes) if rank is not None]
        if home is None:
            return cls(None, min(sizes))
        rank = dist.get_rank() if process_count() > 1 else 0
        others = [other for other, of in enumerate(homes) if of == home and other != home]
        return cls([home, *others].index(rank), min(sizes))


def write_tensors(
    parts: Sequence[Part],
    folder: str,
    naming: Naming,
    *,
    leads: bool,
    describe: Callable[[dict[str, str], int], Mapping[str, Any]],
    beside: Callable[[], None] | None = None,
    most_bytes: int = MOST_BYTES_PER_FILE,
) -> None:
    """Writes tensors that no process needs to hold all of; all processes must call this together, and leave together.

    The processes that see the same folder share the files out, so that they are written at the same time.

    Args:
        parts: In the order in which they go into the files; the same on every process.
        folder: Made if need be. Files of the same naming are replaced.
        naming: What the files are called.
        leads: Whether this process is the one of its machine, or of all, that a checkpoint needs. Where those that
            lead see different folders, each folder gets a whole checkpoint.
        describe: Makes the index of the file of every tensor and the bytes of all.
        beside: Writes what else belongs there, before the files appear; called by one process a folder.
        most_bytes: In a file, unless one part alone is larger.

    Raises:
        RuntimeError: If the processes have different things to write, or another one failed.
        OSError: If this one could not write.
    """
    plan = [(name, tuple(of.shape), str(of.dtype)) for part in parts for name, of in part.tensors.items()]
    digest = hashlib.blake2b(repr((plan, most_bytes)).encode(), digest_size=8).digest()
    verify_agreement(int.from_bytes(digest, "little") >> 1, f"the tensors of {naming.stem} to write")
    team, files = _Team.meet(folder, leads), _deal(parts, most_bytes)
    names = naming.files(len(files))
    for first in range(0, len(files), team.writers):
        own: dict[str, torch.Tensor] = {}
        for place, file in enumerate(files[first : first + team.writers]):
            for part in file:
                found = part.gather(place == team.place)
                if place == team.place:
                    own.update(found)
        with failing_together():
            if own:
                assert team.place is not None
                save_file(
                    {name: tensor.contiguous() for name, tensor in own.items()},
                    os.path.join(folder, names[first + team.place] + _PARTIAL),
                    metadata={"format": "pt"},
                )
    with failing_together():
        if team.place == 0:
            if beside is not None:
                beside()
            weight_map = {
                key: name for name, file in zip(names, files, strict=True) for part in file for key in part.tensors
            }
            index = describe(weight_map, sum(part.size for part in parts))
            _finish(folder, naming, names, None if naming.single and len(files) == 1 else index)


def _deal(parts: Sequence[Part], most_bytes: int) -> list[list[Part]]:
    files: list[list[Part]] = []
    room = 0
    for part in parts:
        if not files or part.size > room:
            files.append([])
            room = most_bytes
        files[-1].append(part)
        room -= part.size
    return files


def _finish(folder: str, naming: Naming, names: Sequence[str], index: Mapping[str, Any] | None) -> None:
    """Gives the files their names; the index, without which they are nothing, goes first and comes last."""
    written = {name + _PARTIAL for name in names}
    stale = [file for file in os.listdir(folder) if naming.matches(file) and file not in written]
    for file in sorted(stale, key=lambda file: file != naming.index):
        os.remove(os.path.join(folder, file))
    for name in names:
        os.replace(os.path.join(folder, name + _PARTIAL), os.path.join(folder, name))
    if index is not None:
        write_json(os.path.join(folder, naming.index), index)


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Writes a file that is either there and whole, or not there."""
    with open(path + _PARTIAL, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
    os.replace(path + _PARTIAL, path)
