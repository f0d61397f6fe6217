"""Our packer and the default: constant tokens per step, outliers released when the step stays balanced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_wlb.packing.base import (
    Bins,
    Packer,
    Replicas,
    documents_from_state,
    documents_to_state,
)
from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.fluid import FluidPlan, FluidStep
from hf_wlb.packing.local_search import even_out_replicas, level_out
from hf_wlb.packing.outlier_pool import Draft, OutlierPool, oldest_first
from hf_wlb.packing.reader import DocumentReader
from hf_wlb.packing.types import Document, MicroBatch, longest_first

#: A document may have to wait if it alone weighs more than this share of a mean micro-batch.
HEAVY_SHARE = 0.5

#: Nothing is read while more than this times ``waiting_limit`` waits in the pool.
OVERFULL = 1.5


class SteadyPacker(Packer):
    """Deviates from Algorithm 1 (paper, section 4) in three ways.

    * Every step trains the same number of tokens, to within 2%: what outliers bring, new documents leave out.
    * Outliers leave as soon as the step that takes them stays balanced by the step-time model, see ``OutlierPool``;
      there are no levels and no thresholds to tune.
    * Waiting is bounded. A document that has waited ``max_wait_steps`` is due: it is placed before all that are not.
      Only when more are due than fit into a step's micro-batches do some wait on, and then at least ``micro_batches``
      due ones that are older, or as old and no shorter, leave in that step. Outliers above ``waiting_limit`` leave as
      soon as they fit into the step's tokens; at half as much again reading stops until some have left. Left-overs of
      bad packing count as tokens of the next step. Where a step is a single micro-batch, none is an outlier.

    Tokens per step are constant as long as the documents can be packed so: what S_max, an overfull pool or due
    documents take or add is made up for in the next steps, up to what these can hold.
    """

    name = "steady"

    def __init__(self, config: PackingConfig) -> None:
        super().__init__(config)
        self._fluid = FluidStep(config)
        self._pool = OutlierPool(self._fluid, config.micro_batches)
        self._remained: list[Document] = []
        self._credit = 0
        self._short_tokens = 0  # of documents that need not wait, for their density
        self._short_work = 0.0

    def next_step(self, reader: DocumentReader, step: int) -> Replicas | None:
        """See ``Packer.next_step``."""
        usual = self.config.tokens_per_step
        draft = Draft(min(max(self._credit + usual, usual // 2, 1), self._most_tokens))
        for document in self._remained:
            draft.add(document)
        self._release(draft, step)
        self._read(draft, reader, step)
        if draft.room > 0 and reader.exhausted:
            self._pool.take_all(draft)
        self._let_due_go(draft, step)
        if not draft.tokens:
            return None
        replicas, self._remained = self._place(draft, step)
        self._credit = draft.room + sum(document.length for document in self._remained)
        return replicas

    def _read(self, draft: Draft, reader: DocumentReader, step: int) -> None:
        every = max(1, self.config.micro_batches // 6)
        arrivals = 0
        overfull = OVERFULL * self.config.waiting_limit
        while draft.room > 0:
            if self._pool.tokens > overfull and not self._relieve(draft):
                return
            document = reader.read(step)
            if document is None:
                return
            if self._may_have_to_wait(document):
                self._pool.add(document)
                arrivals += 1
                if arrivals % every == 0:
                    self._release(draft, step)
            else:
                draft.add(document)
                self._short_tokens += document.length
                self._short_work += document.workload

    def _release(self, draft: Draft, step: int) -> None:
        density = self._density
        if not density or not len(self._pool) or draft.room <= 0:
            return
        self._pool.take_balanced(draft, density, self.config.max_time_gap)
        if self._pool.overdue(step, self.config.max_wait_steps):
            self._pool.take_cheapest(draft, density, oldest=True)
        if self._pool.tokens > self.config.waiting_limit:
            self._pool.take_cheapest(draft, density, oldest=False)

    def _relieve(self, draft: Draft) -> bool:
        """Lets outliers go until no more than ``waiting_limit`` wait; False if too many are left."""
        limit = self.config.waiting_limit
        while draft.room > 0 and self._pool.tokens > limit:
            if not self._pool.take_cheapest(draft, self._density, oldest=False):
                break
        return draft.room > 0 and self._pool.tokens <= OVERFULL * limit

    def _let_due_go(self, draft: Draft, step: int) -> None:
        """Adds the due documents that found no room, as many as the micro-batches can hold; at least one document."""
        self._pool.take_oldest(draft, step - self.config.max_wait_steps, self._most_tokens)
        if not draft.tokens and len(self._pool):
            self._pool.take_one(draft)

    @property
    def _most_tokens(self) -> int:
        return self.config.micro_batches * self.config.s_max

    @property
    def _density(self) -> float:
        if self._short_tokens:
            return self._short_work / self._short_tokens
        lightest = self._pool.lightest  # all data may consist of outliers: the lightest stands in
        return 0.0 if lightest is None else lightest.workload / lightest.length

    def _may_have_to_wait(self, document: Document) -> bool:
        if self.config.micro_batches == 1:  # no balance to wait for
            return False
        return document.length >= self.config.least_outlier and document.workload > (
            HEAVY_SHARE * self._density * self.config.context_length
        )

    def _place(self, draft: Draft, step: int) -> tuple[Replicas, list[Document]]:
        """Outliers first, each in a micro-batch of its own while there are enough, then the rest, longest first."""
        solid = self._fluid.solidify(draft.outliers)
        plan = self._fluid.plan(solid, draft.work, self._density)
        places, offsets = self._places(plan, len(solid.loads))
        bins = Bins(self.config.micro_batches, self.config.s_max, offsets)
        for place, outliers in zip(places, solid.members, strict=True):
            for document in outliers:
                bins.add(place, document)
        placed = {(document.index, document.start) for outliers in solid.members for document in outliers}
        rest = [document for document in draft.outliers if (document.index, document.start) not in placed]
        left_over = [d for d in longest_first([*rest, *draft.regular]) if not bins.add_to_least_loaded_with_room(d)]
        latest = step - self.config.max_wait_steps
        if any(document.arrived <= latest for document in left_over):
            bins, left_over = self._place_due_first(draft, latest)
        level_out(bins)
        return self._deal(bins), left_over

    def _place_due_first(self, draft: Draft, latest: int) -> tuple[Bins, list[Document]]:
        """For when a document is due and finds no room after the heavier ones. Due is what arrived by ``latest``."""
        bins = Bins(self.config.micro_batches, self.config.s_max)
        due = sorted((d for d in draft.documents if d.arrived <= latest), key=oldest_first)
        others = longest_first(d for d in draft.documents if d.arrived > latest)
        return bins, [d for d in [*due, *others] if not bins.add_to_least_loaded_with_room(d)]

    def _deal(self, bins: Bins) -> Replicas:
        """As planned, or dealt anew where that is faster; then replicas exchange documents."""
        config, model = self.config, self.config.step_time
        if config.dp_size == 1 or model.lockstep:
            return self.arrange(bins.documents)
        size = config.micro_batches_per_replica
        as_planned = [list(range(r * size, (r + 1) * size)) for r in range(config.dp_size)]
        groups = min(
            as_planned,
            model.group(bins.workloads, config.dp_size),
            key=lambda groups: model.step_time([[bins.workloads[place] for place in group] for group in groups]),
        )
        even_out_replicas(bins, groups, model)
        return model.order([[MicroBatch.of(bins.documents[place]) for place in group] for group in groups])

    def _places(self, plan: FluidPlan, count: int) -> tuple[list[int], list[float]]:
        """Place of every solid micro-batch, and how far below the highest level each place should stay."""
        size, dp_size = self.config.micro_batches_per_replica, self.config.dp_size
        highest = max(plan.levels)
        offsets = [highest - level for level in plan.levels for _ in range(size)]
        if len(plan.heads) < dp_size:
            return list(range(count)), offsets
        places = [replica * size + k for replica, (first, last) in enumerate(plan.heads) for k in range(last - first)]
        return places, offsets

    @property
    def waiting(self) -> Iterable[Document]:
        """Outliers and left-overs."""
        return [*self._pool, *self._remained]

    def state_dict(self) -> dict[str, Any]:
        """See ``Packer.state_dict``."""
        return {
            "pool": documents_to_state(self._pool),
            "remained": documents_to_state(self._remained),
            "credit": self._credit,
            "short_tokens": self._short_tokens,
            "short_work": self._short_work,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Packer.load_state_dict``."""
        self._pool.restore(documents_from_state(state["pool"]))
        self._remained = documents_from_state(state["remained"])
        self._credit = int(state["credit"])
        self._short_tokens = int(state["short_tokens"])
        self._short_work = float(state["short_work"])
