"""Stage times: what a pipeline's stages take for every micro-batch, measured on one GPU, and the steps made of them.

    python recipes/benchmarks/stage_times.py --lengths FILE                        # PP4; 128K and 64K, two kernels
    python recipes/benchmarks/stage_times.py --lengths FILE --configurations pp4_32k_fa2 pp4_96k_fa2 pp4_160k_fa2
    python recipes/benchmarks/stage_times.py --lengths FILE --configurations pp2cp2_128k_fa2 pp2cp2_128k_fa4
    python recipes/benchmarks/stage_times.py --lengths FILE --configurations pp4cp2_128k_fa4 pp2dp2cp2_128k_fa4
    python recipes/benchmarks/stage_times.py --quick --use-cpu                     # tiny
    python recipes/benchmarks/stage_times.py --show                                # tables of the results
    python recipes/benchmarks/stage_times.py --write-readme                        # renews docs/results.md

Whole steps on four GPUs are measured by ``end_to_end.py``; this is for who has one. The same variants, documents and
sampled steps: one decoder layer, the embedding, and the last norm with head and loss are run forward and backward over
every micro-batch of a step, and 1F1B puts the stages' times together. Not in it are what sends and computing take from
one another, the clocks of four GPUs at work, and clipping and the optimizer, which are the same for all variants.

Where ranks share micro-batches (``cp_size``), every rank's shard is run on the one GPU, one rank after the other, by
the plan that the trainer would make. The exchange of keys and values between ranks is not measured: a stand-in takes
its place (``stage_times_exchange.py``), and what a layer waits for it is added as the simulator prices it
(``stage_times_compose.py``). If the profile does not say what an exchange takes, shards are planned with that price.

Replicas (``dp`` in a configuration's name) share a step's documents, and all of theirs are run, one replica after the
other. A step takes as long as its slowest replica's; reducing gradients, which is the same for all variants, is not in
it.

All configurations take turns in one process, round by round. A line of JSON is written after every step; a launch that
is started again with the same settings and ``--output`` goes on with other steps of the sample. The last line printed
is ``RESULT`` and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import end_to_end
import stage_times_report as show
from end_to_end import FILES, Job
from end_to_end_cases import VARIANTS, K, Settings
from readme_table import RESULTS_PAGE

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "stage_times.jsonl"

#: What is run, by name: settings of the end-to-end benchmark that differ from its defaults. ``processes`` are how many
#: the composed step would have; without them it has one replica.
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "pp4_128k_fa2": {"context_length": 128 * K, "kernel": "flash-attn-2"},
    "pp4_128k_fa4": {"context_length": 128 * K, "kernel": "flash-attn-4"},
    "pp4_64k_fa2": {"context_length": 64 * K, "kernel": "flash-attn-2"},
    "pp4_64k_fa4": {"context_length": 64 * K, "kernel": "flash-attn-4"},
    "pp4_128k_fa2_m4": {"context_length": 128 * K, "kernel": "flash-attn-2", "micro_batches": 4},
    "pp4_128k_fa4_m4": {"context_length": 128 * K, "kernel": "flash-attn-4", "micro_batches": 4},
    "pp4_32k_fa2": {"context_length": 32 * K, "kernel": "flash-attn-2"},
    "pp4_96k_fa2": {"context_length": 96 * K, "kernel": "flash-attn-2"},
    "pp4_160k_fa2": {"context_length": 160 * K, "kernel": "flash-attn-2"},
    "pp2cp2_128k_fa2": {"context_length": 128 * K, "kernel": "flash-attn-2", "pp_size": 2, "cp_size": 2},
    "pp2cp2_128k_fa4": {"context_length": 128 * K, "kernel": "flash-attn-4", "pp_size": 2, "cp_size": 2},
    "pp4cp2_128k_fa4": {"context_length": 128 * K, "kernel": "flash-attn-4", "cp_size": 2},
    "pp4cp2_64k_fa4": {"context_length": 64 * K, "kernel": "flash-attn-4", "cp_size": 2},
    "pp2dp2cp2_128k_fa4": {
        "context_length": 128 * K,
        "kernel": "flash-attn-4",
        "pp_size": 2,
        "cp_size": 2,
        "processes": 8,
    },
    "pp2dp2cp2_64k_fa4": {
        "context_length": 64 * K,
        "kernel": "flash-attn-4",
        "pp_size": 2,
        "cp_size": 2,
        "processes": 8,
    },
}
DEFAULT = ("pp4_128k_fa2", "pp4_128k_fa4", "pp4_64k_fa2", "pp4_64k_fa4")
#: The same for ``--quick``, whose other settings are the end-to-end benchmark's quick ones.
QUICK: Mapping[str, Mapping[str, Any]] = {
    "quick": {},
    "quick_m8": {"micro_batches": 8},
    "quick_cp2": {"cp_size": 2},
    "quick_dp2cp2": {"cp_size": 2, "processes": 8},
}
_FIXED = ("context_length", "kernel", "micro_batches")  # by the configuration; so may be others, such as pp_size


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="document lengths; default: the built-in sampler")
    parser.add_argument(
        "--profile", nargs="*", default=[], metavar="KERNEL=FILE", help="measured costs to plan by, for that kernel"
    )
    parser.add_argument(
        "--configurations", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGURATIONS)}; default: the first four"
    )
    for entry in fields(Settings):
        if entry.name not in (*FILES, *_FIXED):
            kind = {"bool": json.loads, "int": int, "float": float, "str": str}[str(entry.type)]
            choices = (True, False) if entry.type == "bool" else None
            about = f"default {json.dumps(entry.default)}; see Settings"
            parser.add_argument(f"--{entry.name}", type=kind, choices=choices, help=about)
    parser.add_argument("--only", nargs="*", default=[], metavar="VARIANT", help="; ".join(v.name for v in VARIANTS))
    parser.add_argument("--rounds", type=int, default=9, help="of every configuration, at most (default 9)")
    parser.add_argument("--warmups", type=int, default=1, help="steps of each before them (default 1)")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="no round begins that would end later (default 480)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model; writes no results by default")
    parser.add_argument("--use-cpu", action="store_true", help="on the CPU, without any figures to be quoted")
    parser.add_argument("--commit", default="", help="that is measured, for the results")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="lines of JSON (default: results/stage_times.jsonl); a picture of the same name goes beside it",
    )
    parser.add_argument("--show", action="store_true", help="only show what the results hold")
    parser.add_argument("--write-readme", action="store_true", help="only renew the tables of docs/results.md")
    options = parser.parse_args(given)
    if min(options.rounds, options.warmups) < 1:
        parser.error("--rounds and --warmups must be at least 1")
    return options


def profiles_of(words: Sequence[str]) -> dict[str, Path]:
    """Profiles by kernel.

    Raises:
        ValueError: If a word is not KERNEL=FILE.

    >>> profiles_of(["flash-attn-2=here.json"])
    {'flash-attn-2': PosixPath('here.json')}
    """
    found = {}
    for word in words:
        kernel, equals, file = word.partition("=")
        if not (kernel and equals and file):
            raise ValueError(f"--profile takes KERNEL=FILE, such as flash-attn-2=costs.json, not {word!r}.")
        found[kernel] = Path(file)
    return found


def chosen_configurations(options: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """The configurations to run, by name.

    Raises:
        ValueError: For a name that there is not.
    """
    known = QUICK if options.quick else CONFIGURATIONS
    names = options.configurations or (list(QUICK) if options.quick else DEFAULT)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"There is no configuration {', '.join(unknown)}; choose of: {', '.join(known)}.")
    return {name: known[name] for name in names}


def check_split(settings: Settings) -> None:
    """Refuses splits that one GPU's times do not make.

    Raises:
        ValueError: Naming what cannot be.
    """
    if settings.tp_size > 1:
        raise ValueError(
            f"tp_size={settings.tp_size}: ranks that share every matrix talk to one another inside a layer, time and "
            "again, which one GPU cannot measure. Leave it at 1, or run end_to_end.py on as many GPUs."
        )
    if settings.pp_size < 2:
        raise ValueError("pp_size must be at least 2: without a pipeline there are no stages to put together.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ValueError(
            f"{processes} processes were started, but all is measured on one GPU: start it with python alone."
        )


def settings_given(options: argparse.Namespace, name: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a configuration is run: those of the command line, and what it fixes.

    Raises:
        ValueError: If both say something, and not the same.
    """
    known = vars(options)
    for key, value in fixed.items():
        asked = known.get(key)
        if asked is not None and asked != value:
            raise ValueError(
                f"Configuration {name} has {key}={value}, but --{key} {asked} was given: leave that out, or choose "
                "other --configurations."
            )
    return {**known, **dict.fromkeys(_FIXED), **fixed}


def jobs_of(options: argparse.Namespace, folder: Path) -> list[Job]:
    """What to run, going on where launches with the same settings ended; their launches are named after them.

    Raises:
        ValueError, OSError: For settings that cannot be, or files that cannot be read.
    """
    profiles = profiles_of(options.profile)
    words = [
        word if "/" not in word else f"{word.partition('=')[0]}=FILE" if "=" in word else "FILE"
        for word in sys.argv[1:]
    ]
    command = shlex.join(["python", "recipes/benchmarks/stage_times.py", *words])
    output = options.output or (folder / "results.jsonl" if options.quick else RESULTS)
    jobs = []
    for name, given in chosen_configurations(options).items():
        own = {**settings_given(options, name, given), "output": output}
        own["profile"] = profiles.get(str(own["kernel"]))
        if "processes" not in given:
            own["processes"] = end_to_end.settings_of(argparse.Namespace(**own)).replica_size
        job = end_to_end.job_of(argparse.Namespace(**own), folder)
        check_split(job.settings)
        jobs.append(replace(job, launch=f"{job.launch}-{name}", about={**job.about, "command": command}))
    unused = sorted(set(profiles) - {job.settings.kernel for job in jobs})
    if unused:
        raise ValueError(f"--profile names {', '.join(unused)}, which no configuration attends with: leave it out.")
    return jobs


def print_results(output: Path) -> None:
    """Tables, picture and RESULT of what the file holds."""
    launches = show.read_launches(output.read_text(encoding="utf-8"))
    figures = show.summary(launches)
    print(show.configuration_tables(launches), "\n")
    if show.drawn_speedups(figures):
        show.draw(launches, output.with_suffix(".png"))
    print("RESULT", json.dumps(show.result(figures)), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a configuration failed, 2 for what the user can mend."""
    begun = time.perf_counter()
    options = arguments(given)
    status = 0
    try:
        if options.write_readme:
            launches = show.read_launches((options.output or RESULTS).read_text(encoding="utf-8"))
            text = show.with_table(RESULTS_PAGE.read_text(encoding="utf-8"), show.results_tables(launches))
            RESULTS_PAGE.write_text(text, encoding="utf-8")
            return 0
        if options.show:
            print_results(options.output or RESULTS)
            return 0
        with tempfile.TemporaryDirectory(prefix="hf_wlb_stage_times_") as temporary:
            jobs = jobs_of(options, Path(temporary))
            from stage_times_run import run  # needs torch, which tables do not

            failed = run(jobs, begun)
            if len(failed) < len(jobs):
                print_results(Path(jobs[0].output))
            status = int(bool(failed))
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
