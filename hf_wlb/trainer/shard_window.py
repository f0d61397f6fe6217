"""What context parallelism logs: how evenly micro-batches were shared out, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Iterable

from hf_wlb.attention import KernelMeter
from hf_wlb.data.shards import ShardInfo
from hf_wlb.parallel import ParallelMesh, gather_figures

_STRATEGIES = ("per_sequence", "per_document", "placed")


class ShardWindow:
    """The figures of sharding since the last log, all replicas together.

    Micro-batches that were topped up to have a token for every rank are left out of the predicted ones.

    Args:
        mesh: This process's place.
        meter: Times this process's attention kernels.
    """

    def __init__(self, mesh: ParallelMesh, meter: KernelMeter) -> None:
        self._mesh = mesh
        self._meter = meter
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self._meter.take()
        self._seconds = 0.0
        self._steps = 0
        self._own = self._slowest = self._mean = self._skew = 0.0
        self._strategies = dict.fromkeys(_STRATEGIES, 0)

    def add(self, micro_batches: Iterable[ShardInfo]) -> None:
        """Takes the micro-batches of a step in, which is about to be trained."""
        self._seconds += self._meter.drain()  # of the steps before, so that measurements do not pile up
        self._steps += 1
        for info in micro_batches:
            predicted = info.plan.predicted
            if info.topped_up or predicted is None:
                continue
            self._own += float(predicted[self._mesh.cp_rank])
            self._slowest += float(predicted.max())
            self._mean += float(predicted.mean())
            self._skew += info.plan.token_skew
            self._strategies[info.plan.strategy] += 1

    def means(self) -> dict[str, float]:
        """What goes into the log; all processes must call this together.

        Returns:
            ``cp_imbalance``, predicted time of the slowest rank over that of the mean one; ``cp_workload_rank_{r}``,
            rank r's predicted share of the work; ``cp_token_skew``, largest deviation of a rank's tokens from an even
            share; ``cp_{strategy}``, share of micro-batches that it was chosen for. Measured:
            ``cp_attention_ms_rank_{r}``, time of rank r's attention kernels in a step, and ``cp_attention_imbalance``,
            that of the slowest rank over the mean. Ranks are those of context parallelism; figures are means over
            replicas, weighted by time.
        """
        if not self._steps:
            return {}
        self._seconds += self._meter.take()
        own = (self._seconds, self._own, self._slowest, self._mean, self._skew, *self._strategies.values())
        rows, size = gather_figures(own)[:: self._mesh.tp_size], self._mesh.cp_size
        replicas = [rows[first : first + size] for first in range(0, len(rows), size)]
        found: dict[str, float] = {}
        slowest, mean, skew, *counts = (sum(ranks[0][place] for ranks in replicas) for place in range(2, len(own)))
        if mean:
            found = {"cp_imbalance": slowest / mean, "cp_token_skew": skew / sum(counts)}
            found |= {f"cp_{name}": count / sum(counts) for name, count in zip(_STRATEGIES, counts, strict=True)}
            for rank in range(size):
                found[f"cp_workload_rank_{rank}"] = sum(ranks[rank][1] for ranks in replicas) / (mean * size)
        seconds = [[row[0] for row in ranks] for ranks in replicas]
        if total := sum(map(sum, seconds)):
            found["cp_attention_imbalance"] = sum(map(max, seconds)) * size / total
        for rank, taken in enumerate(zip(*seconds, strict=True)):
            found[f"cp_attention_ms_rank_{rank}"] = 1000 * sum(taken) / (len(replicas) * self._steps)
        self.clear()
        return found
