"""Going on with a plan under another layout: the same micro-batches in a step, dealt to other replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_wlb.data import WLBDataLoader
from hf_wlb.packing import PackingConfig, StepPlanner


def under_this_layout(state: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """A data loader's state at the end of a step, as a loader of another layout can go on from it.

    Another layout is another ``dp_size``, accumulation or number of pipeline stages, or parameters that are now shared
    out, or no longer.

    The step that was handed out is planned again as it was, so that no document is trained twice or left out. Which
    documents come together afterwards may depend on the layout (``steady``); each of them still comes exactly once.

    Args:
        state: What ``state_dict`` gave, of a loader or of a stream.
        data: The loader, or stream, that is to go on.

    Returns:
        The state itself where the layouts are the same, or where ``load_state_dict`` will say what is wrong with it.

    Raises:
        ValueError: If a step would have another number of micro-batches, or the data are a stream.
    """
    planned = state.get("planner")
    saved = planned.get("config") if isinstance(planned, Mapping) else None
    now: PackingConfig = data.config
    if not isinstance(planned, Mapping) or not isinstance(saved, Mapping):
        return dict(state)
    size, dp_size = int(saved.get("micro_batches_per_replica", 0)), int(saved.get("dp_size", 0))
    pp_size, sharded = int(saved.get("pp_size", 0)), bool(saved.get("sharded_parameters", False))
    if min(size, dp_size, pp_size) < 1:
        return dict(state)
    then = replace(now, micro_batches_per_replica=size, dp_size=dp_size, pp_size=pp_size, sharded_parameters=sharded)
    if then == now:
        return dict(state)
    if replace(then, sharded_parameters=now.sharded_parameters) == now and (dp_size == 1 or pp_size > 1):
        # No replica waits for another one before the step's end, so plans are the same.
        config = {**saved, "sharded_parameters": now.sharded_parameters}
        return {**state, "planner": {**planned, "config": config}}
    if then.micro_batches != now.micro_batches:
        both = {
            "gradient_accumulation_steps": (size, now.micro_batches_per_replica),
            "replicas": (dp_size, now.dp_size),
        }
        changed = "; ".join(f"{name}: {old} -> {new}" for name, (old, new) in both.items() if old != new)
        raise ValueError(
            f"the checkpoint was saved with {then.micro_batches} micro-batches a step, and this run has "
            f"{now.micro_batches} ({changed}): documents that wait in it were chosen for those. Set "
            "gradient_accumulation_steps so that a step has as many, or ignore_data_skip=True to start the data anew."
        )
    if not isinstance(data, WLBDataLoader):
        raise ValueError(
            f"a stream goes on only with the layout that it was read with: {_layout(then)}, got {_layout(now)}. "
            "Change cp_size or tp_size instead, or set ignore_data_skip=True to start the data anew."
        )
    handed_out = int(state.get("handed_out", -1))
    if handed_out not in (0, then.micro_batches_per_replica):
        return dict(state)
    fresh = data.sampler.planner(int(state.get("epoch", 0)))
    planner = StepPlanner(fresh.source, fresh.workload, then)
    planner.load_state_dict(dict(planned))
    if handed_out:
        next(planner, None)
    return {**state, "handed_out": 0, "planner": {**planner.state_dict(), "config": now.to_dict()}}


def _layout(config: PackingConfig) -> str:
    stages = f" of {config.pp_size} pipeline stages" if config.pp_size > 1 else ""
    shared = " that share parameters out" if config.sharded_parameters else ""
    replicas = f"{config.dp_size} replicas{shared}{stages}"
    return f"{replicas} with gradient_accumulation_steps={config.micro_batches_per_replica}"
