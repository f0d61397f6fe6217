"""Benchmark of context-parallel attention: every sharding strategy against the ideal, one GPU's time over the ranks.

    torchrun --nproc_per_node 4 recipes/benchmarks/context_parallel.py --lengths lengths_wlb_128k.json
    torchrun --nproc_per_node 2 recipes/benchmarks/context_parallel.py --lengths FILE --device cpu --dtype float32 \
        --shrink 128 --heads 4 --kv_heads 1 2 --head_size 16 --quick        # tries the program out, no more

All of it takes under 8 minutes on 4 GPUs, --quick under 2.5, --parts contexts a minute. Results are written part by
part, so that a run that is cut short leaves what it has. The last line printed is ``RESULT`` and JSON; the exit code is
1 if the error against float64 is too large.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import context_parallel_report as show
from context_parallel_cases import Draws
from readme_table import README, RESULTS_PAGE
from rich.console import Console

from hf_wlb.analysis.environment import environment
from hf_wlb.lengths import load_lengths

if TYPE_CHECKING:
    from context_parallel_parts import Parts

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "context_parallel.json"
SCHEMA = "hf_wlb.context_parallel_benchmark/1"
DTYPES = ("bfloat16", "float16", "float32")
PARTS = ("errors", "profile", "cases", "choice", "contexts")
"""What is measured for every number of KV heads, as in the results."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="document lengths to draw from (required)")
    parser.add_argument("--kernel", help="attention kernel (default: the fastest that is installed)")
    parser.add_argument("--kv_heads", type=int, nargs="+", default=[8, 32], metavar="N", help="default 8 32")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--head_size", type=int, default=128, help="default 128")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--kv_head_groups", type=int, help="groups of KV heads exchanged one by one (default: automatic)"
    )
    parser.add_argument("--keep_gathered", action="store_true", help="keep gathered keys and values for backward")
    parser.add_argument(
        "--parts",
        choices=PARTS,
        nargs="+",
        default=list(PARTS),
        metavar="PART",
        help=f"only some of {', '.join(PARTS)}; without profile, plans are made with counted costs",
    )
    parser.add_argument("--quick", action="store_true", help="three cases of 128K and few random micro-batches")
    parser.add_argument("--samples", type=int, default=9, help="repetitions after 2 warm-ups (default 9)")
    parser.add_argument("--choices", type=int, help="random micro-batches (default 40, with --quick 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the random micro-batches")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ahead_ms", type=float, default=5.0, help="how long hosts queue ahead (0: time launches too)")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, for trying the program out")
    parser.add_argument("--commit", help="what to note as the commit, where this is no git checkout")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where results go (default: results/, whole runs only)"
    )
    parser.add_argument("--write-readme", action="store_true", help="only renew the Markdown tables from the results")
    options = parser.parse_args(given)
    options.choices = options.choices or (12 if options.quick else 40)
    if options.lengths is None and not options.write_readme:
        parser.error("--lengths FILE is required: a list of document lengths (.json, .npy, or one a line)")
    options.parts = [part for part in PARTS if part in options.parts]
    whole = not options.quick and options.parts == list(PARTS) and options.shrink == 1
    if options.output is None and (options.write_readme or whole):
        options.output = RESULTS
    if min(options.samples, options.choices, options.kv_head_groups or 1, *options.kv_heads) < 1:
        parser.error("--samples, --choices, --kv_heads and --kv_head_groups must be at least 1")
    return options


class Log:
    """Progress on standard error with the seconds since the start; only the first process speaks."""

    def __init__(self) -> None:
        self.speaks = os.environ.get("RANK", "0") == "0"
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def __call__(self, text: str) -> None:
        """Says something."""
        if self.speaks:
            print(f"[{self.seconds:6.1f} s] {text}", file=sys.stderr, flush=True)


def command() -> str:
    """What was typed, without folders and files of this machine."""
    shown = ["FILE" if "/" in word else word for word in sys.argv[1:]]
    script = "recipes/benchmarks/context_parallel.py"
    return shlex.join(["torchrun", "--nproc_per_node", os.environ.get("LOCAL_WORLD_SIZE", "1"), script, *shown])


def benchmark(options: argparse.Namespace, parts: Parts, log: Log) -> dict[str, Any]:
    """Runs the parts for every number of KV heads, and writes results after each; complete if all parts ran."""
    about = environment(command(), options.seed)
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "columns": show.COLUMNS,
        "environment": {**about, "commit": options.commit or about["commit"], **parts.machine()},
        "settings": parts.settings(),
        "complete": False,
        "kv_heads": {},
    }
    for kv_heads in options.kv_heads:
        part: dict[str, Any] = {}
        results["kv_heads"][str(kv_heads)] = part
        for name, run in parts.of(kv_heads, part):
            log(f"{kv_heads} KV heads: {name}")
            run()
            results["result"] = show.result_line(results)
            save(results, options.output if log.speaks else None)
    results["complete"] = options.parts == list(PARTS)
    results["seconds"] = round(log.seconds, 1)
    save(results, options.output if log.speaks else None)
    return results


def save(results: dict[str, Any], file: Path | None) -> None:
    """Writes the results so far; lists of numbers on one line each."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(dumps(results) + "\n", encoding="utf-8")
    unfinished.replace(file)


def dumps(value: Any, indent: str = "") -> str:
    """JSON that is readable and short: a list of plain values takes one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = (f"{inner}{json.dumps(str(key))}: {dumps(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(inner + dumps(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value)


def print_tables(results: dict[str, Any]) -> None:
    """Everything but RESULT, of the parts that ran."""
    out = Console(width=max(Console().width, 210))
    for kv_heads, part in results["kv_heads"].items():
        for name, table in (("cases", show.cases_table), ("contexts", show.contexts_table)):
            if name in part:
                out.print(table(kv_heads, part[name]))
        lines = show.choice_lines(kv_heads, part["choice"]) if "choice" in part else []
        lines += [show.error_line(kv_heads, part["errors"])] if "errors" in part else []
        for line in lines:
            out.print(line, highlight=False)
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    out.print(f"{about['device']}; {versions}; {results['seconds']} s", highlight=False)


def write_readme(results_file: Path) -> None:
    """Renews the tables of README.md and docs/results.md.

    Raises:
        ValueError: If the results are not those of a whole run.
    """
    results = json.loads(results_file.read_text(encoding="utf-8"))
    if not results["complete"]:
        raise ValueError(f"{results_file.name} holds some of the parts {', '.join(PARTS)} only: run without --parts.")
    page = show.with_table(RESULTS_PAGE.read_text(encoding="utf-8"), show.results_tables(results))
    readme = show.with_summary(README.read_text(encoding="utf-8"), show.readme_table(results))
    RESULTS_PAGE.write_text(page, encoding="utf-8")
    README.write_text(readme, encoding="utf-8")


def main(given: list[str] | None = None) -> int:
    """Runs the benchmark; 1 if the error is too large, 2 for what the user can mend."""
    options = arguments(given)
    log = Log()
    try:
        if options.write_readme:
            write_readme(options.output)
            return 0
        draws = Draws(load_lengths(options.lengths), options.shrink)
        from context_parallel_parts import Parts  # torch only now: --write-readme needs none

        parts = Parts(options, draws, log)
    except (ValueError, OSError) as error:
        log(f"Error: {error}")
        return 2
    results = benchmark(options, parts, log)
    if log.speaks:
        print_tables(results)
        print("RESULT", json.dumps(results["result"]), flush=True)
    parts.close()
    return verdict(results["result"], log)


def verdict(result: dict[str, Any], log: Log) -> int:
    """1 if the error is too large, or no number; 0 where it was not asked for."""
    if result["error_ratio"] is None or result["error_ratio"] <= show.MOST_ERROR_RATIO:
        return 0
    log(f"Error: the error is {result['error_ratio']:.2f} x the plain kernel's, more than {show.MOST_ERROR_RATIO}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
