"""Pipeline stages: which layers each one holds, and how long micro-batches take through them.

``stage_costs`` (counted) or ``StageCosts.from_measurements`` says what a model's parts cost, ``StageCosts.layout`` cuts
it into stages by that, ``StageLayout.from_sizes`` takes a user's own cut. ``pipeline_seconds`` says how long
micro-batches take in their order. No torch.
"""

from hf_wlb.staging.costs import StageCosts, stage_costs, typical_lengths
from hf_wlb.staging.partition import StageLayout, balance_stages
from hf_wlb.staging.simulation import pipeline_seconds, schedule_seconds

__all__ = [
    "StageCosts",
    "StageLayout",
    "balance_stages",
    "pipeline_seconds",
    "schedule_seconds",
    "stage_costs",
    "typical_lengths",
]
