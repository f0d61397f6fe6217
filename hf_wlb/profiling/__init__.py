"""Measures attention and its exchange on this machine, for profiles that ``ProfiledWorkload`` reads.

And what the parts of a model cost that pipeline stages share out, for ``StageCosts``.
"""

from hf_wlb.profiling.assemble import assemble_profile, device_name, library_versions
from hf_wlb.profiling.attention import AttentionShape, attention_points, time_attention
from hf_wlb.profiling.exchange import time_exchange
from hf_wlb.profiling.stages import measure_stage_costs
from hf_wlb.profiling.timing import Stopwatch, median_seconds

__all__ = [
    "AttentionShape",
    "Stopwatch",
    "assemble_profile",
    "attention_points",
    "device_name",
    "library_versions",
    "measure_stage_costs",
    "median_seconds",
    "time_attention",
    "time_exchange",
]
