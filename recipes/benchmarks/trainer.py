"""Benchmark of WLBTrainer: MFU and tokens per second of every split, and what it adds to a bare loop.

    python recipes/benchmarks/trainer.py                     # on 4 GPUs, about 15 minutes
    python recipes/benchmarks/trainer.py --gpus 2            # on 2 GPUs, every axis by itself
    python recipes/benchmarks/trainer.py --only cp4 "dp2 x cp2" pp4 "pp2 x cp2" "pp2 x tp2"    # pipelines, with losses
    python recipes/benchmarks/trainer.py --quick --use-cpu   # tiny, a few minutes on 2 cores; writes nothing
    python recipes/benchmarks/trainer.py --write-readme      # renews docs/results.md from the results

Every split is a run of ``recipes/llama_long_context.py`` itself, started with torchrun, on the same documents of random
tokens; steps and micro-batches are the same in all of them. The last line printed is ``RESULT`` and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import trainer_report as show
from readme_table import RESULTS_PAGE
from trainer_cases import CASES, QUICK, SETTINGS, Case, Settings

from hf_wlb.lengths import IntArray, load_lengths, sample_lengths

HERE = Path(__file__).resolve().parent
RUN, OVERHEAD = HERE / "trainer_run.py", HERE / "trainer_overhead.py"
SCHEMA = "hf_wlb.trainer_benchmark/1"
LIMIT_S = 400.0  # for one run
ON_GPUS = {2: "two", 4: "full"}  # cases by the number of GPUs


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="document lengths; default: the built-in sampler")
    parser.add_argument("--gpus", type=int, choices=sorted(ON_GPUS), default=4, help="splits of 2 or 4 (default 4)")
    parser.add_argument("--only", nargs="*", metavar="CASE", help="only these, such as 'cp4' and 'overhead'")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 processes, few steps; writes no results")
    parser.add_argument("--use-cpu", action="store_true", help="on the CPU, without any figures to be quoted")
    parser.add_argument("--commit", default="", help="that is measured, for the results")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "trainer.json", metavar="FILE")
    parser.add_argument("--write-readme", action="store_true", help="only renew the table of docs/results.md")
    return parser.parse_args(given)


def documents(settings: Settings, lengths: Path | None, folder: Path) -> IntArray:
    """Writes a data set of random tokens; returns its lengths."""
    import datasets

    generator = np.random.default_rng(settings.seed)
    tokens = settings.context_length * settings.micro_batches * (settings.steps + 8)
    drawn = sample_lengths(tokens // 1000, seed=settings.seed) if lengths is None else load_lengths(lengths)
    drawn = np.minimum(generator.permutation(np.asarray(drawn) // settings.shrink), settings.context_length)
    drawn = drawn[drawn > 1]
    kept = drawn[: int(np.searchsorted(np.cumsum(drawn), tokens)) + 1]
    rows = [generator.integers(10, settings.vocabulary, size=int(length), dtype=np.int32) for length in kept]
    datasets.Dataset.from_dict({"input_ids": rows, "length": kept}).save_to_disk(str(folder))
    return kept


def memory_gib(use_cpu: bool) -> float:
    """Of one device."""
    if use_cpu:
        return float("inf")
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


def run(case: Case, settings: Settings, data: Path, folder: Path, use_cpu: bool, commit: str) -> dict[str, Any]:
    """One split, in processes of its own: the recipe's logs, step by step."""
    more = {"activation_checkpointing": True} if memory_gib(use_cpu) < case.recompute_below_gib else {}
    more = {**case.options, **more}
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    script = [str(OVERHEAD if case.overhead else RUN)]
    given = {
        "model": settings.model,
        "dataset": str(data),
        "output_dir": str(output),
        "context_length": settings.context_length,
        "max_document_tokens": settings.context_length,
        "max_steps": settings.steps,
        "gradient_accumulation_steps": settings.micro_batches // case.replicas,
        "plan_pp_size": settings.plan_pp_size,
        "shuffle_documents": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 1e-4,
        "seed": settings.seed,
        **({"use_cpu": True} if use_cpu else {"bf16": True}),
        **more,
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case.processes)]
    command = [*launcher, *script, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        problem = "" if done.returncode == 0 else done.stderr[-3000:]
    except subprocess.TimeoutExpired as error:
        problem = f"longer than {LIMIT_S:g} s; {str(error.stderr)[-2000:]}"
    found = {
        "options": {name: str(value) for name, value in more.items()},
        "processes": case.processes,
        "seconds": round(time.perf_counter() - start, 1),
        "command": shlex.join(["torchrun", "--nproc_per_node", str(case.processes), Path(script[0]).name])
        + " "
        + shlex.join(f"--{name}={value}" for name, value in given.items() if name not in ("dataset", "output_dir")),
        "commit": commit,
    }
    if problem:
        print(f"{case.name} failed:\n{problem}", file=sys.stderr, flush=True)
        return {**found, "problem": problem[-500:]}
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row or "bare_seconds" in row]
    return {**found, "steps": steps, "machine": json.loads((output / "machine.json").read_text(encoding="utf-8"))}


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """All runs and what they come to; written after each of them."""
    settings, cases = (QUICK, CASES["quick"]) if options.quick else (SETTINGS, CASES[ON_GPUS[options.gpus]])
    wanted = [case for case in cases if not options.only or case.name in options.only]
    runs: dict[str, Any] = {}
    results: dict[str, Any] = {"schema": SCHEMA, "columns": show.COLUMNS, "settings": asdict(settings), "runs": runs}
    with tempfile.TemporaryDirectory(prefix="hf_wlb_trainer_") as temporary:
        folder = Path(temporary)
        lengths = documents(settings, options.lengths, folder / "documents")
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": options.commit,
            "lengths": "the built-in sampler" if options.lengths is None else f"`{options.lengths.stem}`",
            "documents": len(lengths),
            "longest": int(lengths.max()),
        }
        for case in wanted:
            runs[case.name] = run(case, settings, folder / "documents", folder, options.use_cpu, options.commit)
            machine = next((found["machine"] for found in runs.values() if "machine" in found), {})
            results |= {"environment": {**about, "machine": machine}, "result": show.result(runs, settings.warmups)}
            print(show.run_line(case.name, runs[case.name], settings.warmups), flush=True)
            if not options.quick:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def main(given: list[str] | None = None) -> int:
    """Runs the benchmark; 1 if a run failed."""
    options = arguments(given)
    if options.write_readme:
        results = json.loads(options.output.read_text(encoding="utf-8"))
        text = show.with_table(RESULTS_PAGE.read_text(encoding="utf-8"), show.results_table(results))
        RESULTS_PAGE.write_text(text, encoding="utf-8")
        return 0
    results = benchmark(options)
    print("RESULT", json.dumps(results["result"]), flush=True)
    return int(any("problem" in found for found in results["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
