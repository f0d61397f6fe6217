"""Metrics that are computed micro-batch by micro-batch, on several ranks and within training."""

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.test_trainer_evaluation import FIRST, Accuracy, whole_accuracy
from tests.support.spawn import run_distributed
from tests.support.training import TWO_RANKS, rows_of, trainer_of


def evaluated(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, split in TWO_RANKS.items():
        batches = Accuracy()
        options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, **split}
        options |= {"eval_dataset": rows_of(FIRST, 1), "compute_metrics": batches, "batch_eval_metrics": True}
        trainer, recorder = trainer_of(folder, **options)
        trainer.train()
        last = trainer.evaluate()
        trainer.args.batch_eval_metrics, trainer.compute_metrics = False, whole_accuracy
        logged = [log["eval_accuracy"] for log in recorder.logs if "eval_accuracy" in log]
        found[name] = logged, last, trainer.evaluate(), batches.closed
    return found


def test_every_rank_has_the_metrics_of_all_micro_batches(tmp_path: Path) -> None:
    for found in run_distributed(evaluated, 2, str(tmp_path)):
        for name in TWO_RANKS:
            logged, last, whole, closed = found[name]
            for figure in ("eval_accuracy", "eval_valid", "eval_loss"):
                assert last[figure] == pytest.approx(whole[figure], rel=1e-12), name
            assert last["eval_valid"] == sum(FIRST) - len(FIRST) - 1, name  # the one of 25 tokens comes in two
            assert len(logged) == 3 and logged[1] == logged[2] == last["eval_accuracy"], name
            assert closed == [3 if name in ("replicas", "fsdp") else 6] * 3, name
