"""The part of ``WLBTrainer`` that splits the model: over tensor-parallel ranks, and with FSDP2 over the others."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_wlb.compilation import compile_decoder_layers, no_whole_model_compilation
from hf_wlb.parallel import (
    ParallelMesh,
    ParallelSizes,
    ParameterLayout,
    TensorShard,
    WLBParallelismConfig,
    check_launcher,
    check_tensor_parallel,
    failing_together,
    is_sharded,
    reduce_over_replicas,
    same_start,
    shard_parameters,
    split_model,
    verify_gradients,
    verify_settings,
    verify_shapes,
    wrap_data_parallel,
)
from hf_wlb.trainer.stages import StagedModel
from hf_wlb.trainer.tokens import Vocabulary
from hf_wlb.trainer.training_loss import causal_lm_of
from hf_wlb.training_args import WLBTrainingArguments


def check_processes(args: TrainingArguments) -> None:
    """Refuses processes that would not know of each other and train the same thing side by side.

    Raises:
        ValueError: A launcher started several, on a machine without a GPU and without ``use_cpu``.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        raise ValueError(
            f"{started} processes were started, but there is no GPU for them, so each would train by itself. Set "
            "use_cpu=True (--use_cpu) to train on the CPU together."
        )


def agreed_sizes(args: WLBTrainingArguments) -> ParallelSizes:
    """The mesh's sizes, compared over all processes first: some might fit and others not. All must call it together.

    Raises:
        RuntimeError: On every rank, if their arguments differ.
        ValueError: On every rank, if the sizes do not multiply to the processes, or the launcher wants others.
    """
    check_processes(args)
    names = ("dp_replicate_size", "dp_shard_size", "pp_size", "pp_stage_layers", "cp_size", "tp_size")
    given = {name: getattr(args, name) for name in names}
    verify_settings({"context_length": args.context_length, **given, "fsdp": args.shard_parameters})
    sizes = args.parallel_sizes(args.world_size)
    check_launcher(sizes)
    if args.shard_parameters and sizes.dp_shard * sizes.cp == 1:
        raise ValueError(
            f"fsdp shards parameters over dp_shard_size x cp_size ranks, but both are 1 here ({sizes}). Set "
            "dp_shard_size, or leave fsdp out."
        )
    return sizes


_PLANNED_BY = (
    "gradient_accumulation_steps", "max_tokens_per_micro_batch", "max_document_tokens", "packer", "oversize_documents",
    "empty_documents", "outlier_thresholds", "outlier_tokens", "max_time_gap", "max_wait_steps", "max_waiting_contexts",
    "window_steps", "plan_pp_size", "shuffle_documents",
)  # fmt: skip
#: Arguments that need not be the same on all ranks.
_MAY_DIFFER = {
    "local_rank", "data_seed",  # the second: compared as what it comes to
    # Files, which a machine may have in a place of its own; of those that are read, what comes of them is compared.
    "output_dir", "resume_from_checkpoint", "workload_profile", "pp_stage_costs",
    # What a process tells, and whom.
    "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "report_to", "run_name", "project",
    "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "debug", "skip_memory_metrics",
    "hub_token", "hub_model_id", "hub_private_repo", "hub_revision",
    # How it reads documents, which are the same for any number of workers.
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    # What its device can do; kernels are compared where ranks share micro-batches.
    "attention_kernel", "peak_flops_per_second",
    "activation_checkpointing", "activation_checkpointing_kwargs",  # other names of gradient_checkpointing...
}  # fmt: skip


def verify_arguments(args: WLBTrainingArguments, mesh: ParallelMesh) -> None:
    """Compares all arguments that ranks must share, before anything is planned. All processes must call it together.

    Fields that a subclass of the arguments adds are its own business.

    Raises:
        RuntimeError: On every rank, if their arguments differ.
    """
    order = args.seed if args.data_seed is None else args.data_seed
    given = {name: getattr(args, name) for name in _PLANNED_BY}
    given["the seed of the documents' order (data_seed, or seed)"] = order
    known = {entry.name for entry in fields(WLBTrainingArguments)} - _MAY_DIFFER
    found: dict[str, object] = args.to_dict()  # type: ignore[no-untyped-call]
    others = {name: _told(value) for name, value in found.items() if name in known and name not in given}
    verify_settings({**given, **others}, place=mesh.place)


def _told(value: Any) -> Any:
    """An argument's value without what only one process knows it by: functions by name, other objects by type."""
    if isinstance(value, Mapping):
        return {name: _told(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_told(own) for own in value]
    if isinstance(value, functools.partial):
        return [_told(value.func), _told(value.args), _told(value.keywords)]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


class SplitModel(StagedModel):
    """``Trainer`` whose model may be in parts; ``WLBTrainer`` sets the attributes before Trainer's own.

    Attributes:
        mesh: This process's place.
        layout: Which part of every parameter is here.
    """

    mesh: ParallelMesh
    layout: ParameterLayout
    model: Any
    _parallelism: WLBParallelismConfig
    _whole_model = True  # until it is split
    _gradients_verified = False  # in the first step
    _vocabulary: Vocabulary

    @property
    def _splits(self) -> bool:
        """Whether a process holds less than all parameters."""
        return self.mesh.tp_size * self.mesh.pp_size > 1 or cast(WLBTrainingArguments, self.args).shard_parameters

    # ---- Accelerate ----

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return {**built, "parallelism_config": self._parallelism, "dynamo_plugin": no_whole_model_compilation()}

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate keeps the first mesh of a process for good; a second trainer may have another one."""
        super().create_accelerator_and_postprocess()
        self.accelerator.state.parallelism_config = self._parallelism
        self.accelerator.state.device_mesh = self.mesh.device_mesh

    def get_tp_size(self) -> int:
        """Ranks that see the same tokens: the stages of a pipeline do, too."""
        return self.mesh.tp_size * self.mesh.pp_size

    # ---- splitting ----

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        if self._splits and (self._whole_model or self._offloads):
            return  # whole, it may be too large for a device: each takes its part first
        super()._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        """Trainer's; a model that is made anew for training is split anew."""
        model = super().call_model_init(trial)
        if not self._whole_model:
            self._split(model)
        return model

    @property
    def _fsdp_options(self) -> Mapping[str, Any]:
        given = self.args.fsdp_config if self.args.fsdp else None
        return given if isinstance(given, dict) else {}

    @property
    def _offloads(self) -> bool:
        return _is_true(self._fsdp_options.get("cpu_offload", False))

    def _check_split(self, model: torch.nn.Module) -> None:
        """Refuses, before anything is split, what could not be trained in parts. Does not talk to other ranks."""
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "the model was split by from_pretrained (tp_plan or distributed_config). Load it whole, on the CPU, "
                "and set tp_size, dp_shard_size or fsdp in WLBTrainingArguments."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter of the model is to be trained: requires_grad is False for all of them.")
        if self._offloads and self.args.device.type == "cpu":
            raise ValueError("fsdp_config['cpu_offload'] is for accelerators; leave it out on the CPU.")
        if not self._splits:
            return
        if self.optimizer is not None:
            raise ValueError(
                "optimizers=... holds the parameters of the whole model, but this run splits them "
                f"({self.mesh.sizes}). Pass optimizer_cls_and_kwargs, or name it with optim."
            )
        if cast(WLBTrainingArguments, self.args).compute_dtype is torch.float16:
            raise ValueError("fp16 does not go together with pp_size, tp_size or fsdp; set bf16=True instead.")
        if self.mesh.pp_size > 1:
            self._check_stages(causal_lm_of(model))
        if self.mesh.tp_size > 1:
            if self.args.use_liger_kernel:
                raise ValueError(
                    "use_liger_kernel replaces modules that tp_size has split. Leave it out; fused_loss uses Liger "
                    "Kernel's loss by itself where it can."
                )
            check_tensor_parallel(model, self.mesh.tp_size)

    def _split(self, model: torch.nn.Module) -> None:
        """Keeps this process's part of the parameters, and compiles layers. All processes must call this together."""
        args, shards = cast(WLBTrainingArguments, self.args), dict[str, TensorShard]()
        self._vocabulary = Vocabulary(causal_lm_of(model))
        if self._layers_here is None:  # stages that were read one by one have nothing to compare
            verify_shapes(model)
            if self._splits:
                same_start(model, args.device)
        if self.mesh.pp_size > 1:  # each has worked it out for itself
            verify_settings({"which layers every stage has": self.stage_layout}, place=self.mesh.place)
        stage = self._cut(model) if self.mesh.pp_size > 1 else None
        if self.mesh.tp_size > 1:
            shards = split_model(cast(PreTrainedModel, model), self.mesh)
        with failing_together(place=self.mesh.place):
            compile_decoder_layers(
                cast(PreTrainedModel, model), args, layers=None if stage is None else len(stage.layers)
            )
        if args.shard_parameters:
            options = self._fsdp_options
            shard_parameters(
                model,
                self.mesh,
                compute_dtype=args.compute_dtype,
                reshard_after_forward=_is_true(options.get("reshard_after_forward", True)),
                cpu_offload=self._offloads,
                layer_classes=options.get("transformer_layer_cls_to_wrap") or (),
            )
        copies = {} if stage is None else stage.copies
        self.layout, self._whole_model = ParameterLayout(self.mesh, shards, copies, self._names), False
        if stage is not None:
            self._join_ends()
        if self._splits:
            self.is_distributed_loading_by_transformers = True  # Accelerate must not wrap it again
            if self.place_model_on_device:
                self._move_model_to_device(model, args.device)

    # ---- gradients ----

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        """DDP among the ranks that hold tokens, tensor-parallel ones left out.

        Accelerate's own is over all ranks, and none at all where an evaluation came before training.
        """
        wrapped: torch.nn.Module = super()._wrap_model(model, training, dataloader)
        if self.mesh.pp_size > 1:  # gradients are summed once all micro-batches are through
            return wrapped
        if not training or wrapped is not self.model or is_sharded(wrapped) or self.mesh.token_group is None:
            return wrapped
        if not self._splits:  # Trainer does it for those that are split
            self.accelerator.prepare_model(wrapped, evaluation_mode=True)
        handler = self.accelerator.ddp_handler
        options = {} if handler is None else handler.to_kwargs()
        return wrap_data_parallel(wrapped, self.mesh, self.args.device, **options)

    def _sync_replicated_trainable_parameters(self, model: torch.nn.Module) -> None:
        """Not Trainer's: our parameters start alike, and every gradient is summed over the mesh."""

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        reduce_over_replicas(self.model, now=False)
        try:
            yield
        finally:
            reduce_over_replicas(self.model, now=True)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        if not self._splits:
            return cast(torch.Tensor, super()._clip_grad_norm(model))  # type: ignore[no-untyped-call]
        norm = self._split_norm()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        factor = torch.clamp(self.args.max_grad_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if not self._splits:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return self._split_norm() if grad_norm is None else grad_norm

    def _split_norm(self) -> torch.Tensor:
        """Of the whole gradient, every element once."""
        model: torch.nn.Module = self.accelerator.unwrap_model(self.model)  # names without what wraps it
        if self.mesh.tp_size > 1 and not self._gradients_verified:
            verify_gradients(model, self.mesh, self.layout.tensor_shards)
            self._gradients_verified = True
        return self.layout.total_norm((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"
