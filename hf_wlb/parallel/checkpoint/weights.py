"""A model's weights as ``from_pretrained`` reads them, written and read in parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod

import torch

from hf_wlb.parallel.agreement import failing_together
from hf_wlb.parallel.checkpoint.files import MOST_BYTES_PER_FILE, Naming, Part, write_tensors
from hf_wlb.parallel.checkpoint.names import (
    FileTensors,
    file_tensors,
    ignorable,
    own_tensors,
    tied_names,
    to_files,
    to_model,
)
from hf_wlb.parallel.checkpoint.reading import TensorFiles, listed
from hf_wlb.parallel.checkpoint.regions import gather_whole, held, held_ranges, take, whole_shape
from hf_wlb.parallel.checkpoint.stages import of_stages
from hf_wlb.parallel.parameter_layout import ParameterLayout

WEIGHTS = Naming("model", single=True)


def has_weights(folder: str) -> bool:
    """Whether a folder holds weights in safetensors files."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (WEIGHTS.index, *WEIGHTS.files(1)))


def save_weights(
    model: torch.nn.Module,
    layout: ParameterLayout,
    folder: str,
    *,
    leads: bool,
    beside: Callable[[], None] | None = None,
    most_bytes: int = MOST_BYTES_PER_FILE,
) -> None:
    """Writes the weights of a split model as ``save_pretrained`` would those of the whole one.

    All processes must call this together, and leave together. Tied weights are written once. The files are those of
    the whole model; with a pipeline none has tensors of two stages, so that a small model has several, too.

    Args:
        model: The Transformers model, or this process's stage of it; its parameters may be slices, and ``DTensor`` of
            FSDP2.
        layout: How they are split.
        folder: The checkpoint.
        leads: See ``write_tensors``.
        beside: Writes the configuration and what else belongs there; called by one process a folder.
        most_bytes: In a file, unless one tensor of the model alone is larger.

    Raises:
        ValueError: For a model that ``check_names`` refuses; or see ``write_tensors``.
        OSError: If this process could not write its files; the others raise a RuntimeError.
    """
    with failing_together(place=layout.mesh.place):
        own = {name: of for name, of in own_tensors(model).items() if name not in layout.copies}
        units = [unit for unit in file_tensors(model, layout) if unit.name in own]
    parameters = of_stages(
        layout.mesh,
        sum(prod(whole_shape(layout, name, of)) for name, of in own.items() if isinstance(of, torch.nn.Parameter)),
    )

    def part(unit: FileTensors) -> Part:
        def gather(keep: bool) -> Mapping[str, torch.Tensor]:
            whole = gather_whole(layout, unit.name, own[unit.name], keep)
            if whole is None:
                return {}
            return to_files(model, {unit.name: whole}) if unit.converted else dict.fromkeys(unit.tensors, whole)

        return Part(unit.tensors, gather)

    write_tensors(
        [part(unit) for unit in units],
        folder,
        WEIGHTS,
        mesh=layout.mesh,
        leads=leads,
        describe=lambda weight_map, size: {
            "metadata": {"total_parameters": sum(parameters), "total_size": size},
            "weight_map": weight_map,
        },
        beside=beside,
        most_bytes=most_bytes,
    )


def load_weights(model: torch.nn.Module, layout: ParameterLayout, folder: str) -> None:
    """Reads this process's part of a checkpoint's weights into a model; no communication.

    A stage of a pipeline reads its own tensors, and takes those that ``layout.elsewhere`` names for the others': what
    no stage has is an error on every process, what is missing on those whose stage has it.

    Args:
        model: Split as it will be trained.
        layout: How.
        folder: Of any ``save_pretrained``, or ``save_weights`` under another split.

    Raises:
        ValueError: If files are damaged, or names, shapes or types of the tensors differ from the model's.
    """
    files, own = TensorFiles(folder, WEIGHTS), own_tensors(model)
    units = file_tensors(model, layout)
    if any(unit.converted for unit in units) and all(layout.whole_name(name) in files.files for name in own):
        nothing = torch.empty(0, device="meta")
        units = [FileTensors(name, {layout.whole_name(name): nothing}, False) for name in own]
    expected = {key for unit in units for key in unit.tensors}
    _compare(model, folder, expected, set(files.files) - (layout.elsewhere - expected))
    for unit in units:
        if not set(unit.tensors) <= set(files.files):
            continue  # the model class says that it may be missing
        tensor = own[unit.name]
        ranges, shape = held_ranges(layout, unit.name, tensor), whole_shape(layout, unit.name, tensor)
        if unit.converted:
            tensors = {key: files.read(key) for key in unit.tensors}
            made = to_model(model, {key: of for key, of in tensors.items() if of is not None})
            whole = made[layout.whole_name(unit.name)]
            found, part = whole.shape, take(whole, ranges)
        else:
            (key,) = unit.tensors
            found = files.shape(key)
            part = files.read(key, ranges) if found == shape else None
        if found != shape:
            raise ValueError(
                f"{unit.name} is {list(found)} in {folder}, but {list(shape)} in the model. Take the checkpoint of a "
                "model of the same configuration."
            )
        fill(unit.name, tensor, part, folder)
    _check_ties(model, layout, own, files)


def _check_ties(
    model: torch.nn.Module, layout: ParameterLayout, own: Mapping[str, torch.Tensor], files: TensorFiles
) -> None:
    """A checkpoint may hold tied tensors twice; of an untied model they are two."""
    for name, source in tied_names(model).items():
        if name not in files.files or name in own or source not in own:
            continue
        part = files.read(name, held_ranges(layout, source, own[source]))
        if part is not None and not torch.equal(part.to(own[source].device), held(own[source].detach())):
            raise ValueError(
                f"{files.folder} holds a {name} of its own, but the model ties it to {source}. Load the model with "
                "tie_word_embeddings=False."
            )


def fill(name: str, tensor: torch.Tensor, part: torch.Tensor | None, folder: str) -> None:
    """Puts what was read into what this process holds of a tensor; None for nothing.

    Raises:
        ValueError: If types differ: what is rounded would not be the run that was saved.
    """
    if part is None:
        return
    if part.dtype != tensor.dtype:
        kinds = [str(dtype).removeprefix("torch.") for dtype in (part.dtype, tensor.dtype)]
        raise ValueError(
            f"{name} is {kinds[0]} in {folder}, but {kinds[1]} in the model. Load the model with dtype={kinds[0]!r}."
        )
    with torch.no_grad():
        held(tensor).copy_(part)


def _compare(model: torch.nn.Module, folder: str, expected: set[str], found: set[str]) -> None:
    may_lack = ignorable(model, "_keys_to_ignore_on_load_missing")
    may_have = ignorable(model, "_keys_to_ignore_on_load_unexpected")
    missing = sorted(name for name in expected - found if not may_lack.search(name))
    unexpected = sorted(name for name in found - expected - tied_names(model).keys() if not may_have.search(name))
    if missing or unexpected:
        said = [f"it lacks {listed(missing)}"] if missing else []
        said += [f"it has {listed(unexpected)}, which the model has not"] if unexpected else []
        raise ValueError(f"{folder} is of another model than {type(model).__name__} as it is here: {'; '.join(said)}.")
