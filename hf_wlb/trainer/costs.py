"""What documents cost in a run that goes on from a checkpoint: what they cost when its steps were planned."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from hf_wlb.accounting import PLANNER_STATE_NAME
from hf_wlb.training_args import WLBTrainingArguments
from hf_wlb.workload import WorkloadModel, load_workload

logger = logging.getLogger(__name__)

_COSTS_BY = ("gradient_checkpointing", "workload_hardware", "workload_crossover", "workload_profile")


def saved_costs(workload: WorkloadModel, by: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's planner state keeps of the costs, in plain JSON types: them, and what they are by."""
    return {"workload": workload.to_dict(), "by": by}


def costs_to_go_on_with(
    checkpoint: str, args: WLBTrainingArguments, workload: WorkloadModel, *, warns: bool = True
) -> tuple[WorkloadModel, dict[str, Any]]:
    """The workload model that a checkpoint's steps were planned with, with a warning if it is not this run's.

    Documents wait in a checkpoint because of what they cost, and which steps an epoch has depends on it: weighed
    otherwise, some would be trained twice and others left out.

    Args:
        checkpoint: The folder.
        args: This run's.
        workload: This run's.
        warns: Whether this process is to say it.

    Returns:
        The model, and the arguments that it is by. This run's, if it is the same or the checkpoint does not tell: what
        is wrong is found when its state is loaded.
    """
    try:
        with open(os.path.join(checkpoint, PLANNER_STATE_NAME), encoding="utf-8") as file:
            saved = json.load(file)["costs"]
        then, by = load_workload(saved["workload"]), dict(saved["by"])
    except (OSError, ValueError, KeyError, TypeError):
        return workload, costs_by(args)
    if then.fingerprint == workload.fingerprint:
        return workload, costs_by(args)
    if warns:
        changed = [
            f"{name}: {by.get(name)!r} -> {now!r}" for name, now in costs_by(args).items() if by.get(name) != now
        ]
        logger.warning(
            "In %s documents cost otherwise than in this run (%s). It goes on with the costs of the checkpoint, so "
            "that every document is still trained once; steps may be balanced a little worse for it. "
            "ignore_data_skip=True takes this run's costs and begins the epoch's documents anew.",
            checkpoint,
            "; ".join(changed) or "another workload, or another model configuration",
        )
    return then, by


def costs_by(args: WLBTrainingArguments) -> dict[str, Any]:
    """The arguments that say what documents cost."""
    given = {name: getattr(args, name) for name in _COSTS_BY}
    return {**given, "gradient_checkpointing": bool(args.gradient_checkpointing), "device": args.device.type}
