"""What callbacks decide, compared over the ranks before they act on it: else some would wait for others for ever."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hf_wlb.parallel import ParallelMesh, verify_agreement

_LOG, _EVALUATION, _CHECKPOINT = "a log", "an evaluation", "a checkpoint"
_END_OF_EPOCH, _END = "the end of the epoch", "the end of training"
_ACTS = (_LOG, _EVALUATION, _CHECKPOINT, _END_OF_EPOCH, _END)


class WholeSteps(CallbackHandler):
    """Callbacks whose stop takes effect at the end of a step, not in its middle.

    There the other ranks would be waiting in the middle of their step, and the step's documents, which are handed out
    already, would be trained by nobody.
    """

    _stops_epoch = _stops_training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Forgets what a run that failed had left."""
        self._stops_epoch = self._stops_training = False
        return super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-any-return]

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Keeps what was decided in the step so far, or before it."""
        control = super().on_substep_end(args, state, control, **kwargs)
        self._stops_epoch |= control.should_epoch_stop
        self._stops_training |= control.should_training_stop
        control.should_epoch_stop = control.should_training_stop = False
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Gives it back."""
        control.should_epoch_stop |= self._stops_epoch
        control.should_training_stop |= self._stops_training
        self._stops_epoch = self._stops_training = False
        return super().on_step_end(args, state, control, **kwargs)  # type: ignore[no-any-return]


class AgreedDecisions(Trainer):
    """``Trainer`` whose ranks compare what comes after a step, if it is anything but the next one.

    That one's plan is compared anyway, so a rank that stops, or saves, meets the others that go on in this comparison,
    and all of them say so. A step with nothing behind it costs nothing.
    """

    mesh: ParallelMesh

    def _stop_at_whole_steps(self) -> None:
        """To be called in the constructor, as soon as Trainer's own is through."""
        # The same handler, which others may hold already; a new one would warn of every callback once more.
        self.callback_handler.__class__ = WholeSteps

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._logs_now():
            self._agree_on(_LOG)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._agree_on(_EVALUATION)
        return super()._evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._agree_on(_CHECKPOINT)
        super()._save_checkpoint(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._compare(_END if self.control.should_training_stop else _END_OF_EPOCH)

    def _logs_now(self) -> bool:
        return self.control.should_log and self.state.global_step > self._globalstep_last_logged

    def _agree_on(self, act: str) -> None:
        """Before an act: on it, and on what else is decided by now."""
        decided = {
            _LOG: self._logs_now(),
            _EVALUATION: self.control.should_evaluate,
            _CHECKPOINT: self.control.should_save,
            _END_OF_EPOCH: self.control.should_epoch_stop,
            _END: self.control.should_training_stop,
        }
        self._compare(*(name for name in _ACTS if name == act or decided[name]))

    def _compare(self, *acts: str) -> None:
        # Below -1, which is the end of the data: a plan's digest is not negative.
        step, decided = self.state.global_step, sum(1 << _ACTS.index(name) for name in acts)
        value = -2 - (step << len(_ACTS)) - decided
        what = f"{' and '.join(acts)} after step {step}"
        verify_agreement(value, what, place=self.mesh.place)
