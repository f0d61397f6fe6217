"""Convergence benchmark: does a model learn as well from balanced micro-batches whose long documents wait?

    python recipes/benchmarks/convergence.py --gpus 2 --runs_per_gpu 3       # five runs at once, about 3 minutes
    python recipes/benchmarks/convergence.py --only sequential steady        # some of the runs
    python recipes/benchmarks/convergence.py --quick --use-cpu               # tiny, a minute on 2 cores
    python recipes/benchmarks/convergence.py --show                          # table and RESULT of the results
    python recipes/benchmarks/convergence.py --write-readme                  # renews docs/results.md and the picture

A small Llama is trained for one pass over the Python sources of this machine, whole files as documents: packed as they
come (sequential), by Algorithm 1 with its outlier queues (wlb) and by the default packer (steady), from the same
weights and over the same documents in the same order; then twice more sequentially from other weights, to show what
difference means nothing. Every run is a process on one GPU and leaves a file in ``--folder``; a call that finds it
there does not repeat the run, so that after Ctrl-C (exit code 130) the same command goes on. The last line printed is
``RESULT`` and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

import convergence_report as show
from convergence_cases import (
    QUICK,
    RUNS,
    SCHEMA,
    Job,
    Run,
    Settings,
    chosen_runs,
    prepare_documents,
    read_json,
    text_folders,
    write_json,
)
from readme_table import REPOSITORY, RESULTS_PAGE

from hf_wlb.analysis.environment import environment
from hf_wlb.data.stdlib_documents import source_file_documents

HERE = Path(__file__).resolve().parent
RUN = HERE / "convergence_run.py"
RESULTS = HERE / "results" / "convergence.json"
FOLDER = REPOSITORY / "runs" / "convergence"
POLL_S = 0.2
SHOWN_OF_LOG = 3_000  # characters, where a run fails
PATIENCE_S = 10.0  # for a run that is told to end; then it is killed
HIDDEN = {"--text": "FOLDER", "--folder": "FOLDER", "--documents": "FOLDER", "--output": "FILE"}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="RUN", help="; ".join(run.name for run in RUNS))
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use (default 1)")
    parser.add_argument("--runs_per_gpu", type=int, default=1, help="runs at once on each of them (default 1)")
    parser.add_argument("--text", nargs="*", metavar="FOLDER", help="with source files; default: of this Python")
    for entry in fields(Settings):
        kind = {"int": int, "float": float, "str": str}[str(entry.type)]
        parser.add_argument(f"--{entry.name}", type=kind, help=f"default {entry.default}; see Settings")
    parser.add_argument("--folder", type=Path, help="for what runs leave (default: runs/convergence; --quick: none)")
    parser.add_argument("--documents", type=Path, metavar="FOLDER", help="for tokens (default: FOLDER/documents)")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"results (default: {RESULTS.name}; --quick: none)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    parser.add_argument("--use-cpu", action="store_true", help="on the CPU, without any figures to be quoted")
    parser.add_argument("--commit", default="", help="that is measured, for the results")
    parser.add_argument("--show", action="store_true", help="only show what the results hold")
    parser.add_argument("--write-readme", action="store_true", help="only renew docs/results.md and the picture")
    options = parser.parse_args(given)
    if min(options.gpus, options.runs_per_gpu) < 1:
        parser.error("--gpus and --runs_per_gpu must be at least 1")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """What is given, else the defaults.

    Raises:
        ValueError: For sizes that cannot be.
    """
    given = {entry.name: getattr(options, entry.name) for entry in fields(Settings)}
    return replace(QUICK if options.quick else Settings(), **{k: v for k, v in given.items() if v is not None})


def shown_words(words: Sequence[str]) -> list[str]:
    """The command line without the paths of this machine.

    Args:
        words: As given; options may be shortened, as argparse allows.

    >>> shown_words(["--text", "/a/b", "/c", "--out", "/d/e.json", "--folder=/f", "--commit", "a/b"])
    ['--text', 'FOLDER', 'FOLDER', '--out', 'FILE', '--folder=FOLDER', '--commit', 'a/b']
    """
    shown, option = list[str](), ""
    for word in words:
        given, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        option = given or option
        hidden = next((kind for name, kind in HIDDEN.items() if option and name.startswith(option)), value)
        shown.append(given + equals + (hidden if os.sep in value else value))
    return shown


def documents(options: argparse.Namespace, settings: Settings, folder: Path) -> dict[str, Any]:
    """What is known of the documents; they are tokenised unless an earlier call did so.

    Raises:
        ValueError, OSError: If those of the earlier call are others, or there is too little text.
    """
    known = folder / "documents.json"
    if known.is_file():
        return read_json(known, settings)
    start = time.perf_counter()
    texts = source_file_documents(text_folders() if options.text is None else options.text)
    read = time.perf_counter()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    about = prepare_documents(texts, settings, folder, None if cores < 4 or options.quick else min(24, cores))
    print(
        f"{len(texts):,} files read in {read - start:.0f} s, {about['tokens']:,} tokens made in "
        f"{time.perf_counter() - read:.0f} s: {about['steps']:,} steps.",
        flush=True,
    )
    if about["steps"] < settings.steps:
        print(f"There is too little text for one pass of {settings.steps:,} steps: all there is is used.", flush=True)
    return about


@dataclass
class Started:
    """A run that is going on: its process, its log, its place and since when."""

    run: Run
    process: subprocess.Popen[bytes]
    log: TextIO
    gpu: int
    since: float


def start(job: Job, gpu: int) -> Started:
    """Starts a run on a GPU."""
    log = (Path(job.folder) / f"{job.run.file_name}.log").open("w", encoding="utf-8")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = devices.split(",") if devices else [str(number) for number in range(gpu + 1)]
    if gpu >= len(names):
        raise ValueError(f"GPU {gpu} was asked for, but CUDA_VISIBLE_DEVICES={devices} names {len(names)}.")
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "" if job.use_cpu else names[gpu],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1" if job.use_cpu else "4"),
    }
    command = [sys.executable, str(RUN), str(job.save())]
    process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
    return Started(job.run, process, log, gpu, time.perf_counter())


def end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process that was told to end; kills it if it does not."""
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_all(jobs: Sequence[Job], places: Sequence[int], finished: Any) -> list[str]:
    """Runs all jobs, one at a place at once, and calls ``finished`` after each that succeeds.

    Args:
        jobs: In the order in which they are started.
        places: The GPU of every place.
        finished: Takes nothing.

    Returns:
        The names of the runs that failed.
    """
    waiting, free, running, failed = list(jobs), list(places), list[Started](), list[str]()
    try:
        while waiting or running:
            while waiting and free:
                running.append(start(waiting.pop(0), free.pop(0)))
            time.sleep(POLL_S)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.gpu)
                one.log.close()
                seconds = time.perf_counter() - one.since
                if one.process.returncode == 0:
                    print(f"{one.run.name}: finished after {seconds:.0f} s", flush=True)
                    finished()
                else:
                    failed.append(one.run.name)
                    log = Path(one.log.name).read_text(encoding="utf-8", errors="replace")
                    print(f"{one.run.name} failed after {seconds:.0f} s:\n{log[-SHOWN_OF_LOG:]}", file=sys.stderr)
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            end(one.process)
            one.log.close()
    return failed


def benchmark(options: argparse.Namespace, temporary: Path) -> tuple[dict[str, Any], list[str]]:
    """All runs that are not there yet; what they come to is written after each of them.

    Returns:
        The results, and the names of the runs that failed.

    Raises:
        ValueError, OSError: For what the user can mend.
    """
    settings, runs = settings_of(options), chosen_runs(options.only)
    folder = (options.folder or (temporary if options.quick else FOLDER)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    output = options.output or (folder / RESULTS.name if options.quick else RESULTS)
    places = (options.documents or folder / "documents").resolve()
    about = documents(options, settings, places)
    command = ["python", "recipes/benchmarks/convergence.py", *shown_words(sys.argv[1:])]
    found = environment(shlex.join(command), settings.seed)
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "columns": show.COLUMNS,
        "environment": {**found, "commit": options.commit or found["commit"]},
        "settings": asdict(settings),
        "documents": {name: value for name, value in about.items() if name not in ("schema", "settings")},
    }

    def gather() -> None:
        there = {run.name: folder / f"{run.file_name}.json" for run in RUNS}
        results["runs"] = {
            name: show.without_repetition(read_json(file, settings, about["fingerprint"]))
            for name, file in there.items()
            if file.is_file()
        }
        results["result"] = show.result(results)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, results, show.json_text)

    gather()
    for name in results["runs"]:
        print(f"{name}: was finished before", flush=True)
    jobs = [
        Job(settings, run, about, str(places), str(folder), options.use_cpu)
        for run in runs
        if run.name not in results["runs"]
    ]
    failed = run_all(jobs, [*range(options.gpus)] * options.runs_per_gpu, gather)
    if show.is_complete(results):
        show.draw(results, output.with_suffix(".png"))
    return results, failed


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a run failed, 2 for what the user can mend, 130 after Ctrl-C."""
    options = arguments(given)
    failed: list[str] = []
    try:
        if options.show or options.write_readme:
            results = json.loads((options.output or RESULTS).read_text(encoding="utf-8"))
        else:
            with tempfile.TemporaryDirectory(prefix="hf_wlb_convergence_") as temporary:
                results, failed = benchmark(options, Path(temporary))
        if options.write_readme:
            page = show.with_table(RESULTS_PAGE.read_text(encoding="utf-8"), show.results_table(results))
            RESULTS_PAGE.write_text(page, encoding="utf-8")
            show.draw(results, (options.output or RESULTS).with_suffix(".png"))
            return 0
        if show.is_complete(results):
            print(show.results_table(results))
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = options.folder is not None or not options.quick
        goes_on = "goes on" if kept else "begins anew (--folder keeps the runs that are finished)"
        print(f"interrupted; the same command {goes_on}", file=sys.stderr)
        return 130
    print("RESULT", json.dumps(results["result"]), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
