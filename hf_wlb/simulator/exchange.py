"""What context parallelism's exchange of keys, values and their gradients takes a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_wlb.simulator.cluster import Cluster, Group, all_gather_seconds, reduce_scatter_seconds
from hf_wlb.workload import ProfiledWorkload

_WHOLE = "key_value_exchange"


@dataclass(frozen=True)
class ExchangeLayers:
    """Layers whose keys and values are exchanged alike.

    Attributes:
        count: So many of them.
        token_bytes: Of a token's keys and values on one rank.
        gather: (seconds, seconds a token) of gathering them, copies included.
        reduce: The same of reducing their gradients.
    """

    count: float
    token_bytes: float
    gather: tuple[float, float]
    reduce: tuple[float, float]


@dataclass(frozen=True)
class Exchange:
    """What context parallelism's exchange takes among the ranks of one group.

    Attributes:
        cp_size: Of the group.
        layers: Of the model, or of a part of it.
        gathers: How often a layer's keys and values are gathered: twice if its forward runs twice.
        measured: Times that take the place of those counted for the layers: a profile with ``key_value_exchange`` (then
            all of a layer's exchange but a second gather), or with both ``all_gather`` and ``reduce_scatter``.
    """

    cp_size: int
    layers: tuple[ExchangeLayers, ...]
    gathers: int
    measured: ProfiledWorkload | None = None

    def parts(self, tokens: int) -> tuple[float, float]:
        """Seconds of the gathers in forward, and of all that backward exchanges."""
        if self.cp_size == 1 or not tokens:
            return 0.0, 0.0
        forward = backward = 0.0
        for layers in self.layers:
            gather, reduce, again = self._of_layer(layers, tokens)
            forward += layers.count * gather
            backward += layers.count * (reduce + (self.gathers - 1) * again)
        return forward, backward

    def _of_layer(self, layers: ExchangeLayers, tokens: int) -> tuple[float, float, float]:
        """Seconds of a gather, of a reduction, and of gathering again."""
        if self.measured is None:
            gather = layers.gather[0] + layers.gather[1] * tokens
            return gather, layers.reduce[0] + layers.reduce[1] * tokens, gather
        size = int(tokens * layers.token_bytes)

        def seconds(operation: str) -> float:
            assert self.measured is not None
            return self.measured.collective_seconds(operation, self.cp_size, size)

        if (_WHOLE, self.cp_size) not in self._sampled:
            return seconds("all_gather"), seconds("reduce_scatter"), seconds("all_gather")
        # Forward and backward move as many bytes, and copy about as many.
        half = seconds(_WHOLE) / 2
        return half, half, seconds("all_gather") if ("all_gather", self.cp_size) in self._sampled else half

    @cached_property
    def _sampled(self) -> frozenset[tuple[str, int]]:
        return frozenset(sample[:2] for sample in self.measured.profile.collectives) if self.measured else frozenset()

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable content."""
        layers = [[part.count, part.token_bytes, list(part.gather), list(part.reduce)] for part in self.layers]
        measured = None if self.measured is None else self.measured.to_dict()
        return {"cp_size": self.cp_size, "layers": layers, "gathers": self.gathers, "measured": measured}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Exchange:
        """What ``to_dict`` gave."""
        layers = tuple(ExchangeLayers(count, size, (g[0], g[1]), (r[0], r[1])) for count, size, g, r in data["layers"])
        measured = None if data["measured"] is None else ProfiledWorkload.from_dict(data["measured"])
        return cls(data["cp_size"], layers, data["gathers"], measured)


def exchange_is_sampled(profile: ProfiledWorkload, cp_size: int) -> bool:
    """Whether a profile tells what an exchange among so many ranks takes."""
    sampled = {sample[0] for sample in profile.profile.collectives if sample[1] == cp_size}
    return _WHOLE in sampled or {"all_gather", "reduce_scatter"} <= sampled


def count_exchange(
    token_bytes: Sequence[float],
    cluster: Cluster,
    group: Group,
    *,
    gradient_checkpointing: bool,
    measured: ProfiledWorkload | None = None,
) -> Exchange:
    """The exchange of layers among a group of ranks.

    Args:
        token_bytes: Of a token's keys and values on one rank, of every layer.
        cluster: What links and memory take.
        group: The context-parallel ranks.
        gradient_checkpointing: Whether forward, and so its gather, runs twice.
        measured: A profile, if it is to be read instead, see ``Exchange``.
    """
    by_bytes: dict[float, int] = {}
    for size in token_bytes:
        by_bytes[size] = by_bytes.get(size, 0) + 1
    layers = tuple(_layers(count, size, cluster, group) for size, count in by_bytes.items())
    return Exchange(group.size, layers, 2 if gradient_checkpointing else 1, measured)


def _layers(count: int, token_bytes: float, cluster: Cluster, group: Group) -> ExchangeLayers:
    """The links' times of keys and of values, and the bytes that are copied around them.

    Forward picks the keys that a rank's chunks read: of evenly cut documents 1 + 1/(2 c) times all of them. Backward
    adds gradients of keys that both chunks read, on average (c + 1)/(4 c) of all, puts all into the order that they are
    sent in, and adds up what has come (see ``hf_wlb.attention.function``). Of 4K to 128K tokens on four H200 that is
    within 10% of what was measured.
    """
    ranks = group.size

    def line(seconds: Callable[[Cluster, Group, float], float], copied: float) -> tuple[float, float]:
        """Intercept and slope in tokens: a collective's time is a straight line in its bytes."""
        small, large = seconds(cluster, group, 1e6), seconds(cluster, group, 2e6)
        per_byte = (large - small) / 1e6
        intercept = 2 * (2 * small - large)  # keys and values travel apart
        return intercept, token_bytes * (per_byte + copied / cluster.memory_bytes_per_second)

    picking = 2 * (1 + 1 / (2 * ranks))
    adding = 3 * (ranks + 1) / (4 * ranks) + 2 + (1 + 1 / ranks)
    return ExchangeLayers(count, token_bytes, line(all_gather_seconds, picking), line(reduce_scatter_seconds, adding))
