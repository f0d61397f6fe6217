"""What a plan is worth: modelled time, imbalance, delay, waiting, variation, context lost, planning time.

Figures are gathered plan by plan in memory that does not grow with the number of documents. The steps after the data
have ended (flush) are reported apart: a real run rarely sees them, a short test is full of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.planner import StepPlanner
from hf_wlb.packing.reader import ReaderCounts
from hf_wlb.packing.types import Document, StepPlan


@dataclass(frozen=True)
class PackingReport:
    """Metrics of a packer over the steps of a pass, flush excluded unless a name says so.

    Attributes:
        packer: Its name.
        steps: Steps measured.
        flush_steps: Further steps after the data had ended.
        imbalance: Mean over steps of the imbalance degree, max W * M / sum W over the step's micro-batches.
        imbalance_worst: The largest of them.
        step_time: Modelled time of all measured steps, in the workload model's units.
        time_gap: Modelled time over that of perfect balance (same total workload, spread evenly); 1.0 is perfect.
        delay: Mean steps a token waited between being read and being trained; waiting ones count at their present age.
        delay_worst: The longest wait of a document, waiting ones included.
        waiting_peak_contexts: Most tokens waiting at the end of a step, in context lengths.
        waiting_mean_contexts: The mean of the same.
        token_variation: Standard deviation over mean of the tokens per step.
        tokens_per_step: Mean tokens per step.
        tokens: Tokens trained in the measured steps.
        context_lost: Share of trained tokens (flush included) whose own document's beginning was cut off.
        flush_delay: Mean wait of the tokens trained in flush steps.
        flush_imbalance: Mean imbalance degree of the flush steps.
        plan_ms: Median planning time per step, milliseconds.
        plan_ms_p99: 99th percentile of the same.
        micro_batches: Per step, all replicas.
        documents: Source documents read, of source_tokens tokens; among them split (into pieces), truncated (by
            truncated_tokens), empty and dropped ones (see ``ReaderCounts``).
    """

    packer: str
    steps: int
    flush_steps: int
    imbalance: float
    imbalance_worst: float
    step_time: float
    time_gap: float
    delay: float
    delay_worst: int
    waiting_peak_contexts: float
    waiting_mean_contexts: float
    token_variation: float
    tokens_per_step: float
    tokens: int
    context_lost: float
    flush_delay: float
    flush_imbalance: float
    plan_ms: float
    plan_ms_p99: float
    micro_batches: int
    documents: int
    source_tokens: int
    split: int
    pieces: int
    truncated: int
    truncated_tokens: int
    empty: int
    dropped: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


class Progress(Protocol):
    """What a report reads of a planner, or of where a data loader stands behind its planner."""

    @property
    def step(self) -> int:
        """Steps so far."""
        ...

    @property
    def waiting(self) -> list[Document]:
        """Documents that were read and are in no step yet."""
        ...

    @property
    def counts(self) -> ReaderCounts:
        """Documents read, split, truncated, skipped."""
        ...


class PackingMetrics:
    """Gathers a ``PackingReport`` plan by plan."""

    def __init__(self, config: PackingConfig) -> None:
        self._config = config
        self._model = config.step_time
        self._regular = _Sums()
        self._flush = _Sums()
        self._lost_tokens = 0
        self._all_tokens = 0
        self._delay_worst = 0
        self._waiting_peak = 0
        self._waiting_sum = 0
        self._observed = 0
        self._plan_seconds: Counter[int] = Counter()  # logarithmic buckets of 1%

    def observe(self, plan: StepPlan, waiting: Iterable[Document], seconds: float | None = None) -> dict[str, float]:
        """Takes one step in.

        Args:
            plan: The step.
            waiting: What waits after it.
            seconds: Time spent planning it, if known.

        Returns:
            The step's own figures, for logging: imbalance, time_gap, delay (steps), tokens, waiting_contexts, and
            plan_ms where the planning time is known.
        """
        workloads = plan.workloads()
        flat = [w for replica in workloads for w in replica]
        total = sum(flat)
        imbalance = max(flat) * len(flat) / total if total > 0 else 1.0
        time_taken, bound = self._model.step_time(workloads), self._model.lower_bound(workloads)
        tokens = waited = 0
        for document in plan.documents:
            age = plan.step - document.arrived
            tokens += document.length
            if age:
                waited += document.length * age
                self._delay_worst = max(self._delay_worst, age)
            if document.start:
                self._lost_tokens += document.length
        self._all_tokens += tokens
        waiting_tokens = sum(document.length for document in waiting)
        self._waiting_peak = max(self._waiting_peak, waiting_tokens)
        self._waiting_sum += waiting_tokens
        self._observed += 1
        (self._flush if plan.flush else self._regular).add(imbalance, time_taken, bound, tokens, waited)
        if seconds is not None:
            self._plan_seconds[round(math.log(max(seconds, 1e-9)) * 100)] += 1
        figures = {
            "imbalance": imbalance,
            "time_gap": time_taken / bound if bound > 0 else 1.0,
            "delay": waited / tokens if tokens else 0.0,
            "tokens": tokens,
            "waiting_contexts": waiting_tokens / self._config.context_length,
        }
        return figures if seconds is None else {**figures, "plan_ms": seconds * 1e3}

    def report(self, planner: Progress) -> PackingReport:
        """The figures so far; ``planner`` gives the counts and what still waits."""
        regular, flush = self._regular, self._flush
        waiting = planner.waiting
        waited, tokens = regular.waited, regular.tokens
        delay_worst = self._delay_worst
        for document in waiting:
            age = planner.step - document.arrived
            waited += document.length * age
            tokens += document.length
            delay_worst = max(delay_worst, age)
        return PackingReport(
            packer=self._config.packer,
            steps=regular.steps,
            flush_steps=flush.steps,
            imbalance=regular.mean(regular.imbalance),
            imbalance_worst=regular.imbalance_worst,
            step_time=regular.time,
            time_gap=regular.time / regular.bound if regular.bound > 0 else 1.0,
            delay=waited / tokens if tokens else 0.0,
            delay_worst=delay_worst,
            waiting_peak_contexts=self._waiting_peak / self._config.context_length,
            waiting_mean_contexts=self._waiting_sum / max(self._observed, 1) / self._config.context_length,
            token_variation=regular.variation(),
            tokens_per_step=regular.mean(regular.tokens),
            tokens=regular.tokens,
            context_lost=self._lost_tokens / self._all_tokens if self._all_tokens else 0.0,
            flush_delay=flush.waited / flush.tokens if flush.tokens else 0.0,
            flush_imbalance=flush.mean(flush.imbalance),
            plan_ms=self._plan_quantile(0.5),
            plan_ms_p99=self._plan_quantile(0.99),
            micro_batches=self._config.micro_batches,
            **asdict(planner.counts),
        )

    def _plan_quantile(self, q: float) -> float:
        wanted = q * sum(self._plan_seconds.values())
        seen = 0
        for bucket in sorted(self._plan_seconds):
            seen += self._plan_seconds[bucket]
            if seen >= wanted:
                return math.exp(bucket / 100) * 1e3
        return 0.0


@dataclass
class _Sums:
    steps: int = 0
    imbalance: float = 0.0
    imbalance_worst: float = 0.0
    time: float = 0.0
    bound: float = 0.0
    tokens: int = 0
    tokens_squared: int = 0
    waited: int = 0

    def add(self, imbalance: float, time_taken: float, bound: float, tokens: int, waited: int) -> None:
        self.steps += 1
        self.imbalance += imbalance
        self.imbalance_worst = max(self.imbalance_worst, imbalance)
        self.time += time_taken
        self.bound += bound
        self.tokens += tokens
        self.tokens_squared += tokens * tokens
        self.waited += waited

    def mean(self, total: float) -> float:
        return total / self.steps if self.steps else 0.0

    def variation(self) -> float:
        if not self.tokens:
            return 0.0
        mean = self.tokens / self.steps
        return math.sqrt(max(self.tokens_squared / self.steps - mean * mean, 0.0)) / mean


def measure(planner: StepPlanner, max_steps: int | None = None) -> PackingReport:
    """Runs a planner over its data, or over ``max_steps`` steps, and reports.

    Raises:
        ValueError: As the planner does, for documents it must not take.
    """
    metrics = PackingMetrics(planner.config)
    while max_steps is None or planner.step < max_steps:
        start = time.perf_counter()
        plan = next(planner, None)
        seconds = time.perf_counter() - start
        if plan is None:
            break
        metrics.observe(plan, planner.waiting, seconds)
    return metrics.report(planner)
