"""How long every forward and backward of a replica takes in one step, from its micro-batches' documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_wlb.packing import MicroBatch
from hf_wlb.sharding import ShardCosts, Sharder, ShardPlan, per_document
from hf_wlb.sharding.types import FloatArray, IntArray
from hf_wlb.simulator.costs import MicroBatchCost, StepModel
from hf_wlb.simulator.placement import BalancedAttention
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.timeline import OpTimes
from hf_wlb.staging import StageLayout
from hf_wlb.workload import WorkloadModel

_TRIED_AT_ONCE = 64  # places of a cut; three rounds find one in 128K tokens


@dataclass(frozen=True, eq=False)
class Operations:
    """What the operations of one replica take.

    Attributes:
        times: Seconds of every operation.
        tokens: On the fullest context-parallel rank, float64 of shape ``(micro-batches, pieces)``.
        ranks: What every context-parallel rank computes of all micro-batches and layers in seconds, exchange left out,
            float64 of shape ``(cp_size,)``.
    """

    times: OpTimes
    tokens: FloatArray
    ranks: FloatArray

    @property
    def micro_batches(self) -> FloatArray:
        """Seconds of every micro-batch on all stages together, shape ``(micro-batches,)``."""
        work: FloatArray = (self.times.forward + self.times.backward).sum(axis=(0, 2))
        return work

    def stages(self, pp_size: int) -> FloatArray:
        """Seconds that every stage works, shape ``(pp_size,)``."""
        work = (self.times.forward + self.times.backward).sum(axis=(1, 2))
        by_stage: FloatArray = work.reshape(-1, pp_size).sum(axis=0)
        return by_stage


class Pricing:
    """Prices replicas of one model under one way of sharing out and one schedule.

    Args:
        model: What prices micro-batches.
        sharder: Shares them out over context-parallel ranks; of ``BalancedAttention`` every rank has an even share.
        schedule: Of the pipeline.

    Raises:
        ValueError: If the sharder is for another number of ranks than the split has, or a stage has fewer layers than
            the schedule has model chunks.
    """

    def __init__(self, model: StepModel, sharder: Sharder, schedule: ScheduleConfig) -> None:
        if sharder.config.cp_size != model.split.cp_size:
            raise ValueError(
                f"The sharder shares micro-batches over {sharder.config.cp_size} ranks, but the split has "
                f"cp_size={model.split.cp_size}: make one for as many."
            )
        self._sharder = sharder
        self._schedule = schedule
        self._workload = model.workload
        self._cp = model.split.cp_size
        layout = model.layout
        if schedule.model_chunks > 1:
            layout = virtual_layout(layout, schedule.model_chunks)
        self._model = replace(model, layout=layout)
        self._stages = layout.pp_size
        #: A rank that has a micro-batch to itself; a share of it is what an ideal rank has to do.
        self._alone = replace(self._model, split=replace(model.split, cp_size=1, fsdp=False))
        self._least = self._model.micro_batch(_one_token_each(self._cp)) if model.split.fsdp else None

    def replica(self, micro_batches: Sequence[MicroBatch]) -> Operations:
        """The operations of a replica, whose micro-batches come in this order."""
        shape = (self._stages, len(micro_batches), self._schedule.pieces)
        forward, backward = np.zeros(shape), np.zeros(shape)
        send, tokens = np.zeros(shape[1:]), np.zeros(shape[1:])
        ranks = np.zeros(self._cp)
        for place, micro_batch in enumerate(micro_batches):
            if micro_batch.tokens < self._cp:
                continue  # a dummy that fills the last step up, or nearly
            lengths = np.array([document.length for document in micro_batch.documents], dtype=np.int64)
            cost, own = self._priced(lengths)
            token_shares, work_shares = piece_shares(lengths, self._schedule.pieces, self._workload)
            forward[:, place] = np.multiply.outer(cost.forward, work_shares)
            backward[:, place] = np.multiply.outer(cost.backward, work_shares)
            send[place] = cost.send * token_shares
            tokens[place] = cost.tokens * token_shares
            ranks += own
        return Operations(OpTimes(forward, backward, send), tokens, ranks)

    def _priced(self, lengths: IntArray) -> tuple[MicroBatchCost, FloatArray]:
        """What a micro-batch costs, and what of that every rank computes."""
        if isinstance(self._sharder, BalancedAttention):
            return self._ideal(lengths)
        plan = self._sharder.plan(lengths)
        parts = self._model.rank_costs(plan)
        return self._model.micro_batch(plan, parts), parts.local + parts.chunks + parts.linear

    def _ideal(self, lengths: IntArray) -> tuple[MicroBatchCost, FloatArray]:
        """An even share of what the micro-batch costs without an exchange; parameters still have to come (FSDP)."""
        whole = self._alone.micro_batch(per_document(lengths, 1))
        forward, backward = (tuple(s / self._cp for s in times) for times in (whole.forward, whole.backward))
        if self._least is not None:
            forward = tuple(map(max, forward, self._least.forward))
            backward = tuple(map(max, backward, self._least.backward))
        cost = MicroBatchCost(
            forward,
            backward,
            whole.send / self._cp,
            -(-whole.tokens // self._cp),
            tuple(s / self._cp for s in whole.attention),
        )
        ideal = ShardCosts.of(lengths, self._workload, self._cp).ideal
        return cost, np.full(self._cp, ideal)


def virtual_layout(layout: StageLayout, model_chunks: int) -> StageLayout:
    """Layers of the virtual stages of an interleaved schedule: every stage's own number, cut as evenly as can be.

    Which layers a stage holds changes, since the first virtual stages of all stages come before the second ones; how
    many does not. Embedding and head stay on the first and on the last.

    Args:
        layout: Of the stages.
        model_chunks: Virtual stages of each.

    Raises:
        ValueError: If a stage has fewer layers than that.

    >>> print(virtual_layout(StageLayout((0, 5, 8)), 2))
    layers 0-2 | 3-4 | 5-6 | 7
    """
    for stage, size in enumerate(layout.sizes):
        if size < model_chunks:
            raise ValueError(
                f"The interleaved schedule cuts every stage's layers into model_chunks={model_chunks}, but stage "
                f"{stage} has {size}: take fewer model_chunks, or a smaller pp_size."
            )
    sizes = [size // model_chunks + (c < size % model_chunks) for c in range(model_chunks) for size in layout.sizes]
    return StageLayout.from_sizes(sizes, layout.layers, len(sizes))


def piece_shares(lengths: IntArray, pieces: int, workload: WorkloadModel) -> tuple[FloatArray, FloatArray]:
    """Cuts a micro-batch into pieces of equal work, to a token; a token has more work the later it is in its document.

    Args:
        lengths: Of its documents in layout order, int64 of shape ``(documents,)``.
        pieces: So many.
        workload: What tokens cost.

    Returns:
        Every piece's share of tokens and of work, float64 of shape ``(pieces,)`` each.

    With attention alone, 70 of 100 tokens have half of the work:

    >>> from hf_wlb.workload import AnalyticWorkload
    >>> tokens, work = piece_shares(np.array([100]), 2, AnalyticWorkload(1.0, 0.0))
    >>> tokens.tolist(), work.round(2).tolist()
    ([0.71, 0.29], [0.51, 0.49])
    """
    if pieces == 1:
        return np.ones(1), np.ones(1)
    work, ends = np.cumsum(workload.document(lengths)), np.cumsum(lengths)
    targets = work[-1] * np.arange(1, pieces) / pieces
    document = np.minimum(np.searchsorted(work, targets), len(lengths) - 1)
    before = work[document] - workload.document(lengths[document])
    # The cut is the first token with which the target is reached: above low, at most high.
    low, high = np.zeros(pieces - 1, dtype=np.int64), lengths[document]
    places, rows = np.linspace(0.0, 1.0, _TRIED_AT_ONCE + 1), np.arange(pieces - 1)
    while (high - low > 1).any():
        tried = low[:, None] + ((high - low)[:, None] * places).astype(np.int64)
        reached = before[:, None] + workload.document(tried) >= targets[:, None]
        reached[:, 0], reached[:, -1] = False, True
        first = reached.argmax(axis=1)
        low, high = tried[rows, first - 1], tried[rows, first]
    cut_tokens = ends[document] - lengths[document] + high
    cut_work = before + workload.document(high)
    token_shares = np.diff(cut_tokens, prepend=0, append=ends[-1]) / ends[-1]
    work_shares = np.diff(cut_work, prepend=0.0, append=work[-1]) / work[-1]
    return token_shares, np.maximum(work_shares, 0.0)


def mean_operations(replicas: Sequence[Operations], *, of_micro_batches: bool) -> Operations:
    """Replicas that all do what they do on average, operation by operation.

    Args:
        replicas: The replicas.
        of_micro_batches: Whether micro-batches, and their pieces, are evened out as well.
    """
    ranks = np.mean([replica.ranks for replica in replicas], axis=0)

    def mean(arrays: Sequence[FloatArray]) -> FloatArray:
        found: FloatArray = np.mean(arrays, axis=0)
        if of_micro_batches:
            found = np.broadcast_to(found.mean(axis=(-2, -1), keepdims=True), found.shape)
        return found

    times = OpTimes(
        mean([replica.times.forward for replica in replicas]),
        mean([replica.times.backward for replica in replicas]),
        mean([replica.times.send for replica in replicas]),
    )
    return Operations(times, mean([replica.tokens for replica in replicas]), ranks)


def in_lockstep(replicas: Sequence[Operations]) -> list[OpTimes]:
    """Times of replicas that wait for the slowest of them in every operation, as under FSDP without a pipeline."""
    slowest = OpTimes(
        np.max([replica.times.forward for replica in replicas], axis=0),
        np.max([replica.times.backward for replica in replicas], axis=0),
        np.max([replica.times.send for replica in replicas], axis=0),
    )
    return [slowest] * len(replicas)


def _one_token_each(cp_size: int) -> ShardPlan:
    """A micro-batch that is hardly any."""
    owner = np.arange(cp_size, dtype=np.int64)
    edges = np.zeros((0, 2 * cp_size + 1), dtype=np.int64)
    return ShardPlan(np.ones(cp_size, dtype=np.int64), cp_size, owner, edges, "whole")
