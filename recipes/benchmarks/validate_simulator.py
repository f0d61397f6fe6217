"""How far the simulator is from what was measured: steps of the end-to-end benchmark, and single layers of attention.

    python recipes/benchmarks/validate_simulator.py                                  # the results in results/
    python recipes/benchmarks/validate_simulator.py --results FILE --cluster h100 --profile PROFILE
    python recipes/benchmarks/validate_simulator.py --write-profile FILE --kv_heads 32 --layers 32

The first reads results/end_to_end*.json* and results/context_parallel.json. The last writes the attention and the
exchange that the context-parallel benchmark measured on four GPUs as a profile, for ``hf-wlb simulate --profile``; what
it lacks is counted. The last line printed is ``RESULT`` and JSON; the exit code is 1 if an error of a step is above 10%
or variants are ranked otherwise than measured, 2 for what the user can mend.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hf_wlb.analysis.simulation import committed_profile, committed_results
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.layer_validation import (
    LayerCheck,
    check_layers,
    choices,
    layer_profile,
    strategy_errors,
)
from hf_wlb.simulator.measured import read_measured
from hf_wlb.simulator.validation import CLUSTER_OF_KERNEL, LaunchCheck, check_launch, step_model
from hf_wlb.workload import ProfiledWorkload

FOLDER = Path(__file__).resolve().parent / "results"
LAYERS = FOLDER / "context_parallel.json"
HEADINGS = ("variant", "steps", "measured s", "predicted s", "error", "of its spans", "stream tokens/s", "predicted")
NOTHING = (
    "No end-to-end results are committed yet (recipes/benchmarks/results/end_to_end*.json*), so no step is compared: "
    "recipes/benchmarks/end_to_end.py measures them."
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, nargs="*", metavar="FILE", help="of end_to_end.py (default: results/end_to_end*.json*)"
    )
    parser.add_argument("--cluster", choices=list(CLUSTERS), help="default: the preset with the launch's kernel")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measured costs of steps (default: results/profile_MODEL_KERNEL.json, or those a launch went by)",
    )
    parser.add_argument("--write-profile", type=Path, metavar="FILE", help="only write a profile of measured attention")
    parser.add_argument("--kv_heads", type=int, default=32, help="of that profile (default 32)")
    parser.add_argument("--layers", type=int, default=32, help="of that profile's model (default 32)")
    return parser.parse_args(given)


def check_file(file: Path, cluster: str | None = None, profile: Path | None = None) -> list[LaunchCheck]:
    """All launches of a results file, measured and predicted.

    Raises:
        ValueError, OSError: If it cannot be read, or not be predicted.
    """
    preset = None if cluster is None else CLUSTERS[cluster]
    measured = None if profile is None else ProfiledWorkload.load(profile)
    launches = read_measured(file.read_text(encoding="utf-8"))
    return [
        check_launch(launch, step_model(launch, preset, measured or committed_profile(launch))) for launch in launches
    ]


def check_measured_layers() -> dict[str, list[LayerCheck]]:
    """All layers of the context-parallel benchmark, priced by its profile and by the preset with its kernel."""
    results = json.loads(LAYERS.read_text(encoding="utf-8"))
    cluster = CLUSTERS[CLUSTER_OF_KERNEL[results["settings"]["kernel"]]]
    return {
        "the measured profile": check_layers(results, cluster, profiled=True),
        f"the figures of {cluster.name!r}": check_layers(results, cluster, profiled=False),
    }


def steps_table(checks: Iterable[LaunchCheck]) -> Table:
    """Measured and predicted step times, and how far steps put together of their own measured spans are off."""
    table = Table(box=SIMPLE)
    table.add_column("launch")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for check in checks:
        for variant in check.variants:
            table.add_row(
                check.label,
                variant.name,
                str(variant.steps),
                f"{variant.measured:.3f}",
                f"{variant.predicted:.3f}",
                f"{variant.error:+.1%}",
                "" if variant.composed is None else f"{variant.composed / variant.measured - 1:+.1%}",
                f"{variant.measured_speed:,.0f}",
                f"{variant.predicted_speed:,.0f}",
            )
    return table


def choices_line(name: str, checks: Sequence[LayerCheck]) -> str:
    """Whether strategies are chosen well by prediction, in a sentence."""
    chosen = choices(checks)
    return (
        f"Attention and exchange of single layers, priced by {name}: the fastest strategy is named for "
        f"{chosen.right} of {chosen.races} micro-batches, {chosen.worst_loss:.1%} of time is lost at most."
    )


def layers_table(checks: Sequence[LayerCheck]) -> Table:
    """Errors of attention and exchange by strategy."""
    table = Table(box=SIMPLE)
    for heading in ("strategy", "micro-batches", "median error", "worst", "bias"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for row in strategy_errors(checks):
        table.add_row(row.strategy, str(row.checks), f"{row.median:.1%}", f"{row.worst:+.1%}", f"{row.bias:+.1%}")
    return table


def result(checks: Sequence[LaunchCheck], layers: Mapping[str, Sequence[LayerCheck]]) -> dict[str, Any]:
    """The last line: the largest error of a variant's mean step time, whether all rankings are as measured.

    Both are None without measured steps; ``ranks_equal`` also where no two variants could be told apart.
    """
    ranks = [check.ranks_equal for check in checks if check.ranks_equal is not None]
    found: dict[str, Any] = {
        "prediction_error": round(max(check.worst_error for check in checks), 4) if checks else None,
        "ranks_equal": all(ranks) if ranks else None,
    }
    for name, kind in zip(("profile", "preset"), layers.values(), strict=True):
        errors = strategy_errors(kind)
        chosen = choices(kind)
        found[f"layer_error_{name}"] = round(max(row.median for row in errors), 4)
        found[f"layer_worst_{name}"] = round(max(abs(row.worst) for row in errors), 4)
        found[f"layer_choice_{name}"] = round(chosen.right / chosen.races, 4)
        found[f"layer_loss_{name}"] = round(chosen.worst_loss, 4)
    return found


def write_profile(file: Path, kv_heads: int, layers: int) -> None:
    """Writes the measured attention and exchange as a profile.

    Raises:
        ValueError, OSError: If they were not measured, or the file cannot be written.
    """
    layer_profile(json.loads(LAYERS.read_text(encoding="utf-8")), kv_heads, layers).save(file)


def main(given: Sequence[str] | None = None) -> int:
    """Compares; see the module for the exit code."""
    options = arguments(given)
    try:
        if options.write_profile is not None:
            write_profile(options.write_profile, options.kv_heads, options.layers)
            return 0
        files = committed_results() if options.results is None else options.results
        checks = [check for file in files for check in check_file(file, options.cluster, options.profile)]
        layers = check_measured_layers()
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    out = Console(width=max(Console().width, 150))
    for name, kind in layers.items():
        out.print(choices_line(name, kind), layers_table(kind), highlight=False)
    if checks:
        out.print(steps_table(checks))
    else:
        out.print(NOTHING, highlight=False)
    complaints = [complaint for check in checks for complaint in check.complaints()]
    for complaint in complaints:
        out.print(complaint, highlight=False)
    print("RESULT", json.dumps(result(checks, layers)), flush=True)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
