"""About how long candidates' steps take, to simulate the likely ones first. Nothing is decided by these figures.

To a step's least time come what its micro-batches are apart, replica by replica, and what ranks lose that share a
micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hf_wlb.packing import StepTimeModel
from hf_wlb.sharding import ShardCosts, Sharder, ShardingConfig
from hf_wlb.sharding.types import IntArray
from hf_wlb.simulator.search_space import Bounded, Sample

FloatArray = NDArray[np.float64]

_POOLED = 4  # steps whose documents are dealt to them together
_PLACES = (0.3, 0.6, 0.9)  # by attention work, of the micro-batches that ranks share on trial


@dataclass(frozen=True, eq=False)
class Estimator:
    """Estimates steps of ``micro_batches`` micro-batches over all replicas.

    Attributes:
        sample: Of the documents.
        micro_batches: Of a step on all replicas.
        shared: Documents of the micro-batches that ranks share on trial, int64 arrays.
    """

    sample: Sample
    micro_batches: int
    shared: tuple[IntArray, ...]

    @classmethod
    def of(cls, sample: Sample, micro_batches: int) -> Estimator:
        """Takes three of next-fit's micro-batches, a lighter, a usual and a heavier one."""
        pairs = np.add.reduceat(sample.lengths.astype(np.float64) ** 2, sample.starts)
        order = np.argsort(pairs, kind="stable")
        chosen = sorted({int(order[int(place * len(order))]) for place in _PLACES})
        packed = np.split(sample.lengths, sample.starts[1:])
        return cls(sample, micro_batches, tuple(-np.sort(-packed[place]) for place in chosen))

    def plain(self, found: Bounded) -> float:
        """Seconds of a step's tokens under Plain-4D."""
        split, work = found.candidate.split, self._work(found)
        loads = np.add.reduceat(work, self.sample.starts)
        steps = max(1, len(loads) // self.micro_batches)
        loads = np.resize(loads, steps * self.micro_batches).reshape(steps, split.dp_size, -1)
        if StepTimeModel(split.pp_size, split.fsdp).lockstep:
            taken = loads.max(axis=1).sum(axis=1)
        else:
            taken = (loads.sum(axis=2) + (split.pp_size - 1) * loads.max(axis=2)).max(axis=1)
        return self._seconds(found, float(taken.sum() / self._even(found, loads).sum()), "per_sequence")

    def ours(self, found: Bounded) -> float:
        """The same with documents over a micro-batch's mean work alone in one, and the others spread over the rest.

        Micro-batches of some steps are dealt to these by their work, as if documents could wait for as long.
        """
        split, work = found.candidate.split, self._work(found)
        own = self.micro_batches // split.dp_size
        taken = even = 0.0
        for first, stop, steps in self._windows():
            loads = evened_out(work[first:stop], steps * self.micro_batches)
            even += float(loads.sum()) / split.dp_size / own * (own + split.pp_size - 1)
            if StepTimeModel(split.pp_size, split.fsdp).lockstep:
                taken += float(loads[:: split.dp_size].sum())
            else:
                usual = loads.sum() / split.dp_size + (split.pp_size - 1) * loads[-1] * steps
                taken += float(max(usual, split.pp_size * loads[:steps].sum()))
        return self._seconds(found, taken / even, "adaptive")

    def _windows(self) -> list[tuple[int, int, int]]:
        """First document, the one behind the last, and steps, of stretches of ``_POOLED`` steps."""
        starts, size = self.sample.starts.tolist(), _POOLED * self.micro_batches
        if len(starts) <= size:
            return [(0, len(self.sample.lengths), max(1, round(len(starts) / self.micro_batches)))]
        edges = starts[::size]
        return [(first, stop, _POOLED) for first, stop in pairwise(edges)]

    def _work(self, found: Bounded) -> FloatArray:
        work: FloatArray = found.model.workload.document(self.sample.lengths)
        return work

    def _even(self, found: Bounded, loads: FloatArray) -> FloatArray:
        """Of steps ``[steps, replicas, micro-batches]`` if all micro-batches were alike, ``[steps]``."""
        own = loads.shape[2]
        even: FloatArray = loads.sum(axis=(1, 2)) / loads.shape[1] / own * (own + found.candidate.split.pp_size - 1)
        return even

    def _seconds(self, found: Bounded, apart: float, sharding: str) -> float:
        ranks, workload = found.candidate.split.cp_size, found.model.workload
        sharder = Sharder(ShardingConfig(ranks, sharding), workload)  # type: ignore[arg-type]  # one of its own
        taken = sum(sharder.plan(lengths).slowest for lengths in self.shared)
        ideal = sum(ShardCosts.of(lengths, workload, ranks).ideal for lengths in self.shared)
        return found.pipeline_seconds * apart * taken / ideal + found.end_seconds


def evened_out(work: FloatArray, places: int) -> FloatArray:
    """Loads of so many places when the heaviest documents have one each and the rest is spread evenly, descending.

    >>> evened_out(np.array([1.0, 6.0, 2.0, 1.0, 2.0]), 3).tolist()
    [6.0, 3.0, 3.0]
    """
    heaviest, rest = -np.sort(-work), float(work.sum())
    loads = np.zeros(places)
    for place in range(places):
        even = rest / (places - place)
        if place >= len(heaviest) or heaviest[place] <= even:
            loads[place:] = even
            break
        loads[place] = heaviest[place]
        rest -= heaviest[place]
    return loads
