"""Adapters of a PEFT model whose parameters are sharded: small, so a process may hold all of them."""

from __future__ import annotations

import os
from typing import Any

import torch

from hf_wlb.parallel.checkpoint.files import Naming
from hf_wlb.parallel.checkpoint.names import own_tensors
from hf_wlb.parallel.checkpoint.reading import TensorFiles, listed
from hf_wlb.parallel.checkpoint.regions import gather_whole, held_ranges, whole_shape
from hf_wlb.parallel.checkpoint.weights import fill
from hf_wlb.parallel.parameter_layout import ParameterLayout

ADAPTER = Naming("adapter_model", single=True)


def gather_adapters(model: Any, layout: ParameterLayout) -> dict[str, torch.Tensor]:
    """What ``PeftModel.save_pretrained(state_dict=...)`` needs of the model's state; all processes call it together.

    Args:
        model: The PEFT model.
        layout: How its parameters are split.

    Returns:
        Whole tensors on the CPU, the same on every process.
    """
    own = own_tensors(model)
    used = {name for adapter in model.peft_config for name in _adapter_names(model, layout, adapter).values()}
    whole = {name: gather_whole(layout, name, own[name], keep=True) for name in own if name in used}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


def load_adapters(model: Any, layout: ParameterLayout, folder: str) -> None:
    """Reads this process's part of all adapters that the model has; no communication.

    Args:
        model: The PEFT model, split as it will be trained.
        layout: How.
        folder: Where ``save_pretrained`` wrote it; adapters not called ``default`` lie in folders of their names.

    Raises:
        ValueError: If files are damaged, or names, shapes or types of the tensors differ from the model's.
    """
    own = own_tensors(model)
    for adapter in model.peft_config:
        place = folder if adapter == "default" else os.path.join(folder, adapter)
        files, names = TensorFiles(place, ADAPTER), _adapter_names(model, layout, adapter)
        differing = sorted(names.keys() ^ files.files.keys())
        if differing:
            raise ValueError(
                f"the adapter in {place} and the model's adapter {adapter!r} do not agree on {listed(differing)}. Give "
                "the model the configuration that the adapter was trained with."
            )
        for key, name in names.items():
            shape = whole_shape(layout, name, own[name])
            if files.shape(key) != shape:
                raise ValueError(
                    f"{key} is {list(files.shape(key))} in {place}, but {list(shape)} in the model. Give the model the "
                    "configuration that the adapter was trained with."
                )
            fill(name, own[name], files.read(key, held_ranges(layout, name, own[name])), place)


def _adapter_names(model: Any, layout: ParameterLayout, adapter: str) -> dict[str, str]:
    """What an adapter's tensors are called in its file, and in the model."""
    from peft import get_peft_model_state_dict

    whole = {
        name: torch.empty(whole_shape(layout, name, tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in own_tensors(model).items()
    }
    known = {id(tensor): name for name, tensor in whole.items()}
    found = get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter)
    made = sorted(key for key, tensor in found.items() if id(tensor) not in known)
    if made:
        raise ValueError(
            f"adapter {adapter!r} computes {listed(made)} for its checkpoint, which cannot be done in parts. Train it "
            "without fsdp."
        )
    return {key: known[id(tensor)] for key, tensor in found.items()}
