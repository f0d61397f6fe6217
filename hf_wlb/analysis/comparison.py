"""Runs packers over the same documents in the same order and says what each is worth.

Packers read at different speeds: in the same number of steps one has trained more documents than another, or lighter
ones. Every packer here therefore gets exactly the same documents and must train all of them, those included that it
holds back until the data end (flush). Two kinds of figures come out:

* of the regular steps, before the data ended: imbalance, delay, waiting, variation of tokens (``PackingReport``);
* of the whole set: the modelled time that training all of it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_wlb.analysis.cases import PackerCase, comparable, standard_cases
from hf_wlb.lengths import IntArray, LengthArray, LengthSummary, length_summary
from hf_wlb.packing import (
    ArraySource,
    Document,
    PackingConfig,
    PackingMetrics,
    PackingReport,
    StepPlan,
    StepPlanner,
    length_stream,
)
from hf_wlb.workload import WorkloadModel

PlanObserver = Callable[[StepPlan], None]


@dataclass(frozen=True)
class CaseResult:
    """What a packer did with a set of documents. Times are in the workload model's units.

    Attributes:
        label: Name of the case.
        config: Its settings.
        report: Figures of the regular steps; its ``delay`` includes the documents that waited when the data ended, at
            their age then, and its ``delay_worst`` every document of the set.
        subset: The documents were only the first ``steps`` steps' worth of the others' set.
        total_steps: Steps that the whole set took, flush included.
        total_tokens: Tokens trained in them.
        total_time: Modelled time of them.
        time_over_perfect: ``total_time`` over the time that the same documents would take in perfect balance, cut only
            where they exceed the longest length allowed. Below the truth for a packer that cuts others as well, because
            it does less attention: see ``work_share``.
        work_share: Workload trained over that of those documents; below 1 where further ones are cut.
        plan_ms_mean: Mean planning time per step in milliseconds; like the report's, processor time, so that other work
            on the machine does not count.
    """

    label: str
    config: PackingConfig
    report: PackingReport
    subset: bool
    total_steps: int
    total_tokens: int
    total_time: float
    time_over_perfect: float
    work_share: float
    plan_ms_mean: float

    @property
    def time_over_own_work(self) -> float:
        """``total_time`` over perfect balance of the work that was done: comparable where documents are cut."""
        return self.time_over_perfect / self.work_share if self.work_share else 1.0

    @property
    def time_per_token(self) -> float:
        """Modelled time of the whole set per token."""
        return self.total_time / self.total_tokens if self.total_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "label": self.label,
            "config": self.config.to_dict(),
            "regular_steps": self.report.to_dict(),
            "subset": self.subset,
            "equal_set": {
                "steps": self.total_steps,
                "tokens": self.total_tokens,
                "time": self.total_time,
                "time_per_token": self.time_per_token,
                "time_over_perfect": self.time_over_perfect,
                "time_over_own_work": self.time_over_own_work,
                "work_share": self.work_share,
            },
            "plan_ms_mean": self.plan_ms_mean,
        }


def equal_documents(
    lengths: LengthArray, config: PackingConfig, steps: int, seed: int = 0, *, stored_order: bool = False
) -> IntArray:
    """The documents that all packers get: as many as make up ``steps`` steps of ``config.tokens_per_step`` tokens.

    Args:
        lengths: The data, shape [documents]; where they do not suffice they are read again in another order.
        config: For the tokens of a step.
        steps: Steps wanted.
        seed: Of the order.
        stored_order: Read the first pass as stored instead of in random order.

    Raises:
        ValueError: ``steps`` is below 1, or there is no document with tokens.
    """
    if steps < 1:
        raise ValueError(f"at least 1 step is needed to compare packers, got {steps}")
    return length_stream(lengths, steps * config.tokens_per_step, seed, first_pass_stored=stored_order)


def run_case(
    case: PackerCase, documents: IntArray, workload: WorkloadModel, on_plan: PlanObserver | None = None
) -> CaseResult:
    """Plans all of ``documents`` to the end.

    Args:
        case: The packer.
        documents: Lengths in reading order; for a case with ``steps`` only the first of them are used.
        workload: What a document costs.
        on_plan: Gets every step's plan.

    Raises:
        ValueError: As the planner does, for documents that it must not take.
    """
    if case.steps is not None:
        documents = equal_documents(documents, case.config, case.steps, stored_order=True)
    run = _Run(case.config)
    planner = StepPlanner(ArraySource(documents), workload, case.config)
    while True:
        start = time.process_time()
        plan = next(planner, None)
        seconds = time.process_time() - start
        if plan is None:
            break
        run.observe(plan, planner.waiting, seconds)
        if on_plan is not None:
            on_plan(plan)
    whole = whole_work(documents, workload, case.config)
    slots = case.config.micro_batches_per_replica + case.config.pp_size - 1
    perfect = whole / case.config.micro_batches * slots
    return CaseResult(
        label=case.label,
        config=case.config,
        report=run.report(planner),
        subset=case.steps is not None,
        total_steps=planner.step,
        total_tokens=run.tokens,
        total_time=run.time,
        time_over_perfect=run.time / perfect if perfect else 1.0,
        work_share=run.work / whole if whole else 1.0,
        plan_ms_mean=run.seconds / max(planner.step, 1) * 1e3,
    )


def whole_work(documents: IntArray, workload: WorkloadModel, config: PackingConfig) -> float:
    """Workload of the documents if they are cut only where they exceed what may stay whole.

    That is ``max_document_tokens`` if stated, for concat-and-cut else the context length.

    >>> from hf_wlb.workload import AnalyticWorkload
    >>> config = PackingConfig(10, micro_batches_per_replica=2, max_document_tokens=10)
    >>> model = AnalyticWorkload.from_crossover(9)
    >>> whole_work(np.array([5, 23]), model, config) == model.document(5) + 2 * model.document(10) + model.document(3)
    True
    """
    longest = config.max_document_tokens or config.longest_document or config.context_length
    if config.oversize == "truncate":
        return float(np.sum(workload.document(np.minimum(documents, longest))))
    rest = documents % longest
    pieces = int((documents // longest).sum())
    return pieces * workload.document(longest) + float(np.sum(workload.document(rest[rest > 0])))


class _Run:
    """Sums over a whole set, beside the metrics of the regular steps."""

    def __init__(self, config: PackingConfig) -> None:
        self.time = self.work = self.seconds = 0.0
        self.tokens = 0
        self._model = config.step_time
        self._metrics = PackingMetrics(config)
        self._regular_steps = 0
        self._waiting: list[Document] = []  # after the last regular step

    def observe(self, plan: StepPlan, waiting: list[Document], seconds: float) -> None:
        self._metrics.observe(plan, waiting, seconds)
        workloads = plan.workloads()
        self.time += self._model.step_time(workloads)
        self.work += sum(map(sum, workloads))
        self.tokens += plan.tokens
        self.seconds += seconds
        if not plan.flush:
            self._regular_steps, self._waiting = plan.step + 1, waiting

    def report(self, planner: StepPlanner) -> PackingReport:
        """Counts what waited when the data ended, which by now is trained, at its age then."""
        report = self._metrics.report(planner)
        waited = sum(d.length * (self._regular_steps - d.arrived) for d in self._waiting)
        tokens = report.tokens + sum(d.length for d in self._waiting)
        return replace(report, delay=(report.delay * report.tokens + waited) / tokens if tokens else 0.0)


@dataclass(frozen=True)
class Analysis:
    """What ``analyze`` found.

    Attributes:
        summary: The lengths.
        documents: Documents that every packer got.
        tokens: Tokens in them.
        crossover_length: Length at which attention equals linear work, in tokens.
        results: One per packer.
        notes: What a reader must know.
        stream: The documents that every packer got: int64 lengths in reading order, shape [documents].
    """

    summary: LengthSummary
    documents: int
    tokens: int
    crossover_length: float
    results: tuple[CaseResult, ...]
    notes: tuple[str, ...]
    stream: IntArray = field(repr=False, compare=False)

    def result(self, label: str) -> CaseResult:
        """The result called ``label``."""
        return next(result for result in self.results if result.label == label)

    def speedup(self, over: str, of: CaseResult | None = None) -> float:
        """Modelled time of ``over`` of the whole set, over that of ``of`` (``steady``): 1.2 is 20% more a second."""
        return self.result(over).total_time / (of or self.result("steady")).total_time

    def bars(self, *further: CaseResult) -> list[tuple[str, float]]:
        """Label and time over perfect balance of everything that trained the whole set."""
        rows = [*self.results, *further]
        return [(bar_label(row.label, row.work_share), row.time_over_perfect) for row in rows if not row.subset]

    def to_dict(self, shown: CaseResult | None = None) -> dict[str, Any]:
        """Plain JSON types; with the gain of ``shown``, by default ``steady``."""
        shown = shown or self.result("steady")
        return {
            "schema": "hf_wlb.analysis/1",
            "lengths": self.summary.to_dict(),
            "equal_set": {"documents": self.documents, "tokens": self.tokens},
            "crossover_length": None if np.isinf(self.crossover_length) else self.crossover_length,
            "packers": [result.to_dict() for result in self.results],
            "speedup": {
                "of": shown.label,
                "over_next_fit": self.speedup("next-fit", shown),
                "over_concat_and_cut": self.speedup("concat-and-cut", shown),
            },
            "notes": list(self.notes),
        }


def bar_label(label: str, work_share: float) -> str:
    """A label that says if a packer's time is flattered by work left out.

    >>> bar_label("concat-and-cut", 0.915), bar_label("wlb", 1.0)
    ('concat-and-cut (92% of the work)', 'wlb')
    """
    return label if work_share > 0.995 else f"{label} ({work_share:.0%} of the work)"


def analyze(
    lengths: LengthArray,
    workload: WorkloadModel,
    config: PackingConfig,
    *,
    steps: int = 200,
    seed: int = 0,
    stored_order: bool = False,
    solver_windows: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Analysis:
    """Compares all packers on the same documents.

    Args:
        lengths: Tokens per document, shape [documents]; empty documents are left out and counted in a note.
        workload: What a document costs.
        config: Layout and policies.
        steps: Steps' worth of documents that every packer gets.
        seed: Of their order.
        stored_order: Take them as stored instead of in random order.
        solver_windows: Steps' worth of documents for the solver; 0 leaves it out.
        progress: Called with the name of what is being done.

    Raises:
        ValueError: ``steps`` is below 1, no document has tokens, or a policy refuses one.
    """
    tell = progress or (lambda _: None)
    tell("lengths")
    summary = length_summary(lengths)
    documents = equal_documents(lengths, config, steps, seed, stored_order=stored_order)
    results = []
    for case in standard_cases(config, documents, solver_windows):
        tell(case.label)
        results.append(run_case(case, documents, workload))
    return Analysis(
        summary=summary,
        documents=len(documents),
        tokens=int(documents.sum()),
        crossover_length=workload.crossover_length,
        results=tuple(results),
        notes=tuple(_notes(summary, documents, config, results)),
        stream=documents,
    )


def _notes(
    summary: LengthSummary, documents: IntArray, config: PackingConfig, results: Sequence[CaseResult]
) -> list[str]:
    notes = []
    if summary.empty:
        notes.append(f"{summary.empty:,} empty documents were left out.")
    if len(documents) > summary.count:
        notes.append(
            f"The data have {summary.tokens:,} tokens, fewer than the comparison needs; they were read "
            f"{len(documents) / summary.count:.1f} times, each time in another order."
        )
    longest = comparable(config).max_document_tokens or config.context_length
    longer = int((documents > longest).sum())
    if longer:
        notes.append(
            f"{longer:,} of {len(documents):,} documents are longer than {longest:,} tokens and were "
            f"{_treated(config)} there for every packer, so that all do the same work; wlb and steady can keep them "
            "whole up to S_max."
        )
    if not config.balances:
        notes.append(
            "One replica without pipeline stages, or with one micro-batch a step, takes as long whichever documents "
            "train together: there is nothing to balance between micro-batches, and only padding to save."
        )
    cut = next(result for result in results if result.config.packer == "concat-and-cut")
    if cut.work_share < 1:
        notes.append(
            f"concat-and-cut cuts documents: {cut.report.context_lost:.1%} of its tokens lost the beginning of their "
            f"document, and it did {cut.work_share:.1%} of the work of whole ones. Its time is flattered by that."
        )
    if not any(result.config.packer == "solver" for result in results):
        notes.append("The solver was left out: a step has too many documents for it, or none was asked for.")
    return notes


def _treated(config: PackingConfig) -> str:
    return "truncated" if config.oversize == "truncate" else "split"
