"""The trainer's book-keeping: exact evaluation losses, the planner's figures between two logs, its saved state."""

from __future__ import annotations

import json
import os
import time
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother

from hf_wlb.packing import PackingReport

PLANNER_STATE_NAME = "planner_state.json"


class TokenMean:
    """Mean over tokens of losses that come as means over ever different numbers of tokens.

    >>> mean = TokenMean()
    >>> mean.add(torch.tensor(1.0), 10)
    >>> mean.add(torch.tensor(0.9), 1000)
    >>> round(mean.value(), 3)
    0.901
    """

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.tokens = 0

    def add(self, mean_loss: torch.Tensor, tokens: int) -> None:
        """Takes the mean loss of ``tokens`` tokens in."""
        self.loss_sum += float(mean_loss) * tokens
        self.tokens += tokens

    def value(self) -> float:
        """The mean; nan without any token."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")


def check_loss(model: PreTrainedModel, shifted: bool = False) -> None:
    """Refuses a model whose loss is not the sum of its next-token losses over ``num_items_in_batch``.

    Args:
        model: The model.
        shifted: Whether it will be given ``shift_labels``, as under context parallelism.

    Raises:
        ValueError: If it does not shift its labels (or take them shifted), ignores that number or adds something: then
            the loss of a step would depend on how its documents are packed.
    """
    labels = torch.tensor([[-100, 2, -100, 2, 1]], device=model.device)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    given = {"labels": targets, "shift_labels": targets} if shifted else {"labels": labels}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([[1, 2, 1, 2, 1]], device=model.device),
                num_items_in_batch=torch.tensor(7, device=model.device),
                use_cache=False,
                **given,
            )
    finally:
        model.train(training)
    expected = cross_entropy(output.logits[0].float(), targets[0], reduction="sum") / 7
    if not torch.allclose(output.loss.float(), expected, rtol=1e-3, atol=1e-5):
        how = ", with labels that are shifted already (shift_labels)," if shifted else ""
        raise ValueError(
            f"the loss of {type(model).__name__}{how} is not the sum of its next-token losses over the number of "
            f"tokens of the whole step (found {float(output.loss):.4f} instead of {float(expected):.4f} in a trial), "
            "so the result would change with how documents are packed. Only plain causal language models are supported."
        )


class CausalLabelSmoother(LabelSmoother):
    """Label smoothing of next-token losses.

    Trainer decides by the model's class name whether labels have to be shifted, and FSDP2 changes that name.

    Args:
        epsilon: Share of the loss that is spread over the vocabulary.
        shifted: Whether labels come shifted, as under context parallelism.
    """

    def __init__(self, epsilon: float, shifted: bool) -> None:
        super().__init__(epsilon=epsilon)
        self.shifted = shifted

    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """As ``LabelSmoother``, whatever it is told of shifting."""
        loss: torch.Tensor = super().__call__(  # type: ignore[no-untyped-call]
            model_output, labels, not self.shifted, num_items_in_batch
        )
        return loss


class LogWindow:
    """The planner's figures since the last log: means, and tokens per second of wall-clock time."""

    _NAMES: ClassVar[dict[str, str]] = {
        "imbalance": "imbalance",
        "time_gap": "time_gap",
        "delay": "delay",
        "tokens": "tokens_per_step",
        "waiting_contexts": "waiting_contexts",
        "plan_ms": "plan_ms",
    }

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._since = time.perf_counter()

    def add(self, step: dict[str, float]) -> None:
        """Takes one step's figures in, see ``PackingMetrics.observe``."""
        self._rows.append(step)

    def leave_out(self, seconds: float) -> None:
        """Leaves an evaluation that took so long out of the tokens per second; the steps before it still count."""
        self._since += seconds

    def means(self) -> dict[str, float]:
        """What goes into the log; empty without steps."""
        if not self._rows:
            return {}
        means = {label: sum(row[name] for row in self._rows) / len(self._rows) for name, label in self._NAMES.items()}
        seconds = max(time.perf_counter() - self._since, 1e-9)
        return {**means, "tokens_per_second": sum(row["tokens"] for row in self._rows) / seconds}


#: What the summary at the end of training says of the last epoch, as ``packing_...``; see ``PackingReport``.
_SUMMARY = (
    "documents",
    "split",
    "truncated",
    "empty",
    "dropped",
    "imbalance",
    "time_gap",
    "delay",
    "delay_worst",
    "waiting_peak_contexts",
    "token_variation",
    "context_lost",
)
_OF_REGULAR_STEPS = ("imbalance", "time_gap", "token_variation")


def packing_summary(report: PackingReport) -> dict[str, float]:
    """Figures of a report for the log; without those of regular steps, where the data ended in the first one."""
    absent = () if report.steps else _OF_REGULAR_STEPS
    return {f"packing_{name}": getattr(report, name) for name in _SUMMARY if name not in absent}


def save_planner_state(checkpoint: str, step: int, data: dict[str, Any], **more: Any) -> None:
    """Writes the state of the training data, as of an optimizer step, into a checkpoint.

    Args:
        checkpoint: The folder.
        step: Steps trained.
        data: What ``state_dict`` gave.
        **more: What else a resume needs, in plain JSON types.
    """
    with open(os.path.join(checkpoint, PLANNER_STATE_NAME), "w", encoding="utf-8") as file:
        json.dump({"global_step": step, "data": data, **more}, file)


def read_planner_state(checkpoint: str, step: int) -> dict[str, Any]:
    """Reads that state back.

    Raises:
        ValueError: If there is none, it cannot be read, or it is of another step than the checkpoint's ``step``.
    """
    path = os.path.join(checkpoint, PLANNER_STATE_NAME)
    if not os.path.isfile(path):
        raise ValueError(
            f"{checkpoint} holds no {PLANNER_STATE_NAME}, so it is not known which documents were trained. Resume "
            "from a checkpoint that WLBTrainer wrote, or set ignore_data_skip=True to start the data anew."
        )
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        written, data = int(state["global_step"]), dict(state["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): the checkpoint is damaged. Resume from another "
            "one, or set ignore_data_skip=True to start the data anew."
        ) from error
    if written != step:
        raise ValueError(
            f"{path} was written at step {written} but the checkpoint is of step {step}: the checkpoint is damaged"
        )
    return data
