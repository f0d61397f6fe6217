"""Replicas: gradients averaged over all ranks that hold tokens, with parameters whole (DDP) or sharded (FSDP2).

Ranks of a mesh whose losses are scaled by ``dp x cp`` get the gradient of the sum over all tokens, see
``hf_wlb.trainer``. Tensor-parallel ranks see the same tokens and are left out of the average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_wlb.parallel.agreement import verify_settings
from hf_wlb.parallel.collectives import process_count
from hf_wlb.parallel.mesh import ParallelMesh


def shard_parameters(
    model: PreTrainedModel | torch.nn.Module,
    mesh: ParallelMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    layer_classes: Sequence[str] = (),
) -> None:
    """Shards parameters over ``dp_shard x cp`` with FSDP2: layer by layer, then the rest. All ranks call it together.

    Moves the model to the mesh's device, part by part. Parameter names stay as they are.

    Args:
        model: Whole on every rank, or split over tensor-parallel ranks already; on the CPU or its device.
        mesh: This process's place.
        compute_dtype: What parameters are gathered and computed in; None for their own type. Gradients are summed in
            float32.
        reshard_after_forward: Frees gathered parameters after each layer's forward and gathers them again in backward.
        cpu_offload: Keeps parameters, gradients and the optimizer on the CPU.
        layer_classes: Names of classes to gather as one; by default what the model says not to split.

    Raises:
        ValueError: If no layer of these classes is there, or there is nobody to share with.
    """
    if mesh.shard_group is None:
        raise ValueError(
            "fsdp shards parameters over dp_shard_size x cp_size ranks, but both are 1. Set dp_shard_size, or leave "
            "dp_replicate_size out."
        )
    wanted = tuple(layer_classes) or tuple(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers of class {' or '.join(wanted) or '(none named)'} to shard one by "
            "one. Name the class of its decoder layers: fsdp_config={'transformer_layer_cls_to_wrap': [...]}."
        )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    options: dict[str, Any] = {
        "mesh": mesh.shard_mesh,
        "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model._is_fsdp_managed_module = True  # type: ignore[assignment]  # so that generate keeps ranks in step
    register_fsdp_forward_method(model, "generate")


def reduce_over_replicas(model: torch.nn.Module, now: bool) -> None:
    """Whether the next backward also sums gradients over ``dp_replicate``; earlier ones stay within a replica.

    Sharded gradients are summed over ``dp_shard x cp`` in every backward, so that no rank ever holds them all.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def wrap_data_parallel(
    model: torch.nn.Module, mesh: ParallelMesh, device: torch.device, **options: Any
) -> torch.nn.Module:
    """DDP over the ranks that hold tokens; the model itself where there is one such rank, or nothing is trained.

    Args:
        model: With whole parameters, or split over tensor-parallel ranks.
        mesh: This process's place.
        device: Where the model is.
        **options: Of ``DistributedDataParallel``.
    """
    if mesh.token_group is None or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    own = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(model, device_ids=own, process_group=mesh.token_group, **options)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 holds its parameters."""
    return isinstance(model, FSDPModule)


def verify_shapes(model: torch.nn.Module) -> None:
    """Compares the models of all ranks, but not their numbers. All ranks must call it together.

    Raises:
        RuntimeError: On every rank, if their models differ in names, shapes or types.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    shapes = "; ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
    verify_settings({"the names, shapes and types of the model's parameters (their digest)": digest})


def same_start(model: torch.nn.Module, device: torch.device) -> None:
    """Gives all ranks the parameters and buffers of rank 0, one at a time. All ranks must call it together.

    DDP does so by itself; parts of models that were initialised differently would make a model that nobody made.

    Args:
        model: Whole, of the same shapes on every rank, see ``verify_shapes``.
        device: Where the ranks can talk: parameters elsewhere go there and back.
    """
    if process_count() == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                continue
            there = tensor.detach().to(device)
            dist.broadcast(there, src=0)
            if there.data_ptr() != tensor.data_ptr() and dist.get_rank() > 0:
                tensor.copy_(there)
