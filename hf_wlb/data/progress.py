"""Steps as they are planned, and how far a pass over them has come as seen by whoever trains."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_wlb.packing import (
    Document,
    PackingConfig,
    PackingMetrics,
    PackingReport,
    ReaderCounts,
    StepPlan,
    StepPlanner,
)
from hf_wlb.parallel import process_count, verify_agreement

logger = logging.getLogger(__name__)

Collator = Callable[[list[Any]], dict[str, Any]]
"""Documents to one micro-batch; none to a dummy."""

_END_OF_PASS = -1  # no digest is negative


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step's plan with all that is needed to hand it out later, or to plan it again.

    Attributes:
        plan: The plan.
        state: The planner's state before it.
        snapshot: What else was noted before it (a stream's position and the tokens it holds).
        waiting: Documents waiting after it.
        counts: What the reader had met after it.
        seconds: Time it took to plan.
    """

    plan: StepPlan
    state: dict[str, Any]
    snapshot: Any
    waiting: list[Document]
    counts: ReaderCounts
    seconds: float


def planned_steps(planner: StepPlanner, snapshot: Callable[[], Any] = lambda: None) -> Iterator[PlannedStep]:
    """Plan step after step to the end of the data, noting the state before each."""
    while True:
        state, noted = planner.state_dict(), snapshot()
        begin = time.perf_counter()
        plan = next(planner, None)
        seconds = time.perf_counter() - begin
        if plan is None:
            return
        yield PlannedStep(plan, state, noted, planner.waiting, copy.copy(planner.counts), seconds)


@dataclass(frozen=True, slots=True)
class _AsHandedOut:
    """The part of a planner that a report reads, as of the step in progress: the planner itself may be ahead."""

    step: int
    waiting: list[Document]
    counts: ReaderCounts


class PassProgress:
    """How far one pass has come: the step in progress, its micro-batches handed out, and the figures so far.

    Args:
        config: Settings of the planner.
        place: What this rank is besides its number, for errors.
        compare_ranks: Compare every step over the ranks. Off in data loader workers, which are in no process group.
    """

    def __init__(self, config: PackingConfig, *, place: str = "", compare_ranks: bool = True) -> None:
        self.step: PlannedStep | None = None
        self.handed_out = 0
        self.step_metrics: dict[str, float] = {}
        self._metrics = PackingMetrics(config)
        self._place = place
        self._compare_ranks = compare_ranks

    @property
    def plan(self) -> StepPlan | None:
        """The plan of the step in progress; None before the first."""
        return None if self.step is None else self.step.plan

    def begin(self, step: PlannedStep, *, handed_out: int = 0, salt: int = 0) -> None:
        """Enter a step, after comparing it over the ranks.

        Args:
            step: The step.
            handed_out: Micro-batches of it that were handed out before (in the run that this one resumes).
            salt: Mixed into what is compared: a checksum of the tokens read and the collator's fingerprint, 63 bits.

        Raises:
            RuntimeError: On every rank, if the ranks planned different steps.
        """
        if self._compare_ranks:
            what = f"the plan of step {step.plan.step} (compared by its digest)"
            verify_agreement(step.plan.digest() ^ salt, what, place=self._place)
        self.step, self.handed_out = step, handed_out
        self.step_metrics = self._metrics.observe(step.plan, step.waiting, step.seconds)

    def finish(self) -> None:
        """End the pass, after making sure that it ends on every rank.

        Raises:
            RuntimeError: On every rank, if others have further steps.
        """
        if self._compare_ranks:
            verify_agreement(_END_OF_PASS, "the end of the data", place=self._place)

    def report(self) -> PackingReport:
        """Return the figures over the steps entered so far."""
        step = self.step
        seen = (
            _AsHandedOut(0, [], ReaderCounts())
            if step is None
            else _AsHandedOut(step.plan.step + 1, step.waiting, step.counts)
        )
        return self._metrics.report(seen)


class TellsProgress:
    """What everything that hands out planned micro-batches tells of the present pass."""

    _progress: PassProgress

    @property
    def plan(self) -> StepPlan | None:
        """The whole step (all replicas) of the micro-batch handed out last; None before the first of a pass."""
        return self._progress.plan

    @property
    def step_metrics(self) -> dict[str, float]:
        """That step's figures for the log: see ``PackingMetrics.observe``."""
        return self._progress.step_metrics

    def report(self) -> PackingReport:
        """Return the figures over the present pass, from its beginning or from where it was resumed."""
        return self._progress.report()


def fingerprint_of(collator: Any) -> int:
    """How a collator shares micro-batches out, 63 bits; 0 for one that does not say."""
    return int(getattr(collator, "fingerprint", 0))


def check_replica(config: PackingConfig, dp_rank: int) -> None:
    """Refuse a replica that the layout does not have.

    Raises:
        ValueError: If it has none of that number.
    """
    if not 0 <= dp_rank < config.dp_size:
        raise ValueError(
            f"dp_rank={dp_rank} is no replica of dp_size={config.dp_size}; give a number from 0 to "
            f"{config.dp_size - 1}, and set dp_size in PackingConfig to the number of data-parallel replicas."
        )


def check_repeatable(config: PackingConfig) -> None:
    """Refuse to plan on several processes with a packer that stops by the clock.

    Raises:
        ValueError: For the solver, where more than one process plans.
    """
    if config.packer == "solver" and (config.dp_size > 1 or process_count() > 1):
        raise ValueError(
            "The solver packer stops after solver_seconds, so several processes may come to different plans. Plan "
            "once for all of them with pack_dataset(dataset, config, workload), or choose another packer."
        )


def check_state(state: Mapping[str, Any], schema: str, what: str, parts: Sequence[str], micro_batches: int) -> None:
    """Refuse a state that this version does not read, or that is incomplete.

    Args:
        state: The state.
        schema: The schema that is read.
        what: Whose state it is, for the error.
        parts: What must be in it.
        micro_batches: Of a step on one replica: no more can have been handed out of it.

    Raises:
        ValueError: Saying what is wrong.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"This {what} state is a {type(state).__name__}, not what state_dict() gave.")
    if state.get("schema") != schema:
        raise ValueError(
            f"This {what} state has schema {state.get('schema')!r}, but this version of hf_wlb reads {schema!r}; "
            "resume with the version that wrote it, or start a new pass over the data."
        )
    missing = [name for name in parts if name not in state]
    if missing:
        raise ValueError(f"This {what} state is incomplete: {', '.join(missing)} is missing. It must be kept whole.")
    if not 0 <= int(state["handed_out"]) <= micro_batches:
        raise ValueError(
            f"This {what} state says that {state['handed_out']} micro-batches of a step were handed out, but a step "
            f"has {micro_batches}: it is damaged."
        )


def whole_steps(before: Mapping[str, Any], handed_out: int, config: PackingConfig) -> int:
    """Steps that are done in a pass.

    Args:
        before: The planner's state before the present step.
        handed_out: Micro-batches of that step that were handed out to each replica.
        config: With which it was planned.
    """
    return int(before["step"]) + int(handed_out >= config.micro_batches_per_replica)


def warn_position_dropped(loaded: int, epoch: int) -> None:
    """Say that a loaded state is not used after all."""
    logger.warning(
        "The loaded state is in epoch %d, but epoch %d was asked for: it starts at its beginning.", loaded, epoch
    )
