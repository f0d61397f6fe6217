"""``TrainingArguments`` with what the step planner and context parallelism need to know."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_wlb.attention.kernels import KERNELS
from hf_wlb.packing import PACKER_NAMES, PackingConfig
from hf_wlb.sharding import SHARDING_STRATEGIES, ShardingConfig
from hf_wlb.workload import HARDWARE_PRESETS, AnalyticWorkload, WorkloadModel, load_workload


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class WLBTrainingArguments(TrainingArguments):
    """Arguments of ``WLBTrainer``: those of ``Trainer`` and the settings of ``PackingConfig`` and ``ShardingConfig``.

    ``gradient_accumulation_steps`` is the number of micro-batches of one optimizer step on one replica. A device gets
    one packed micro-batch at a time, so ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are 1.
    Lengths are in tokens.

    With ``cp_size`` above 1 so many processes share every micro-batch, whose ``context_length`` and S_max are of all of
    them together: a process holds about ``1 / cp_size`` of it. The number of replicas is that of processes over
    ``cp_size``.

    Raises:
        ValueError: ``context_length`` is missing, or an option does not go together with planned micro-batches.
    """

    per_device_train_batch_size: int = _option(1, "Packed micro-batches per device and forward pass: always 1.")
    per_device_eval_batch_size: int = _option(1, "Packed micro-batches per device in evaluation: always 1.")
    context_length: int | None = _option(None, "Tokens of a micro-batch on average. Required: it is never guessed.")
    packer: str = _option("steady", f"How documents are packed: {', '.join(PACKER_NAMES)}.")
    max_tokens_per_micro_batch: int | None = _option(None, "S_max, what fits in memory; default 1.25 x context_length.")
    max_document_tokens: int | None = _option(None, "Longest document left whole; default S_max.")
    oversize_documents: str = _option("split", "What happens to longer ones: split, truncate (both counted) or error.")
    empty_documents: str = _option("error", "What happens to documents without tokens: error, or skip (counted).")
    outlier_thresholds: list[int] | None = field(
        default=None, metadata={"help": "Packer wlb: lengths where the outlier queue's levels begin."}
    )
    outlier_tokens: int | None = _option(None, "Packer steady: documents from this length on may have to wait.")
    max_time_gap: float = _option(0.03, "Packer steady: how much longer than perfectly balanced a step may become.")
    max_wait_steps: int = _option(20, "Packer steady: steps after which a document's waiting ends.")
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
    cp_size: int = _option(1, "Context parallelism: processes that share every micro-batch.")
    cp_strategy: str = _option("adaptive", f"How they share it out: {', '.join(SHARDING_STRATEGIES)}.")
    cp_threshold: int | None = _option(
        None, "Strategy placed: longest document left whole on a process; default: the best one for each micro-batch."
    )
    max_tokens_per_shard: int | None = _option(None, "Most tokens that a process can hold; default: as the skew says.")
    cp_max_token_skew: float = _option(0.05, "How far the tokens of a process may be from an even share, under placed.")
    attention_kernel: str | None = _option(
        None, f"Attention kernel: {', '.join(KERNELS)}; default (or auto): the fastest one that can do what is asked."
    )
    kv_head_groups: int | None = _option(
        None, "Context parallelism: groups of heads to exchange keys and values in; default: by how much is exchanged."
    )
    regather_key_values: bool | None = _option(
        None,
        "Context parallelism: exchange keys and values again in backward instead of keeping them until then; default: "
        "not with gradient_checkpointing, where they are kept for one layer at a time only.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
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
        _require(not self.auto_find_batch_size, "auto_find_batch_size cannot change planned micro-batches; lower S_max")
        _require(
            self.average_tokens_across_devices,
            "average_tokens_across_devices=False would weigh tokens by the rank that trains them; leave it True",
        )
        _require(
            sum(given is not None for given in (self.workload_profile, self.workload_crossover, self.workload_hardware))
            <= 1,
            "give at most one of workload_profile, workload_crossover and workload_hardware",
        )
        _require(
            not self.deepspeed and not self.fsdp,
            "deepspeed and fsdp are not supported by WLBTrainer; it runs one process or plain data parallel",
        )
        _require(
            self.parallelism_config is None,
            "parallelism_config is not supported by WLBTrainer: Accelerate would shard micro-batches once more and "
            "lose which document is which. Set cp_size instead.",
        )
        self._check_context_parallelism(self.packing_config(1))  # fails now, not on the cluster

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
        try:
            return ShardingConfig(
                cp_size=self.cp_size,
                strategy=self.cp_strategy,  # type: ignore[arg-type]  # checked by ShardingConfig
                threshold=self.cp_threshold,
                max_tokens_per_shard=self.max_tokens_per_shard,
                max_token_skew=self.cp_max_token_skew,
            )
        except ValueError as error:  # its names are not those of these arguments
            raise ValueError(re.sub(r"\b(strategy|threshold|max_token_skew)\b", r"cp_\1", str(error))) from None

    def packing_config(self, dp_size: int) -> PackingConfig:
        """The planner's settings for ``dp_size`` replicas."""
        assert self.context_length is not None
        return PackingConfig(
            context_length=self.context_length,
            micro_batches_per_replica=self.gradient_accumulation_steps,
            dp_size=dp_size,
            pp_size=self.plan_pp_size,
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
            return load_workload(self.workload_profile)
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


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
