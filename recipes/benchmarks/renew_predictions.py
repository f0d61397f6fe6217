"""Renews what the simulator says of the steps in results files: after it, or a profile in results/, has changed.

    python recipes/benchmarks/renew_predictions.py --lengths FILE [RESULTS ...]

How the sampled steps compare with their whole stream tells the speed of that (``stream_tokens_per_second_per_gpu``).
The streams are planned anew for it, from the same document lengths and by the cost model that the launch went by; a
step that does not come out as it was run is an error, and nothing is written then. What was measured stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from end_to_end_cases import Settings, Stream, chosen_variants, documents, lengths_of, streams
from readme_table import REPOSITORY
from step_prices import StepPrices

from hf_wlb.lengths import load_lengths
from hf_wlb.simulator.measured import complete_lines, read_rounds
from hf_wlb.workload import load_workload

RESULTS = [
    REPOSITORY / "recipes" / "benchmarks" / "results" / f"{name}.jsonl" for name in ("end_to_end", "stage_times")
]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, metavar="FILE", help="that the launches trained on")
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS", help="default: those of this repository")
    return parser.parse_args(given)


def planned(about: Mapping[str, Any], lengths: Path) -> tuple[str, list[Stream]]:
    """(What predictions go by, a launch's streams as they were planned).

    Raises:
        ValueError: If the lengths are not those of the launch.
    """
    settings, replicas = Settings(**about["settings"]), about["replicas"]
    if lengths.stem != settings.lengths:
        raise ValueError(f"Launch {about['launch']} trained on {settings.lengths}; {lengths} cannot be those lengths.")
    variants, _ = chosen_variants(settings.cp_size, list(about["streams"]))
    prices, workload = StepPrices.of(about), load_workload(about["workload"])
    given = documents(load_lengths(lengths), settings, replicas)
    return prices.source, streams(variants, given, settings, replicas, workload, prices.of_sharding)


def renewed(text: str, lengths: Path) -> str:
    """A results file with other predictions.

    Raises:
        ValueError: If the file is damaged, or a step's documents are not those that were run.
    """
    read_rounds(text)  # refuses a damaged file
    found: dict[str, dict[str, Stream]] = {}
    lines = []
    for line in complete_lines(text).splitlines():
        row = json.loads(line)
        if row["kind"] == "launch":
            row["predicted_by"], own = planned(row, lengths)
            found[row["launch"]] = {stream.variant.name: stream for stream in own}
            for name, before in row["streams"].items():
                now = found[row["launch"]][name].figures()
                if now["pass_tokens"] != before["pass_tokens"]:
                    raise ValueError(f"The streams of launch {row['launch']} hold other documents now.")
                before |= {**now, "plan_seconds": before["plan_seconds"]}  # which was measured
            print(f"{row['launch']}: by {row['predicted_by']}", flush=True)
        elif row["round"] >= 0:  # the others are the warm-up
            stream = found[row["launch"]][row["variant"]]
            plan = stream.steps[row["step"]].plan
            if [[lengths_of(m) for m in replica] for replica in plan.replicas] != row["micro_batch_lengths"]:
                raise ValueError(
                    f"Step {row['step']} of {row['variant']} in launch {row['launch']} is packed otherwise now: its "
                    "stream is not the one that was measured."
                )
            row["predicted"] = stream.predicted[row["step"]]
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """Renews the files; 2 for what the user can mend."""
    options = parse(given)
    try:
        files = options.results or RESULTS
        texts = {file: renewed(file.read_text(encoding="utf-8"), options.lengths) for file in files}
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for file, text in texts.items():
        whole = file.with_suffix(".new")  # so that a write that breaks off takes no measurements along
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
