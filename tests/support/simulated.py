"""Small models on slow hardware, so that simulated costs can be counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hf_wlb.simulator.cluster import Cluster, Link
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.split import Split
from hf_wlb.workload import HardwareFigures, ProfiledWorkload

LENGTHS = np.array([3000, 700, 41, 259])
#: Products at 1000 FLOP/s, attention at 400 and 200, memory at 100 bytes a second, links without latency.
SLOW = Cluster("slow", 4, 1e6, HardwareFigures("slow", 1e3, 400.0, 200.0), 100.0, Link(50.0, 0.0), Link(10.0, 0.0), 0.0)
K = 1024


def config(**changes):
    settings = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
    }
    return SimpleNamespace(**{**settings, **changes})


def llama_7b(layers: int = 32):
    return config(
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32_000,
    )


SLIDING = {
    "model_type": "gemma3_text",
    "head_dim": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 100,
}
SPARSE = {
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
}


def model(split: Split | None = None, cluster: Cluster = SLOW, changes=None, **options) -> StepModel:
    made = {"context_length": 4000, **options}
    return StepModel.of(config(**(changes or {})), split or Split(), cluster, **made)


def profile(**changes) -> ProfiledWorkload:
    def timed(key, sizes, forward, backward):
        return [{key: n, "forward_seconds": n * forward, "backward_seconds": n * backward} for n in sizes]

    def moved(operation, ranks, rate):
        sizes = (100, 1_000_000)
        return [{"operation": operation, "group_size": ranks, "bytes": n, "seconds": n / rate} for n in sizes]

    data = {
        "schema": "hf_wlb.profile/1",
        "metadata": {
            "device": "none",
            "dtype": "bfloat16",
            "versions": {},
            "model": {"tp_size": 1, "hidden_size": 8, "heads": 2, "kv_heads": 1, "kv_width": 8, "vocab_size": 16},
        },
        "layers": [{"count": 4, "window": None}],
        "attention": [
            {"q_len": n, "kv_len": n, "forward_seconds": n * n * 2e-3, "backward_seconds": n * n * 7e-3}
            for n in (100, 1000, 4000)
        ],
        "linear": timed("tokens", (1000, 4000), 0.3, 0.7),
        "head": timed("tokens", (1000, 4000), 0.9, 0.2),
        "embedding": timed("tokens", (1000, 4000), 0.01, 0.05),
        "collectives": [*moved("all_gather", 2, 500.0), *moved("reduce_scatter", 2, 250.0)],
    }
    return ProfiledWorkload.from_dict({key: value for key, value in {**data, **changes}.items() if value is not None})
