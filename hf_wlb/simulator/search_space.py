"""Ways to share the training of a model out over GPUs, and what each could reach at best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.lengths import IntArray
from hf_wlb.packing import Document, MicroBatch
from hf_wlb.simulator.cluster import Cluster
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.counts import ModelShape
from hf_wlb.simulator.memory import STATE_BYTES, stage_memory
from hf_wlb.simulator.operations import Pricing
from hf_wlb.simulator.placement import BalancedAttention, WholeDocuments
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.split import Split
from hf_wlb.workload import ProfiledWorkload

TILE = 128
"""Tokens that a chunk of an evenly cut context has at least: a kernel's tile of queries. Bounds ``cp_size``."""

STRATA = 4_000
"""Documents by which means are taken, where there are more."""

TENSOR = "the model's heads or widths do not divide by tp_size, or tp_size is more than a node's GPUs"
REPLICAS = "replicas do not divide the step's micro-batches"
PROFILE = "the profile was measured with another tp_size"
MEMORY = "more memory than a GPU has"


@dataclass(frozen=True)
class Candidate:
    """A split, and whether activations are recomputed.

    Attributes:
        split: Of the GPUs.
        gradient_checkpointing: Whether every layer's forward runs twice.
    """

    split: Split
    gradient_checkpointing: bool

    @property
    def label(self) -> str:
        """Such as ``"TP2 CP4 PP2 DP1, recomputed"``."""
        return f"{self.split.label}{', recomputed' if self.gradient_checkpointing else ''}"


def divisors(number: int) -> list[int]:
    """All of them, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def splits(gpus: int, gpus_per_node: int, context_length: int, layers: int) -> Iterator[Split]:
    """Every split that there could be: tensor parallelism in powers of two within a node, the others as they divide.

    Ranks that talk in every layer (``tp_size * cp_size``) fill whole nodes or an even share of one: groups that lie
    across the edge of a node would be slower than others, and are not priced.

    Args:
        gpus: To be used, all of them.
        gpus_per_node: Most tensor-parallel ranks.
        context_length: Bounds the context-parallel ranks, see ``TILE``.
        layers: Most pipeline stages.

    >>> for split in splits(2, 8, 1024, 32):
    ...     print(split.label)
    TP1 CP1 PP1 DP2
    TP1 CP1 PP1 FSDP2
    TP1 CP1 PP2 DP1
    TP1 CP2 PP1 DP1
    TP1 CP2 PP1 FSDP1
    TP2 CP1 PP1 DP1
    """
    most_cp = max(1, context_length // (2 * TILE))
    tensor = [2**power for power in range(int(math.log2(min(gpus_per_node, gpus))) + 1) if gpus % 2**power == 0]
    for tp_size in tensor:
        rest = gpus // tp_size
        for cp_size in (size for size in divisors(rest) if size <= most_cp):
            if gpus > gpus_per_node and gpus_per_node % (tp_size * cp_size) and tp_size * cp_size % gpus_per_node:
                continue
            for pp_size in (size for size in divisors(rest // cp_size) if size <= layers):
                dp_size = rest // cp_size // pp_size
                for fsdp in (False, True)[: 1 + (cp_size * dp_size > 1)]:
                    yield Split(tp_size, cp_size, pp_size, dp_size, fsdp)


def default_micro_batches(gpus: int, context_length: int) -> int:
    """Micro-batches of a step on all replicas, where nothing is said: four million tokens' worth.

    At least one for each 128 GPUs, so that larger clusters have something to share out: on 16,384 GPUs with 128K tokens
    of context that is 16M tokens a step, which Llama 3 405B was trained with. At most 16 a GPU. The number has the odd
    part of the number of GPUs, if that is not much, so that replicas can share them.

    >>> [default_micro_batches(gpus, 131_072) for gpus in (1, 8, 64, 96, 8_192)]
    [16, 32, 32, 48, 64]
    """
    wanted = min(max(2**22 // context_length, math.ceil(gpus / 128), 1), 16 * gpus)
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    if odd > 2 * wanted:
        return int(2 ** math.ceil(math.log2(wanted)))
    return int(odd * 2 ** max(0, math.ceil(math.log2(wanted / odd))))


def cut_at(documents: IntArray, longest: int) -> IntArray:
    """Documents as they are trained where longer ones are split: in pieces of ``longest`` tokens and what is left.

    >>> cut_at(np.array([3, 10, 4]), 4).tolist()
    [3, 4, 4, 2, 4]
    """
    pieces = -(-documents // longest)
    cut = np.full(int(pieces.sum()), longest, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = documents - (pieces - 1) * longest
    return cut


@dataclass(frozen=True, eq=False)
class Sample:
    """Documents that stand for the data, none longer than the context.

    Attributes:
        lengths: In reading order, int64 of shape ``(documents,)``.
        starts: First document of each micro-batch that next-fit makes of them, int64 of shape ``(micro-batches,)``.
        means: As many of the documents as ``STRATA``, or all, as if they were one micro-batch.
    """

    lengths: IntArray
    starts: IntArray
    means: MicroBatch

    @classmethod
    def of(cls, documents: IntArray, context_length: int) -> Sample:
        """Documents in reading order; those above the context length are split at it."""
        lengths = cut_at(np.asarray(documents, dtype=np.int64), context_length)
        starts, room = [], 0
        for place, length in enumerate(lengths.tolist()):
            if length > room:
                starts.append(place)
                room = context_length
            room -= length
        few = np.sort(lengths)
        if len(few) > STRATA:  # one of each of so many equal ranges of the sorted documents
            few = few[(2 * np.arange(STRATA) + 1) * len(few) // (2 * STRATA)]
        pieces = tuple(Document(index, 0, length, 0.0, 0) for index, length in enumerate(few.tolist()))
        return cls(lengths, np.array(starts, dtype=np.int64), MicroBatch(pieces, int(few.sum()), 0.0))


@dataclass(frozen=True, eq=False)
class Bounded:
    """A candidate and what it could reach.

    Attributes:
        candidate: Itself.
        model: That prices it.
        pipeline_seconds: Least time from a step's first forward to its last backward: micro-batches all alike,
            attention even over ranks, nothing exchanged.
        end_seconds: Of what follows.
        memory_bytes: Least memory of the stage that needs most: micro-batches of ``context_length`` tokens.
    """

    candidate: Candidate
    model: StepModel
    pipeline_seconds: float
    end_seconds: float
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """A step's least time."""
        return self.pipeline_seconds + self.end_seconds


def enumerate_candidates(
    config: Any,
    gpus: int,
    cluster: Cluster,
    *,
    context_length: int,
    micro_batches: int,
    profile: ProfiledWorkload | None = None,
) -> tuple[list[Candidate], Counter[str]]:
    """All candidates that can be run on such a cluster, memory aside, and how many cannot, by reason.

    Args:
        config: A Transformers config, or any object with its attributes.
        gpus: To be used, all of them.
        cluster: Bounds tensor parallelism to a node.
        context_length: Tokens of a micro-batch on average.
        micro_batches: Of a step on all replicas.
        profile: Measured costs; then only splits with its ``tp_size`` count.
    """
    found: list[Candidate] = []
    dropped: Counter[str] = Counter()
    measured = None if profile is None else profile.profile.metadata["model"].get("tp_size")
    layers = int(getattr(config, "num_hidden_layers", 0) or config.text_config.num_hidden_layers)
    fits: dict[int, bool] = {}
    for split in splits(gpus, cluster.gpus_per_node, context_length, layers):
        if split.tp_size not in fits:
            fits[split.tp_size] = _suits(config, split.tp_size)
        reason = None
        if not fits[split.tp_size]:
            reason = TENSOR
        elif measured is not None and split.tp_size != measured:
            reason = PROFILE
        elif micro_batches % split.dp_size:
            reason = REPLICAS
        if reason is None:
            found += [Candidate(split, again) for again in (False, True)]
        else:
            dropped[reason] += 2
    return found, dropped


def _suits(config: Any, tp_size: int) -> bool:
    try:
        Split(tp_size=tp_size).check_model(config)
    except ValueError:
        if tp_size == 1:
            raise  # the model itself cannot be counted
        return False
    return True


class Bounder:
    """Says what candidates could reach.

    Args:
        config: Of the model, as Transformers has it.
        cluster: Where.
        sample: Of the documents.
        context_length: Tokens of a micro-batch on average.
        micro_batches: Of a step on all replicas.
        profile: Measured costs.
    """

    def __init__(
        self,
        config: Any,
        cluster: Cluster,
        sample: Sample,
        *,
        context_length: int,
        micro_batches: int,
        profile: ProfiledWorkload | None = None,
    ) -> None:
        self._config, self._cluster, self._profile = config, cluster, profile
        self._sample, self._shape = sample, ModelShape.of(config)
        self._context, self._micro_batches = context_length, micro_batches

    def bound(self, candidate: Candidate) -> Bounded:
        """Prices a candidate by means."""
        split = candidate.split
        model = StepModel.of(
            self._config,
            split,
            self._cluster,
            context_length=self._context,
            gradient_checkpointing=candidate.gradient_checkpointing,
            profile=self._profile,
        )
        own = self._micro_batches // split.dp_size
        forward, backward, send = self._mean_micro_batch(model)
        before, after = np.cumsum(forward) - forward, np.cumsum(backward) - backward
        hops = 2 * send * np.arange(split.pp_size)
        # A stage's first forward follows those of the stages before it, whose last backwards follow its own.
        pipeline = float((before + after + hops + own * (forward + backward)).max())
        return Bounded(candidate, model, pipeline, model.end_of_step().seconds, self._least_memory(model))

    def states_bytes(self, candidate: Candidate) -> float:
        """Weights, gradients and optimizer states on a GPU of the mean stage."""
        split = candidate.split
        shards = split.cp_size * split.dp_size if split.fsdp else 1
        parameters = self._shape.stage_parameters(0, len(self._shape.layers))
        return STATE_BYTES * parameters / (split.tp_size * split.pp_size * shards)

    def _mean_micro_batch(self, model: StepModel) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Forward and backward by stage, ``[stages]`` each, and a transfer."""
        ranks = model.split.cp_size
        even = Pricing(model, BalancedAttention(ranks, model.workload), ScheduleConfig())
        whole = even.replica([self._sample.means]).times
        part = self._context / self._sample.means.tokens
        forward, backward = (times[:, 0, 0] * part for times in (whole.forward, whole.backward))
        if model.split.fsdp:  # every micro-batch waits for the parameters, however short
            least = model.micro_batch(WholeDocuments(ranks, model.workload, room=1).plan([1] * ranks))
            forward, backward = np.maximum(forward, least.forward), np.maximum(backward, least.backward)
        return forward, backward, float(whole.send[0, 0]) * part

    def _least_memory(self, model: StepModel) -> float:
        split, own = model.split, self._micro_batches // model.split.dp_size
        tokens = self._context / split.cp_size
        return max(
            stage_memory(model, stage, min(split.pp_size - stage, own) * tokens, tokens).total
            for stage in range(split.pp_size)
        )
