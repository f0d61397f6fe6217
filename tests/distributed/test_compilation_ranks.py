"""Compiled decoder layers on two context-parallel ranks, under DDP and FSDP2: as uncompiled, and compiled once."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_wlb.attention import AttentionContext
from hf_wlb.compilation import compile_decoder_layers
from hf_wlb.parallel import ProcessGroupExchange
from tests.numerics.test_families import ACCEPTED, build
from tests.support.compiled import compile_arguments, graphs, inputs_of, loss_and_gradients_of, micro_batches
from tests.support.oracle import gradients_of, relative_error, worst_error
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import COMPILED

MOST_RECOMPILATIONS = 3


def mean_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def compare(model: Any, plain: Any, gradients: Callable[[Any], Any], count: int) -> tuple[float, int, int]:
    """The worst error over micro-batches, graphs compiled for the first of them, and for the others."""
    context = AttentionContext(exchange=ProcessGroupExchange(), kv_head_groups=2)
    worst, before, first = 0.0, graphs(), 0
    for rows in micro_batches(count):
        inputs = inputs_of(rows, context)
        loss, found = loss_and_gradients_of(model, inputs, gradients)
        first = first or graphs() - before
        expected = loss_and_gradients_of(plain, inputs, mean_gradients)
        worst = max(worst, relative_error(loss, expected[0]), worst_error(found, expected[1]))
    return worst, first, graphs() - before - first


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_two(rank: int, world_size: int, folder: str) -> dict[str, tuple[float, int, int]]:
    found = {}
    model = tiny_llama().train()
    plain = copy.deepcopy(model)
    compile_decoder_layers(model, compile_arguments(folder))
    model.activation_checkpointing_enable()
    found["DDP and checkpointing"] = compare(DistributedDataParallel(model), plain, gradients_of, 50)

    model = build(ACCEPTED["smollm3"]).float().train()  # rotary positions in one layer only
    plain = copy.deepcopy(model)
    compile_decoder_layers(model, compile_arguments(folder, "eager"))
    found["FSDP2"] = compare(sharded(model), plain, whole_gradients, 5)
    return found


def test_two_context_parallel_ranks(tmp_path) -> None:
    for found in run_distributed(on_two, 2, str(tmp_path), timeout_s=400):
        assert len(found) == 2
        for name, (error, compiled, recompiled) in found.items():
            assert error <= COMPILED, name
            assert compiled >= 4 and recompiled <= MOST_RECOMPILATIONS, name
