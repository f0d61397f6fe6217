"""Benchmark of the packers: the paper's Table 2, a large layout, frontiers, and ten million lengths.

    python recipes/benchmarks/packing.py                      # all of it but --scale, under 8 minutes on 2 cores
    python recipes/benchmarks/packing.py --quick              # half a minute, writes nothing
    python recipes/benchmarks/packing.py --lengths mine.json  # any lengths: .npy, a JSON list, or one a line

Modelled times: 128K context, attention = linear work at 24K tokens, 4 pipeline stages. The last line printed is
``RESULT`` and JSON. Without ../shared/data beside the repository the lengths are those of the built-in sampler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import packing_cases as cases
import packing_report as show
from readme_table import README, RESULTS_PAGE
from rich.console import Console

from hf_wlb.analysis import CaseResult, PackerCase, bar_label, run_case
from hf_wlb.analysis.environment import environment
from hf_wlb.lengths import IntArray, load_lengths, sample_lengths

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SHARED = REPOSITORY.parent / "shared" / "data"
REFERENCE, SAMPLER = "lengths_wlb_128k", "sampler"
SCHEMA = "hf_wlb.packing_benchmark/1"
TIMED_STEPS_64 = 60
LARGE_SHARE = 2  # the large layout gets steps / 2

DELAY, WAITING = "mean delay of a token (steps)", "tokens waiting, mean (contexts)"
STEADY = "steady (gap: max_time_gap, wait: max_waiting)"
#: The two sweeps of steady, which pictures show as one.
PREFIXES = {"steady, max_time_gap": "gap ", "steady, max_waiting_contexts": "wait "}

Logged = tuple[CaseResult, list[dict[str, Any]]]
log = Console(stderr=True)
out = Console(width=max(Console().width, 170))  # the tables have many columns


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="lengths to use instead of the usual ones")
    parser.add_argument("--sampler", action="store_true", help="use the built-in sampler only")
    parser.add_argument("--steps", type=int, help="steps' worth of documents (default 400; 64 micro-batches get half)")
    parser.add_argument("--quick", action="store_true", help="few steps, one source, no sweeps; writes no results")
    parser.add_argument("--scale", action="store_true", help="also run over 10 million lengths in a memory-mapped file")
    parser.add_argument("--only-scale", action="store_true", help="only that, into the results that are there")
    parser.add_argument("--scale-documents", type=int, default=10_000_000, metavar="N", help="how many for --scale")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write every packer's plan as JSON lines")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where results go (default: results/ beside this)"
    )
    parser.add_argument(
        "--write-readme",
        action="store_true",
        help="only renew the tables of README.md and docs/results.md and the pictures from the results",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampler and of passes after the first")
    parser.add_argument("--workers", type=int, default=2, help="processes for what is not timed")
    options = parser.parse_args(given)
    options.steps = options.steps or (40 if options.quick else 400)
    if options.steps < 2 or options.workers < 1 or options.scale_documents < 1:
        parser.error("--steps must be at least 2, --workers and --scale-documents at least 1")
    if options.output is None and not options.quick:
        options.output = HERE / "results"
    return options


def sources(options: argparse.Namespace) -> dict[str, IntArray]:
    """Lengths by name, the one of RESULT first."""
    if options.lengths is not None:
        return {options.lengths.stem: load_lengths(options.lengths)}
    sampled = {SAMPLER: sample_lengths(100_000, options.seed)}
    if options.sampler:
        return sampled
    files = [SHARED / f"{name}.json" for name in (REFERENCE, "lengths_prolong")]
    found = {file.stem: load_lengths(file) for file in files if file.is_file()}
    everything = {**found, **sampled} if REFERENCE in found else {**sampled, **found}
    return dict([next(iter(everything.items()))]) if options.quick else everything


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Says on standard error what is done and how long it took."""
    start = time.perf_counter()
    with log.status(what):
        yield
    log.print(f"{what}: {time.perf_counter() - start:.1f} s", highlight=False)


class Source:
    """One source of lengths on its way through the benchmark."""

    def __init__(self, name: str, lengths: IntArray, options: argparse.Namespace, log_plans: bool) -> None:
        self.name, self._log_plans = name, log_plans
        self._steps, self._large_steps = options.steps, max(options.steps // LARGE_SHARE, 2)
        self._small = cases.documents_for(lengths, cases.SMALL, self._steps, options.seed)
        self._large = cases.documents_for(lengths, cases.LARGE, self._large_steps, options.seed)
        self._timed = cases.documents_for(lengths, cases.LARGE, min(self._large_steps, TIMED_STEPS_64), options.seed)
        self._available = len(lengths)
        self.records: list[dict[str, Any]] = []
        self._table: list[CaseResult] = []
        self._solver: list[Future[Logged]] = []
        self._large_runs: list[Future[Logged]] = []
        self._sweeps: dict[str, dict[str, list[Future[Logged]]]] = {}

    def run_timed(self) -> None:
        """Everything whose planning time is reported, alone on the machine as far as this benchmark goes."""
        for case in cases.table_cases():
            self._table.append(self._keep(cases.run_logged(case, self._small, self._log_plans)))
        steady = PackerCase("steady", replace(cases.LARGE, packer="steady"))
        self.timed_64 = run_case(steady, self._timed, cases.WORKLOAD).report

    def submit(self, pool: ProcessPoolExecutor, solver: dict[int, tuple[int, float]], sweeps: bool) -> None:
        """Everything else, slowest first."""
        self._large_runs = [self._go(pool, case, self._large) for case in reversed(cases.large_cases())][::-1]
        self._solver = [self._go(pool, case, self._small) for case in reversed(cases.solver_cases(solver))][::-1]
        if sweeps:
            sets = {"small": (cases.sweep_cases(), self._small), "large": (cases.large_sweep_cases(), self._timed)}
            self._sweeps = {
                size: {name: [self._go(pool, case, documents, False) for case in found] for name, found in all_.items()}
                for size, (all_, documents) in sets.items()
            }

    def _go(
        self, pool: ProcessPoolExecutor, case: PackerCase, documents: IntArray, log_plans: bool | None = None
    ) -> Future[Logged]:
        logged = self._log_plans if log_plans is None else log_plans
        return pool.submit(cases.run_logged, case, documents, logged)

    def _keep(self, logged: Logged, prefix: str = "") -> CaseResult:
        self.records += [{**record, "packer": prefix + record["packer"]} for record in logged[1]]
        return logged[0]

    def collect(self) -> dict[str, Any]:
        """All rows."""
        solver = [self._keep(run.result()) for run in self._solver]
        large = show.rows([self._keep(run.result(), "64: ") for run in self._large_runs])
        for r in large:  # planned beside other work: their times would mean nothing
            r["plan_ms"] = r["plan_ms_p99"] = r["pack_ms"] = None
        steady = next(r for r in large if r["packer"] == "steady")
        steady["plan_ms"], steady["plan_ms_p99"] = round(self.timed_64.plan_ms, 3), round(self.timed_64.plan_ms_p99, 3)
        table = show.rows(self._table)
        place = next(i for i, r in enumerate(table) if r["packer"].startswith("wlb"))
        table[place:place] = show.rows(solver)
        return {
            "available_documents": self._available,
            "steps": self._steps,
            "documents": len(self._small),
            "tokens": int(self._small.sum()),
            "large_steps": self._large_steps,
            "large_documents": len(self._large),
            "table": table,
            "large": large,
            "sweeps": {
                size: {name: [_point(run.result()[0]) for run in runs] for name, runs in series.items()}
                for size, series in self._sweeps.items()
            },
        }


def _point(result: CaseResult) -> dict[str, Any]:
    full = show.row(result, None)
    names = ("imbalance", "step_gap", "delay", "delay_worst", "waiting_mean", "waiting_peak", "token_variation")
    return {"setting": result.label, **{name: full[name] for name in names}}


def run_scale(options: argparse.Namespace) -> dict[str, Any]:
    """Ten million lengths in a file; every part in a fresh process, so that its memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "lengths.npy")
        for function, given in (
            (cases.write_sample, (path, options.scale_documents, options.seed)),
            (cases.scale_pass, (path, options.steps)),
        ):
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                result = pool.submit(function, *given).result()
    assert isinstance(result, dict)
    return result


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """The section of the results file."""
    with stage(f"{options.scale_documents:,} lengths"):
        return {"environment": environment(command(), options.seed), **run_scale(options)}


def command() -> str:
    """What was typed, without folders and files of this machine."""
    shown = ["FILE" if "/" in word else word for word in sys.argv[1:]]
    return shlex.join(["python", "recipes/benchmarks/packing.py", *shown])


def draw(results: dict[str, Any], folder: Path) -> None:
    """Pictures of the first source's table and sweeps."""
    from hf_wlb.plots import plot_frontier, plot_packer_bars

    name = results["result"]["lengths"]
    source = results["sources"][name]
    complete = [
        (bar_label(r["packer"], r["work_share"]), r["total_time"])
        for r in source["table"]
        if r["total_time"] is not None
    ]
    title = f"Time for the same documents ({name}) above perfect balance"
    plot_packer_bars(complete, folder / "packing_time.png", title=title)
    if not source["sweeps"]:
        return
    small, large = source["sweeps"]["small"], source["sweeps"]["large"]
    for file, series, shown, x, label, layout in (
        ("time_against_delay.png", small, ("wlb", "steady"), "delay", DELAY, "4 micro-batches"),
        ("time_against_waiting.png", small, ("wlb", "steady"), "waiting_mean", WAITING, "4 micro-batches"),
        (
            "time_against_waiting_64.png",
            large,
            ("greedy", "wlb", "steady"),
            "waiting_mean",
            WAITING,
            "64 micro-batches",
        ),
    ):
        points: dict[str, list[dict[str, Any]]] = {}
        for packer, found in series.items():
            if packer.startswith(shown):
                prefix = PREFIXES.get(packer, "")
                known = points.setdefault(STEADY if prefix else packer, [])
                known += [{**point, "setting": prefix + point["setting"]} for point in found]
        plot_frontier(
            {packer: frontier(found, x) for packer, found in points.items()},
            folder / file,
            xlabel=f"{label}; each packer's best settings, {name}",
            ylabel="modelled step time over perfect balance (%)",
            title=f"Step time against {x.split('_')[0]}: {layout} of 128K a step",
        )


def frontier(points: list[dict[str, Any]], x: str) -> list[tuple[float, float, str]]:
    """Settings that no other of the same packer beats in both quantities: (x, percent over perfect, setting)."""
    kept: list[tuple[float, float, str]] = []
    for point in sorted(points, key=lambda p: (p[x], p["step_gap"])):
        percent = (point["step_gap"] - 1) * 100
        if not kept or percent < kept[-1][1]:
            kept.append((point[x], percent, point["setting"]))
    return kept


def write_readme(results_file: Path) -> None:
    """Renews the tables of README.md and docs/results.md and the pictures."""
    results = json.loads(results_file.read_text(encoding="utf-8"))
    page = show.with_table(RESULTS_PAGE.read_text(encoding="utf-8"), show.results_tables(results))
    readme = show.with_summary(README.read_text(encoding="utf-8"), show.readme_table(results))
    RESULTS_PAGE.write_text(page, encoding="utf-8")
    README.write_text(readme, encoding="utf-8")
    draw(results, results_file.parent)


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything that was asked for; the content of the results file."""
    running = [
        Source(name, lengths, options, log_plans=options.dump is not None and place == 0)
        for place, (name, lengths) in enumerate(sources(options).items())
    ]
    for source in running:
        with stage(f"{source.name}: timed packers"):
            source.run_timed()
    with stage("solver, 64 micro-batches, sweeps"), ProcessPoolExecutor(options.workers) as pool:
        for place, source in enumerate(running):
            solver = cases.SHORT_SOLVER if place else cases.SOLVER
            solver = cases.QUICK_SOLVER if options.quick else solver
            source.submit(pool, solver, sweeps=place == 0 and not options.quick)
        collected = {source.name: source.collect() for source in running}
    if options.dump is not None:
        with options.dump.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in running[0].records)
    first = running[0].name
    results = {
        "schema": SCHEMA,
        "columns": show.COLUMNS,
        "environment": environment(command(), options.seed),
        "sources": collected,
        "result": show.result_line(first, collected[first]["table"], collected[first]["large"]),
    }
    if options.scale:
        results["scale"] = scale(options)
    return results


def print_tables(results: dict[str, Any]) -> None:
    """Everything but RESULT."""
    for name, source in results["sources"].items():
        title = f"{name}: the same {source['documents']:,} documents for every packer, 4 micro-batches, PP 4"
        out.print(show.rich_table(title, source["table"], paper=True))
        title = f"{name}: the same {source['large_documents']:,} documents, 64 micro-batches (4 replicas of 16), PP 4"
        out.print(show.rich_table(title, source["large"], paper=False))
    for column, meaning in show.COLUMNS.items():
        out.print(f"  {column}: {meaning}", style="dim", highlight=False)
    if "scale" in results:
        out.print("Scale:", {key: value for key, value in results["scale"].items() if key != "environment"})


def main() -> int:
    """Runs the benchmark; 2 for what the user can mend."""
    options = arguments()
    try:
        if options.write_readme:
            write_readme((options.output or HERE / "results") / "packing.json")
            return 0
        if options.only_scale:
            return add_scale(options)
        results = benchmark(options)
    except (ValueError, OSError) as error:
        log.print(f"Error: {error}", style="red", markup=False, highlight=False)
        return 2
    print_tables(results)
    if options.output is not None:
        save(results, options.output)
    print("RESULT", json.dumps(results["result"]))
    return 0


def add_scale(options: argparse.Namespace) -> int:
    """Renews the scale section of the results that are there."""
    file = (options.output or HERE / "results") / "packing.json"
    results = json.loads(file.read_text(encoding="utf-8"))
    results["scale"] = scale(options)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.print(results["scale"])
    return 0


def save(results: dict[str, Any], folder: Path) -> None:
    """Writes packing.json and the pictures; a scale run of an earlier call stays in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "packing.json"
    if "scale" not in results and file.is_file():
        earlier = json.loads(file.read_text(encoding="utf-8"))
        if "scale" in earlier:
            results["scale"] = earlier["scale"]
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, folder)


if __name__ == "__main__":
    sys.exit(main())
