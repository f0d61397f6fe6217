"""How long training steps take on a cluster, before there is one. No torch."""

from hf_wlb.simulator.cluster import (
    ASSUMED,
    CLUSTERS,
    Cluster,
    Group,
    Link,
    all_gather_seconds,
    all_reduce_seconds,
    changed,
    reduce_scatter_seconds,
    send_seconds,
)
from hf_wlb.simulator.costs import MicroBatchCost, StepModel
from hf_wlb.simulator.end_of_step import EndOfStep
from hf_wlb.simulator.memory import MemoryUse, stage_memory
from hf_wlb.simulator.plan_result import PlanResult
from hf_wlb.simulator.planner import search
from hf_wlb.simulator.schedules import SCHEDULES, ScheduleConfig
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.step import StepResult, StepSimulator, simulate_step
from hf_wlb.simulator.stream import PlanCache, StreamResult, documents_for, simulate_stream
from hf_wlb.simulator.systems import SHARDINGS, SYSTEMS, System, sharder_of
from hf_wlb.simulator.timeline import Timeline, run_schedule, to_trace

__all__ = [
    "ASSUMED",
    "CLUSTERS",
    "SCHEDULES",
    "SHARDINGS",
    "SYSTEMS",
    "Cluster",
    "EndOfStep",
    "Group",
    "Link",
    "MemoryUse",
    "MicroBatchCost",
    "PlanCache",
    "PlanResult",
    "ScheduleConfig",
    "Split",
    "StepModel",
    "StepResult",
    "StepSimulator",
    "StreamResult",
    "System",
    "Timeline",
    "all_gather_seconds",
    "all_reduce_seconds",
    "changed",
    "documents_for",
    "reduce_scatter_seconds",
    "run_schedule",
    "search",
    "send_seconds",
    "sharder_of",
    "simulate_step",
    "simulate_stream",
    "stage_memory",
    "to_trace",
]
