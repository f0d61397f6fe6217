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
    """Appends every log as one JSON object a line, with the step and seconds since the start of this process.

    A resumed run goes on in the same file; lines of steps after the checkpoint are those of the interrupted run and
    come again, so that readers take the last line of a step.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._start = time.perf_counter()

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
