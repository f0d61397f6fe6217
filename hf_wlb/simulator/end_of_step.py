"""What follows the last backward of a step: gradients are summed, clipped and applied."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_wlb.simulator.cluster import Group
from hf_wlb.simulator.counts import GRADIENT_BYTES, NUMBER_BYTES, ModelShape
from hf_wlb.simulator.linear import Links
from hf_wlb.simulator.split import Split
from hf_wlb.staging import StageLayout

BUCKET_BYTES = 2**28
"""Gradients that go in one all-reduce, as in ``hf_wlb.parallel.pipeline.gradients``."""
# Bytes of a weight, all in float32. AdamW reads weight, gradient and both moments, and writes all but the gradient.
_OPTIMIZER_BYTES = 4 * 4 + 3 * 4
_NORM_BYTES = 4 + 2 * 4  # read for the norm; read and written to clip
_BUCKET_COPY_BYTES = 2 * 8 + 8  # into the bucket and back, and divided by the number of ranks


@dataclass(frozen=True)
class EndOfStep:
    """Seconds after the last backward, on the stage with most parameters.

    Attributes:
        reduce: Summing gradients over replicas and context-parallel ranks, in float32, as if none were hidden by
            backward; under FSDP, where they are summed layer by layer, those of the layer that comes last.
        norm: Of all gradients, and clipping by it.
        optimizer: AdamW.
        gather: Parameters of the next step's first layer, under FSDP; other layers' are gathered while others compute.
    """

    reduce: float
    norm: float
    optimizer: float
    gather: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.reduce + self.norm + self.optimizer + self.gather


def end_of_step(shape: ModelShape, split: Split, layout: StageLayout, links: Links) -> EndOfStep:
    """Of a model whose stages are laid out so."""
    memory = links.cluster.memory_bytes_per_second
    stages = [shape.stage_parameters(layout.bounds[s], layout.bounds[s + 1]) for s in range(layout.pp_size)]
    held = max(stages) / split.tp_size
    own, gather = held, 0.0
    if split.fsdp:
        group = split.reduce_groups[0]
        own /= group.size
        last = max(layer.parameters for layer in shape.layers) / split.tp_size
        reduce = links.reduce_scatter(group, GRADIENT_BYTES * last)
        gather = links.all_gather(group, NUMBER_BYTES * last)
    else:
        reduce = _all_reduce(links, split.reduce_groups, GRADIENT_BYTES * held)
        reduce += _BUCKET_COPY_BYTES * held / memory if split.reduce_groups else 0.0
    if shape.tied and split.pp_size > 1:  # first and last stage hold the same embedding
        ends = Group(2, split.pp_stride * (split.pp_size - 1))
        reduce += links.all_reduce(ends, GRADIENT_BYTES * shape.vocabulary_parameters / split.tp_size)
    scalar = links.all_reduce(Group(split.gpus, 1), GRADIENT_BYTES)
    return EndOfStep(reduce, scalar + _NORM_BYTES * own / memory, _OPTIMIZER_BYTES * own / memory, gather)


def _all_reduce(links: Links, groups: tuple[Group, ...], size_bytes: float) -> float:
    """Bucket by bucket: scattered over the inner ranks, summed over the outer ones, gathered again."""
    if not groups:
        return 0.0
    buckets = max(1, math.ceil(size_bytes / BUCKET_BYTES))
    size, (*inner, outer) = size_bytes / buckets, groups
    seconds = 0.0
    for group in inner:
        seconds += links.reduce_scatter(group, size) + links.all_gather(group, size)
        size /= group.size
    return buckets * (seconds + links.all_reduce(outer, size))
