"""Writing whole tensors into safetensors files of bounded size, several processes at a time.

Each stage of a pipeline writes its own tensors into files of its own, at the same time as the others: it gathers them
without talking to other stages. Files appear under their own names only when all of them are written, and the index
that names them comes last: what was cut in the middle does not look complete.
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
from hf_wlb.parallel.checkpoint.stages import of_stages
from hf_wlb.parallel.collectives import gather_objects, process_count
from hf_wlb.parallel.mesh import ParallelMesh

MOST_BYTES_PER_FILE = 5 * 10**9
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Part:
    """Tensors that are made whole together.

    Attributes:
        tensors: By their names in the file, without data (on the meta device).
        gather: Called by all processes of a stage together; returns the tensors, on the CPU, where its argument is
            True.
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
        leads: Whether this process finishes what they write.
        place: Of this process among those of its stage in the team; None if it sees nobody's files.
        writers: For each stage, processes that every team has of it.
    """

    leads: bool
    place: int | None
    writers: tuple[int, ...]

    @classmethod
    def meet(cls, folder: str, leads: bool, mesh: ParallelMesh) -> _Team:
        token = f"{uuid.uuid4().hex}{_PARTIAL}" if leads else None
        with failing_together(place=mesh.place):
            if token is not None:
                os.makedirs(folder, exist_ok=True)
                with open(os.path.join(folder, token), "x"):
                    pass
        tokens = gather_objects(token)
        seen = (rank for rank, of in enumerate(tokens) if of is not None and os.path.exists(os.path.join(folder, of)))
        home = next(seen, None)
        places = gather_objects((home, mesh.pp_rank))
        if token is not None:
            os.remove(os.path.join(folder, token))
        teams = {
            of: [[rank for rank, at in enumerate(places) if at == (of, stage)] for stage in range(mesh.pp_size)]
            for of in sorted({of for of, _ in places if of is not None})
        }
        for of, stages in teams.items():
            blind = [str(stage) for stage, members in enumerate(stages) if not members]
            if blind:
                raise ValueError(
                    f"{folder} of rank {of} is not seen by any process of pipeline stage {', '.join(blind)}, and each "
                    "stage writes its own files of a checkpoint. A pipeline over several machines needs a folder that "
                    "all of them share: set output_dir to one."
                )
        rank = dist.get_rank() if process_count() > 1 else 0
        writers = tuple(min(map(len, of_stage)) for of_stage in zip(*teams.values(), strict=True))
        place = None if home is None else teams[home][mesh.pp_rank].index(rank)
        return cls(home == rank, place, writers)


@dataclass(frozen=True)
class _Plan:
    """What all processes write.

    Attributes:
        names: For each stage, of its files.
        weight_map: The file of every tensor.
        size: Bytes of all tensors.
    """

    names: tuple[tuple[str, ...], ...]
    weight_map: Mapping[str, str]
    size: int

    @classmethod
    def agree(cls, files: Sequence[Sequence[Part]], naming: Naming, mesh: ParallelMesh) -> _Plan:
        """Of the files of this process's stage; all processes must call this together."""
        own = [
            [(key, tuple(of.shape), str(of.dtype)) for part in file for key, of in part.tensors.items()]
            for file in files
        ]
        found = of_stages(mesh, (own, sum(part.size for file in files for part in file)))
        digest = hashlib.blake2b(repr(found).encode(), digest_size=8).digest()
        verify_agreement(
            int.from_bytes(digest, "little") >> 1, f"the tensors of {naming.stem} to write", place=mesh.place
        )
        rest = iter(naming.files(sum(len(of_stage) for of_stage, _ in found)))
        names = tuple(tuple(next(rest) for _ in of_stage) for of_stage, _ in found)
        weight_map: dict[str, str] = {}
        for of_stage, (contents, _) in zip(names, found, strict=True):
            for name, tensors in zip(of_stage, contents, strict=True):
                twice = next((key for key, _, _ in tensors if key in weight_map), None)
                if twice is not None:
                    raise ValueError(f"two pipeline stages have a {twice} of their own. Set pp_size=1 for this model.")
                weight_map |= dict.fromkeys((key for key, _, _ in tensors), name)
        return cls(names, weight_map, sum(size for _, size in found))

    @property
    def count(self) -> int:
        """Files."""
        return sum(map(len, self.names))

    def rounds(self, writers: Sequence[int]) -> int:
        """How often a process writes, at most, if each stage has so many that do so at a time."""
        return max(-(-len(of_stage) // count) for of_stage, count in zip(self.names, writers, strict=True))


def check_folder(folder: str, mesh: ParallelMesh, *, leads: bool) -> None:
    """Refuses a folder into which a pipeline's stages could not write one checkpoint; makes it if need be.

    All processes must call this together, before training rather than when it is lost.

    Args:
        folder: Where checkpoints will lie.
        mesh: This process's place.
        leads: See ``write_tensors``.

    Raises:
        ValueError: On every process, if a stage does not see the folder.
        OSError: If this process leads and cannot write there; the others raise a RuntimeError.
    """
    _Team.meet(folder, leads, mesh)


def write_tensors(
    parts: Sequence[Part],
    folder: str,
    naming: Naming,
    *,
    mesh: ParallelMesh,
    leads: bool,
    describe: Callable[[Mapping[str, str], int], Mapping[str, Any]],
    beside: Callable[[], None] | None = None,
    most_bytes: int = MOST_BYTES_PER_FILE,
) -> None:
    """Writes tensors that no process needs to hold all of; all processes must call this together, and leave together.

    The processes that see the same folder share the files out, so that they are written at the same time. No file has
    tensors of two stages of a pipeline, so there are at least as many files as stages that have any.

    Args:
        parts: In the order in which they go into the files; the same on every process of a stage. Stages follow each
            other.
        folder: Made if need be. Files of the same naming are replaced.
        naming: What the files are called.
        mesh: This process's place.
        leads: Whether this process is the one of its machine, or of all, that a checkpoint needs. Where those that
            lead see different folders, each folder gets a whole checkpoint.
        describe: Makes the index of the file of every tensor and the bytes of all.
        beside: Writes what else belongs there, before the files appear; called by one process a folder.
        most_bytes: In a file, unless one part alone is larger.

    Raises:
        RuntimeError: If the processes of a stage have different things to write, or another one failed.
        ValueError: On every process, if a stage does not see the folder, or two have tensors of the same name.
        OSError: If this one could not write.
    """
    files = _deal(parts, most_bytes)
    plan, team = _Plan.agree(files, naming, mesh), _Team.meet(folder, leads, mesh)
    names, writers = plan.names[mesh.pp_rank], team.writers[mesh.pp_rank]
    for number in range(plan.rounds(team.writers)):
        first = number * writers
        own: dict[str, torch.Tensor] = {}
        for place, file in enumerate(files[first : first + writers]):
            for part in file:
                found = part.gather(place == team.place)
                if place == team.place:
                    own.update(found)
        with failing_together(place=mesh.place):
            if own:
                assert team.place is not None
                save_file(
                    {name: tensor.contiguous() for name, tensor in own.items()},
                    os.path.join(folder, names[first + team.place] + _PARTIAL),
                    metadata={"format": "pt"},
                )
    with failing_together(place=mesh.place):
        if team.leads:
            if beside is not None:
                beside()
            index = describe(plan.weight_map, plan.size)
            every = [name for of_stage in plan.names for name in of_stage]
            _finish(folder, naming, every, None if naming.single and plan.count == 1 else index)


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
