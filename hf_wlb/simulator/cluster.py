"""GPUs and the links between them: what a collective or a transfer takes.

Every figure is measured (then it says where) or an assumption; ``ASSUMED`` names those that a prediction should be
tried with changed, by ``changed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hf_wlb.sharding.cost import HIDDEN, WAITING
from hf_wlb.workload import HARDWARE_PRESETS, HardwareFigures
from hf_wlb.workload.analytic import SEGMENT_OVERHEAD_TOKENS
from hf_wlb.workload.base import is_whole_number
from hf_wlb.workload.model_flops import bf16_peak


def _check_above_0(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be above 0 and finite, but {value!r} was given.")


@dataclass(frozen=True)
class Link:
    """What one GPU sends or receives at a time.

    Args:
        bytes_per_second: Of large messages.
        latency_seconds: Of one round of a collective, or of one message, however small.

    Raises:
        ValueError: If the rate is not above 0, the latency is negative, or one is not finite.
    """

    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        _check_above_0("bytes_per_second of a link", self.bytes_per_second)
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ValueError(
                f"latency_seconds of a link must be finite and at least 0, but {self.latency_seconds!r} was given."
            )

    def seconds(self, size_bytes: float, rounds: int = 1) -> float:
        """Of so many bytes through it, in so many rounds."""
        return size_bytes / self.bytes_per_second + rounds * self.latency_seconds


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Args:
        name: What the figures belong to.
        gpus_per_node: GPUs that ``inside`` connects.
        memory_bytes: Of a GPU, that training may use.
        figures: Rates of matrix products and attention.
        memory_bytes_per_second: What element-wise kernels reach, bytes read and written counted.
        inside: NVLink, from any GPU of a node to the others.
        between: One GPU's share of the network between nodes; all GPUs of a node use theirs at the same time.
        segment_overhead_tokens: What short rows of attention calls lose, see ``AnalyticWorkload``.
        hidden_exchange: Share of the exchange of keys and values that runs while kernels do, see
            ``hf_wlb.sharding.cost.HIDDEN``. Sharders choose by that constant, whatever is said here.
        unlike_chunks: What waiting for ranks with more to do on chunks costs, of the time waited, see
            ``hf_wlb.sharding.cost.WAITING``; the same holds.

    Raises:
        ValueError: For a size or rate that is not above 0 and finite, a negative overhead or cost of waiting, or a
            share that is not between 0 and 1.
    """

    name: str
    gpus_per_node: int
    memory_bytes: float
    figures: HardwareFigures
    memory_bytes_per_second: float
    inside: Link
    between: Link
    segment_overhead_tokens: float = SEGMENT_OVERHEAD_TOKENS
    hidden_exchange: float = HIDDEN
    unlike_chunks: float = WAITING

    def __post_init__(self) -> None:
        if not is_whole_number(self.gpus_per_node) or self.gpus_per_node < 1:
            raise ValueError(
                f"gpus_per_node of {self.name!r} must be a whole number of at least 1, got {self.gpus_per_node!r}."
            )
        for key in ("memory_bytes", "memory_bytes_per_second"):
            _check_above_0(f"{key} of {self.name!r}", getattr(self, key))
        for key in ("segment_overhead_tokens", "unlike_chunks"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{key} of {self.name!r} must be finite and at least 0, got {value!r}.")
        if not 0 <= self.hidden_exchange <= 1:
            raise ValueError(
                f"hidden_exchange of {self.name!r} is a share and must be between 0 and 1, got "
                f"{self.hidden_exchange!r}."
            )


# Measured: bare all-gathers among four H200 of one node, benchmark of context parallelism
# (recipes/benchmarks/results/context_parallel.json). 4 MiB to 2 GiB in all lie within 5% of 30 us plus what a rank
# receives at 320 GB/s; the 30 us are taken as two rounds of a tree, so that eight GPUs take three.
_NVLINK = Link(320e9, 15e-6)
# Assumption: 400 Gb/s a GPU, four fifths of which a collective reaches, and somewhat more a round than NVLink.
_NETWORK = Link(0.8 * 400e9 / 8, 20e-6)
# That element-wise kernels reach four fifths of the data sheet's rate is an assumption.
_REACHED = 0.8
# Of the SXM cards: bytes a second by their data sheets, and what they are sold as. An H100's driver reports 85.0e9
# bytes; what is above 80e9 is left to it and to fragmentation. An H200 computes as fast as an H100.
_H100_MEMORY_BYTES_PER_SECOND, _H100_MEMORY_BYTES = _REACHED * 3.35e12, 80e9
_H200_MEMORY_BYTES_PER_SECOND, _H200_MEMORY_BYTES = _REACHED * 4.8e12, 141e9


def _h100(name: str) -> Cluster:
    return Cluster(
        name=name,
        gpus_per_node=8,  # HGX and DGX H100
        memory_bytes=_H100_MEMORY_BYTES,
        figures=HARDWARE_PRESETS[name],  # attention measured, matrix products assumed at 0.75 of the peak
        memory_bytes_per_second=_H100_MEMORY_BYTES_PER_SECOND,
        inside=_NVLINK,
        between=_NETWORK,
    )


CLUSTERS: Mapping[str, Cluster] = MappingProxyType({name: _h100(name) for name in ("h100", "h100-flash-attn-4")})
"""Nodes of eight H100 SXM by name: "h100" (with flash-attn 2) and "h100-flash-attn-4"."""

_MEMORY_OF_CARD = {
    "H100": (_H100_MEMORY_BYTES_PER_SECOND, _H100_MEMORY_BYTES),
    "H200": (_H200_MEMORY_BYTES_PER_SECOND, _H200_MEMORY_BYTES),
}


def on_device(cluster: Cluster, device_name: str) -> Cluster:
    """The cluster with the memory, its size and speed, of a card.

    Args:
        cluster: Of H100 or H200 SXM, which compute alike.
        device_name: As the driver calls the card.

    Raises:
        ValueError: If it is neither of these.

    >>> h200 = on_device(CLUSTERS["h100"], "NVIDIA H200")
    >>> h200.memory_bytes_per_second / 1e12, h200.memory_bytes / 1e9
    (3.84, 141.0)
    >>> on_device(CLUSTERS["h100"], "NVIDIA H100 80GB HBM3") == CLUSTERS["h100"]
    True
    """
    card = next((name for name in _MEMORY_OF_CARD if name in device_name), None)
    if card is None or bf16_peak(device_name) is None:  # other cards carry these names too
        raise ValueError(
            f"No memory is known of a device called {device_name!r}; known are {' and '.join(_MEMORY_OF_CARD)} SXM. "
            "Give a Cluster of your own."
        )
    speed, size = _MEMORY_OF_CARD[card]
    return replace(cluster, memory_bytes_per_second=speed, memory_bytes=size)


ASSUMED: Mapping[str, str] = MappingProxyType(
    {
        "matmul": "FLOP/s of large matrix products: 0.75 of the data sheet's peak, assumed",
        "attention forward": "FLOP/s of the attention kernel's forward, measured at 64K tokens on an H200",
        "attention backward": "FLOP/s of the attention kernel's backward, measured at 64K tokens on an H200",
        "element-wise": "bytes a second of kernels that are no products: 0.8 of the data sheet's, assumed",
        "NVLink": "bytes a second that a GPU receives within a node, measured among four H200",
        "network": "bytes a second that a GPU receives from other nodes: 0.8 of 400 Gb/s, assumed",
        "latency": "seconds of a round of a collective: measured within a node, assumed between nodes",
        "short rows": "queries over its keys that a row of an attention call wastes, measured with flash-attn 4",
        "hidden exchange": "share of the exchange that local documents hide, measured among four H100",
        "unlike chunks": "cost of waiting for ranks with more to do on chunks, of the time: one case on four H100",
    }
)
"""Constants that a prediction rests on, besides what is counted, and where each is from."""


def _figures(cluster: Cluster, matmul: float = 1.0, forward: float = 1.0, backward: float = 1.0) -> Cluster:
    old = cluster.figures
    new = replace(
        old,
        matmul_flops_per_second=matmul * old.matmul_flops_per_second,
        attention_flops_per_second=forward * old.attention_flops_per_second,
        # Written out, because it is the forward's where none was given.
        attention_backward_flops_per_second=backward * old.attention_backward_rate,
    )
    return replace(cluster, figures=new)


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_second=link.bytes_per_second * factor)


def _later(link: Link, factor: float) -> Link:
    return replace(link, latency_seconds=link.latency_seconds * factor)


_CHANGES: Mapping[str, Callable[[Cluster, float], Cluster]] = {
    "matmul": lambda old, factor: _figures(old, matmul=factor),
    "attention forward": lambda old, factor: _figures(old, forward=factor),
    "attention backward": lambda old, factor: _figures(old, backward=factor),
    "element-wise": lambda old, factor: replace(old, memory_bytes_per_second=old.memory_bytes_per_second * factor),
    "NVLink": lambda old, factor: replace(old, inside=_faster(old.inside, factor)),
    "network": lambda old, factor: replace(old, between=_faster(old.between, factor)),
    "latency": lambda old, factor: replace(old, inside=_later(old.inside, factor), between=_later(old.between, factor)),
    "short rows": lambda old, factor: replace(old, segment_overhead_tokens=old.segment_overhead_tokens * factor),
    "hidden exchange": lambda old, factor: replace(old, hidden_exchange=old.hidden_exchange * factor),
    "unlike chunks": lambda old, factor: replace(old, unlike_chunks=old.unlike_chunks * factor),
}


def changed(cluster: Cluster, constant: str, factor: float) -> Cluster:
    """The cluster with one of ``ASSUMED`` multiplied by a factor, to see what a prediction owes to it.

    Args:
        cluster: As it is assumed to be.
        constant: A key of ``ASSUMED``.
        factor: Above 0.

    Raises:
        ValueError: For an unknown constant, or a factor that is not above 0 and finite.

    >>> faster = changed(CLUSTERS["h100"], "NVLink", 1.25)
    >>> faster.inside.bytes_per_second / CLUSTERS["h100"].inside.bytes_per_second, faster.between == _NETWORK
    (1.25, True)
    """
    if constant not in ASSUMED:
        raise ValueError(f"There is no assumed constant {constant!r}; they are {', '.join(ASSUMED)}.")
    _check_above_0(f"The factor of {constant!r}", factor)
    return _CHANGES[constant](cluster, factor)


@dataclass(frozen=True)
class Group:
    """Ranks of one axis of the mesh.

    Args:
        size: Ranks.
        stride: How many GPUs lie from one to the next.

    Raises:
        ValueError: If one is no whole number of at least 1.
    """

    size: int
    stride: int

    def __post_init__(self) -> None:
        for key in ("size", "stride"):
            value = getattr(self, key)
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"{key} of a group of ranks must be a whole number of at least 1, got {value!r}.")

    def per_node(self, gpus_per_node: int) -> int:
        """Ranks of the group in one node.

        >>> Group(8, 1).per_node(8), Group(4, 4).per_node(8), Group(4, 16).per_node(8)
        (8, 2, 1)
        """
        return min(self.size, max(1, gpus_per_node // self.stride))

    def nodes(self, gpus_per_node: int) -> int:
        """Nodes that the group lies in.

        >>> Group(8, 1).nodes(8), Group(4, 4).nodes(8), Group(4, 16).nodes(8)
        (1, 2, 4)
        """
        return math.ceil(self.size / self.per_node(gpus_per_node))


def all_gather_seconds(cluster: Cluster, group: Group, size_bytes: float) -> float:
    """Until every rank has the whole of a tensor that lies in equal parts on all of them.

    In a node i ranks share their network links: each fetches its i-th part of what other nodes have, then they hand on
    to one another what they have fetched. The two steps do not overlap.

    Args:
        cluster: Where.
        group: Which ranks.
        size_bytes: Of the whole tensor.

    On 2 nodes with 8 ranks each, 1.6 GB: 0.1 GB from the other node at 40 GB/s in one round of 20 us, and 1.4 GB
    inside at 320 GB/s in three rounds of 15 us:

    >>> round(all_gather_seconds(CLUSTERS["h100"], Group(16, 1), 1.6e9) * 1e6)
    6940
    """
    if group.size == 1 or not size_bytes:
        return 0.0
    inside, nodes = group.per_node(cluster.gpus_per_node), group.nodes(cluster.gpus_per_node)
    seconds = 0.0
    if nodes > 1:
        seconds += cluster.between.seconds((nodes - 1) / nodes * size_bytes / inside, _rounds(nodes))
    if inside > 1:
        seconds += cluster.inside.seconds((inside - 1) / inside * size_bytes, _rounds(inside))
    return seconds


def reduce_scatter_seconds(cluster: Cluster, group: Group, size_bytes: float) -> float:
    """Until every rank has the sum of its own part of a tensor; moves what an all-gather moves, the other way.

    Args:
        cluster: Where.
        group: Which ranks.
        size_bytes: Of the whole tensor, of which every rank has a term.
    """
    return all_gather_seconds(cluster, group, size_bytes)


def all_reduce_seconds(cluster: Cluster, group: Group, size_bytes: float) -> float:
    """Until every rank has the sum of all ranks' tensors: a reduce-scatter and an all-gather.

    Args:
        cluster: Where.
        group: Which ranks.
        size_bytes: Of the tensor that every rank has.
    """
    return reduce_scatter_seconds(cluster, group, size_bytes) + all_gather_seconds(cluster, group, size_bytes)


def send_seconds(cluster: Cluster, stride: int, size_bytes: float) -> float:
    """Until a tensor has come to another GPU.

    Args:
        cluster: Where.
        stride: How many GPUs away; one node's worth or more goes over the network.
        size_bytes: Of the tensor.
    """
    if not size_bytes:
        return 0.0
    return (cluster.inside if stride < cluster.gpus_per_node else cluster.between).seconds(size_bytes)


def _rounds(ranks: int) -> int:
    """Of a tree."""
    return math.ceil(math.log2(ranks))
