"""Giving a model, or one stage of it, the parameters that it has only the shapes of."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

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
from hf_wlb.parallel.checkpoint.regions import held, held_ranges, take, whole_shape
from hf_wlb.parallel.checkpoint.weights import WEIGHTS
from hf_wlb.parallel.parameter_layout import ParameterLayout
from hf_wlb.parallel.pipeline.initialise import initialise
from hf_wlb.parallel.pipeline.skeleton import weights_folder
from hf_wlb.parallel.pipeline.stage import StandIn

logger = logging.getLogger(__name__)

#: In checkpoints of long ago; computed since.
_FORMERLY_SAVED = re.compile(r"rotary_emb\.inv_freq$")


def materialise(
    model: PreTrainedModel,
    layout: ParameterLayout,
    folder: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> None:
    """Gives what is left of a skeleton its values: those of a checkpoint, or random ones. No communication.

    From a checkpoint, this process reads its own part of the tensors that it has, and nothing of other stages'; what
    is saved in another floating-point type is rounded to the model's, as ``from_pretrained`` does. Without one, every
    module begins as its model class says, with numbers that depend on the seed and the module's name alone: the same
    for every split, and of the same distribution as ``from_config``'s. A head that is tied to the embeddings of the
    first stage gets their values.

    Parameters become other objects: make the optimizer afterwards. Compile layers afterwards, too.

    Args:
        model: From ``skeleton``, whole or after ``cut_stage``. It may be split over tensor-parallel ranks (before it
            was cut) and sharded by FSDP2, while on the meta device.
        layout: How; ``copies`` are those of the ``PipelineStage``.
        folder: A checkpoint of ``save_pretrained`` or ``save_weights``, or a name on the hub, see ``weights_folder``;
            None for random weights.
        seed: Of random weights, the same on every process. The random state of the caller stays as it is.
        device: Where parameters and buffers will be.
        revision: Of a name on the hub.

    Raises:
        ValueError: If there are no safetensors files, they are damaged, they lack a tensor, hold another shape, or
            quantized numbers; or if the model class does not say how a tensor begins.
    """
    persistent = model.state_dict().keys()
    computed = {name for name, buffer in model.named_buffers() if buffer.is_meta and name not in persistent}
    _allocate(model, torch.device(device))
    own = own_tensors(model)
    filled = set() if folder is None else _read(model, layout, own, weights_folder(folder, revision))
    initialise(model, layout, (own.keys() - filled) | computed, seed)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise RuntimeError(
            f"{type(model).__name__} would not let go of the meta device: {listed(left)} are still there."
        )


def _allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Moves what is real and makes room for the rest; tied parameters stay one."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, key))
    tied = [found for found in places.values() if len(found) > 1]
    originals = {id(parameter := module._parameters[key]): parameter for ((module, key), *_) in tied}
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in made:
            return made[id(tensor)]
        there = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        if id(tensor) in originals:
            made[id(tensor)] = there
        return there

    model._apply(real)  # FSDP2 notices
    for (first, name), *others in tied:
        for module, key in others:
            module._parameters[key] = first._parameters[name]


def _read(model: PreTrainedModel, layout: ParameterLayout, own: dict[str, torch.Tensor], folder: str) -> set[str]:
    """Fills tensors from files; returns which."""
    files = TensorFiles(folder, WEIGHTS)
    units = file_tensors(model, layout)
    keys = {unit.name: _keys(model, layout, unit, files) for unit in units}
    if any(unit.converted for unit in units):
        as_here = {name: _keys(model, layout, FileTensors(name, {name: of}, False), files) for name, of in own.items()}
        if all(as_here.values()):  # saved as the model holds them, without Transformers' conversions
            units, keys = [FileTensors(name, {name: of}, False) for name, of in own.items()], as_here
    _check_names(model, layout, units, keys, files)
    filled = set()
    for unit in units:
        if not keys[unit.name]:
            continue  # the model class says that it may be missing
        _fill(model, layout, own[unit.name], unit, keys[unit.name], files)
        filled.add(unit.name)
    return filled


def _keys(model: PreTrainedModel, layout: ParameterLayout, unit: FileTensors, files: TensorFiles) -> list[str]:
    """Where a tensor lies in files: all parts of a converted one; else one that is tied may lie there several times."""
    if unit.converted:
        return [*unit.tensors] if unit.tensors.keys() <= files.files.keys() else []
    ties = tied_names(model)
    owner = layout.whole_name(unit.name)
    owner = ties.get(owner, owner)
    names = [owner, *(name for name, source in {**ties, **layout.copies}.items() if source == owner)]
    tied = [_file_name(model, name, unit) for name in names] if len(names) > 1 else []
    return [key for key in dict.fromkeys([*tied, *unit.tensors]) if key in files.files]


def _file_name(model: PreTrainedModel, name: str, unit: FileTensors) -> str:
    (tensor,) = unit.tensors.values()
    return next(iter(to_files(model, {name: torch.empty_like(tensor, device="meta")})))


def _check_names(
    model: PreTrainedModel,
    layout: ParameterLayout,
    units: list[FileTensors],
    keys: dict[str, list[str]],
    files: TensorFiles,
) -> None:
    may_lack = ignorable(model, "_keys_to_ignore_on_load_missing")
    lacking = [unit for unit in units if not keys[unit.name] and not may_lack.search(unit.name)]
    missing = sorted({key for unit in lacking for key in unit.tensors} - files.files.keys())
    if missing:
        raise ValueError(
            f"{files.folder} lacks {listed(missing)}, which {type(model).__name__} of this configuration has. Take the "
            "checkpoint that belongs to the configuration."
        )
    mesh = layout.mesh
    if mesh.dp_rank + mesh.pp_rank + mesh.cp_rank + mesh.tp_rank > 0:
        return
    may_have = ignorable(model, "_keys_to_ignore_on_load_unexpected")
    known = {key for unit in units for key in unit.tensors} | {key for of in keys.values() for key in of}
    elsewhere = _prefixes_elsewhere(model)
    unexpected = sorted(
        key
        for key in files.files.keys() - known - tied_names(model).keys()
        if not key.startswith(elsewhere) and not may_have.search(key) and not _FORMERLY_SAVED.search(key)
    )
    if unexpected:
        logger.warning(
            "%s has %s, which %s of this configuration has not; they are not read.",
            files.folder,
            listed(unexpected),
            type(model).__name__,
        )


def _prefixes_elsewhere(model: PreTrainedModel) -> tuple[str, ...]:
    """What the names of other stages' tensors begin with in files, where some modules are called otherwise."""
    nothing = torch.empty(0, device="meta")
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, StandIn)]
    in_files = to_files(model, dict.fromkeys(names, nothing))
    return tuple(key.removesuffix("weight") for key in (*names, *in_files))


def _fill(
    model: PreTrainedModel,
    layout: ParameterLayout,
    tensor: torch.Tensor,
    unit: FileTensors,
    keys: list[str],
    files: TensorFiles,
) -> None:
    ranges, shape = held_ranges(layout, unit.name, tensor), whole_shape(layout, unit.name, tensor)
    part: torch.Tensor | None
    if unit.converted:
        tensors = dict(_whole(keys, files))
        _check_type(keys[0], tensors[keys[0]], tensor, files)
        whole = to_model(model, tensors)[layout.whole_name(unit.name)]
        _check_shape(unit.name, whole.shape, shape, files)
        part = take(whole, ranges)
    else:
        for key in keys:
            _check_shape(key, files.shape(key), shape, files)
        part = files.read(keys[0], ranges)
        for key in keys[1:]:
            other = files.read(key, ranges)
            if part is not None and other is not None and not torch.equal(part, other):
                raise ValueError(
                    f"{files.folder} holds {keys[0]} and another {key}, but {type(model).__name__} ties them. Load it "
                    "with tie_word_embeddings=False."
                )
        if part is not None:
            _check_type(keys[0], part, tensor, files)
    if part is not None:
        with torch.no_grad():
            held(tensor).copy_(part)


def _whole(keys: list[str], files: TensorFiles) -> Iterator[tuple[str, torch.Tensor]]:
    for key in keys:
        tensor = files.read(key)
        assert tensor is not None
        yield key, tensor


def _check_shape(key: str, found: torch.Size, expected: torch.Size, files: TensorFiles) -> None:
    if found != expected:
        raise ValueError(
            f"{key} is {list(found)} in {files.folder}, but {list(expected)} in the model. Take the checkpoint that "
            "belongs to the configuration."
        )


def _check_type(key: str, found: torch.Tensor, tensor: torch.Tensor, files: TensorFiles) -> None:
    """Other floating-point types of two bytes and more are only rounded; anything else means something else."""
    rounded = found.is_floating_point() and tensor.is_floating_point() and found.dtype.itemsize > 1
    if found.dtype != tensor.dtype and not rounded:
        kinds = [str(of.dtype).removeprefix("torch.") for of in (found, tensor)]
        raise ValueError(
            f"{key} is {kinds[0]} in {files.folder}, but {kinds[1]} in the model: it is quantized. Take a checkpoint "
            "that is not, or save it dequantized."
        )
