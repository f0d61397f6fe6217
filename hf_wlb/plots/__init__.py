"""Pictures of workloads, lengths, packers, shards and profiles, as PNG files.

Plain numbers in, one file out; nothing is shown on a screen and no global Matplotlib state is touched. A packer has the
same colour in every picture (Okabe and Ito's palette, which colour-blind readers can tell apart).
"""

from hf_wlb.plots.documents import plot_micro_batch_documents
from hf_wlb.plots.inline import Picture, inline
from hf_wlb.plots.lengths import octave_shares, plot_length_histogram
from hf_wlb.plots.lines import LinePanel, plot_lines
from hf_wlb.plots.maps import MapPanel, plot_maps, shades_of
from hf_wlb.plots.masks import mask_ranks, pairs_by_rank, plot_masks
from hf_wlb.plots.packers import mean_imbalance, plot_frontier, plot_micro_batch_workloads, plot_packer_bars
from hf_wlb.plots.plan import PlanPoint, plot_plan
from hf_wlb.plots.profile import attention_rates, plot_attention_rates
from hf_wlb.plots.sharding import ShardPanel, plot_shard_plans
from hf_wlb.plots.spread import plot_spread
from hf_wlb.plots.stacks import plot_stacks
from hf_wlb.plots.steps import plot_steps
from hf_wlb.plots.style import packer_colours, token_text
from hf_wlb.plots.timeline import plot_timelines
from hf_wlb.plots.waits import plot_waits

__all__ = [
    "LinePanel",
    "MapPanel",
    "Picture",
    "PlanPoint",
    "ShardPanel",
    "attention_rates",
    "inline",
    "mask_ranks",
    "mean_imbalance",
    "octave_shares",
    "packer_colours",
    "pairs_by_rank",
    "plot_attention_rates",
    "plot_frontier",
    "plot_length_histogram",
    "plot_lines",
    "plot_maps",
    "plot_masks",
    "plot_micro_batch_documents",
    "plot_micro_batch_workloads",
    "plot_packer_bars",
    "plot_plan",
    "plot_shard_plans",
    "plot_spread",
    "plot_stacks",
    "plot_steps",
    "plot_timelines",
    "plot_waits",
    "shades_of",
    "token_text",
]
