"""Models of four layers as pipeline stages, with optimizer state, for checkpoints."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from hf_wlb.parallel import ParallelMesh, ParallelSizes
from hf_wlb.parallel.checkpoint import all_names, load_optimizer, load_weights
from hf_wlb.parallel.data_parallel import shard_parameters
from hf_wlb.parallel.parameter_layout import ParameterLayout
from hf_wlb.parallel.pipeline import cut_stage, find_parts
from hf_wlb.parallel.tensor_parallel import split_model
from tests.numerics.test_families import ACCEPTED, build
from tests.support.checkpoints import optimizer_of, some_steps
from tests.support.tiny_llama import tiny_llama

LAYERS = 4
#: First layers of the stages, by their number, and the end: not even, where they can be.
BOUNDS = {1: (0, 4), 2: (0, 3, 4), 4: (0, 1, 2, 3, 4)}


def model_of(kind: str, seed: int, layers: int = LAYERS, **settings: Any) -> Any:
    """Float32, with other weights for every seed."""
    if kind in ("untied", "tied"):
        config = tiny_llama(tie_word_embeddings=kind == "tied").config
        for name, value in {"num_hidden_layers": layers, **settings}.items():
            setattr(config, name, value)
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
    family = ACCEPTED[kind]
    model = build(family._replace(settings={**family.settings, "num_hidden_layers": layers})).float()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def split(model: Any, sizes: ParallelSizes) -> ParameterLayout:
    """As WLBTrainer does it: matrices, then layers, then shards."""
    mesh = ParallelMesh.of(sizes, "cpu")
    parts, names = find_parts(model), all_names(model)
    shards = split_model(model, mesh) if sizes.tp > 1 else {}
    stage = cut_stage(model, parts, range(*BOUNDS[sizes.pp][mesh.pp_rank : mesh.pp_rank + 2]))
    shards |= {copy: shards[owner] for copy, owner in stage.copies.items() if owner in shards}
    if sizes.dp_shard * sizes.cp > 1:
        shard_parameters(model, mesh)
    return ParameterLayout(mesh, shards, stage.copies, names)


def trained(kind: str, sizes: ParallelSizes) -> tuple[Any, Any, ParameterLayout]:
    model = model_of(kind, seed=0)
    layout = split(model, sizes)
    optimizer = optimizer_of(model)
    some_steps(model, optimizer)
    return model, optimizer, layout


def untrained(kind: str, sizes: ParallelSizes, **settings: Any) -> tuple[Any, Any, ParameterLayout]:
    model = model_of(kind, seed=1, **settings)
    layout = split(model, sizes)
    return model, optimizer_of(model), layout


def load(model: Any, optimizer: Any, layout: ParameterLayout, folder: Path) -> None:
    load_weights(model, layout, str(folder))
    load_optimizer(optimizer, model, layout, str(folder))
