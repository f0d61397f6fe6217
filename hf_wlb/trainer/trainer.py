"""``WLBTrainer``: a Transformers ``Trainer`` whose micro-batches are planned.

Trainer keeps its loop, optimizer, logs, callbacks and checkpoints. Different are only: where micro-batches come from,
how documents are kept apart in attention, how many steps an epoch has, what the loss is divided by, and what a resume
restores. It overrides private methods of Trainer for that and therefore checks the Transformers version.
"""

from __future__ import annotations

import itertools
import logging
import math
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
from hf_wlb.attention import LayerAttention, check_isolation, document_attention_enabled
from hf_wlb.callbacks import WLBProgressCallback
from hf_wlb.data import StreamingPackedDataset, WLBDataCollator, WLBDataLoader
from hf_wlb.packing import PackingConfig
from hf_wlb.parallel import ParallelMesh, WLBParallelismConfig, failing_together, verify_agreement
from hf_wlb.sharding import Sharder
from hf_wlb.trainer.attention import TrainerAttention
from hf_wlb.trainer.checkpoints import SplitCheckpoints
from hf_wlb.trainer.evaluation import PlannedEvaluation
from hf_wlb.trainer.inputs import PlannedInputs
from hf_wlb.trainer.pipeline import PipelineTraining
from hf_wlb.trainer.shard_window import ShardWindow
from hf_wlb.trainer.splitting import agreed_sizes, verify_plan_settings
from hf_wlb.trainer.stages import ModelSource, open_model
from hf_wlb.trainer.supervision import SupervisedTraining
from hf_wlb.trainer.swap import planned_arguments, planned_collator, without_mixed_precision
from hf_wlb.trainer.tokens import TargetWatch
from hf_wlb.trainer.training_loss import causal_lm_of
from hf_wlb.training_args import WLBTrainingArguments
from hf_wlb.workload import WorkloadModel

logger = logging.getLogger(__name__)

PlannedData = WLBDataLoader | StreamingPackedDataset


class WLBTrainer(SupervisedTraining, PipelineTraining, SplitCheckpoints, PlannedInputs, PlannedEvaluation):
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
            with the longest document of a sample as context length (a warning says what that means).
        train_dataset: Documents with ``input_ids`` (and perhaps ``labels``), one a row; map-style, or iterable with
            ``max_steps`` set.
        eval_dataset: As Trainer's, of map-style documents. Documents are packed in their order; the loss is the mean
            over all tokens. For ``compute_metrics`` a row is a micro-batch, padded with -100.
        data_collator: A ``WLBDataCollator``, or None. Any other one is replaced, with a warning. Its shards are the
            trainer's business.
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
            checked = planned_arguments(args, train_dataset)
            device_type = checked.device.type  # joins the processes, if nothing did so before
        data_collator = planned_collator(data_collator)
        self._parallelism = WLBParallelismConfig(sizes=agreed_sizes(checked))
        self.mesh = ParallelMesh.from_config(self._parallelism, device_type)
        verify_plan_settings(checked, self.mesh)
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
        self._steps_by_epoch: list[int] = []
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

    def _collator(self, given: WLBDataCollator | None) -> WLBDataCollator:
        args, text_config = cast(WLBTrainingArguments, self.args), self._causal_lm.config.get_text_config()
        if given is None:
            token = getattr(text_config, "pad_token_id", None)
            given = WLBDataCollator(
                pad_token_id=0 if token is None else token,
                max_position_embeddings=getattr(text_config, "max_position_embeddings", None),
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

    # ---- steps and epochs ----

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Micro-batches of a step; context-parallel ranks share theirs."""
        return args.gradient_accumulation_steps * self.mesh.dp_size

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple[Any, ...]:
        """Counts epochs and steps as they are planned; epochs may differ by a few steps."""
        if isinstance(dataloader, WLBDataLoader) and not dataloader.sampler.steps(0):
            raise ValueError("the train_dataset holds no documents")
        values = list(super().set_initial_training_values(args, dataloader))
        if not isinstance(dataloader, WLBDataLoader):
            self._steps_by_epoch = []
            return tuple(values)
        steps: list[int] = []
        whole = math.ceil(args.num_train_epochs)
        while len(steps) < whole if args.max_steps <= 0 else sum(steps) < args.max_steps:
            steps.append(dataloader.sampler.steps(len(steps)))
        if args.max_steps > 0:
            max_steps = args.max_steps
        else:
            share = args.num_train_epochs - (whole - 1)
            max_steps = sum(steps[:-1]) + math.ceil(steps[-1] * share)
        # Else some would wait for the others at the end.
        verify_agreement(max_steps, "the number of steps to train", place=self.mesh.place)
        self._steps_by_epoch = steps
        values[0], values[1], values[5], values[6] = (
            len(steps),
            steps[0],
            steps[0] * args.gradient_accumulation_steps,
            max_steps,
        )
        return tuple(values)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        epochs, micro_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        self._window = LogWindow()
        self._targets = TargetWatch(warns=self.is_world_process_zero())
        if self._shard_window is not None:
            self._shard_window.clear()
        if resume is None:
            return epochs, micro_batches
        if self._steps_by_epoch:
            epochs, done = 0, self.state.global_step
            while epochs < len(self._steps_by_epoch) and done >= self._steps_by_epoch[epochs]:
                done -= self._steps_by_epoch[epochs]
                epochs += 1
        else:  # a stream: an epoch is a pass, and counted as if it had max_steps
            epochs = int(self.state.epoch or 0)
            done = round(((self.state.epoch or 0) - epochs) * max_steps)
        micro_batches = done * self.args.gradient_accumulation_steps
        if self.args.ignore_data_skip:
            return epochs, 0
        assert self._train_data is not None
        self._load_planner_state(resume, self._train_data)
        if self._steps_by_epoch and not micro_batches and next(iter(self._train_data), None) is not None:
            raise ValueError(f"{resume} was saved at the end of an epoch, but its planner state is not: it is damaged")
        return epochs, micro_batches

    def _run_epoch(  # type: ignore[override]  # Trainer calls it with keywords only
        self,
        *,
        epoch: int,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **kwargs: Any,
    ) -> None:
        """Trainer's epoch, with this epoch's own number of steps, started in its middle after a resume.

        The data already stands where it should (see ``_init_training_state``), so nothing is skipped: Trainer runs the
        steps that are left, and a fractional ``epoch`` makes its epoch counter come out right.
        """
        if self.state.global_step >= self.state.max_steps:  # a resume of a finished run
            self.control.should_training_stop = True
            return
        accumulation = self.args.gradient_accumulation_steps
        steps = self._steps_by_epoch[epoch] if self._steps_by_epoch else num_update_steps_per_epoch
        done = 0
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            done = steps_trained_in_current_epoch // accumulation
            self._rng_checkpoint = resume_from_checkpoint
        data = self._train_data
        assert data is not None
        if self._steps_by_epoch:
            data.set_epoch(epoch)
        super()._run_epoch(  # type: ignore[no-untyped-call]
            epoch=epoch + done / steps,
            train_dataloader=_AnyEpoch(data),
            steps_in_epoch=steps * accumulation,
            num_update_steps_per_epoch=steps - done,
            resume_from_checkpoint=None,
            epochs_trained=epochs_trained,
            steps_trained_in_current_epoch=0,
            **{name: value for name, value in kwargs.items() if name != "train_dataloader"},
        )

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

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Valid tokens of all ranks; at least 1, so that a step of one-token documents has loss 0 and not nan."""
        number = super()._get_num_items_in_batch(batch_samples, device)
        if number is None:
            return None
        self._num_items = int(number)
        # An integer: FSDP2 casts floating-point arguments to the type that is computed in.
        return torch.clamp(torch.as_tensor(number), min=1).to(torch.int64)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with document_attention_enabled(self._causal_lm):
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
            save_planner_state(output_dir, self.state.global_step, self._train_data.state_dict())


class _AnyEpoch:
    """The data as Trainer's loop takes it: iterable, with the epoch already set."""

    def __init__(self, data: PlannedData) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._data)
        for first in iterator:
            return itertools.chain([first], iterator)
        return iter(self._data)  # resumed where a pass over a stream had ended


def check_versions() -> None:
    """Refuses a Transformers whose Trainer is built differently from the one whose methods are overridden here.

    Raises:
        ImportError: Naming what is missing.
    """
    import transformers

    expected = ("_run_epoch", "_init_training_state", "set_initial_training_values", "_get_num_items_in_batch")
    missing = [name for name in expected if not hasattr(Trainer, name)]
    if missing:
        raise ImportError(
            f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}, which WLBTrainer "
            "builds on; install transformers >= 5.20 (tested with 5.24)"
        )
