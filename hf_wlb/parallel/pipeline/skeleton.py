"""The whole of a model without its weights, to cut a stage from, and where the weights are."""

from __future__ import annotations

import copy
import json
import os
import re
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import is_offline_mode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, cached_files, extract_commit_hash

from hf_wlb.parallel.checkpoint.reading import TensorFiles
from hf_wlb.parallel.checkpoint.weights import WEIGHTS, has_weights

_PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")


def skeleton(
    source: str | os.PathLike[str] | PreTrainedConfig,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model whose parameters are on the meta device: shapes and types, no memory.

    Buffers are real, and tied parameters are one. ``find_parts`` and ``cut_stage`` take it as it is, and
    ``materialise`` gives the parameters that are left their values. The caller's random state stays as it is.

    Args:
        source: A folder of ``save_pretrained`` or a name on the hub, for what ``from_pretrained`` would load, in
            evaluation mode; or a configuration, for what ``from_config`` would make of it. A configuration is copied.
        dtype: Of the parameters. By default the configuration's; if it has none, that of the weights in ``source``,
            and torch's default for a configuration. Modules that their class keeps in float32 are so in what
            ``from_pretrained`` would load.
        revision: Of a name on the hub.
        trust_remote_code: As for ``from_pretrained``.
        **options: Of ``from_config``, such as ``attn_implementation``.

    Raises:
        ValueError: If the weights are quantized, or no causal language model has such a configuration.
        OSError: If there is no configuration in ``source``; Transformers says why.

    >>> from transformers import LlamaConfig
    >>> model = skeleton(LlamaConfig(num_hidden_layers=2), dtype="bfloat16")
    >>> model.lm_head.weight.device.type, model.dtype, model.model.rotary_emb.inv_freq.device.type
    ('meta', torch.bfloat16, 'cpu')
    """
    if isinstance(source, PreTrainedConfig):
        folder, config = None, copy.deepcopy(source)
    elif isinstance(source, str | os.PathLike):
        folder = os.fspath(source)
        config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    else:
        raise ValueError(
            f"a skeleton is made of a folder, a name on the hub or a configuration, not of a {type(source).__name__}. "
            "Of a model, give its config."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder or type(config).__name__} is quantized (quantization_config), and quantized weights cannot be "
            "cut into pipeline stages. Take a checkpoint that is not, or save it dequantized."
        )
    if dtype == "auto":
        dtype = config.dtype or (torch.get_default_dtype() if folder is None else _type_of_weights(folder, revision))
    elif isinstance(dtype, str):
        dtype = _named_type(dtype)
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    if folder is not None:
        assert isinstance(dtype, torch.dtype)
        _keep_in_float32(model, dtype)
        _take_generation_config(model, folder, revision)
        model.eval()
    model.tie_weights()  # those that moved to the meta device are two
    return model


def weights_folder(source: str | os.PathLike[str], revision: str | None = None) -> str:
    """The folder that holds a model's safetensors files; of a name on the hub, where they are cached.

    Fetches them first if need be; with ``HF_HUB_OFFLINE=1``, the cache must have them. No communication between
    processes: those of one machine wait for each other by the cache's locks.

    Args:
        source: A folder, or a name on the hub.
        revision: Of a name on the hub.

    Raises:
        ValueError: If no safetensors files are there.
        OSError: If the hub does not have it; Transformers says why.
    """
    source = os.fspath(source)
    if os.path.isdir(source):
        if not has_weights(source):
            raise ValueError(_without_safetensors(source, [n for n in _PICKLED if os.path.isfile(f"{source}/{n}")]))
        return source
    index = cached_file(source, WEIGHTS.index, revision=revision, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        # the index's own commit, should the revision move on in between
        cached_files(source, names, revision=extract_commit_hash(index, None) or revision)
        return os.path.dirname(index)
    single = cached_file(source, WEIGHTS.files(1)[0], revision=revision, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise ValueError(_without_safetensors(source, []))
    return os.path.dirname(single)


def _without_safetensors(source: str, pickled: list[str]) -> str:
    said = f"{source} holds no weights in safetensors files ({WEIGHTS.index} or {WEIGHTS.files(1)[0]})"
    if pickled:
        said += f", only {pickled[0]}"
    elif is_offline_mode() and not os.path.isdir(source):
        said += ", or the cache lacks them, and HF_HUB_OFFLINE forbids to fetch them"
    return (
        f"{said}. A stage reads its own tensors only, which other files do not allow: load the model once with "
        "from_pretrained and write it with save_pretrained."
    )


def _named_type(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name!r} is no type of torch's. Allowed are 'auto', and names such as 'bfloat16'.")
    return found


def _type_of_weights(source: str, revision: str | None) -> torch.dtype:
    files = TensorFiles(weights_folder(source, revision), WEIGHTS)
    for name in sorted(files.files, key=lambda name: (files.files[name], name)):
        dtype = files.dtype(name)
        if dtype.is_floating_point:
            return dtype
    raise ValueError(f"{source} holds no floating-point weights. Say which type the model has: dtype='bfloat16'.")


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """As ``from_pretrained`` does it for modules that would lose too much in a short type, such as routers."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern = re.compile("|".join(name.replace("*", ".*") for name in plan))
    persistent = model.state_dict().keys()
    for name, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                full = f"{name}.{key}" if name else key
                if tensor is None or full not in persistent or not pattern.search(full):
                    continue
                wide = tensor.detach().float()
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                held[key] = torch.nn.Parameter(wide, tensor.requires_grad) if is_parameter else wide


def _take_generation_config(model: PreTrainedModel, source: str, revision: str | None) -> None:
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision or "main")
    except OSError:
        return  # there is none: the model has made one of its configuration
