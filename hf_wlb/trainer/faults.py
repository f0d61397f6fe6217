"""Steps whose loss is not finite: the run stops, or goes on without them, on all ranks alike."""

from __future__ import annotations

import logging
import math
from typing import Any, cast

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_wlb.parallel.agreement import name_ranks
from hf_wlb.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

NONFINITE_ACTIONS = ("stop", "skip")
MOST_NAMED = 8
"""Micro-batches that an error names."""


class NonFiniteSteps(TrainerCallback, ExportableState):
    """Decides about steps whose loss or gradients are not finite, and counts those left out.

    It goes by the norm of the gradients, which is the same number on all ranks: a loss that is nan or infinite makes
    it so. Only then do ranks tell each other whose loss it was. As a callback it keeps its count in
    ``trainer_state.json``.

    Args:
        action: ``"stop"`` raises; ``"skip"`` has the step's gradients dropped, so that neither weights nor optimizer
            change, and warns.
        most_in_a_row: So many steps left out one after the other stop the run all the same.

    Attributes:
        nonfinite_steps: Steps left out so far, before a resume too.
        in_a_row: Those without a good one since.

    Raises:
        ValueError: For another action, or a number below 1.

    >>> steps = NonFiniteSteps("skip")
    >>> steps.add(torch.tensor(0.5))
    >>> steps.passes(torch.tensor(2.0), step=1), steps.passes(torch.tensor(float("nan")), step=2), steps.figures()
    (True, False, {'nonfinite_steps': 1})
    """

    def __init__(self, action: str = "stop", most_in_a_row: int = 10) -> None:
        if action not in NONFINITE_ACTIONS:
            raise ValueError(f"on_nonfinite_loss must be one of {', '.join(NONFINITE_ACTIONS)}, got {action!r}")
        if most_in_a_row < 1:
            raise ValueError(f"max_nonfinite_steps must be at least 1, got {most_in_a_row}")
        self.action = action
        self.most_in_a_row = most_in_a_row
        self.nonfinite_steps = 0
        self.in_a_row = 0
        self._losses: list[torch.Tensor] = []
        self._warns = True

    # ---- during a step ----

    def add(self, loss: torch.Tensor) -> None:
        """Takes this rank's own loss of a micro-batch; nothing is waited for."""
        self._losses.append(loss.detach())

    def passes(self, grad_norm: torch.Tensor | float, step: int, *, loss_scaled: bool = False, place: str = "") -> bool:
        """Whether the step shall be trained; all ranks must call this together, after its backward.

        Waits for the GPU, once a step.

        Args:
            grad_norm: Of all gradients, the same on every rank.
            step: The step, from 1, for messages.
            loss_scaled: Whether a ``GradScaler`` (fp16) watches the gradients. They overflow now and then, as a sign
                for it to lower its scale; where every loss is finite, that is left to it.
            place: What this rank is besides its number, for messages.

        Returns:
            False if the gradients must be dropped before the optimizer's step.

        Raises:
            RuntimeError: On every rank alike, naming the step, the ranks whose loss it was and their micro-batches.
        """
        losses, self._losses = self._losses, []
        if math.isfinite(float(grad_norm)):
            self.in_a_row = 0
            return True
        own = [(number, value) for number, loss in enumerate(losses) if not math.isfinite(value := float(loss))]
        told: list[tuple[str, list[tuple[int, float]]]] = gather_objects((place, own))
        if loss_scaled and not any(found for _, found in told):
            return True
        what = _in_words(step, told)
        if self.action == "stop":
            raise RuntimeError(
                f"{what} Training stops before this step changes the weights: resume from the last checkpoint with a "
                "lower learning rate or other data, or set on_nonfinite_loss='skip' to leave such steps out."
            )
        self.nonfinite_steps += 1
        self.in_a_row += 1
        if self.in_a_row >= self.most_in_a_row:
            raise RuntimeError(
                f"{what} That makes {self.in_a_row} such steps in a row: leaving them out does not help, and training "
                "stops."
            )
        if self._warns:
            logger.warning("%s It is left out; %d so far.", what, self.nonfinite_steps)
        return False

    def figures(self) -> dict[str, float]:
        """What goes into the log."""
        return {"nonfinite_steps": self.nonfinite_steps}

    # ---- between runs ----

    def state(self) -> dict[str, Any]:
        """As ``ExportableState`` wants it."""
        return {
            "args": {"action": self.action, "most_in_a_row": self.most_in_a_row},
            "attributes": {"nonfinite_steps": self.nonfinite_steps, "in_a_row": self.in_a_row},
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Goes on counting where the checkpoint of a resumed run stood; the settings are those of this run."""
        self._warns = state.is_world_process_zero
        self._losses = []
        # Trainer wants an entry to replace when it saves; checkpoints of others have none.
        callbacks = cast(dict[str, Any], state.stateful_callbacks)
        saved = callbacks.setdefault(type(self).__name__, self.state())
        resumed = saved["attributes"] if state.global_step else {}
        self.nonfinite_steps, self.in_a_row = resumed.get("nonfinite_steps", 0), resumed.get("in_a_row", 0)


def _in_words(step: int, told: list[tuple[str, list[tuple[int, float]]]]) -> str:
    places = [place for place, _ in told]
    found = [
        f"{value} in micro-batch {number} of {name_ranks([rank], places)}"
        for rank, (_, own) in enumerate(told)
        for number, value in own
    ]
    if not found:
        return f"The gradients of step {step} are not finite, though every loss is."
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"The loss of step {step} is not finite: {', '.join(found[:MOST_NAMED])}{more}."
