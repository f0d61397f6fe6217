"""The part of ``WLBTrainer`` that gives every process of a pipeline its stage.

Of a model that is there, or of one that nobody needs to hold as a whole: then each process reads its own part.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from hf_wlb.parallel import ParallelMesh, ParameterLayout
from hf_wlb.parallel.checkpoint import all_names
from hf_wlb.parallel.pipeline import (
    ModelParts,
    PipelineStage,
    StandIn,
    TiedEnds,
    check_layers,
    check_pipeline,
    cut_stage,
    find_parts,
    materialise,
    skeleton,
)
from hf_wlb.staging import StageCosts, StageLayout, stage_costs
from hf_wlb.training_args import WLBTrainingArguments

ModelSource = str | os.PathLike[str] | PreTrainedConfig


@dataclass(frozen=True)
class OpenedModel:
    """A model of which this process has read its part only.

    Attributes:
        model: Whole where there is no pipeline, else a stage.
        layout: Which layers which stage has.
        parts: Of the whole model.
        stage: None without a pipeline.
        names: Of the whole model's tensors, see ``all_names``.
    """

    model: PreTrainedModel
    layout: StageLayout | None = None
    parts: ModelParts | None = None
    stage: PipelineStage | None = None
    names: frozenset[str] = frozenset()


def open_model(
    source: ModelSource, args: WLBTrainingArguments, mesh: ParallelMesh, options: Mapping[str, Any]
) -> OpenedModel:
    """Reads this process's stage of a checkpoint, or initialises it; does not talk to other ranks.

    Args:
        source: A folder or a name on the hub, as for ``from_pretrained``; or a configuration: then weights are random,
            by ``args.seed`` and parameter names alone, so that they are the same under every split.
        args: The run's.
        mesh: This process's place.
        options: Of ``skeleton``, such as ``dtype``.

    Raises:
        ValueError: If it cannot be split into stages, or has no weights that can be read in parts.
    """
    if mesh.pp_size > 1:
        check_schedule(mesh.pp_size)
    model, revision = skeleton(source, **options), options.get("revision")
    folder = None if isinstance(source, PreTrainedConfig) else source
    if mesh.pp_size == 1:
        materialise(model, ParameterLayout(mesh), folder, seed=args.seed, revision=revision)
        return OpenedModel(model)
    layout = stage_layout(model.config, args)
    parts = find_parts(model)
    names = frozenset(all_names(model))
    stage = cut_stage(model, parts, layout.range_of(mesh.pp_rank))
    materialise(model, ParameterLayout(mesh, copies=stage.copies), folder, seed=args.seed, revision=revision)
    check_layers(model, parts.layers, stage.layers)
    return OpenedModel(model, layout, parts, stage, names)


def check_schedule(pp_size: int) -> None:
    """Refuses a pipeline where DeepSpeed, whose schedule it runs by, is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            f'pp_size={pp_size} needs DeepSpeed, for its pipeline schedule: pip install "hf_wlb[pipeline]", or in a '
            'checkout pip install -e ".[pipeline]". Or set pp_size=1.'
        )


def stage_layout(config: Any, args: WLBTrainingArguments) -> StageLayout:
    """Which layers every pipeline stage has: as the arguments say, or so that all cost the same, measured or counted.

    Raises:
        ValueError: If there are fewer layers than stages, or the arguments name something else than the model has.
    """
    layers = config.get_text_config().num_hidden_layers
    if args.pp_stage_layers is not None:
        return StageLayout.from_sizes(args.pp_stage_layers, layers, args.pp_size)
    if args.pp_stage_costs is not None:
        measured = StageCosts.load(args.pp_stage_costs)
        if len(measured.layers) != layers:
            raise ValueError(
                f"pp_stage_costs={args.pp_stage_costs!r} holds costs of {len(measured.layers)} layers, but the model "
                f"has {layers}. Measure this model: hf-wlb stages --measure --json FILE."
            )
        return measured.layout(args.pp_size)
    assert args.context_length is not None
    hardware = args.workload_hardware or ("cpu" if args.device.type == "cpu" else "h100")
    try:
        costs = stage_costs(
            config,
            context_length=args.context_length,
            hardware=hardware,
            tp_size=args.tp_size,
            gradient_checkpointing=bool(args.gradient_checkpointing),
        )
    except ValueError as error:
        raise ValueError(f"{error} Or say how many layers every stage has: pp_stage_layers.") from error
    return costs.layout(args.pp_size)


class StagedModel(Trainer):
    """``Trainer`` whose model may be one stage of a pipeline; ``WLBTrainer`` sets the mesh before Trainer's own.

    Attributes:
        stage: With a pipeline, which layers are here.
        stage_layout: And which are elsewhere.
    """

    mesh: ParallelMesh
    stage: PipelineStage
    stage_layout: StageLayout
    _parts: ModelParts | None = None
    _names: frozenset[str] = frozenset()  # of the whole model's tensors
    _opened: OpenedModel | None = None
    _tied_ends: TiedEnds | None = None
    _reduces_gradients: bool

    def _take_opened(self, opened: OpenedModel) -> None:
        self._opened = opened
        if opened.layout is not None:
            self.stage_layout, self._parts, self._names = opened.layout, opened.parts, opened.names

    @property
    def _layers_here(self) -> int | None:
        """How many of the model's layers are, before it is split; None for all of them."""
        return None if self._opened is None or self._opened.stage is None else len(self._opened.stage.layers)

    @property
    def _has_head(self) -> bool:
        """Whether the model's head is here, before it is split."""
        return self._layers_here is None or self.mesh.is_last_stage

    def _check_uncut(self, model: PreTrainedModel) -> None:
        if self._layers_here is None and any(isinstance(module, StandIn) for module in model.modules()):
            raise ValueError(
                f"this {type(model).__name__} is one stage of a pipeline: an earlier WLBTrainer has cut it. Load the "
                "model anew for another one."
            )

    def _check_stages(self, model: PreTrainedModel) -> None:
        """Refuses, before anything is split, what cannot be. Does not talk to other ranks."""
        check_schedule(self.mesh.pp_size)
        if model is not self.model:
            raise ValueError(
                f"pp_size={self.mesh.pp_size} cannot train adapters of PEFT. Set pp_size=1, or merge them first: "
                "merge_and_unload()."
            )
        if self._opened is None:
            self.stage_layout = stage_layout(model.config, cast(WLBTrainingArguments, self.args))
            ranges = [self.stage_layout.range_of(stage) for stage in range(self.mesh.pp_size)]
            self._parts = check_pipeline(model, ranges)
            self._names = frozenset(all_names(model))

    def _cut(self, model: torch.nn.Module) -> PipelineStage:
        """Leaves this process its stage."""
        assert self._parts is not None
        opened = self._opened
        if opened is not None and opened.stage is not None:
            self.stage = opened.stage
        else:
            layers = self.stage_layout.range_of(self.mesh.pp_rank)
            self.stage = cut_stage(cast(PreTrainedModel, model), self._parts, layers)
        return self.stage

    def _join_ends(self) -> None:
        """Once parameters are what the optimizer will know. All processes must call this together."""
        assert self._parts is not None
        self.stage.guard()
        self._reduces_gradients = not cast(WLBTrainingArguments, self.args).shard_parameters
        if self._parts.tied:
            self._tied_ends = TiedEnds(self.mesh, self.stage.model, dict(self._parts.tied))
