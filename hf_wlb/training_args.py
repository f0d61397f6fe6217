"""``TrainingArguments`` with what the step planner needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_wlb.packing import PACKER_NAMES, PackingConfig
from hf_wlb.workload import HARDWARE_PRESETS, AnalyticWorkload, WorkloadModel, load_workload


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class WLBTrainingArguments(TrainingArguments):
    """Arguments of ``WLBTrainer``: those of ``Trainer`` and the settings of ``PackingConfig``.

    ``gradient_accumulation_steps`` is the number of micro-batches of one optimizer step on one replica. A device gets
    one packed micro-batch at a time, so ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are 1.
    Lengths are in tokens.

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
        self.packing_config(1)  # fails now, not on the cluster

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
