"""Splitting a Transformers model over tensor-parallel ranks, in place."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from hf_wlb.parallel.mesh import ParallelMesh
from hf_wlb.parallel.parameter_layout import TensorShard
from hf_wlb.parallel.tensor_parallel.communication import TensorRanks
from hf_wlb.parallel.tensor_parallel.forwards import SplitState, install, share_input
from hf_wlb.parallel.tensor_parallel.heads import rope_features
from hf_wlb.parallel.tensor_parallel.plan import TensorPlan, read_plan
from hf_wlb.parallel.tensor_parallel.styles import LOCAL_COLUMNS, STYLES

logger = logging.getLogger(__name__)


def check_tensor_parallel(model: torch.nn.Module, tp_size: int) -> None:
    """Refuses a model that cannot be split over so many ranks. Does not talk to other ranks.

    Args:
        model: Whole.
        tp_size: Ranks that share every matrix.

    Raises:
        ValueError: Names the module, what it has, and what would do.
    """
    _plan_of(model, tp_size, 0)


def split_model(model: PreTrainedModel, mesh: ParallelMesh) -> dict[str, TensorShard]:
    """Leaves every rank its slices of the parameters, as the model's own plan says, and makes the modules work so.

    Does not talk to other ranks, which must start from the same parameters. Parameters stay the objects that they are,
    with fewer elements; parameters, inputs and outputs that the plan does not name stay whole and the same on all
    ranks, the model's logits among them.

    Args:
        model: Whole; on any device, "meta" included.
        mesh: This process's place.

    Returns:
        This rank's slice of every parameter that was split, by its name in ``model.named_parameters()``.

    Raises:
        ValueError: As ``check_tensor_parallel``.
    """
    if mesh.tp_group is None:
        return {}
    plan = _plan_of(model, mesh.tp_size, mesh.tp_rank)
    shards = _cut_parameters(model, plan)
    _install(model, plan, TensorRanks.of(mesh.tp_group))
    for name, heads in plan.heads.items():
        attention = model.get_submodule(name)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = heads.groups  # type: ignore[assignment]
    _tell(model, shards, mesh)
    return shards


def _plan_of(model: torch.nn.Module, tp_size: int, tp_rank: int) -> TensorPlan:
    kind = type(model).__name__
    adapted = next((n for n, m in model.named_modules() if type(m).__module__.split(".")[0] == "peft"), None)
    if adapted is not None or getattr(model, "peft_config", None):
        raise ValueError(
            f"tp_size={tp_size} cannot split adapters of PEFT ({adapted or 'the model'!r} of {kind}). Train them with "
            "cp_size, dp_replicate_size or dp_shard_size, or merge them first: merge_and_unload()."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"tp_size={tp_size} needs a model of Transformers, whose tp_plan says what to split; {kind} is none."
        )
    quantized = next((n for n, p in model.named_parameters() if not p.is_floating_point()), None)
    if getattr(model, "is_quantized", False) or quantized is not None:
        raise ValueError(
            f"tp_size={tp_size} cannot split the quantized weights of {kind}. Load it without quantization_config, or "
            "set tp_size=1."
        )
    if not model.tp_plan:
        raise ValueError(
            f"{kind} has no tensor-parallel plan (model.tp_plan is empty), so tp_size={tp_size} does not know what to "
            "split. Set tp_size=1, or give it one: model.tp_plan = {...}."
        )
    return read_plan(model, tp_size, tp_rank)


def _cut_parameters(model: PreTrainedModel, plan: TensorPlan) -> dict[str, TensorShard]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shards: dict[str, TensorShard] = {}
    for planned in plan.modules:
        for own, shard in planned.shards.items():
            parameter = planned.module._parameters[own]
            assert parameter is not None
            name = names[id(parameter)]
            if name not in shards:  # tied parameters come twice
                parameter.data = shard.take(parameter.data)
                shards[name] = shard
    return shards


def _install(model: PreTrainedModel, plan: TensorPlan, ranks: TensorRanks) -> None:
    for planned in plan.modules:
        rule = STYLES[planned.style] if planned.style else None
        if rule is None or rule.forward is None:
            continue
        block = model.get_submodule(planned.parent)
        state = SplitState(
            ranks,
            share_input(block) if planned.style in LOCAL_COLUMNS else None,
            copies=tuple((own, s.index, s.count) for own, s in planned.shards.items() if s.count < ranks.size),
            rows=planned.shards["weight"].ranges()[0] if planned.style == "embedding_rowwise" else (0, 0),
            rope_features=rope_features(model, planned.name) if planned.style == "mla_kv_a_proj" else 0,
        )
        install(planned.module, rule.forward, state)
        if isinstance(planned.module, torch.nn.Embedding) and "weight" in planned.shards:
            _keep_padding(planned.module, planned.shards["weight"])


def _keep_padding(embedding: torch.nn.Embedding, shard: TensorShard) -> None:
    """The row without a gradient, where it is now."""
    ((first, last),) = shard.ranges()
    row = embedding.padding_idx
    embedding.padding_idx = row - first if row is not None and first <= row < last else None


def _tell(model: PreTrainedModel, shards: dict[str, TensorShard], mesh: ParallelMesh) -> None:
    parameters = dict(model.named_parameters())
    split = sum(parameters[name].numel() for name in shards) * mesh.tp_size
    share = split / (split + sum(p.numel() for name, p in parameters.items() if name not in shards))
    if share < 0.5 and mesh.tp_rank == mesh.dp_rank == mesh.cp_rank == 0:
        logger.warning(
            "tp_size=%d splits %.0f%% of the parameters of %s: its tensor-parallel plan leaves the others whole on "
            "every rank, which computes them all. cp_size or dp_shard_size would use these ranks better.",
            mesh.tp_size,
            100 * share,
            type(model).__name__,
        )
