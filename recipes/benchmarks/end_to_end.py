"""End-to-end benchmark: WLB against Plain-4D and Fixed-4D, and every part alone, on the GPUs given.

    python recipes/benchmarks/end_to_end.py --lengths FILE                                  # PP4, 128K, 4 GPUs
    python recipes/benchmarks/end_to_end.py --lengths FILE --pp_size 2 --cp_size 2 --kernel flash-attn-4
    python recipes/benchmarks/end_to_end.py --lengths FILE --pp_size 2 --cp_size 2 --processes 8   # DP2, 8 GPUs
    python recipes/benchmarks/end_to_end.py --quick --use-cpu                               # tiny, 2 processes
    python recipes/benchmarks/end_to_end.py --show                                          # tables of the results
    python recipes/benchmarks/end_to_end.py --write-readme                                  # renews docs/results.md

GPU time is short, so every packer's long stream of steps is planned on the CPU, over the same documents, and a random
sample of steps behind its beginning is run. All variants take turns in one launch, with one model, after a warm-up
over the range of shapes. A line of JSON is written after every step; a launch that is started again with the same
settings and ``--output`` goes on with other steps of the sample. A profile that does not say what an exchange between
context-parallel ranks takes (``hf-wlb profile`` on one GPU) gets the simulator's price of it. The last line printed is
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import end_to_end_report as show
from end_to_end_cases import QUICK, VARIANTS, Settings, chosen_variants
from readme_table import RESULTS_PAGE

from hf_wlb.analysis.environment import environment
from hf_wlb.lengths import sample_lengths
from hf_wlb.simulator.measured import complete_lines

HERE = Path(__file__).resolve().parent
RUN = HERE / "end_to_end_run.py"
RESULTS = HERE / "results" / "end_to_end.jsonl"
FILES = ("lengths", "profile")  # of which settings and results hold the name only
SAMPLED = 20_000  # lengths of the built-in sampler, where no file is given


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="document lengths; default: the built-in sampler")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="measured costs, to plan and shard by")
    parser.add_argument("--processes", type=int, help="one a GPU (default 4; 2 with --quick)")
    for entry in fields(Settings):
        if entry.name not in FILES:
            kind = {"bool": _flag, "int": int, "float": float, "str": str}[str(entry.type)]
            parser.add_argument(f"--{entry.name}", type=kind, help=f"default {entry.default}; see Settings")
    parser.add_argument("--only", nargs="*", default=[], metavar="VARIANT", help="; ".join(v.name for v in VARIANTS))
    parser.add_argument("--rounds", type=int, default=4, help="steps of every variant, at most (default 4)")
    parser.add_argument("--warmups", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="no round begins that would end later (default 480)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 processes; writes no results by default")
    parser.add_argument("--use-cpu", action="store_true", help="on the CPU, without any figures to be quoted")
    parser.add_argument("--commit", default="", help="that is measured, for the results")
    parser.add_argument("--output", type=Path, metavar="FILE", help="lines of JSON (default: results/end_to_end.jsonl)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="a timeline of every launch goes there")
    parser.add_argument("--show", action="store_true", help="only show what the results hold")
    parser.add_argument("--write-readme", action="store_true", help="only renew the tables of docs/results.md")
    options = parser.parse_args(given)
    if min(options.rounds, options.warmups, 1 if options.processes is None else options.processes) < 1:
        parser.error("--rounds, --warmups and --processes must be at least 1")
    return options


def _flag(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false, not {word!r}")
    return word.lower() == "true"


@dataclass(frozen=True)
class Job:
    """What a launch does; ``end_to_end_run.py`` reads it.

    Attributes:
        settings: What its variants have in common.
        lengths: File of document lengths.
        profile: File with measured costs; "" for none.
        folder: For the trainer's own files.
        output: Lines of JSON go at its end: one for the launch, one for every step.
        launch: The launch's name in them.
        about: Commit, command and what else its line shall hold.
        first_round: Rounds that were run before.
        rounds: To run now, at most.
        warmups: Steps before them.
        seconds: No round begins that would end after so many.
        variants: Only these; none for all.
        use_cpu: On the CPU.
        processes: One a GPU.
    """

    settings: Settings
    lengths: str
    profile: str
    folder: str
    output: str
    launch: str
    about: dict[str, Any] = field(default_factory=dict)
    first_round: int = 0
    rounds: int = 4
    warmups: int = 3
    seconds: float = 480.0
    variants: Sequence[str] = ()
    use_cpu: bool = False
    processes: int = 1

    @property
    def replicas(self) -> int:
        """Data-parallel replicas.

        Raises:
            ValueError: If the processes do not make whole ones.
        """
        return self.settings.replicas(self.processes)

    def save(self, file: Path) -> None:
        """Writes it for the processes."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Job:
        """Reads it."""
        given = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**given, "settings": Settings(**given["settings"])})


def settings_of(options: argparse.Namespace) -> Settings:
    """What is given, else the defaults.

    Raises:
        ValueError: For sizes that cannot be.
    """
    given = {entry.name: getattr(options, entry.name) for entry in fields(Settings) if entry.name not in FILES}
    lengths = "the built-in sampler" if options.lengths is None else options.lengths.stem
    named = {name: value for name, value in given.items() if value is not None}
    named["profile"] = "" if options.profile is None else options.profile.stem
    return replace(QUICK if options.quick else Settings(), lengths=lengths, **named)


def job_of(options: argparse.Namespace, folder: Path) -> Job:
    """What to launch, going on where launches with the same settings ended.

    Raises:
        ValueError, OSError: For settings that cannot be, or a results file that cannot be read.
    """
    settings = settings_of(options)
    chosen_variants(settings.cp_size, options.only)
    processes = options.processes or (2 if options.quick else 4)
    replicas = settings.replicas(processes)
    output = options.output or (folder / "results.jsonl" if options.quick else RESULTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    before = output.read_text(encoding="utf-8") if output.is_file() else ""
    if complete_lines(before) != before:
        output.write_text(complete_lines(before), encoding="utf-8")
    lengths = options.lengths
    if lengths is None:
        lengths = folder / "lengths.json"
        lengths.write_text(json.dumps(sample_lengths(SAMPLED, settings.seed).tolist()), encoding="utf-8")
    words = [word if "/" not in word else "FILE" for word in sys.argv[1:]]
    about = environment(shlex.join(["python", "recipes/benchmarks/end_to_end.py", *words]), settings.seed)
    return Job(
        settings=settings,
        lengths=str(lengths.resolve()),
        profile="" if options.profile is None else str(options.profile.resolve()),
        folder=str(folder / "trainer"),
        output=str(output.resolve()),
        launch=datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f"),
        about={**about, "commit": options.commit or about["commit"]},
        first_round=show.rounds_done(show.read_launches(before), asdict(settings), replicas),
        rounds=options.rounds,
        warmups=options.warmups,
        seconds=options.seconds,
        variants=options.only,
        use_cpu=options.use_cpu,
        processes=processes,
    )


def launch(job: Job, folder: Path) -> int:
    """Runs the job in processes of its own; returns their exit status."""
    file = folder / "job.json"
    job.save(file)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(job.processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    return subprocess.run([*command, str(RUN), str(file)], env=environment, check=False).returncode


def print_results(output: Path, pictures: Path | None) -> None:
    """Tables, pictures and RESULT of what the file holds."""
    launches = show.read_launches(output.read_text(encoding="utf-8"))
    best, figures = show.best_launches(launches), show.summary(launches)
    for label, variants in figures.items():
        print("\n".join(show.launch_lines(label, variants, best[label].about["same_as"])), "\n")
    if pictures is not None:
        from end_to_end_timeline import draw_timeline

        for label, found in best.items():
            draw_timeline(found, pictures / f"end_to_end_{label}.png")
    print("RESULT", json.dumps(show.result(figures)), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if the launch failed, 2 for what the user can mend."""
    options = arguments(given)
    try:
        if options.write_readme:
            launches = show.read_launches((options.output or RESULTS).read_text(encoding="utf-8"))
            text = show.with_table(RESULTS_PAGE.read_text(encoding="utf-8"), show.results_tables(launches))
            RESULTS_PAGE.write_text(text, encoding="utf-8")
            return 0
        if options.show:
            print_results(options.output or RESULTS, options.pictures)
            return 0
        with tempfile.TemporaryDirectory(prefix="hf_wlb_end_to_end_") as temporary:
            job = job_of(options, Path(temporary))
            status = launch(job, Path(temporary))
            if status == 0 or Path(job.output).is_file():
                print_results(Path(job.output), options.pictures)
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
