"""Pictures of workloads, lengths, packers, shards and profiles, as PNG files.

Plain numbers in, one file out; nothing is shown on a screen and no global Matplotlib state is touched. A packer has the
same colour in every picture (Okabe and Ito's palette, which colour-blind readers can tell apart).
"""

from hf_wlb.plots.lengths import octave_shares, plot_length_histogram
from hf_wlb.plots.packers import mean_imbalance, plot_frontier, plot_micro_batch_workloads, plot_packer_bars
from hf_wlb.plots.profile import attention_rates, plot_attention_rates
from hf_wlb.plots.sharding import ShardPanel, plot_shard_plans
from hf_wlb.plots.style import packer_colours, token_text

__all__ = [
    "ShardPanel",
    "attention_rates",
    "mean_imbalance",
    "octave_shares",
    "packer_colours",
    "plot_attention_rates",
    "plot_frontier",
    "plot_length_histogram",
    "plot_micro_batch_workloads",
    "plot_packer_bars",
    "plot_shard_plans",
    "token_text",
]
