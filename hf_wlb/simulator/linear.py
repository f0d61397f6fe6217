"""What a token costs one rank besides attention and its exchange: layers, embedding, head with loss.

Linear work has one rate, as in ``ProfiledWorkload``: it is read at the tokens that a rank holds of a typical
micro-batch. What a micro-batch costs whatever its length (latencies of collectives, casts of weights, sums of their
gradients) is in it, spread over these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_wlb.simulator.cluster import (
    Cluster,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from hf_wlb.simulator.counts import ACCUMULATE_BYTES, CAST_BYTES, NUMBER_BYTES, LayerShape, ModelShape
from hf_wlb.workload import ProfiledWorkload
from hf_wlb.workload.curves import PowerCurve

Samples = Sequence[tuple[int, float, float]]


@dataclass(frozen=True)
class Pass:
    """Seconds of the phases of a micro-batch; a forward that runs again in backward counts there."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LinearCosts:
    """Seconds a token on one rank.

    Attributes:
        layers: Of every decoder layer.
        embedding: Of what comes before the first.
        head: Of final norm, head and loss.
    """

    layers: tuple[Pass, ...]
    embedding: Pass
    head: Pass

    @property
    def total(self) -> float:
        """Of the whole model, forward plus backward."""
        return sum(layer.total for layer in self.layers) + self.embedding.total + self.head.total

    def of_stage(self, first: int, stop: int) -> Pass:
        """Of the stage that holds layers ``first`` up to ``stop``, embedding and head included."""
        parts = list(self.layers[first:stop])
        parts += [self.embedding] * (first == 0) + [self.head] * (stop == len(self.layers))
        return Pass(sum(part.forward for part in parts), sum(part.backward for part in parts))


@dataclass(frozen=True)
class Links:
    """Collectives: from a profile where it holds them for ranks that lie alike, else from the cluster's figures.

    A profile's were measured among neighbours. Ranks that lie apart in one node are taken to be as fast.
    """

    cluster: Cluster
    profile: ProfiledWorkload | None = None

    def measured(self, group: Group) -> bool:
        """Whether a profile's collectives among so many ranks are those of the group."""
        return group.stride == 1 or group.nodes(self.cluster.gpus_per_node) == 1

    def _of_profile(self, operation: str, group: Group, size_bytes: float) -> float | None:
        if self.profile is None or not self.measured(group):
            return None
        if not any(sample[:2] == (operation, group.size) for sample in self.profile.profile.collectives):
            return None
        return self.profile.collective_seconds(operation, group.size, int(size_bytes))

    def all_gather(self, group: Group, size_bytes: float) -> float:
        """See ``all_gather_seconds``."""
        if group.size == 1 or not size_bytes:
            return 0.0
        found = self._of_profile("all_gather", group, size_bytes)
        return all_gather_seconds(self.cluster, group, size_bytes) if found is None else found

    def reduce_scatter(self, group: Group, size_bytes: float) -> float:
        """See ``reduce_scatter_seconds``."""
        if group.size == 1 or not size_bytes:
            return 0.0
        found = self._of_profile("reduce_scatter", group, size_bytes)
        return reduce_scatter_seconds(self.cluster, group, size_bytes) if found is None else found

    def all_reduce(self, group: Group, size_bytes: float) -> float:
        """See ``all_reduce_seconds``."""
        if group.size == 1 or not size_bytes:
            return 0.0
        found = self._of_profile("all_reduce", group, size_bytes)
        return all_reduce_seconds(self.cluster, group, size_bytes) if found is None else found

    def send(self, stride: int, size_bytes: float) -> float:
        """See ``send_seconds``."""
        if not size_bytes:
            return 0.0
        found = None
        if stride < self.cluster.gpus_per_node:
            found = self._of_profile("send_recv", Group(2, stride), size_bytes)
        return send_seconds(self.cluster, stride, size_bytes) if found is None else found


@dataclass(frozen=True)
class LinearCounter:
    """Counts, or reads off a profile, what a token costs one rank.

    Attributes:
        shape: Of the model.
        links: What collectives take.
        tp_group: Ranks that share every matrix.
        tokens: Of a typical micro-batch, on one rank.
        gradient_checkpointing: Whether every layer's forward runs twice.
        compiled: Whether element-wise work is done in fused kernels.
    """

    shape: ModelShape
    links: Links
    tp_group: Group
    tokens: int
    gradient_checkpointing: bool
    compiled: bool

    def costs(self, profile: ProfiledWorkload | None = None) -> LinearCosts:
        """Sections that the profile holds are read off it, the others counted."""
        sections = None if profile is None else profile.profile
        layers = tuple(self._layer(layer) for layer in self.shape.layers)
        if sections is not None and sections.linear:
            layers = (self._measured(sections.linear, again=self.gradient_checkpointing),) * len(layers)
        embedding, head = self._embedding(), self._head()
        if sections is not None and sections.embedding:
            embedding = self._measured(sections.embedding)
        if sections is not None and sections.head:
            head = self._measured(sections.head)
        return LinearCosts(layers, embedding, head)

    def _measured(self, samples: Samples, again: bool = False) -> Pass:
        """At the typical tokens; both passes' sum is what ``ProfiledWorkload`` reads."""
        counts, forward, backward = zip(*samples, strict=True)
        at = np.array([self.tokens], dtype=np.float64)
        both = [(2 if again else 1) * f + b for f, b in zip(forward, backward, strict=True)]
        total = float(PowerCurve(counts, both)(at)[0]) / self.tokens
        # What runs again, and no less, belongs to backward.
        share = float(PowerCurve(counts, forward)(at)[0]) / self.tokens / total
        return Pass(share * total, (1 - share) * total)

    def _layer(self, layer: LayerShape) -> Pass:
        tp = self.tp_group.size
        product = 2 * layer.count.weights / tp / self._matmul
        moved, moved_back = self.shape.element_wise_bytes(layer, tp, compiled=self.compiled)
        weights = layer.parameters / tp / self.tokens
        forward = product + self._moving(moved + CAST_BYTES * weights) + 2 * self._all_reduce
        backward = 2 * product + self._moving(moved_back + ACCUMULATE_BYTES * weights) + 2 * self._all_reduce
        return Pass(forward, backward + forward if self.gradient_checkpointing else backward)

    def _embedding(self) -> Pass:
        """A token's row is read and written; its gradient read and added to a row of zeros, which is added up."""
        table = self.shape.vocabulary_parameters / self.tp_group.size / self.tokens
        row = NUMBER_BYTES * self.shape.hidden
        zeros = 4 + 12  # of a number in float32: cleared, then added to the sum of the micro-batches before
        return Pass(self._moving(2 * row) + self._all_reduce, self._moving(3 * row + zeros * table))

    def _head(self) -> Pass:
        """The loss takes its gradients in forward, see ``hf_wlb.loss``: three products, no second forward.

        Logits are read twice (largest and sum, then gradient) and written once more.
        """
        tp = self.tp_group.size
        weights = self.shape.vocabulary_parameters / tp
        norm = 2 * NUMBER_BYTES * self.shape.hidden
        logits = 3 * NUMBER_BYTES * self.shape.vocabulary / tp
        casts = (CAST_BYTES + ACCUMULATE_BYTES) * weights / self.tokens
        forward = 3 * 2 * weights / self._matmul + self._moving(norm + logits + casts) + self._all_reduce
        return Pass(forward, self._moving(3 * norm))  # scales the gradient, then the norm's backward

    @property
    def _matmul(self) -> float:
        return self.links.cluster.figures.matmul_flops_per_second

    def _moving(self, size_bytes: float) -> float:
        return size_bytes / self.links.cluster.memory_bytes_per_second

    @property
    def _all_reduce(self) -> float:
        """Of a token's hidden states among the ranks that share matrices."""
        size = self.tokens * self.shape.hidden * NUMBER_BYTES
        return self.links.all_reduce(self.tp_group, size) / self.tokens
