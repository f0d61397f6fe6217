"""Micro-batches of one replica from known lengths, as lists of document keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.utils.data

from hf_wlb.data.documents import DocumentKey
from hf_wlb.data.progress import check_repeatable, check_replica, planned_steps
from hf_wlb.lengths import LengthArray, RandomOrder, StoredOrder
from hf_wlb.packing import ArraySource, PackingConfig, StepPlan, StepPlanner
from hf_wlb.workload import WorkloadModel

_EPOCHS_REMEMBERED = 16


class PlannedBatchSampler(torch.utils.data.Sampler[list[DocumentKey]]):
    """Yields this replica's micro-batches of one epoch in plan order, each a list of document keys.

    A pure function of (lengths, settings, seed, epoch): every rank plans for itself and takes its replica's share.
    One epoch is one complete pass, waiting documents included: every document exactly once (or in pieces, see
    ``PackingConfig.oversize``), the same number of micro-batches on every replica. A dummy is an empty list.

    It knows what it yielded, not what was trained: for resume in mid-epoch use :class:`~hf_wlb.data.WLBDataLoader`.

    Args:
        lengths: Tokens of every document, integers, shape ``[documents]``; a memory map is never copied whole.
        config: Settings of the planner.
        workload: What a document costs.
        dp_rank: The replica to yield for, below ``config.dp_size``.
        seed: Of the order of documents.
        shuffle: Visit documents in a random order, another one every epoch; else as they are stored.

    Raises:
        ValueError: If the lengths are no flat list of integers, there is no such replica, or the packer gives plans
            that ranks cannot repeat.

    Example:
        >>> from hf_wlb.workload import AnalyticWorkload
        >>> config = PackingConfig(context_length=5, micro_batches_per_replica=2, packer="next-fit")
        >>> sampler = PlannedBatchSampler(
        ...     [4, 1, 3, 2], config, AnalyticWorkload.from_crossover(8), shuffle=False
        ... )
        >>> [[key.length for key in micro_batch] for micro_batch in sampler]
        [[4, 1], [3, 2]]
        >>> len(sampler), sampler.steps(epoch=0)
        (2, 1)
    """

    def __init__(
        self,
        lengths: LengthArray | Sequence[int],
        config: PackingConfig,
        workload: WorkloadModel,
        *,
        dp_rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_replica(config, dp_rank)
        check_repeatable(config)
        self.lengths = lengths if isinstance(lengths, np.ndarray) else _as_array(lengths)
        self.config = config
        self.workload = workload
        self.dp_rank = dp_rank
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self._steps: dict[int, int] = {}
        self.planner(0)  # the lengths are checked there

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields."""
        self.epoch = epoch

    def planner(self, epoch: int) -> StepPlanner:
        """Return a planner at the beginning of an epoch."""
        n = len(self.lengths)
        order = RandomOrder(n, self.seed, epoch) if self.shuffle else StoredOrder(n)
        return StepPlanner(ArraySource(self.lengths, order), self.workload, self.config)

    def keys(self, plan: StepPlan) -> list[list[DocumentKey]]:
        """Return this replica's micro-batches of a step."""
        replica = plan.replicas[self.dp_rank]
        return [[DocumentKey.of(document) for document in micro_batch.documents] for micro_batch in replica]

    def __iter__(self) -> Iterator[list[DocumentKey]]:
        for step in planned_steps(self.planner(self.epoch)):
            yield from self.keys(step.plan)

    def __len__(self) -> int:
        """Micro-batches of the present epoch on this replica."""
        return self.steps(self.epoch) * self.config.micro_batches_per_replica

    def steps(self, epoch: int) -> int:
        """Steps of an epoch. Epochs may differ by a few, as their orders do; each is planned once to count them."""
        if not self.shuffle:
            epoch = 0  # all alike
        if epoch not in self._steps:
            while len(self._steps) >= _EPOCHS_REMEMBERED:
                del self._steps[next(iter(self._steps))]
            self._steps[epoch] = sum(1 for _ in self.planner(epoch))
        return self._steps[epoch]


def _as_array(lengths: Sequence[int]) -> Any:
    array = np.asarray(lengths)
    return array.astype(np.int64) if array.size == 0 else array
