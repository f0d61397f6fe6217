"""The part of ``WLBTrainer`` that watches over training: its speed, losses that are not finite, ranks that part."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers.trainer_utils import EvalLoopOutput

from hf_wlb.accounting import LogWindow
from hf_wlb.parallel import ParallelMesh
from hf_wlb.parallel.failures import reporting_failures
from hf_wlb.trainer.decisions import AgreedDecisions
from hf_wlb.trainer.faults import NonFiniteSteps
from hf_wlb.trainer.throughput import Throughput, flops_of, peak_of


class SupervisedTraining(AgreedDecisions):
    """``Trainer`` that measures its steps, stops at non-finite ones or leaves them out, and fails on all ranks alike.

    Attributes:
        throughput: What the steps since the last log came to, see ``Throughput.figures`` for what is logged.
    """

    mesh: ParallelMesh
    micro_batch_losses: list[torch.Tensor]
    throughput: Throughput
    _window: LogWindow
    _train_data: Any
    _loss_before: torch.Tensor | None = None  # summed up for the log, before the present step
    _steps_logged = 0  # since the last log, and those of them that were left out
    _steps_left_out = 0

    def _supervise(self, action: str, most_in_a_row: int, peak_flops_per_second: float | None) -> None:
        """To be called in the constructor, as soon as Trainer's own is through and before the model is split."""
        self._stop_at_whole_steps()
        device = self.args.device
        self.throughput = Throughput(flops_of(self.model), peak_of(device, peak_flops_per_second), device)
        self.add_callback(NonFiniteSteps(action, most_in_a_row))

    @property
    def nonfinite(self) -> NonFiniteSteps:
        """Decides about steps that are not finite. Trainer replaces callbacks when it restores their state."""
        return next(found for found in self.callback_handler.callbacks if isinstance(found, NonFiniteSteps))

    # ---- failing ranks ----

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with reporting_failures(lambda: self.state.global_step + 1, place=self.mesh.place):
            return super()._inner_training_loop(*args, **kwargs)

    # ---- what a step achieves ----

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.throughput.clear()
        self.throughput.timer.watch(cast(torch.nn.Module, self.model))
        self._steps_logged = self._steps_left_out = 0
        return found

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Also begins a step of the measurements."""
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples[0]:
            plan = self._train_data.plan
            self.throughput.add(() if plan is None else (document.length for document in plan.documents))
            self._loss_before = None
            self._steps_logged += 1
        return samples

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Trainer's, measured."""
        if self._loss_before is None:
            self._loss_before = self._tr_loss.clone()
        if self.mesh.pp_size > 1:  # measured piece by piece
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            for own in self.micro_batch_losses:
                self.nonfinite.add(own)
            return loss
        with self.throughput.timer.measure():
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.nonfinite.add(loss)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Trainer's; it counts as no time of training."""
        start = time.perf_counter()
        output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        seconds = time.perf_counter() - start
        for window in (self._window, self.throughput):
            window.leave_out(seconds)
        return output

    # ---- losses that are not finite ----

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Drops the gradients of a step that is left out: without any, no optimizer changes weights or its state."""
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        scaled = self.accelerator.scaler is not None
        step = self.state.global_step + 1
        if not self.nonfinite.passes(norm, step, loss_scaled=scaled, place=self.mesh.place):
            model.zero_grad()
            self._steps_left_out += 1
            assert self._loss_before is not None
            self._tr_loss = self._loss_before
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the measurements to the logs of training; ``loss`` is the mean over the steps that were trained."""
        if "loss" in logs:
            trained = self._steps_logged - self._steps_left_out
            if self._steps_left_out:
                loss = logs["loss"] * self._steps_logged / trained if trained else math.nan
                logs = {**logs, "loss": loss}
            logs = {**logs, **self.throughput.figures(), **self.nonfinite.figures()}
            self._steps_logged = self._steps_left_out = 0
        super().log(logs, start_time)
