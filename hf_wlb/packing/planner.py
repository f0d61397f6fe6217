"""The step planner: a pure function of (lengths, settings, state) that gives one step's plan after the other.

Replicated on every rank it needs no communication (DESIGN: planning is replicated); ``StepPlan.digest`` lets the ranks
check that they agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hf_wlb.packing.base import Packer
from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.reader import DocumentReader, DocumentSource, ReaderCounts
from hf_wlb.packing.sequential import ConcatAndCutPacker, NextFitPacker
from hf_wlb.packing.solver import SolverPacker
from hf_wlb.packing.steady import SteadyPacker
from hf_wlb.packing.types import Document, StepPlan
from hf_wlb.packing.windowed import GreedyPacker
from hf_wlb.packing.wlb import WlbPacker
from hf_wlb.workload import WorkloadModel

STATE_SCHEMA = "hf_wlb.planner/1"


def make_packer(config: PackingConfig, workload: WorkloadModel) -> Packer:
    """The packer that ``config.packer`` names."""
    if config.packer == "steady":
        return SteadyPacker(config)
    if config.packer == "wlb":
        return WlbPacker(config)
    if config.packer == "greedy":
        return GreedyPacker(config)
    if config.packer == "solver":
        return SolverPacker(config)
    if config.packer == "next-fit":
        return NextFitPacker(config)
    return ConcatAndCutPacker(config, workload)


class StepPlanner(Iterator[StepPlan]):
    """Plans one pass over a source of documents.

    Args:
        source: Lengths in reading order, ``ArraySource`` or a stream.
        workload: What a document costs.
        config: Context, layout, packer.

    Every document is planned exactly once (``config.oversize`` and ``config.empty`` say what happens to unusual ones,
    and ``counts`` how often it did). All steps have the same number of micro-batches on every replica.

    >>> import numpy as np
    >>> from hf_wlb.packing.reader import ArraySource
    >>> from hf_wlb.workload import AnalyticWorkload
    >>> planner = StepPlanner(
    ...     ArraySource(np.array([4, 3, 2, 1])),
    ...     AnalyticWorkload.from_crossover(8),
    ...     PackingConfig(context_length=5, micro_batches_per_replica=2),
    ... )
    >>> [[[d.length for d in m.documents] for m in plan.replicas[0]] for plan in planner]
    [[[4, 1], [3, 2]]]
    """

    def __init__(self, source: DocumentSource, workload: WorkloadModel, config: PackingConfig) -> None:
        self.config = config
        self.source = source
        self.workload = workload
        self._reader = DocumentReader(source, workload, config.longest_document, config.oversize, config.empty)
        self._packer = make_packer(config, workload)
        self._step = 0

    def __iter__(self) -> StepPlanner:
        return self

    def __next__(self) -> StepPlan:
        replicas = self._packer.next_step(self._reader, self._step)
        if replicas is None:
            raise StopIteration
        plan = StepPlan(self._step, replicas, flush=self._reader.exhausted)
        self._step += 1
        return plan

    @property
    def step(self) -> int:
        """Steps planned so far."""
        return self._step

    @property
    def counts(self) -> ReaderCounts:
        """Documents read, split, truncated, skipped."""
        return self._reader.counts

    @property
    def waiting(self) -> list[Document]:
        """Documents that were read and are not in any plan yet."""
        return list(self._packer.waiting)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last plan given, in plain JSON types."""
        return {
            "schema": STATE_SCHEMA,
            "config": self.config.to_dict(),
            "workload": self.workload.fingerprint,
            "source": self.source.fingerprint,
            "step": self._step,
            "reader": self._reader.state_dict(),
            "packer": self._packer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where ``state_dict`` was taken.

        Raises:
            ValueError: The state is of another version, other data, other settings or another workload model.
        """
        check_planner_state(state, self.config, self.workload, self.source)
        self._step = int(state["step"])
        self._reader.load_state_dict(state["reader"])
        self._packer.load_state_dict(copy.deepcopy(state["packer"]))


def check_planner_state(
    state: dict[str, Any], config: PackingConfig, workload: WorkloadModel, source: DocumentSource
) -> None:
    """Refuses a state that would continue something else than what it was taken from."""
    schema = state.get("schema")
    if schema != STATE_SCHEMA:
        raise ValueError(
            f"this planner state has schema {schema!r}, but this version of hf_wlb reads {STATE_SCHEMA!r}; "
            "resume with the version that wrote it, or start a new pass over the data"
        )
    missing = [key for key in ("config", "workload", "source", "step", "reader", "packer") if key not in state]
    if missing:
        raise ValueError(
            f"this planner state is incomplete: it lacks {', '.join(missing)}; pass all of what state_dict() gave"
        )
    if state["source"] != source.fingerprint:
        raise ValueError(
            "this planner state belongs to another data set, or to the same documents in another order or of other "
            f"lengths (state: {state['source']}, given: {source.fingerprint}); pass the data set, seed and epoch "
            "that it was taken from, or start anew without the state"
        )
    now = config.to_dict()
    then = state["config"]
    changed = [f"{name}: {then.get(name)!r} -> {now[name]!r}" for name in now if then.get(name) != now[name]]
    if changed:
        raise ValueError(
            f"this planner state was taken with other packing settings ({'; '.join(changed)}); documents that wait in "
            "it were chosen for those. Resume with the same settings, or start anew without the state"
        )
    if state["workload"] != workload.fingerprint:
        raise ValueError(
            "this planner state was taken with another workload model: another model configuration, "
            "gradient_checkpointing, hardware, crossover length or profile file. Resume with that one "
            "(workload=...), or start anew without the state"
        )
