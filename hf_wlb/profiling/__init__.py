"""Measures attention, its exchange and all other work on this machine, for profiles that ``ProfiledWorkload`` reads.

And what the parts of a model cost that pipeline stages share out, for ``StageCosts``.
"""

from hf_wlb.profiling.assemble import assemble_profile, device_name, library_versions
from hf_wlb.profiling.attention import AttentionShape, attention_points, time_attention
from hf_wlb.profiling.exchange import time_exchange
from hf_wlb.profiling.grid import AttentionBudget
from hf_wlb.profiling.held_out import held_out_errors
from hf_wlb.profiling.linear import LayerKind, LinearBench
from hf_wlb.profiling.profile import ProfileOptions, layer_tokens, measure_profile
from hf_wlb.profiling.stages import measure_stage_costs
from hf_wlb.profiling.timing import Stopwatch, forward_backward_seconds, median_seconds

__all__ = [
    "AttentionBudget",
    "AttentionShape",
    "LayerKind",
    "LinearBench",
    "ProfileOptions",
    "Stopwatch",
    "assemble_profile",
    "attention_points",
    "device_name",
    "forward_backward_seconds",
    "held_out_errors",
    "layer_tokens",
    "library_versions",
    "measure_profile",
    "measure_stage_costs",
    "median_seconds",
    "time_attention",
    "time_exchange",
]
