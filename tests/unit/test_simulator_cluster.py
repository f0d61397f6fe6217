"""Collectives by hand, what faster links do, and what was measured on four GPUs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_wlb.sharding.cost import HIDDEN, WAITING
from hf_wlb.simulator.cluster import (
    ASSUMED,
    CLUSTERS,
    Cluster,
    Group,
    Link,
    all_gather_seconds,
    all_reduce_seconds,
    changed,
    on_device,
    reduce_scatter_seconds,
    send_seconds,
)
from hf_wlb.workload import HardwareFigures
from tests.support.source_tree import REPOSITORY

FIGURES = HardwareFigures("unit", 10.0, 4.0, 2.0)
#: Nodes of 4; a byte a second between them, 10 inside; rounds of 100 and 1000 seconds.
SLOW = Cluster("slow", 4, 1e3, FIGURES, 5.0, Link(10.0, 100.0), Link(1.0, 1000.0))
RESULTS = REPOSITORY / "recipes" / "benchmarks" / "results" / "context_parallel.json"
COLLECTIVES = (all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds)


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        (Group(1, 1), 0.0),
        (Group(4, 1), 3 / 4 * 80 / 10 + 200),  # inside a node, two rounds
        (Group(2, 2), 1 / 2 * 80 / 10 + 100),
        (Group(2, 4), 1 / 2 * 80 / 1 + 1000),  # one rank a node
        (Group(4, 8), 3 / 4 * 80 / 1 + 2000),
        (Group(8, 1), 1 / 2 * 80 / 4 / 1 + 1000 + 3 / 4 * 80 / 10 + 200),  # four ranks a node share the network
        (Group(8, 2), 3 / 4 * 80 / 2 / 1 + 2000 + 1 / 2 * 80 / 10 + 100),
    ],
)
def test_collectives_by_hand(group: Group, seconds: float) -> None:
    assert all_gather_seconds(SLOW, group, 80) == pytest.approx(seconds)
    assert reduce_scatter_seconds(SLOW, group, 80) == pytest.approx(seconds)
    assert all_reduce_seconds(SLOW, group, 80) == pytest.approx(2 * seconds)
    assert all(collective(SLOW, group, 0) == 0 for collective in COLLECTIVES)


def test_sends_by_hand() -> None:
    assert send_seconds(SLOW, 1, 50) == 105
    assert send_seconds(SLOW, 3, 50) == 105
    assert send_seconds(SLOW, 4, 50) == 1050
    assert send_seconds(SLOW, 4, 0) == 0


@given(
    size=st.integers(1, 64),
    stride=st.integers(1, 64),
    size_bytes=st.floats(1, 1e10),
    constant=st.sampled_from(["NVLink", "network"]),
)
def test_a_faster_link_never_slows(size: int, stride: int, size_bytes: float, constant: str) -> None:
    group = Group(size, stride)
    for cluster in (SLOW, CLUSTERS["h100"]):
        faster = changed(cluster, constant, 2.0)
        for collective in COLLECTIVES:
            assert collective(faster, group, size_bytes) <= collective(cluster, group, size_bytes)
        assert send_seconds(faster, stride, size_bytes) <= send_seconds(cluster, stride, size_bytes)


@given(size=st.integers(1, 64), stride=st.integers(1, 64))
def test_a_group_lies_on_as_few_nodes_as_its_stride_allows(size: int, stride: int) -> None:
    group = Group(size, stride)
    assert 1 <= group.per_node(8) <= size
    assert group.nodes(8) * group.per_node(8) >= size
    assert (group.nodes(8) == 1) == (stride * size <= 8 or size <= 8 // stride or size == 1)


def test_all_gathers_are_those_that_were_measured() -> None:
    """On four H200; from 4 MiB to 2 GiB."""
    measured = [
        (sample["bytes"], sample["seconds"])
        for part in json.loads(RESULTS.read_text())["kv_heads"].values()
        for sample in part["profile"]["collectives"]
        if sample["operation"] == "all_gather"
    ]

    def worst(cluster: Cluster) -> float:
        return max(abs(all_gather_seconds(cluster, Group(4, 1), size) / time - 1) for size, time in measured)

    assert len(measured) == 10
    assert worst(CLUSTERS["h100"]) < 0.05
    # Negative controls.
    assert worst(changed(CLUSTERS["h100"], "NVLink", 0.9)) > 0.05
    assert worst(changed(CLUSTERS["h100"], "latency", 0.8)) > 0.05


@pytest.mark.parametrize("constant", ASSUMED)
def test_a_constant_is_changed_alone(constant: str) -> None:
    figures = {
        "matmul": "matmul_flops_per_second",
        "attention forward": "attention_flops_per_second",
        "attention backward": "attention_backward_flops_per_second",
    }
    new = changed(SLOW, constant, 1.5)
    expected = {
        "element-wise": {"memory_bytes_per_second": 7.5},
        "NVLink": {"inside": Link(15.0, 100.0)},
        "network": {"between": Link(1.5, 1000.0)},
        "latency": {"inside": Link(10.0, 150.0), "between": Link(1.0, 1500.0)},
        "short rows": {"segment_overhead_tokens": 225.0},
        "hidden exchange": {"hidden_exchange": 1.5 * HIDDEN},
        "unlike chunks": {"unlike_chunks": 1.5 * WAITING},
    }
    if constant in figures:
        key = figures[constant]
        assert new == replace(SLOW, figures=replace(FIGURES, **{key: 1.5 * getattr(FIGURES, key)}))
    else:
        assert new == replace(SLOW, **expected[constant])
    assert new != SLOW and changed(SLOW, constant, 1.0) == SLOW


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_shares_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="hidden_exchange of 'slow' is a share and must be between 0 and 1"):
        replace(SLOW, hidden_exchange=value)
    if not value > 0:
        with pytest.raises(ValueError, match="unlike_chunks of 'slow' must be finite and at least 0"):
            replace(SLOW, unlike_chunks=value)


@pytest.mark.parametrize("preset", CLUSTERS)
def test_a_card_decides_the_memory_alone(preset: str) -> None:
    h100 = CLUSTERS[preset]
    assert on_device(h100, "NVIDIA H100 80GB HBM3") == h100
    h200 = on_device(h100, "NVIDIA H200")
    assert h200 == replace(h100, memory_bytes_per_second=0.8 * 4.8e12, memory_bytes=141e9)
    assert on_device(h200, "NVIDIA H100 80GB HBM3") == h100
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB", "cpu (x86_64)"):
        with pytest.raises(ValueError, match="known are H100 and H200 SXM"):
            on_device(h100, name)


def test_a_backward_rate_that_follows_the_forwards_is_changed_alone() -> None:
    cluster = replace(SLOW, figures=HardwareFigures("one rate", 10.0, 4.0))
    slower = changed(cluster, "attention forward", 0.5).figures
    assert (slower.attention_flops_per_second, slower.attention_backward_rate) == (2.0, 4.0)


@pytest.mark.parametrize("name", CLUSTERS)
def test_presets_are_nodes_of_eight_h100(name: str) -> None:
    cluster = CLUSTERS[name]
    assert (cluster.name, cluster.gpus_per_node, cluster.memory_bytes) == (name, 8, 80e9)
    assert cluster.memory_bytes_per_second == pytest.approx(2.68e12)
    assert cluster.between.bytes_per_second == 40e9
    assert cluster.figures.matmul_flops_per_second == 0.75 * 989e12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0.0, 1.0), "bytes_per_second of a link must be above 0"),
        (lambda: Link(1.0, -1.0), "latency_seconds of a link must be finite and at least 0"),
        (lambda: Group(0, 1), "size of a group of ranks must be a whole number of at least 1, got 0"),
        (lambda: Group(2, True), "stride of a group of ranks must be a whole number"),
        (lambda: replace(SLOW, gpus_per_node=0), "gpus_per_node of 'slow' must be a whole number of at least 1, got 0"),
        (lambda: replace(SLOW, memory_bytes=float("inf")), "memory_bytes of 'slow' must be above 0 and finite"),
        (lambda: replace(SLOW, segment_overhead_tokens=-1.0), "segment_overhead_tokens of 'slow'"),
        (lambda: changed(SLOW, "luck", 2.0), "no assumed constant 'luck'; they are matmul, attention forward"),
        (lambda: changed(SLOW, "network", 0.0), "The factor of 'network' must be above 0"),
    ],
)
def test_refusals(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
