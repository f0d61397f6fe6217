"""What an exchange of keys and values takes where no profile says so: as the simulator prices it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_wlb.simulator.cluster import CLUSTERS, Cluster, Group, on_device
from hf_wlb.simulator.exchange import count_exchange, exchange_is_sampled
from hf_wlb.simulator.validation import CLUSTER_OF_KERNEL
from hf_wlb.workload import ProfiledWorkload, WorkloadModel

#: Whose NVLink is taken: of the simulator's presets all Hopper ones have the same.
CLUSTER = "h100"
_SIZES = tuple(2**power for power in range(20, 34))  # bytes; times of others are read off between these

Row = Mapping[str, Any]


def exchange_cluster(name: str, device: str | None) -> Cluster:
    """The preset whose links the exchange takes, with the device's memory; with its own if it knows none of it.

    >>> exchange_cluster("h100", "NVIDIA H200").memory_bytes_per_second / 1e12
    3.84
    """
    preset = CLUSTERS[name]
    try:
        return on_device(preset, device or "")
    except ValueError:  # such as a CPU, of which no figures are quoted
        return preset


def exchange_row(kernel: str) -> Row:
    """What a launch's line says of the exchange: the preset of its attention kernel, or of all other Hopper ones."""
    return {"cluster": CLUSTER_OF_KERNEL.get(kernel, CLUSTER)}


def with_exchange(workload: WorkloadModel, cp_size: int, cluster: Cluster) -> WorkloadModel:
    """A profile that says what the exchange among so many ranks takes: if it does not, as the simulator prices it.

    So micro-batches can be shared out by a profile that one GPU measured. Other workloads come back as they are.

    Args:
        workload: What steps are planned and shared out by.
        cp_size: Ranks.
        cluster: Whose links and memory.

    Raises:
        ValueError: If the profile does not say how wide keys and values are.
    """
    if cp_size == 1 or not isinstance(workload, ProfiledWorkload) or exchange_is_sampled(workload, cp_size):
        return workload
    profile = workload.profile
    width = profile.metadata["model"].get("kv_width")
    if width is None:
        raise ValueError(
            "The profile does not say how many numbers a token's keys and values are (kv_width), so the exchange of "
            f"cp_size={cp_size} cannot be priced. Measure it anew: hf-wlb profile."
        )
    token_bytes = 2.0 * width  # in bf16
    group = Group(cp_size, 1)
    (layer,) = count_exchange([token_bytes], cluster, group, gradient_checkpointing=False).layers
    samples = [sample for sample in profile.collectives if sample[:2] != ("all_gather", cp_size)]
    for size in _SIZES:
        gather, reduce = (base + slope * size / token_bytes for base, slope in (layer.gather, layer.reduce))
        samples += [("key_value_exchange", cp_size, size, gather + reduce), ("all_gather", cp_size, size, gather)]
    metadata = {**profile.metadata, "exchange": f"simulated, {cluster.name}"}
    return replace(workload, profile=replace(profile, metadata=metadata, collectives=tuple(sorted(samples))))
