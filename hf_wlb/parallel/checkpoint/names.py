"""What a model's tensors are called in a Hugging Face checkpoint, and how they lie there.

Transformers holds some tensors of a model otherwise than its published checkpoints do: the experts of a layer as one
tensor, or under other names. It converts whole checkpoints; here every tensor is converted by itself, so that no
process has to hold more. A pipeline stage has some of the tensors, and names them as the whole model does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers.core_model_loading import revert_weight_conversion

from hf_wlb.parallel.checkpoint.reading import listed
from hf_wlb.parallel.checkpoint.regions import whole_shape
from hf_wlb.parallel.mesh import ParallelMesh
from hf_wlb.parallel.parameter_layout import ParameterLayout

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FileTensors:
    """Where one tensor of the model lies in files.

    Attributes:
        name: In the model, as this process calls it.
        tensors: In files, by name, without data.
        converted: Whether they are other tensors than the model's, not only called otherwise.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    converted: bool


def own_tensors(model: torch.nn.Module) -> Tensors:
    """Parameters and persistent buffers of a model as this process holds them, each once: without tied copies.

    Puts the shards of FSDP2 back in their place first, should a forward pass have gathered them.
    """
    state = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    ties = tied_names(model)
    seen: set[int] = set()
    found: Tensors = {}
    for name, tensor in state.items():
        if id(tensor) in seen or (name in ties and state.get(ties[name]) is tensor):
            continue
        seen.add(id(tensor))
        found[name] = tensor
    return found


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters among ``own_tensors``: those that an optimizer may know."""
    return {name: of for name, of in own_tensors(model).items() if isinstance(of, torch.nn.Parameter)}


def plain_name(name: str) -> str:
    """The name that a tensor has without torch.compile's wrapper.

    >>> plain_name("model.layers.0._orig_mod.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace("_orig_mod.", "")


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Tied tensors, and the one that each is tied to."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def to_files(model: torch.nn.Module, tensors: Tensors) -> Tensors:
    """Whole tensors of the model, as they lie in files."""
    return cast(Tensors, revert_weight_conversion(cast(Any, model), tensors))


def to_model(model: torch.nn.Module, tensors: Tensors) -> Tensors:
    """The inverse of ``to_files``: reverting the reverted conversions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        mapping = get_model_conversion_mapping(cast(Any, model), add_legacy=False)
        conversions = [of for of in mapping if not isinstance(of, PrefixChange)]
    reverted = [of.reverse_transform() for of in conversions[::-1]]
    return to_files(cast(Any, SimpleNamespace(config=model.config, _weight_conversions=reverted)), tensors)


def file_tensors(model: torch.nn.Module, layout: ParameterLayout) -> list[FileTensors]:
    """Where every tensor of the model, or of a stage of it, lies in files, in the model's order.

    A stage's copies of tied tensors lie where their owners' do.

    Raises:
        ValueError: If some cannot be converted one by one and back.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    own, whole = dict[str, str](), Tensors()
    for held_as, of in own_tensors(model).items():
        name = layout.whole_name(held_as)
        if name not in ignored:
            own[name] = held_as
            whole[name] = torch.empty(whole_shape(layout, held_as, of), dtype=of.dtype, device="meta")
    expected = to_files(model, dict(whole))
    if all(expected.get(name) is tensor for name, tensor in whole.items()):
        return [FileTensors(own[name], {name: tensor}, False) for name, tensor in whole.items()]
    found: list[FileTensors] = []
    for name, tensor in whole.items():
        files = _alone(model, name, tensor)
        converted = len(files) != 1 or next(iter(files.values())) is not tensor
        if any(key not in expected or expected[key].shape != of.shape for key, of in files.items()) or not (
            not converted or _comes_back(model, name, tensor, files)
        ):
            raise ValueError(_together(model, [name]))
        found.append(FileTensors(own[name], files, converted))
    missing = sorted(set(expected) - {key for unit in found for key in unit.tensors})
    if missing:
        raise ValueError(_together(model, missing))
    return found


def all_names(model: torch.nn.Module) -> frozenset[str]:
    """What a model's tensors are called, in memory and in files; call it on the whole model, before it is split.

    For ``ParameterLayout.elsewhere`` of a pipeline's stages. Does not talk to other ranks.

    Args:
        model: With its weights, or on the meta device.

    Raises:
        ValueError: If some cannot be converted one by one, see ``check_names``.
    """
    in_files = {key for unit in file_tensors(model, ParameterLayout(ParallelMesh())) for key in unit.tensors}
    return frozenset(in_files | own_tensors(model).keys())


def check_names(model: torch.nn.Module) -> None:
    """Refuses a model whose checkpoints cannot be written one tensor at a time; call it on the whole model.

    Raises:
        ValueError: Naming the tensors.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantized: its weights cannot be split, nor put together again for a "
            "checkpoint. Load it without quantization_config, or train it without fsdp and with tp_size=1."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{type(model).__name__} carries adapters of its own (add_adapter), which checkpoints of split parameters "
            "do not know. Make it a PEFT model: get_peft_model(model, config)."
        )
    file_tensors(model, ParameterLayout(ParallelMesh()))


def can_save_in_parts(model: torch.nn.Module) -> bool:
    """Whether ``check_names`` would accept the model."""
    try:
        check_names(model)
    except ValueError:
        return False
    return True


def _alone(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Tensors:
    try:
        return to_files(model, {name: tensor})
    except Exception as error:  # whatever a conversion does that lacks its other tensors
        raise ValueError(_together(model, [name])) from error


def _comes_back(model: torch.nn.Module, name: str, tensor: torch.Tensor, files: Tensors) -> bool:
    back = to_model(model, files)
    return set(back) == {name} and back[name].shape == tensor.shape


def _together(model: torch.nn.Module, names: list[str]) -> str:
    return (
        f"a checkpoint of {type(model).__name__} holds {listed(names)} in a way that Transformers only converts "
        "together with other weights, and a run whose parameters are split writes them one by one. Train it without "
        "fsdp and with tp_size=1."
    )


def ignorable(model: torch.nn.Module, attribute: str) -> re.Pattern[str]:
    """What matches the patterns that a model class has for names that may be missing, or unexpected."""
    patterns = [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    patterns += list(getattr(model, attribute, None) or ())
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
