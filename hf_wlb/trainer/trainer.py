"""``WLBTrainer``: a Transformers ``Trainer`` whose micro-batches are planned.

Trainer keeps its loop, optimizer, logs, callbacks and checkpoints. Different are only: where micro-batches come from,
how documents are kept apart in attention, how many steps an epoch has, what the loss is divided by, and what a resume
restores. It overrides private methods of Trainer for that and therefore checks the Transformers version.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedConfig, PreTrainedModel, ProgressCallback, Trainer, TrainingArguments

from hf_wlb.accounting import (
    CausalLabelSmoother,
    LogWindow,
    check_loss,
    packing_summary,
    save_planner_state,
)
from hf_wlb.attention import LayerAttention, check_isolation, document_attention_enabled, position_limit
from hf_wlb.callbacks import WLBProgressCallback
from hf_wlb.data import StreamingPackedDataset, WLBDataCollator
from hf_wlb.packing import PackingConfig
from hf_wlb.parallel import ParallelMesh, WLBParallelismConfig, failing_together
from hf_wlb.sharding import Sharder
from hf_wlb.trainer.attention import TrainerAttention
from hf_wlb.trainer.checkpoints import SplitCheckpoints
from hf_wlb.trainer.costs import saved_costs
from hf_wlb.trainer.epochs import PlannedData, PlannedEpochs
from hf_wlb.trainer.evaluation import PlannedEvaluation
from hf_wlb.trainer.given import check_given
from hf_wlb.trainer.inputs import PlannedInputs
from hf_wlb.trainer.pipeline import PipelineTraining
from hf_wlb.trainer.shard_window import ShardWindow
from hf_wlb.trainer.splitting import agreed_sizes, verify_arguments
from hf_wlb.trainer.stages import ModelSource, open_model
from hf_wlb.trainer.supervision import SupervisedTraining
from hf_wlb.trainer.swap import planned_arguments, planned_collator, without_mixed_precision
from hf_wlb.trainer.tokens import TargetWatch
from hf_wlb.trainer.training_loss import causal_lm_of
from hf_wlb.training_args import WLBTrainingArguments
from hf_wlb.workload import WorkloadModel

logger = logging.getLogger(__name__)


class WLBTrainer(
    PlannedEpochs, SupervisedTraining, PipelineTraining, SplitCheckpoints, PlannedInputs, PlannedEvaluation
):
    """``Trainer`` with planned micro-batches, documents that do not see each other and an exact token-mean loss.

    With ``cp_size`` above 1 the processes of a replica share each micro-batch (context parallelism): all of them plan
    it, and each takes its shard. With ``tp_size`` above 1 they share every matrix (tensor parallelism), with
    ``pp_size`` above 1 each has some of the layers (pipeline parallelism), and with ``fsdp`` replicas and
    context-parallel ranks share out the parameters (FSDP2): then the model stays on the CPU until each process has
    taken its part, and ``model`` is in parts as soon as the trainer is there.

    Args:
        model: A causal language model of Transformers. Refused, with the reason, if documents packed together would
            attend to each other in it. Or a folder or a name on the hub, of which each pipeline stage reads its own
            layers only, so that no process needs room for all of them; or a configuration, for random weights that
            depend on ``args.seed`` and not on the split.
        args: ``WLBTrainingArguments``; ``context_length`` is required. Plain ``TrainingArguments`` train data parallel,
            with the longest document of a sample as context length, at most the model's positions (a warning says
            what that means).
        train_dataset: Documents with ``input_ids`` (and perhaps ``labels``), one a row; map-style, or iterable with
            ``max_steps`` set.
        eval_dataset: As Trainer's, of map-style documents. Documents are packed in their order; the loss is the mean
            over all tokens. For ``compute_metrics`` a row is a micro-batch, padded with -100.
        data_collator: A ``WLBDataCollator``, or None. One of Transformers that only pads is replaced, with a
            warning; any other one is refused. Shards are the trainer's business.
        workload: What documents cost; by default as ``args`` say.
        model_init_kwargs: How to make the model of a name or a configuration: ``dtype`` (of the weights; default: what
            they have), ``revision``, ``trust_remote_code`` and what ``from_config`` takes.
        **kwargs: Trainer's other arguments.

    Attributes:
        mesh: This process's place among replicas, context-parallel and tensor-parallel ranks.
        layout: Which part of every parameter it holds.
        packing: The planner's settings.
        workload: What documents cost.
        attention_kernels: Names of the kernels that the model's layers attend with.

    Raises:
        ValueError: For a model or settings that would not be trained exactly.
        RuntimeError: On every other rank, if one refuses its model or settings; on all, if their settings differ.

    Logs (means over the steps since the last log, all replicas together): ``imbalance``, ``delay`` (steps),
    ``time_gap`` (modelled time over perfect balance), ``tokens_per_step``, ``waiting_contexts``, ``plan_ms``,
    ``tokens_per_second``; ``mfu``, ``tokens_per_second_per_gpu`` and every rank's time, see ``Throughput.figures``;
    ``nonfinite_steps``, those left out; under context parallelism also how evenly micro-batches were shared out, as
    predicted and as measured, see ``ShardWindow.means``. The summary at the end has the last epoch's figures as
    ``packing_...``, with the documents split, truncated and dropped. ``num_input_tokens_seen`` counts the documents'
    tokens, no dummies'.

    Checkpoints hold ``planner_state.json`` besides Trainer's files: a resume continues with the very next micro-batch.
    """

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module | ModelSource | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        workload: WorkloadModel | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with failing_together():
            check_versions()
            check_given(train_dataset, eval_dataset)
            checked = planned_arguments(args, train_dataset, model, model_init_kwargs)
            device_type = checked.device.type  # joins the processes, if nothing did so before
        data_collator = planned_collator(data_collator)
        self._parallelism = WLBParallelismConfig(sizes=agreed_sizes(checked))
        self.mesh = ParallelMesh.from_config(self._parallelism, device_type)
        verify_arguments(checked, self.mesh)
        with failing_together(place=self.mesh.place):
            if isinstance(model, str | os.PathLike | PreTrainedConfig):
                self._take_opened(opened := open_model(model, checked, self.mesh, model_init_kwargs or {}))
                model = opened.model
            elif model_init_kwargs:
                raise ValueError(
                    f"model_init_kwargs={dict(model_init_kwargs)} says how to make a model of a name or a "
                    f"configuration, but the model is there: a {type(model).__name__}. Leave it out."
                )
            without_mixed_precision(model)
            super().__init__(
                model=model,
                args=checked,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                **kwargs,
            )
            layers = self._check_model()
            self._check_context_parallelism()
            self._check_split(self.model)
            self._check_checkpoints()
            self._supervise(checked.on_nonfinite_loss, checked.max_nonfinite_steps, checked.peak_flops_per_second)
            self.packing: PackingConfig = checked.packing_config(self.mesh.dp_size)
            self._say_what_is_balanced()
            self.workload = checked.workload_model(self._causal_lm.config) if workload is None else workload
            self.data_collator: Any = self._collator(data_collator)
        self._attention = TrainerAttention(checked, layers, self.mesh)
        self._split(self.model)
        self._set_up_runner()
        self._set_up_loss(self._causal_lm)
        self.attention_kernels = self._attention.kernels
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(WLBProgressCallback)
        self._train_data: PlannedData | None = None
        self._rng_checkpoint: str | None = None  # restored once the first micro-batches are there
        self._num_items = 0
        self._window = LogWindow()
        meter = self._attention.meter
        self._shard_window = None if meter is None else ShardWindow(self.mesh, meter)

    def _check_model(self) -> list[LayerAttention]:
        name = type(self._causal_lm).__name__
        if not isinstance(self._causal_lm, PreTrainedModel):
            raise ValueError(f"WLBTrainer trains causal language models of Transformers, got a {name}")
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process sees {self.args.n_gpu} GPUs, which Trainer would use through DataParallel. Start one "
                "process per GPU: accelerate launch or torchrun."
            )
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{name} takes no num_items_in_batch: its loss cannot be divided by the number of tokens of the whole "
                "step, and would not be exact"
            )
        adapters = getattr(self.model, "peft_config", None) or {}
        if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
            raise ValueError(
                "PEFT's prompt learning puts virtual tokens before every micro-batch, which holds several documents: "
                "only the first would see them. Take another kind of adapters, such as LoRA."
            )
        if getattr(self._causal_lm.config, "output_router_logits", False):
            raise ValueError(
                f"{name} adds a router loss (output_router_logits=True), a mean per micro-batch that changes with how "
                "documents are packed. Set config.output_router_logits = False."
            )
        self._check_uncut(self._causal_lm)
        layers = check_isolation(self._causal_lm, self._layers_here)
        if self._has_head:
            check_loss(self._causal_lm)
            self._check_head(self._causal_lm)
        return layers

    def _check_context_parallelism(self) -> None:
        if self.label_smoother is not None:
            self.label_smoother = CausalLabelSmoother(self.label_smoother.epsilon, shifted=self.mesh.cp_size > 1)
        if self.mesh.cp_size == 1:
            return
        if self.compute_loss_func is not None:
            raise ValueError(
                f"compute_loss_func is not supported with cp_size={self.mesh.cp_size}: it would get labels that are "
                "shifted already and in a shard's order. Leave it away, or set cp_size=1."
            )
        if "inputs" in self.args.include_for_metrics:
            raise ValueError(
                f"include_for_metrics=['inputs'] is not supported with cp_size={self.mesh.cp_size}: every process has "
                "only a shard of the input_ids. Take the label_ids, or set cp_size=1."
            )
        if self._has_head:
            check_loss(self._causal_lm, shifted=True)

    def _say_what_is_balanced(self) -> None:
        if self.packing.balances or self.packing.fixed_length or not self.is_world_process_zero():
            return
        logger.warning(
            "There is nothing to balance between micro-batches %s: a step takes as long whichever documents train "
            "together.%s Data-parallel replicas, or pipeline stages with several micro-batches a step, would gain "
            "more; plan_pp_size plans as for a pipeline, to rehearse.",
            "of one replica without pipeline stages" if self.packing.pp_size == 1 else "where a step has only one",
            " The shards of each are balanced all the same." if self.mesh.cp_size > 1 else "",
        )

    def _collator(self, given: WLBDataCollator | None) -> WLBDataCollator:
        args, text_config = cast(WLBTrainingArguments, self.args), self._causal_lm.config.get_text_config()
        if given is None:
            token, limit = getattr(text_config, "pad_token_id", None), position_limit(text_config)
            given = WLBDataCollator(
                pad_token_id=0 if token is None else token,
                max_position_embeddings=None if limit is None else limit.tokens,
            )
        if self.mesh.cp_size == 1 and given.sharder is None:
            return given
        return given.for_rank(Sharder(args.sharding_config(), self.workload), self.mesh.cp_rank)

    def call_model_init(self, trial: Any = None) -> Any:
        """Trainer's; what is made anew for training gets its loss anew."""
        model = super().call_model_init(trial)
        if not self._whole_model:
            self._set_up_runner()
            self._set_up_loss(causal_lm_of(model))
        return model

    # ---- data ----

    def get_train_dataloader(self) -> PlannedData:  # type: ignore[override]  # not a torch DataLoader
        """The planned micro-batches of this rank's replica; never goes through ``accelerator.prepare``."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        args = cast(WLBTrainingArguments, self.args)
        if isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__len__"):
            if args.dataloader_num_workers:
                logger.warning("A stream is read in the main process: dataloader_num_workers is not used.")
            self._train_data = StreamingPackedDataset(
                self.train_dataset,
                self.packing,
                self.workload,
                dp_rank=self.mesh.dp_rank,
                collator=self.data_collator,
                place=self.mesh.place,
            )
        else:
            self._train_data = self._loader(self.train_dataset, self.packing, args.shuffle_documents)
        return self._train_data

    def num_examples(self, dataloader: Any) -> int:
        """Documents of the data set."""
        return len(dataloader.dataset)

    # ---- steps ----

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self._window = LogWindow()
        self._targets = TargetWatch(warns=self.is_world_process_zero())
        if self._shard_window is not None:
            self._shard_window.clear()
        return super()._init_training_state(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of one step and the valid tokens of all ranks in it."""
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._rng_checkpoint is not None:
            # Only now: starting the data loader draws random numbers of its own.
            self._load_rng_state(self._rng_checkpoint)
            self._rng_checkpoint = None
        if self._train_data is not None and samples[0]:
            self._window.add(self._train_data.step_metrics)
            if samples[1] is not None and self.compute_loss_func is None:  # counted, and what is learned from
                self._targets.add(self._num_items, self.state.global_step + 1)
            if self._shard_window is not None:
                self._shard_window.add([micro_batch["wlb_info"] for micro_batch in samples[0]])
        return samples

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Counts a step's documents on all ranks from its plan, once it is complete."""
        if self.args.include_num_input_tokens_seen == "no" or not self.accelerator.sync_gradients:
            return
        plan = None if self._train_data is None else self._train_data.plan
        self.state.num_input_tokens_seen += 0 if plan is None else plan.tokens

    # ---- loss ----

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trainer's; refuses a subclass's ``compute_loss`` that context parallelism gives the wrong labels."""
        self._loss_computed = False
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # a pipeline computes all losses with the step's last micro-batch
            self._check_own_loss()
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Valid tokens of all ranks; at least 1, so that a step of one-token documents has loss 0 and not nan."""
        number = super()._get_num_items_in_batch(batch_samples, device)
        if number is None:
            return None
        self._num_items = int(number)
        # An integer: FSDP2 casts floating-point arguments to the type that is computed in.
        return torch.clamp(torch.as_tensor(number), min=1).to(torch.int64)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with document_attention_enabled(self._causal_lm), self._weighing_as_in(kwargs.get("resume_from_checkpoint")):
            return super()._inner_training_loop(*args, **kwargs)

    # ---- logs and checkpoints ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the planner's figures to the logs of training steps and to the summary at the end."""
        if "loss" in logs:
            logs = {**logs, **self._window.means()}
            self._window = LogWindow()
            if self._shard_window is not None:
                logs |= self._shard_window.means()
        elif "train_runtime" in logs and self._train_data is not None:
            logs = {**logs, **packing_summary(self._train_data.report())}
        super().log(logs, start_time)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save and self._train_data is not None:
            costs = saved_costs(self.workload, self._costs_by)
            save_planner_state(output_dir, self.state.global_step, self._train_data.state_dict(), costs=costs)


def check_versions() -> None:
    """Refuses a Transformers whose Trainer is built differently from the one whose methods are overridden here.

    Raises:
        ImportError: Naming what is missing.
    """
    import transformers

    expected = (
        *("_run_epoch", "_init_training_state", "set_initial_training_values", "_get_num_items_in_batch"),
        *("_maybe_log_save_evaluate", "_evaluate", "_save_checkpoint"),
    )
    missing = [name for name in expected if not hasattr(Trainer, name)]
    if missing:
        raise ImportError(
            f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}, which WLBTrainer "
            "builds on; install transformers >= 5.20 (tested with 5.24)"
        )
