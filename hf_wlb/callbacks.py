"""What a run tells while it goes on: a progress bar with the planner's figures, and metrics.jsonl."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

#: Shown behind the bar: name in the logs, label, format.
_SHOWN = (
    ("loss", "loss", "{:.3f}"),
    ("imbalance", "imbalance", "{:.3f}"),
    ("delay", "delay", "{:.2f}"),
    ("cp_imbalance", "cp imbalance", "{:.3f}"),  # under context parallelism only
    ("tokens_per_second", "tok/s", "{:,.0f}"),
)


class WLBProgressCallback(ProgressCallback):
    """The usual progress bar, with loss, imbalance, delay and tokens/s behind it instead of a line per log."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Updates the bar; logs without a loss (evaluation, summary) are printed as usual."""
        bar: Any = self.training_bar  # None before training and on other processes
        if logs is None or "loss" not in logs or bar is None:
            super().on_log(args, state, control, logs=logs, **kwargs)  # type: ignore[no-untyped-call]
            return
        shown = {label: form.format(float(logs[name])) for name, label, form in _SHOWN if name in logs}
        bar.set_postfix(shown, refresh=True)


class MetricsFileCallback(TrainerCallback):
    """Writes every log as one JSON object a line, with the step and seconds since the start of this process.

    A run that starts anew starts the file anew. A resumed run keeps the lines up to its checkpoint and goes on behind
    them, so that every step is there once.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._start = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forgets what an earlier run wrote about steps that are still to come."""
        if not state.is_world_process_zero or not self._path.is_file():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if state.global_step and _step_of(line) <= state.global_step]
        self._path.write_text("".join(kept), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes on the main process only."""
        if logs is None or not state.is_world_process_zero:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        row = {"step": state.global_step, "seconds": round(time.perf_counter() - self._start, 3), **logs}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a killed run left unfinished."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
