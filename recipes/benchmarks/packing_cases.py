"""What the packing benchmark runs: the paper's Table 2, a large layout, two sweeps, and ten million lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_wlb.analysis import CaseResult, PackerCase, comparable, run_case
from hf_wlb.lengths import IntArray, length_summary, load_lengths, sample_lengths
from hf_wlb.packing import ArraySource, PackingConfig, StepPlan, StepPlanner, length_stream, measure
from hf_wlb.workload import AnalyticWorkload

CONTEXT = 128 * 1024
CROSSOVER = 24 * 1024
WORKLOAD = AnalyticWorkload.from_crossover(CROSSOVER)
# comparable: all packers split documents at the context length, so that all do the same work.
SMALL = comparable(PackingConfig(CONTEXT, micro_batches_per_replica=4, pp_size=4))  # the paper's 7B-128K
LARGE = comparable(PackingConfig(CONTEXT, micro_batches_per_replica=16, dp_size=4, pp_size=4))  # 64 micro-batches
WLB_S_MAX = int(1.5 * CONTEXT)
K = 1024
QUEUES = {1: (64 * K,), 2: (32 * K, 64 * K), 3: (32 * K, 64 * K, 96 * K)}

#: Solver: window -> (windows solved, seconds allowed for each).
SOLVER = {1: (12, 5.0), 2: (6, 10.0), 4: (3, 15.0)}
#: The same for lengths other than the first.
SHORT_SOLVER = {1: (6, 5.0)}
QUICK_SOLVER = {1: (2, 1.0)}


def table_cases() -> list[PackerCase]:
    """Rows of Table 2 without the solver, and ours."""
    cases = [
        PackerCase("concat-and-cut", replace(SMALL, packer="concat-and-cut")),
        PackerCase("next-fit", replace(SMALL, packer="next-fit")),
    ]
    for window in (1, 2, 4, 8):
        cases.append(PackerCase(_windowed("greedy", window), replace(SMALL, packer="greedy", window_steps=window)))
    for queues, thresholds in QUEUES.items():
        label = f"wlb, {queues} queue{'s' * (queues > 1)}"
        cases.append(PackerCase(label, _wlb(SMALL, thresholds)))
    return [*cases, PackerCase("steady", replace(SMALL, packer="steady"))]


def solver_cases(windows: dict[int, tuple[int, float]]) -> list[PackerCase]:
    """The solver on a few windows, and greedy on the same documents."""
    cases = []
    for window, (count, seconds) in windows.items():
        config = replace(SMALL, packer="solver", window_steps=window, solver_seconds=seconds)
        cases.append(PackerCase(_windowed("solver", window), config, steps=count * window))
        greedy = replace(SMALL, packer="greedy", window_steps=window)
        cases.append(PackerCase(f"{_windowed('greedy', window)}, solver's set", greedy, count * window))
    return cases


def large_cases() -> list[PackerCase]:
    """64 micro-batches: 4 replicas of 16, 4 pipeline stages."""
    return [
        PackerCase("concat-and-cut", replace(LARGE, packer="concat-and-cut")),
        PackerCase("next-fit", replace(LARGE, packer="next-fit")),
        PackerCase("greedy, 1 global batch", replace(LARGE, packer="greedy")),
        PackerCase("wlb, 2 queues", _wlb(LARGE, QUEUES[2])),
        PackerCase("steady", replace(LARGE, packer="steady")),
    ]


def sweep_cases() -> dict[str, list[PackerCase]]:
    """Series of the frontiers with 4 micro-batches; labels are what the points are called."""
    levels = [(16,), (32,), (48,), (64,), (96,), (16, 64), (32, 64), (48, 80), (64, 96), (16, 48, 80), (32, 64, 96)]
    thresholds = {"/".join(f"{t}K" for t in level): tuple(t * K for t in level) for level in levels}
    gaps = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
    contexts = (2, 3, 4, 6, 10, 16)
    steady = replace(SMALL, packer="steady")
    return {
        "greedy": [PackerCase(f"{k}", replace(SMALL, packer="greedy", window_steps=k)) for k in (1, 2, 4, 8)],
        "wlb, S_max 1.5x": [PackerCase(name, _wlb(SMALL, t)) for name, t in thresholds.items()],
        "steady, max_time_gap": [PackerCase(f"{gap:g}", replace(steady, max_time_gap=gap)) for gap in gaps],
        "steady, max_waiting_contexts": [PackerCase(f"{n}", replace(steady, max_waiting_contexts=n)) for n in contexts],
    }


def large_sweep_cases() -> dict[str, list[PackerCase]]:
    """Series of the frontier of time against waiting with 64 micro-batches."""
    thresholds = [(32,), (64,), (96,), (32, 64), (32, 64, 96)]
    steady = replace(LARGE, packer="steady")
    contexts, gaps = (8, 12, 16, 20, 28, 40, 60), (0.02, 0.03, 0.05, 0.08)
    return {
        "greedy": [PackerCase(f"{k}", replace(LARGE, packer="greedy", window_steps=k)) for k in (1, 2)],
        "wlb, S_max 1.5x": [
            PackerCase("/".join(f"{t}K" for t in level), _wlb(LARGE, tuple(t * K for t in level)))
            for level in thresholds
        ],
        "steady, max_time_gap": [PackerCase(f"{gap:g}", replace(steady, max_time_gap=gap)) for gap in gaps],
        "steady, max_waiting_contexts": [PackerCase(f"{n}", replace(steady, max_waiting_contexts=n)) for n in contexts],
    }


def _wlb(layout: PackingConfig, thresholds: tuple[int, ...]) -> PackingConfig:
    return replace(layout, packer="wlb", thresholds=thresholds, max_tokens_per_micro_batch=WLB_S_MAX)


def _windowed(packer: str, window: int) -> str:
    return f"{packer}, {window} global batch{'es' * (window > 1)}"


def documents_for(lengths: IntArray, layout: PackingConfig, steps: int, seed: int) -> IntArray:
    """The first documents as stored, then further passes in random order; ``steps`` steps' worth of tokens."""
    return length_stream(lengths, steps * layout.tokens_per_step, seed, first_pass_stored=True)


def run_logged(case: PackerCase, documents: IntArray, log_plans: bool) -> tuple[CaseResult, list[dict[str, Any]]]:
    """Runs a case; its plans as records for the dump, if asked for."""
    records: list[dict[str, Any]] = []
    observer: Callable[[StepPlan], None] | None = None
    if log_plans:

        def observer(plan: StepPlan) -> None:
            records.extend(plan_records(case.label, plan))

    return run_case(case, documents, WORKLOAD, observer), records


def plan_records(label: str, plan: StepPlan) -> list[dict[str, Any]]:
    """One record per micro-batch. ``arrived`` is, per document, the step in which it was read."""
    return [
        {
            "packer": label,
            "step": plan.step,
            "flush": plan.flush,
            "replica": r,
            "micro_batch": m,
            "documents": [[d.index, d.start, d.length] for d in micro_batch.documents],
            "arrived": [d.arrived for d in micro_batch.documents],
        }
        for r, replica in enumerate(plan.replicas)
        for m, micro_batch in enumerate(replica)
    ]


def write_sample(path: str, count: int, seed: int) -> None:
    """Draws lengths into a .npy file."""
    np.save(path, sample_lengths(count, seed))


def scale_pass(path: str, sample_steps: int) -> dict[str, Any]:
    """Histogram and a full pass of steady over a memory-mapped file; the other packers over a sample of it.

    Runs in a fresh process: memory is what this process's peak grows by.
    """
    lengths = load_lengths(path)
    measure(StepPlanner(ArraySource(np.full(64, 4000)), WORKLOAD, replace(SMALL, packer="steady")))  # warm up
    before, anonymous_before = peak_memory(), _status("RssAnon")
    start = time.perf_counter()
    summary = length_summary(lengths)
    histogram_seconds = time.perf_counter() - start
    histogram_growth = peak_memory() - before
    start = time.perf_counter()
    report = measure(StepPlanner(ArraySource(lengths), WORKLOAD, replace(SMALL, packer="steady")))
    steady_seconds = time.perf_counter() - start
    growth, anonymous = peak_memory() - before, _status("RssAnon") - anonymous_before
    others = {}
    sample = documents_for(lengths, SMALL, sample_steps, 0)
    for case in table_cases():
        if case.config.packer != "steady":
            start = time.perf_counter()
            run_case(case, sample, WORKLOAD)
            others[case.label] = round(time.perf_counter() - start, 2)
    return {
        "documents": summary.count,
        "tokens": summary.tokens,
        "file_mb": round(Path(path).stat().st_size / 1e6, 1),
        "histogram_seconds": round(histogram_seconds, 2),
        "steady_seconds": round(steady_seconds, 1),
        "steady_steps": report.steps,
        "steady_time_gap": round(report.time_gap, 5),
        "steady_delay": round(report.delay, 4),
        "steady_delay_worst": report.delay_worst,
        "histogram_peak_growth_mb": round(histogram_growth / 1e6, 1),
        "peak_growth_mb": round(growth / 1e6, 1),
        "anonymous_growth_mb": round(anonymous / 1e6, 1),
        "sample_documents": len(sample),
        "sample_seconds": others,
    }


def peak_memory() -> int:
    """Most resident memory of this process so far in bytes, pages of the mapped file included."""
    peak = _status("VmHWM")
    if peak:
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    """A field of /proc/self/status in bytes; 0 where there is none."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == f"{name}:"), 0)
