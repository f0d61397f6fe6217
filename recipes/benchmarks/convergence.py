"""Convergence benchmark: does a model learn as well from balanced micro-batches whose long documents wait?

    python recipes/benchmarks/convergence.py --prepare                  # only tokenises the documents; no GPU
    python recipes/benchmarks/convergence.py --only base                # the weights that all runs start from
    python recipes/benchmarks/convergence.py --runs_per_gpu 5 --checkpoints 8         # what is not there yet
    python recipes/benchmarks/convergence.py --base_steps 0 --learning_rate 1e-3      # from scratch instead
    python recipes/benchmarks/convergence.py --only sequential steady   # some of the runs
    python recipes/benchmarks/convergence.py --quick --use-cpu          # tiny, a minute or two on 2 cores
    python recipes/benchmarks/convergence.py --show                     # table and RESULT of the results
    python recipes/benchmarks/convergence.py --write-readme             # renews docs/results.md and the picture

A small Llama is trained on the Python sources of this machine, whole files as documents. First a base, from scratch
and packed as documents come, long enough that its loss has fallen as it does once, rather suddenly and at a moment that
chance decides: runs that end in the middle of that are percents apart for no other reason. All runs start
from the base's weights with optimizers of their own, as long-context training goes on from a model that is there, and
make one pass over other documents, which neither the base saw nor are held out: packed as they come (sequential), by
Algorithm 1 with its outlier queues (wlb) and by the default packer (steady), in the same random order; then twice more
sequentially in other orders of the same documents, to show what difference means nothing. Without a base
(``--base_steps 0``) runs start from random weights, and the further two from others than the first three, in the same
order. Copying is measured as well (copy loss): the loss on a random string that is repeated, against that on the string
itself.

The base is a process on one GPU, alone, and then every run is one. They leave a file in ``--folder``; a call that finds
it there does not repeat them, so that after Ctrl-C (exit code 130) or SIGTERM (143) the same command goes on, with
``--checkpoints`` in the middle of a run. The base goes with its documents and what its own settings are: runs of other
lengths or learning rates can start from it. The last line printed is ``RESULT`` and JSON (not with ``--prepare``).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import convergence_report as show
from convergence_cases import (
    BASE,
    FROM_SCRATCH,
    QUICK,
    RUNS,
    SCHEMA,
    Job,
    Settings,
    chosen_runs,
    read_json,
    runs_of,
    write_json,
)
from convergence_documents import chosen_documents, prepare_documents, text_folders
from convergence_processes import Terminated, run_all, sigterm_interrupts
from readme_table import REPOSITORY, RESULTS_PAGE

from hf_wlb.analysis.environment import environment
from hf_wlb.data.stdlib_documents import source_file_documents

RESULTS = Path(__file__).resolve().parent / "results" / "convergence.json"
FOLDER = REPOSITORY / "runs" / "convergence"
HIDDEN = {"--text": "FOLDER", "--folder": "FOLDER", "--documents": "FOLDER", "--output": "FILE"}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = dict.fromkeys(run.name for run in (BASE, *RUNS, *FROM_SCRATCH))
    parser.add_argument("--only", nargs="*", default=[], metavar="RUN", help="; ".join(names))
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use (default 1)")
    parser.add_argument("--runs_per_gpu", type=int, default=1, help="runs at once on each of them (default 1)")
    parser.add_argument("--text", nargs="*", metavar="FOLDER", help="with source files; default: of this Python")
    for entry in fields(Settings):
        kind: Any = {"bool": _flag, "int": int, "float": float, "str": str}[str(entry.type)]
        parser.add_argument(f"--{entry.name}", type=kind, help=f"default {entry.default}; see Settings")
    parser.add_argument("--folder", type=Path, help="for what runs leave (default: runs/convergence; --quick: none)")
    parser.add_argument("--documents", type=Path, metavar="FOLDER", help="for tokens (default: FOLDER/documents)")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"results (default: {RESULTS.name}; --quick: none)")
    parser.add_argument("--prepare", action="store_true", help="only tokenise the documents")
    parser.add_argument(
        "--checkpoints", type=int, default=0, metavar="N", help="of every run, to go on from (default 0)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    parser.add_argument("--use-cpu", action="store_true", help="on the CPU, without any figures to be quoted")
    parser.add_argument("--commit", default="", help="that is measured, for the results")
    parser.add_argument("--show", action="store_true", help="only show what the results hold")
    parser.add_argument("--write-readme", action="store_true", help="only renew docs/results.md and the picture")
    options = parser.parse_args(given)
    if min(options.gpus, options.runs_per_gpu) < 1:
        parser.error("--gpus and --runs_per_gpu must be at least 1")
    if options.checkpoints < 0:
        parser.error("--checkpoints must not be negative")
    if options.prepare and options.quick and not (options.folder or options.documents):
        parser.error("--prepare --quick needs --folder or --documents: what it makes would be lost")
    return options


def _flag(word: str) -> bool:
    """True or False, in words.

    >>> _flag("true"), _flag("0")
    (True, False)
    """
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if word.lower() not in known:
        raise argparse.ArgumentTypeError(f"must be true or false, got {word!r}")
    return known[word.lower()]


def settings_of(options: argparse.Namespace) -> Settings:
    """What is given, else the defaults; on the CPU layers are not compiled unless that is given.

    Raises:
        ValueError: For sizes that cannot be.
    """
    given = {entry.name: getattr(options, entry.name) for entry in fields(Settings)}
    default = QUICK if options.quick else Settings()
    if options.use_cpu:
        default = replace(default, compiled=False)
    return replace(default, **{name: value for name, value in given.items() if value is not None})


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
    """What is known of the documents, see ``chosen_documents``; they are tokenised unless an earlier call did so.

    Raises:
        ValueError, OSError: If those of the earlier call are others, or there is too little text.
    """
    known = folder / "documents.json"
    if known.is_file():
        pool = read_json(known, settings)
    else:
        start = time.perf_counter()
        texts = source_file_documents(text_folders() if options.text is None else options.text)
        read = time.perf_counter()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        pool = prepare_documents(texts, settings, folder, None if cores < 4 or options.quick else min(24, cores))
        print(
            f"{len(texts):,} files read in {read - start:.0f} s, {pool['documents']:,} of them tokenised in "
            f"{time.perf_counter() - read:.0f} s: {pool['tokens']:,} tokens.",
            flush=True,
        )
    about = chosen_documents(folder, pool, settings)
    if about["steps"] < settings.steps:
        print(
            f"There is text for {about['steps']:,} steps instead of {settings.steps:,}: all of it is used.", flush=True
        )
    return about


def summary(run: dict[str, Any]) -> str:
    """What is said of a run that is finished."""
    steps = len(run["loss"])
    first, again = run["copying"][-1][2:]
    return (
        f": {steps:,} steps, {run['seconds']:.0f} s in them and evaluations ({1000 * run['seconds'] / steps:.0f} ms a "
        f"step), held-out loss {show.held_out_loss(run):.4f}, copy loss {again:.2f} (of the string itself {first:.2f})"
    )


class Results:
    """What runs came to so far, written after each of them.

    Args:
        job: Of any run: what all runs have in common.
        output: The file.
        environment: For the file.
    """

    def __init__(self, job: Job, output: Path, environment: dict[str, Any]) -> None:
        self.job = job
        self.output = output
        self.results: dict[str, Any] = {
            "schema": SCHEMA,
            "columns": show.COLUMNS,
            "environment": environment,
            "settings": asdict(job.settings),
            "documents": job.about,
            "base": None,
        }
        self.gather()

    @property
    def base(self) -> str | None:
        """Of its weights; None as long as there is none."""
        found = self.results["base"]
        return None if found is None else str(found["weights"])

    def gather(self, finished: Job | None = None) -> str:
        """Reads what is there, and writes the results; returns what is said of the run that is just finished.

        Raises:
            ValueError: If a file is of other settings, documents or another base.
        """
        settings = self.job.settings
        jobs = {run.name: replace(self.job, run=run) for run in (BASE, *runs_of(settings))}
        base = jobs.pop(BASE.name)
        if settings.base_steps and base.results.is_file():
            if not (base.output / "config.json").is_file():
                raise ValueError(f"{base.results} is there, but not its weights in {base.output}: remove it.")
            found = read_json(base.results, settings, base.fingerprint)
            self.results["base"] = {**show.without_repetition(found), "settings": found["settings"]}
        self.results["runs"] = {
            name: show.without_repetition(read_json(job.results, settings, job.fingerprint, self.base))
            for name, job in jobs.items()
            if job.results.is_file()
        }
        self.results["result"] = show.result(self.results)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.output, self.results, show.json_text)
        if finished is None:
            return ""
        return summary(self.results["base"] if finished.run.is_base else self.results["runs"][finished.run.name])


def benchmark(options: argparse.Namespace, temporary: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The base and all runs that are not there yet.

    Returns:
        The results, None where documents are prepared only, and the names of the runs that failed.

    Raises:
        ValueError, OSError: For what the user can mend.
    """
    settings = settings_of(options)
    runs = chosen_runs(options.only, settings)
    folder = (options.folder or (temporary if options.quick else FOLDER)).resolve()
    places = (options.documents or folder / "documents").resolve()
    places.mkdir(parents=True, exist_ok=True)
    about = documents(options, settings, places)
    if options.prepare:
        return None, []
    folder.mkdir(parents=True, exist_ok=True)
    command = ["python", "recipes/benchmarks/convergence.py", *shown_words(sys.argv[1:])]
    found = environment(shlex.join(command), settings.seed)
    output = options.output or (folder / RESULTS.name if options.quick else RESULTS)
    job = Job(settings, BASE, about, str(places), str(folder), options.use_cpu, options.checkpoints)
    gathered = Results(job, output, {**found, "commit": options.commit or found["commit"]})
    results, failed = gathered.results, list[str]()
    for name in [*([BASE.name] if results["base"] else []), *results["runs"]]:
        print(f"{name}: was finished before", flush=True)
    if settings.base_steps and results["base"] is None:
        failed = run_all([job], [0], gathered.gather)
    if not failed:
        missing = [run for run in runs if run.name not in results["runs"]]
        jobs = [replace(job, run=run, base=gathered.base) for run in missing]
        failed = run_all(jobs, [*range(options.gpus)] * options.runs_per_gpu, gathered.gather)
    if show.is_complete(results):
        show.draw(results, output.with_suffix(".png"))
    return results, failed


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a run failed, 2 for what the user can mend, 130 after Ctrl-C, 143 after SIGTERM."""
    options = arguments(given)
    failed: list[str] = []
    try:
        if options.show or options.write_readme:
            results = json.loads((options.output or RESULTS).read_text(encoding="utf-8"))
        else:
            with sigterm_interrupts(), tempfile.TemporaryDirectory(prefix="hf_wlb_convergence_") as temporary:
                results, failed = benchmark(options, Path(temporary))
        if results is None:
            return 0
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
    except KeyboardInterrupt as stopped:
        kept = options.folder is not None or not options.quick
        goes_on = "goes on" if kept else "begins anew (--folder keeps the runs that are finished)"
        print(f"interrupted; the same command {goes_on}", file=sys.stderr)
        return 143 if isinstance(stopped, Terminated) else 130
    print("RESULT", json.dumps(results["result"]), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
