"""The part of ``WLBTrainer`` that counts steps and epochs as they are planned, and goes on in the middle of one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

from transformers import TrainingArguments

from hf_wlb.data import StreamingPackedDataset, WLBDataLoader
from hf_wlb.parallel import verify_agreement
from hf_wlb.trainer.checkpoints import SplitCheckpoints
from hf_wlb.trainer.costs import costs_by, costs_to_go_on_with
from hf_wlb.training_args import WLBTrainingArguments
from hf_wlb.workload import WorkloadModel

PlannedData = WLBDataLoader | StreamingPackedDataset

_EPOCHS_COUNTED = 16  # as many as a sampler remembers; to plan thousands of them would take minutes


class PlannedEpochs(SplitCheckpoints):
    """``Trainer`` whose epochs are passes of planned steps; ``WLBTrainer`` sets the attributes."""

    _train_data: PlannedData | None
    _rng_checkpoint: str | None
    workload: WorkloadModel
    _costs_by: dict[str, Any]

    @contextlib.contextmanager
    def _weighing_as_in(self, resume: str | None) -> Iterator[None]:
        """Inside, documents are weighed as in the run that a checkpoint is of: the steps that it planned go on."""
        own, args = self.workload, cast(WLBTrainingArguments, self.args)
        self._costs_by = costs_by(args)
        if resume is not None and not args.ignore_data_skip:
            warns = self.is_world_process_zero()
            self.workload, self._costs_by = costs_to_go_on_with(resume, args, own, warns=warns)
        try:
            yield
        finally:
            self.workload = own

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Micro-batches of a step; context-parallel ranks share theirs."""
        return args.gradient_accumulation_steps * self.mesh.dp_size

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple[Any, ...]:
        """Counts epochs and steps as they are planned; epochs may differ by a few steps.

        With ``max_steps`` those of the first epochs only: of later ones the number is as high as it can be.
        """
        if isinstance(dataloader, WLBDataLoader) and not dataloader.sampler.steps(0):
            raise ValueError("the train_dataset holds no documents")
        values = list(super().set_initial_training_values(args, dataloader))
        if not isinstance(dataloader, WLBDataLoader):
            return tuple(values)
        sampler = dataloader.sampler
        if args.max_steps > 0:
            max_steps, epochs, counted = args.max_steps, 0, 0
            while counted < max_steps and epochs < _EPOCHS_COUNTED:
                counted += sampler.steps(epochs)
                epochs += 1
            epochs += -(-max(max_steps - counted, 0) // _least_steps(dataloader))
        else:
            epochs = math.ceil(args.num_train_epochs)
            share = args.num_train_epochs - (epochs - 1)  # of the last one
            steps = [sampler.steps(epoch) for epoch in range(epochs)]
            max_steps = sum(steps[:-1]) + math.ceil(steps[-1] * share) if steps else 0
        # Else some would wait for the others at the end.
        verify_agreement(max_steps, "the number of steps to train", place=self.mesh.place)
        first = sampler.steps(0)
        values[0], values[1], values[5], values[6] = epochs, first, first * args.gradient_accumulation_steps, max_steps
        return tuple(values)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        epochs, micro_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        if resume is None:
            return epochs, micro_batches
        data = self._train_data
        assert data is not None
        if self.args.ignore_data_skip:
            planned = isinstance(data, WLBDataLoader)
            return self._epochs_of(self.state.global_step) if planned else int(self.state.epoch or 0), 0
        # By the data's own position: an epoch may have been ended early, and max_steps may have been another.
        self._load_planner_state(resume, data)
        epochs, done = data.epoch, data.steps_handed_out
        if isinstance(data, WLBDataLoader) and done >= data.sampler.steps(epochs):
            if next(iter(data), None) is not None:
                raise ValueError(
                    f"{resume} was saved at the end of an epoch, but its planner state is not: it is damaged"
                )
            epochs, done = epochs + 1, 0
        return epochs, done * self.args.gradient_accumulation_steps

    def _epochs_of(self, steps: int) -> int:
        """Whole epochs in so many steps from the beginning."""
        assert isinstance(self._train_data, WLBDataLoader)
        epochs = 0
        while steps >= (own := self._train_data.sampler.steps(epochs)):
            steps -= own
            epochs += 1
        return epochs

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
        data = self._train_data
        assert data is not None
        accumulation = self.args.gradient_accumulation_steps
        steps = num_update_steps_per_epoch  # of a stream: a pass is counted as if it had max_steps
        done = 0
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            done = steps_trained_in_current_epoch // accumulation
            self._rng_checkpoint = resume_from_checkpoint
        if isinstance(data, WLBDataLoader):
            steps = data.sampler.steps(epoch)
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


def _least_steps(data: WLBDataLoader) -> int:
    """What no epoch can have fewer steps than: all of them full."""
    config, lengths = data.config, data.sampler.lengths
    if config.oversize == "truncate" and config.longest_document is not None:
        lengths = lengths.clip(max=config.longest_document)
    return max(-(-int(lengths.sum()) // (config.micro_batches * config.capacity)), 1)


class _AnyEpoch:
    """The data as Trainer's loop takes it: iterable, with the epoch already set."""

    def __init__(self, data: PlannedData) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._data)
        for first in iterator:
            return itertools.chain([first], iterator)
        return iter(self._data)  # resumed where a pass over a stream had ended
