"""``TrainingArguments`` with what the step planner and context parallelism need to know."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from transformers import TrainingArguments

from hf_wlb.argument_names import named_as_arguments
from hf_wlb.attention.kernels import KERNELS
from hf_wlb.loss import FUSED_LOSSES
from hf_wlb.packing import PACKER_NAMES, PackingConfig
from hf_wlb.parallel import ParallelSizes
from hf_wlb.sharding import SHARDING_STRATEGIES, ShardingConfig
from hf_wlb.staging import StageCosts, StageLayout
from hf_wlb.workload import HARDWARE_PRESETS, AnalyticWorkload, ProfiledWorkload, WorkloadModel, load_workload

logger = logging.getLogger(__name__)

#: Whole ways of training: the packers that make each of them, its own first, and its cp_strategy.
_SYSTEMS: dict[str, tuple[tuple[str, ...], str]] = {
    "wlb": (("steady", "wlb"), "adaptive"),
    "plain-4d": (("next-fit",), "per_sequence"),
    "fixed-4d": (("greedy",), "per_document"),
}
#: What only some packers look at.
_OPTIONS_OF_PACKERS = {
    "max_tokens_per_micro_batch": ("steady", "wlb"),
    "outlier_thresholds": ("wlb",),
    **dict.fromkeys(("outlier_tokens", "max_time_gap", "max_wait_steps", "max_waiting_contexts"), ("steady",)),
    "window_steps": ("greedy",),
}
#: What fsdp_config may set.
_FSDP_OPTIONS = ("reshard_after_forward", "cpu_offload", "transformer_layer_cls_to_wrap")
#: What it may say besides, because that is what happens anyway.
_FSDP_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "version": (2, "2"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "state_dict_type": ("FULL_STATE_DICT",),
    "min_num_params": (0,),
    "activation_checkpointing": (False, "false"),
    "cpu_ram_efficient_loading": (False, "false"),
    "use_orig_params": (True, "true"),
    "sync_module_states": (True, "true"),
    "forward_prefetch": (False, "false"),
    "limit_all_gathers": (True, "true"),
    "xla": (False,),
    "xla_fsdp_v2": (False,),
    "xla_fsdp_grad_ckpt": (False,),
}
#: Options of Trainer that would train something else than they say, and what to do.
_UNSUPPORTED = {
    "deepspeed": "to share out parameters set fsdp=True.",
    "enable_jit_checkpoint": "each process would save by a clock of its own, in the middle of a step. Use save_steps.",
    "neftune_noise_alpha": "a document's noise would shrink with those it is packed with. Leave it unset.",
    "parallelism_config": "Accelerate would shard micro-batches once more and lose which document is which. "
    "Set dp_replicate_size, dp_shard_size, pp_size, cp_size and tp_size instead.",
}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class WLBTrainingArguments(TrainingArguments):
    """Arguments of ``WLBTrainer``: those of ``Trainer`` and the settings of ``PackingConfig`` and ``ShardingConfig``.

    ``gradient_accumulation_steps`` is the number of micro-batches of one optimizer step on one replica. A device gets
    one packed micro-batch at a time, so ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are 1.
    Lengths are in tokens.

    With ``cp_size`` above 1 so many processes share every micro-batch, whose ``context_length`` and S_max are of all of
    them together: a process holds about ``1 / cp_size`` of it. With ``tp_size`` above 1 so many processes share every
    matrix, and with ``pp_size`` above 1 the layers are shared out over so many stages (pipeline parallelism), which a
    step's ``gradient_accumulation_steps`` micro-batches go through one behind the other: give it several times as many.
    The number of replicas is that of processes over ``pp_size * cp_size * tp_size``; with ``fsdp`` (or
    ``dp_shard_size``) replicas and context-parallel ranks share out the parameters, too.

    ``system`` names a whole way of training, to compare with what the paper compares with; it decides what is not given
    otherwise. ``wlb``, as without it: packer ``steady`` and ``cp_strategy="adaptive"``. ``plain-4d``: documents are
    packed up to ``context_length`` as they come (packer ``next-fit``), and micro-batches cut ``per_sequence``.
    ``fixed-4d``: the micro-batches of one global batch are balanced, none above ``context_length`` (packer ``greedy``),
    and cut ``per_document``. The paper's Fixed-4D has the better of the two static strategies, so try
    ``cp_strategy="per_sequence"`` besides. For all three to train the same documents set
    ``max_document_tokens=context_length``: longer ones are split, and only ``wlb`` has room for them.

    Raises:
        ValueError: ``context_length`` is missing, or an option does not go together with planned micro-batches.
    """

    per_device_train_batch_size: int = _option(1, "Packed micro-batches per device and forward pass: always 1.")
    per_device_eval_batch_size: int = _option(1, "Packed micro-batches per device in evaluation: always 1.")
    logging_nan_inf_filter: bool = _option(
        False, "Whether logs leave losses that are not finite out; on_nonfinite_loss says what happens to such steps."
    )
    context_length: int | None = _option(None, "Tokens of a micro-batch on average. Required: it is never guessed.")
    system: str | None = _option(
        None, f"A whole way of training, for comparison: {', '.join(_SYSTEMS)}; sets packer and cp_strategy."
    )
    packer: str | None = _option(
        None, f"How documents are packed: {', '.join(PACKER_NAMES)}; default: steady, or as system says."
    )
    max_tokens_per_micro_batch: int | None = _option(None, "S_max, what fits in memory; default 1.25 x context_length.")
    max_document_tokens: int | None = _option(None, "Longest document left whole; default S_max.")
    oversize_documents: str = _option("split", "What happens to longer ones: split, truncate (both counted) or error.")
    empty_documents: str = _option("error", "What happens to documents without tokens: error, or skip (counted).")
    outlier_thresholds: list[int] | None = field(
        default=None, metadata={"help": "Packer wlb: lengths where the outlier queue's levels begin."}
    )
    outlier_tokens: int | None = _option(None, "Packer steady: documents from this length on may have to wait.")
    max_time_gap: float = _option(0.03, "Packer steady: how much longer than perfectly balanced a step may become.")
    max_wait_steps: int = _option(
        20, "Packer steady: steps after which a document goes first; what then fits into no step waits on."
    )
    max_waiting_contexts: float | None = _option(None, "Packer steady: context lengths' worth of tokens that may wait.")
    window_steps: int = _option(1, "Packer greedy: global batches packed together.")
    shuffle_documents: bool = _option(True, "Another random order of documents every epoch.")
    plan_pp_size: int = _option(
        1, "Plan as for a pipeline of so many stages: to rehearse on a small machine what a cluster would do."
    )
    workload_profile: str | None = _option(None, "JSON file with measured costs, or with a saved workload model.")
    workload_crossover: float | None = _option(None, "Length at which attention costs as much as all linear work.")
    workload_hardware: str | None = _option(
        None, f"Figures to compute costs from the model's shape: {', '.join(HARDWARE_PRESETS)}. Default: by device."
    )
    dp_replicate_size: int | None = _option(
        None, "Data parallelism: copies of the parameters; default: as many as the other sizes leave."
    )
    dp_shard_size: int | None = _option(
        None, "Data parallelism: replicas that share a copy of the parameters (FSDP2); default: 1, with fsdp all."
    )
    tp_size: int = _option(1, "Tensor parallelism: processes that share every matrix.")
    cp_size: int = _option(1, "Context parallelism: processes that share every micro-batch.")
    pp_size: int = _option(1, "Pipeline parallelism: stages, each with some of the layers.")
    pp_stage_layers: list[int] | None = field(
        default=None, metadata={"help": "Layers of every pipeline stage; default: so that stages cost the same."}
    )
    pp_stage_costs: str | None = _option(
        None, "JSON file with measured costs to cut stages by (hf-wlb stages --measure --json); default: counted costs."
    )
    cp_strategy: str | None = _option(
        None, f"How they share it out: {', '.join(SHARDING_STRATEGIES)}; default: adaptive, or as system says."
    )
    cp_threshold: int | None = _option(
        None, "Strategy placed: longest document left whole on a process; default: the best one for each micro-batch."
    )
    max_tokens_per_shard: int | None = _option(None, "Most tokens that a process can hold; default: as the skew says.")
    cp_max_token_skew: float = _option(0.05, "How far the tokens of a process may be from an even share, under placed.")
    attention_kernel: str | None = _option(
        None, f"Attention kernel: {', '.join(KERNELS)}; default (or auto): the fastest one that can do what is asked."
    )
    fused_loss: str = _option(
        "auto",
        f"How the loss is computed without whole logits: {', '.join(FUSED_LOSSES)}. auto: the fastest way that can; "
        "with an adapter on the head, or a trained copy of it, whole logits after all.",
    )
    on_nonfinite_loss: str = _option(
        "stop", "What happens to a step whose loss is not finite: stop, or skip (left out and counted)."
    )
    max_nonfinite_steps: int = _option(10, "With on_nonfinite_loss=skip: so many of them in a row stop the run.")
    peak_flops_per_second: float | None = _option(
        None, "For the MFU: what a device can do in the type that is trained in; default: known for H100 and H200."
    )
    kv_head_groups: int | None = _option(
        None,
        "Context parallelism: groups of heads to exchange keys and values in; default: by how much is exchanged, in "
        "backward by the memory it takes.",
    )
    regather_key_values: bool | None = _option(
        None,
        "Context parallelism: exchange keys and values again in backward instead of keeping them until then; default: "
        "not with gradient_checkpointing, where they are kept for one layer at a time only.",
    )

    @classmethod
    def from_plain(cls, args: TrainingArguments, **settings: Any) -> WLBTrainingArguments:
        """Plain ``TrainingArguments`` with settings of ours; ``args`` stay as they are.

        Args:
            args: Already checked by themselves.
            **settings: Fields of this class, at least ``context_length``.

        Raises:
            ValueError: As at construction.
        """
        planned = cls.__new__(cls)
        planned.__dict__.update(copy.copy(args.__dict__))
        known = {entry.name for entry in fields(TrainingArguments)}
        for entry in fields(cls):
            if entry.name not in known:
                planned.__dict__[entry.name] = settings.get(entry.name, entry.default)
        planned.per_device_train_batch_size = planned.per_device_eval_batch_size = 1
        planned._check()
        return planned

    def __post_init__(self) -> None:
        if isinstance(self.fsdp, str) and self.fsdp.lower() in ("true", "false"):  # --fsdp True
            self.fsdp = cast(Any, self.fsdp.lower() == "true")
        super().__post_init__()  # type: ignore[no-untyped-call]
        self._check()

    def _check(self) -> None:
        _require(
            self.context_length is not None,
            "context_length is missing: the tokens that a micro-batch holds on average, for example "
            "context_length=8192. It is not guessed from the model, because it decides memory and training.",
        )
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            _require(
                getattr(self, name) == 1,
                f"{name}={getattr(self, name)}: a device gets one packed micro-batch at a time, so it must be 1. "
                "Use context_length and gradient_accumulation_steps to train more tokens per step.",
            )
        _require(
            self.train_sampling_strategy in ("random", "sequential"),
            f"train_sampling_strategy={self.train_sampling_strategy!r}: the step planner decides what trains together; "
            "leave it at 'random' (set shuffle_documents=False for the stored order)",
        )
        _require(not self.dataloader_drop_last, "dataloader_drop_last would lose documents; leave it False")
        _require(
            not self.auto_find_batch_size,
            "auto_find_batch_size cannot change planned micro-batches; lower max_tokens_per_micro_batch",
        )
        _require(
            self.average_tokens_across_devices,
            "average_tokens_across_devices=False would weigh tokens by the rank that trains them; leave it True",
        )
        _require(
            sum(given is not None for given in (self.workload_profile, self.workload_crossover, self.workload_hardware))
            <= 1,
            "give at most one of workload_profile, workload_crossover and workload_hardware",
        )
        for name, instead in _UNSUPPORTED.items():
            _require(not getattr(self, name), f"{name} is not supported by WLBTrainer: {instead}")
        self._choose_system()
        self._check_loss()
        self._check_sharding()
        self._check_context_parallelism(self.packing_config(1))  # fails now, not on the cluster
        self._warn_of_packer_options()

    def _choose_system(self) -> None:
        """Puts in the place of what is not given what the system is made of."""
        _require(
            self.system is None or self.system in _SYSTEMS,
            f"system must be one of {', '.join(_SYSTEMS)}, got {self.system!r}",
        )
        packers, strategy = _SYSTEMS[self.system or "wlb"]
        _require(
            self.system is None or self.packer is None or self.packer in packers,
            f"packer={self.packer!r} contradicts system={self.system!r}, which is made by its packer "
            f"({' or '.join(packers)}). Leave one of them out.",
        )
        self.packer = self.packer or packers[0]
        self.cp_strategy = self.cp_strategy or strategy

    def _warn_of_packer_options(self) -> None:
        """No error: to compare packers, one changes the packer alone."""
        for name, packers in _OPTIONS_OF_PACKERS.items():
            given = getattr(self, name)
            if given != getattr(type(self), name) and self.packer not in packers:
                logger.warning(
                    "%s=%s is for packer %s: %s does not look at it.", name, given, " or ".join(packers), self.packer
                )

    def _check_loss(self) -> None:
        _require(
            self.fused_loss in FUSED_LOSSES,
            f"fused_loss must be one of {', '.join(FUSED_LOSSES)}, got {self.fused_loss!r}",
        )
        liger = self.liger_kernel_config or {}
        _require(
            not self.use_liger_kernel or self.fused_loss == "off" or liger.get("fused_linear_cross_entropy") is False,
            "use_liger_kernel would compute the loss a second way. Add "
            "liger_kernel_config={'fused_linear_cross_entropy': False, 'cross_entropy': False}: fused_loss, which is "
            f"{self.fused_loss!r}, uses Liger Kernel's loss by itself where it can.",
        )

    def _check_sharding(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "pp_size", "plan_pp_size"):
            size = getattr(self, name)
            whole = size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 1)
            _require(whole, f"{name} must be a whole number of at least 1, got {size!r}.")
        _require(
            self.plan_pp_size == 1 or self.plan_pp_size >= self.pp_size,
            f"plan_pp_size={self.plan_pp_size} plans for fewer stages than there are (pp_size={self.pp_size}). Give at "
            "least as many, or leave plan_pp_size out.",
        )
        self._check_stages()
        # Parameters are sharded over our own mesh, not by Accelerate's plugin.
        self.fsdp_plugin_args = None
        if not self.fsdp:
            return
        _require(isinstance(self.fsdp_config, dict), "fsdp_config was not read")  # by TrainingArguments
        given = cast(dict[str, Any], self.fsdp_config)
        for name, value in given.items():
            _require(
                name in _FSDP_OPTIONS or value in _FSDP_DEFAULTS.get(name, ()),
                f"fsdp_config[{name!r}]={value!r} is not supported by WLBTrainer, which shards with FSDP2 over its own "
                f"mesh. It takes {', '.join(_FSDP_OPTIONS)}; leave the others out"
                + (" and set activation_checkpointing=True." if name == "activation_checkpointing" else "."),
            )

    def _check_stages(self) -> None:
        sizes: Any = self.pp_stage_layers
        if self.pp_stage_costs is not None:
            _require(
                self.pp_size > 1,
                f"pp_stage_costs={self.pp_stage_costs!r} is for cutting pipeline stages, but pp_size=1. Set pp_size, "
                "or leave it out.",
            )
            _require(
                sizes is None,
                "pp_stage_costs and pp_stage_layers both say what pipeline stages hold. Leave one of them out.",
            )
            StageCosts.load(self.pp_stage_costs)
        if sizes is None:
            return
        _require(
            self.pp_size > 1,
            f"pp_stage_layers={sizes} says what pipeline stages hold, but pp_size=1. Set pp_size, or leave it out.",
        )
        _require(
            isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in sizes),
            f"pp_stage_layers must be a list of whole numbers, one a stage, got {sizes!r}.",
        )
        StageLayout.from_sizes(sizes, max(sum(sizes), self.pp_size), self.pp_size)  # the model may still have others

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What is computed in, by bf16, fp16 or the Accelerate configuration; None for the weights' own type."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self.mixed_precision))

    @property
    def shard_parameters(self) -> bool:
        """Whether parameters are shared out over replicas and context-parallel ranks."""
        return bool(self.fsdp) or (self.dp_shard_size or 1) > 1

    def parallel_sizes(self, processes: int) -> ParallelSizes:
        """The mesh of so many processes.

        Raises:
            ValueError: If the sizes do not multiply to them.
        """
        return ParallelSizes.of(
            processes,
            cp_size=self.cp_size,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            dp_replicate_size=self.dp_replicate_size,
            dp_shard_size=self.dp_shard_size,
            shard_all=bool(self.fsdp),
        )

    def _check_context_parallelism(self, packing: PackingConfig) -> None:
        if self.attention_kernel == "auto":
            self.attention_kernel = None
        _require(
            self.attention_kernel is None or self.attention_kernel in KERNELS,
            f"attention_kernel must be one of auto, {', '.join(KERNELS)}, got {self.attention_kernel!r}",
        )
        _require(
            self.kv_head_groups is None or self.kv_head_groups >= 1,
            f"kv_head_groups must be at least 1 or None, got {self.kv_head_groups}",
        )
        self.sharding_config()
        most = self.max_tokens_per_shard
        _require(
            most is None or packing.capacity <= most * self.cp_size,
            f"micro-batches of up to {packing.capacity:,} tokens (S_max) do not fit cp_size={self.cp_size} processes "
            f"of at most max_tokens_per_shard={most} tokens each. Raise one of these, or lower "
            "max_tokens_per_micro_batch.",
        )

    def sharding_config(self) -> ShardingConfig:
        """How micro-batches are shared out over context-parallel ranks."""
        with named_as_arguments():
            return ShardingConfig(
                cp_size=self.cp_size,
                strategy=self.cp_strategy,  # type: ignore[arg-type]  # checked by ShardingConfig
                threshold=self.cp_threshold,
                max_tokens_per_shard=self.max_tokens_per_shard,
                max_token_skew=self.cp_max_token_skew,
            )

    def packing_config(self, dp_size: int) -> PackingConfig:
        """The planner's settings for ``dp_size`` replicas."""
        assert self.context_length is not None
        with named_as_arguments():
            return PackingConfig(
                context_length=self.context_length,
                micro_batches_per_replica=self.gradient_accumulation_steps,
                dp_size=dp_size,
                pp_size=max(self.pp_size, self.plan_pp_size),
                sharded_parameters=self.shard_parameters,
                packer=self.packer,  # type: ignore[arg-type]  # checked by PackingConfig
                max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
                max_document_tokens=self.max_document_tokens,
                oversize=self.oversize_documents,  # type: ignore[arg-type]
                empty=self.empty_documents,  # type: ignore[arg-type]
                thresholds=None if self.outlier_thresholds is None else tuple(self.outlier_thresholds),
                outlier_tokens=self.outlier_tokens,
                max_time_gap=self.max_time_gap,
                max_wait_steps=self.max_wait_steps,
                max_waiting_contexts=self.max_waiting_contexts,
                window_steps=self.window_steps,
            )

    def workload_model(self, model_config: Any) -> WorkloadModel:
        """What documents cost: from a profile, a crossover length, or the model's shape and hardware figures."""
        if self.workload_profile is not None:
            workload = load_workload(self.workload_profile)
            if isinstance(workload, ProfiledWorkload) and workload.compiled != bool(self.torch_compile):
                logger.warning(
                    "%s is a profile of layers %s torch_compile, but this run has torch_compile=%s: documents will be "
                    "weighed wrongly. Measure another one: hf-wlb profile, with --torch-compile or without.",
                    *(self.workload_profile, "with" if workload.compiled else "without", bool(self.torch_compile)),
                )
            self._check_exchange(workload)
            return workload
        if self.workload_crossover is not None:
            return AnalyticWorkload.from_crossover(self.workload_crossover)
        hardware = self.workload_hardware or ("cpu" if self.device.type == "cpu" else "h100")
        try:
            return AnalyticWorkload.from_config(
                model_config, hardware, gradient_checkpointing=bool(self.gradient_checkpointing)
            )
        except ValueError as error:
            raise ValueError(
                f"{error} Or give workload_crossover, the length at which attention costs as much as the rest."
            ) from error

    def _check_exchange(self, workload: WorkloadModel) -> None:
        try:
            workload.exchange(1, self.cp_size)
        except ValueError as error:
            raise ValueError(
                f"{self.workload_profile} does not say what cp_size={self.cp_size} exchanges. {error} Measure with as "
                f"many processes: torchrun --nproc_per_node {self.cp_size} -m hf_wlb.cli profile."
            ) from error


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
