"""Which parameters a model's own tensor-parallel plan splits, how, and whether that works out.

A plan maps names with ``*`` for layer numbers to styles: ``{"model.layers.*.self_attn.q_proj": "colwise", ...}``. A
style named for a module is its parameters' as well, unless these have their own. What no entry names stays whole on
every rank: slower, not wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hf_wlb.parallel.parameter_layout import TensorShard
from hf_wlb.parallel.pipeline.stage import StandIn
from hf_wlb.parallel.tensor_parallel.heads import AttentionHeads, divisors, rope_features
from hf_wlb.parallel.tensor_parallel.styles import LOCAL_COLUMNS, STYLES, StyleRule


@dataclass(frozen=True)
class PlannedModule:
    """A module that the plan names, or whose parameters it names.

    Attributes:
        name: In the model.
        module: Itself.
        style: Of its forward; None where only its parameters are named.
        shards: This rank's slices of its own parameters, by their names in the module.
    """

    name: str
    module: torch.nn.Module
    style: str | None = None
    shards: Mapping[str, TensorShard] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        """Name of the module that it is in."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class TensorPlan:
    """What is to be done to a model.

    Attributes:
        modules: In the model's order.
        heads: Attention modules whose heads are shared out, by name.
    """

    modules: list[PlannedModule]
    heads: Mapping[str, AttentionHeads]


def read_plan(model: PreTrainedModel, tp_size: int, tp_rank: int = 0) -> TensorPlan:
    """The slices of one rank.

    Args:
        model: Whole; on any device, "meta" included.
        tp_size: Ranks that share every matrix.
        tp_rank: This one.

    Raises:
        ValueError: If it cannot be done: names the module, and says what would do.
    """
    reader = _Reader(model, tp_size, tp_rank)
    plan = TensorPlan(list(reader.modules()), reader.heads)
    _check_ties(model, plan.modules)
    return plan


class _Reader:
    """Goes through the model once."""

    def __init__(self, model: PreTrainedModel, tp_size: int, tp_rank: int) -> None:
        self.model, self.size, self.rank = model, tp_size, tp_rank
        self.kind = type(model).__name__
        self.plan = _with_tied_embeddings(model)
        self.heads: dict[str, AttentionHeads] = {}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self.vocabulary = {id(p) for end in ends if end is not None for p in end.parameters()}

    def style(self, name: str) -> str | None:
        """What the plan says about a module or parameter."""
        style = self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and style not in STYLES:
            raise ValueError(
                f"the tensor-parallel plan of {self.kind} makes {name} {style!r}, which is not supported; supported "
                f"are {', '.join(sorted(STYLES))}. Set tp_size=1 for this model."
            )
        return style

    def modules(self) -> Iterator[PlannedModule]:
        """Every module that the plan concerns."""
        for name, module in self.model.named_modules():
            if isinstance(module, StandIn):  # another pipeline stage's
                continue
            style = self.style(name)
            children = [child for child, _ in module.named_children()]
            columns = [child for child in children if self.style(_join(name, child)) in LOCAL_COLUMNS]
            heads = AttentionHeads.of(name, module, columns, self.model, self.size)
            if heads is not None:
                self.heads[name] = heads
            if style is not None:
                self.check_module(name, module, style)
            shards = dict(self.shards(name, module, style))
            if style is not None or shards:
                yield PlannedModule(name, module, style, shards)

    def check_module(self, name: str, module: torch.nn.Module, style: str) -> None:
        """Refuses a module that its style is not for."""
        if not STYLES[style].fits(module):
            raise ValueError(
                f"the tensor-parallel plan of {self.kind} makes {name} {style!r}, which cannot be done to a "
                f"{type(module).__name__}. Set tp_size=1 for this model."
            )
        if style == "mla_kv_a_proj":
            rope_features(self.model, name)
        for own, parameter in module.named_parameters() if style == "moe_tp_experts" else ():
            own_style = self.style(_join(name, own))
            if own_style is None or STYLES[own_style].dim is None or parameter.dim() != 3:
                raise ValueError(
                    f"the tensor-parallel plan of {self.kind} does not say how to split {name}.{own} "
                    f"{tuple(parameter.shape)}, and what ranks add up must not be whole on each. Set tp_size=1 for "
                    "this model."
                )

    def shards(self, name: str, module: torch.nn.Module, style: str | None) -> Iterator[tuple[str, TensorShard]]:
        """Slices of a module's own parameters."""
        heads = self.heads.get(name)
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            own_style = self.style(_join(name, own))
            if own_style is None:  # a plan may leave out the sinks of heads that it shares out
                own_style = "colwise" if heads is not None and heads.is_per_head(own, parameter) else style
            rule = STYLES[own_style] if own_style else StyleRule()
            dim = rule.dim_of(own, parameter)
            if dim is not None:
                yield own, self.shard(_join(name, own), parameter, dim, rule.blocks)

    def shard(self, name: str, parameter: torch.Tensor, dim: int, blocks: int) -> TensorShard:
        """This rank's slice."""
        module = name.rpartition(".")[0]
        parent, _, child = module.rpartition(".")
        heads = self.heads.get(parent)
        count = heads.key_value_slices if heads is not None and child in heads.key_value_modules else self.size
        size = parameter.shape[dim]
        if size % blocks or (size // blocks) % count:
            raise ValueError(self.does_not_divide(name, parameter, dim, blocks))
        return TensorShard(dim, (size // blocks,) * blocks, self.rank * count // self.size, count)

    def does_not_divide(self, name: str, parameter: torch.Tensor, dim: int, blocks: int) -> str:
        """The sentence for whoever chose ``tp_size``."""
        size = parameter.shape[dim] // blocks
        if id(parameter) in self.vocabulary:
            return (
                f"tp_size={self.size} does not divide the vocabulary of {size} rows ({name} of {self.kind}). Set "
                f"tp_size to {divisors(size)}, or pad the vocabulary before training: "
                f"model.resize_token_embeddings(pad_to_multiple_of={self.size})."
            )
        packed = "" if blocks == 1 else f" of each of the {blocks} matrices packed"
        side = "input" if dim == parameter.dim() - 1 and parameter.dim() > 1 else "output"
        return (
            f"tp_size={self.size} does not divide the {size} {side} features{packed} in {name} of {self.kind}. Set "
            f"tp_size to {divisors(size)}."
        )


def _with_tied_embeddings(model: PreTrainedModel) -> dict[str, str]:
    """The plan, in which a tied embedding and head are split alike even if it names only one of them."""
    plan = dict(model.tp_plan or {})
    ends = {id(end): end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    # On a pipeline stage only one of the two is left.
    cut = any(isinstance(end, StandIn) for end in ends.values())
    tied = cut and bool(model.config.get_text_config().tie_word_embeddings)
    if not tied and len({id(getattr(end, "weight", end)) for end in ends.values()}) == len(ends):
        return plan
    names = {id(module): name for name, module in model.named_modules() if id(module) in ends}
    first, last = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
    if plan.get(last) in ("colwise_gather_output", "colwise_rep"):
        plan.setdefault(first, "embedding_rowwise")
    if plan.get(first) == "embedding_rowwise":
        plan.setdefault(last, "colwise_gather_output")
    return plan


def _check_ties(model: PreTrainedModel, modules: list[PlannedModule]) -> None:
    """A parameter with two names must be split the same way under both."""
    found: dict[int, tuple[str, TensorShard | None]] = {}
    shards = {_join(planned.name, own): shard for planned in modules for own, shard in planned.shards.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shard = shards.get(name)
        other, before = found.setdefault(id(parameter), (name, shard))
        if before != shard:
            raise ValueError(
                f"{other} and {name} of {type(model).__name__} are one parameter (tied), but its tensor-parallel plan "
                "splits them in different ways. Untie them, or set tp_size=1."
            )


def _join(module: str, own: str) -> str:
    return f"{module}.{own}" if module else own
