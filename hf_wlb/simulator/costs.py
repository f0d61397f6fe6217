"""What micro-batches and the end of a step cost one model under one split of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.sharding import ShardCosts, ShardPlan
from hf_wlb.sharding.cost import RankCosts
from hf_wlb.simulator.cluster import Cluster
from hf_wlb.simulator.counts import GRADIENT_BYTES, NUMBER_BYTES, STREAM_BYTES, ModelShape
from hf_wlb.simulator.end_of_step import EndOfStep, end_of_step
from hf_wlb.simulator.exchange import Exchange, count_exchange, exchange_is_sampled
from hf_wlb.simulator.linear import LinearCosts, LinearCounter, Links
from hf_wlb.simulator.profiles import rank_profile
from hf_wlb.simulator.rank_workload import RankWorkload, of_window
from hf_wlb.simulator.split import Split
from hf_wlb.staging import StageCosts, StageLayout, typical_lengths
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload
from hf_wlb.workload.analytic import ATTENTION_BACKWARD_FLOPS
from hf_wlb.workload.base import is_whole_number

__all__ = ["EndOfStep", "MicroBatchCost", "StepModel"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class MicroBatchCost:
    """What a micro-batch costs every stage.

    Attributes:
        forward: Seconds by stage, on the context-parallel rank that is slowest in it; embedding on the first stage,
            head and loss on the last.
        backward: The same of backward, with another forward where gradients are checkpointed.
        send: Seconds for hidden states to the next stage, and for gradients back.
        tokens: Of the fullest rank.
        attention: Attention in both of the rank that is slowest in both together, by stage, exchange left out.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: float
    tokens: int
    attention: tuple[float, ...]


@dataclass(frozen=True)
class _Window:
    """Layers of one attention window: what prices them, and how they lie on stages.

    Attributes:
        workload: Of all of them, forward plus backward, without linear work.
        forward: Attention of their first forward alone; None where it is ``share`` of all.
        share: Of forward in attention.
        stages: Part of their attention that every stage has, ``[stages]``.
    """

    workload: RankWorkload
    forward: ProfiledWorkload | None
    share: float
    stages: FloatArray


@dataclass(frozen=True)
class StepModel:
    """Prices micro-batches of one model under one split of a cluster; make it by ``of``.

    Attributes:
        config: Of the model, as Transformers has it.
        split: Of the GPUs.
        cluster: Where.
        layout: Which stage holds which layers.
        gradient_checkpointing: Whether every layer's forward runs twice.
        context_length: Tokens of a micro-batch on average; linear work has the rate that it has at so many.
        compiled: Whether element-wise work is counted for fused kernels (``torch_compile``) or eager ones.
        profile: Measured costs of one rank; None where all are counted.
        shape: Counts of the model.
        linear: Linear work of a token on one rank.
        stream_bytes: Of one number of the hidden states between layers, as they are kept and sent.
    """

    config: Any
    split: Split
    cluster: Cluster
    layout: StageLayout
    gradient_checkpointing: bool
    context_length: int
    compiled: bool
    profile: ProfiledWorkload | None
    shape: ModelShape
    linear: LinearCosts
    stream_bytes: int

    @classmethod
    def of(
        cls,
        config: Any,
        split: Split,
        cluster: Cluster,
        *,
        context_length: int,
        gradient_checkpointing: bool = False,
        layout: StageLayout | None = None,
        profile: ProfiledWorkload | None = None,
        compiled: bool = True,
        stream_bytes: int | None = None,
    ) -> StepModel:
        """Count what there is to count, and read the rest off the profile.

        A profile's attention, linear work, head, embedding and collectives take the place of what is counted; what it
        lacks comes from the cluster. Collectives are taken for groups of as many ranks that lie as close.

        Args:
            config: A Transformers config, or any object with its attributes; nested text configs are entered.
            split: How many GPUs each kind of parallelism takes.
            cluster: Figures of the GPUs and their links.
            context_length: Tokens of a micro-batch on average.
            gradient_checkpointing: Whether every layer's forward runs a second time in backward.
            layout: Which stage holds which layers; None has them cost as much as they can alike.
            profile: Measured on one rank with the split's ``tp_size``; read as ``gradient_checkpointing`` says.
            compiled: Whether layers are compiled; says how element-wise work is counted.
            stream_bytes: Of one number of the hidden states between layers; None for what ``WLBTrainer`` has with
                ``bf16``: float32 (``STREAM_BYTES``), or bf16 under FSDP.

        Raises:
            ValueError: If the model cannot be counted or split so, the layout is for other stages or layers, the
                profile is of another model or ``tp_size``, or a micro-batch has fewer tokens than ranks.
        """
        split.check_model(config)
        if not is_whole_number(context_length) or context_length < split.cp_size:
            raise ValueError(
                f"context_length must be a whole number of at least cp_size={split.cp_size}, a token for every rank, "
                f"got {context_length!r}."
            )
        shape = ModelShape.of(config)
        if profile is not None:
            profile = rank_profile(profile, shape, split, gradient_checkpointing)
        counter = LinearCounter(
            shape,
            Links(cluster, profile),
            split.tp_group,
            tokens=int(context_length) // split.cp_size,
            gradient_checkpointing=gradient_checkpointing,
            compiled=compiled,
        )
        made = cls(
            config,
            split,
            cluster,
            StageLayout((0, len(shape.layers))),
            gradient_checkpointing,
            int(context_length),
            compiled,
            profile,
            shape,
            counter.costs(profile),
            (NUMBER_BYTES if split.fsdp else STREAM_BYTES) if stream_bytes is None else stream_bytes,
        )
        return made._laid_out(layout)

    def _laid_out(self, layout: StageLayout | None) -> StepModel:
        """With this layout, or one of stages that cost alike."""
        pp_size, layers = self.split.pp_size, len(self.shape.layers)
        if layout is None:
            return replace(self, layout=self.stage_costs.layout(pp_size)) if pp_size > 1 else self
        if (layout.layers, layout.pp_size) != (layers, pp_size):
            raise ValueError(
                f"The layout has {layout.layers} layers on {layout.pp_size} stages, but the model has {layers} layers "
                f"and pp_size is {pp_size}."
            )
        return replace(self, layout=layout)

    # ---- what packers and sharders go by ----

    @cached_property
    def attention_model(self) -> AnalyticWorkload | ProfiledWorkload:
        """What prices attention of one rank, over all layers."""
        if self.profile is not None:
            return self.profile
        counted = AnalyticWorkload.from_config(
            self.config,
            self.cluster.figures,
            tp_size=self.split.tp_size,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        return replace(counted, segment_overhead_tokens=self.cluster.segment_overhead_tokens)

    @cached_property
    def workload(self) -> RankWorkload:
        """All of one rank's work in seconds: all layers, forward plus backward, whatever stage they are on.

        Tensor-parallel collectives and element-wise work are part of the linear work, the exchange is that of the
        split's context-parallel group.
        """
        return RankWorkload(self.attention_model, self.linear.total, self._exchange(range(len(self.shape.layers))))

    def _exchange(self, layers: Sequence[int]) -> Exchange:
        group, profile = self.split.cp_group, self.profile
        sampled = profile is not None and self.links.measured(group) and exchange_is_sampled(profile, group.size)
        widths = [self.shape.kv_width(self.shape.layers[layer], self.split.tp_size) for layer in layers]
        return count_exchange(
            [NUMBER_BYTES * width for width in widths],
            self.cluster,
            group,
            gradient_checkpointing=self.gradient_checkpointing,
            measured=profile if sampled else None,
        )

    @cached_property
    def links(self) -> Links:
        """What collectives take."""
        return Links(self.cluster, self.profile)

    # ---- micro-batches ----

    @cached_property
    def stage_costs(self) -> StageCosts:
        """What layers, embedding and head cost of a typical micro-batch on one rank; layouts are made by it."""
        lengths = typical_lengths(self.context_length)
        per_rank = self.context_length / self.split.cp_size
        attention = np.zeros(len(self.shape.layers))
        for window, shares in self._shares.items():
            seconds = float(of_window(self.attention_model, window).attention(lengths).sum())
            attention += shares * seconds / self.split.cp_size
        return StageCosts(
            tuple(own + layer.total * per_rank for own, layer in zip(attention, self.linear.layers, strict=True)),
            before=self.linear.embedding.total * per_rank,
            after=self.linear.head.total * per_rank,
            source=f"the simulator's costs of {self.split.label} on {self.cluster.name!r}",
        )

    @cached_property
    def _shares(self) -> dict[int | None, FloatArray]:
        """By window: every layer's part, by width, of the attention of all layers with that window, ``[layers]``."""
        windows = [layer.count.window for layer in self.shape.layers]
        found = {}
        for window in dict.fromkeys(windows):
            widths = [
                layer.count.qk_width + layer.count.v_width if own == window else 0
                for layer, own in zip(self.shape.layers, windows, strict=True)
            ]
            found[window] = np.array(widths) / sum(widths)
        return found

    @cached_property
    def _windows(self) -> tuple[_Window, ...]:
        return tuple(self._window(window, shares) for window, shares in self._shares.items())

    def _window(self, window: int | None, shares: FloatArray) -> _Window:
        model = of_window(self.attention_model, window)
        exchange = self._exchange([layer for layer, share in enumerate(shares) if share])
        stages = np.array([shares[slice(*span)].sum() for span in self._spans])
        forward, share = None, 1.0
        if isinstance(model, ProfiledWorkload):
            samples = tuple((q_len, kv_len, seconds, 0.0) for q_len, kv_len, seconds, _ in model.profile.attention)
            forward = replace(model, profile=replace(model.profile, attention=samples), gradient_checkpointing=False)
        else:
            figures = self.cluster.figures
            once = 1 / figures.attention_flops_per_second
            backward = ATTENTION_BACKWARD_FLOPS / figures.attention_backward_rate
            share = once / ((2 if self.gradient_checkpointing else 1) * once + backward)
        return _Window(RankWorkload(model, 0.0, exchange), forward, share, stages)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """First layer and the one behind the last of every stage."""
        return list(pairwise(self.layout.bounds))

    @cached_property
    def _linear(self) -> tuple[FloatArray, FloatArray]:
        """Linear work of a token on every stage, forward and backward, each ``[stages, 1]``."""
        passes = [self.linear.of_stage(*span) for span in self._spans]
        return np.array([[own.forward] for own in passes]), np.array([[own.backward] for own in passes])

    def rank_costs(self, plan: ShardPlan, workload: RankWorkload | None = None) -> RankCosts:
        """What every rank does of a micro-batch in all layers, with this cluster's share of the exchange hidden.

        Args:
            plan: Of the micro-batch.
            workload: What prices it; None for ``self.workload``.
        """
        costs = ShardCosts.of(
            plan.lengths,
            workload or self.workload,
            self.split.cp_size,
            hidden=self.cluster.hidden_exchange,
            unlike=self.cluster.unlike_chunks,
        )
        return costs.parts([plan])[0]

    def micro_batch(self, plan: ShardPlan, costs: RankCosts | None = None) -> MicroBatchCost:
        """What a micro-batch costs that is shared out so.

        Rank by rank as ``hf_wlb.sharding`` prices plans, stage by stage for its own layers. A pass through a stage
        takes as long as the rank that has most to do in it.

        Args:
            plan: Of the micro-batch; its prediction is not needed.
            costs: Its ``rank_costs``, if they are known: so layers that all have one window are not priced again.

        Raises:
            ValueError: If the plan is for another number of ranks than the split has.
        """
        ranks = self.split.cp_size
        if plan.cp_size != ranks:
            raise ValueError(f"The plan shares a micro-batch over {plan.cp_size} ranks, but the split has {ranks}.")
        tokens = plan.tokens
        by_token, by_token_back = self._linear
        forward, backward = by_token * tokens, by_token_back * tokens
        attention = np.zeros_like(forward)
        for window in self._windows:
            parts = costs if costs is not None and len(self._windows) == 1 else self.rank_costs(plan, window.workload)
            once, total, exchange, back = self._rank_seconds(window, plan, parts)
            share = window.stages[:, None]
            forward += share * (once + exchange)
            backward += share * (total - once + back)
            attention += share * total
        slowest = (forward + backward).argmax(axis=1)
        gathers, others = self._sharded
        return MicroBatchCost(
            tuple(np.maximum(forward.max(axis=1), gathers).tolist()),
            tuple(np.maximum(backward.max(axis=1), others).tolist()),
            self._send_seconds(int(tokens.max())),
            int(tokens.max()),
            tuple(attention[np.arange(len(slowest)), slowest].tolist()),
        )

    def waiting(self, plan: ShardPlan) -> tuple[FloatArray, FloatArray]:
        """What ``micro_batch`` has ranks wait for in all layers: the exchange that does not hide, and one another.

        Args:
            plan: Of the micro-batch; its prediction is not needed.

        Returns:
            Seconds of every rank in forward and in backward, each ``[ranks]``.
        """
        found = np.zeros((2, self.split.cp_size))
        for window in self._windows:
            _, _, forward, backward = self._rank_seconds(window, plan, self.rank_costs(plan, window.workload))
            found += forward, backward
        return found[0], found[1]

    def _rank_seconds(
        self, window: _Window, plan: ShardPlan, parts: RankCosts
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Of every rank: attention in forward and in all, waiting in forward and in backward, each ``[ranks]``."""
        ranks = self.split.cp_size
        total = parts.local + parts.chunks
        once = window.share * total
        if window.forward is not None:
            alone = RankWorkload(window.forward, 0.0, Exchange(ranks, (), 1))
            found = ShardCosts.of(plan.lengths, alone, ranks).parts([plan])[0]
            once = np.minimum(found.local + found.chunks, total)
        moved = int(plan.exchanged_tokens.max()) * ranks if len(plan.edges) else 0
        gathers, others = window.workload.exchange_costs.parts(moved)
        # Of the exchange, what does not hide behind local documents is shared out as the exchange is, and waiting for
        # ranks with more attention as attention is.
        waiting = self.cluster.unlike_chunks * (parts.chunks.max() - parts.chunks)
        shown = parts.waiting - waiting
        gathered = shown * (gathers / (gathers + others)) if moved else shown
        early = waiting * np.divide(once, total, out=np.zeros(ranks), where=total > 0)
        return once, total, gathered + early, shown - gathered + waiting - early

    def _send_seconds(self, tokens: int) -> float:
        """Every tensor-parallel rank sends whole hidden states. The slowest hop is the one that counts."""
        if self.split.pp_size == 1:
            return 0.0
        stride, node = self.split.pp_stride, self.cluster.gpus_per_node
        crosses = stride * self.split.pp_size > node
        size = tokens * self.shape.hidden * self.stream_bytes
        return self.links.send(max(stride, node) if crosses else stride, size)

    @cached_property
    def _sharded(self) -> tuple[FloatArray, FloatArray]:
        """Under FSDP, what parameters and gradients take on their way, forward and backward, each ``[stages]``.

        Layer by layer: a gather in forward, in backward one more and a reduction in float32. They go on while others
        compute, so only what takes longer than computing shows.
        """
        if not self.split.fsdp:
            return np.zeros(1), np.zeros(1)
        group = self.split.reduce_groups[0]
        gathers, others = [], []
        for first, stop in self._spans:
            units = [layer.parameters / self.split.tp_size for layer in self.shape.layers[first:stop]]
            ends = self.shape.stage_parameters(first, stop) / self.split.tp_size - sum(units)
            gather = sum(self.links.all_gather(group, NUMBER_BYTES * unit) for unit in (*units, ends))
            reduce = sum(self.links.reduce_scatter(group, GRADIENT_BYTES * unit) for unit in (*units, ends))
            gathers.append(gather)
            others.append(gather + reduce)
        return np.array(gathers), np.array(others)

    def end_of_step(self) -> EndOfStep:
        """What follows the last backward."""
        return end_of_step(self.shape, self.split, self.layout, self.links)
