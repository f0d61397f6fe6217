"""How the trainer's benchmark is shown: a line a run, the RESULT line, the table of docs/results.md. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from readme_table import between_marks

BEGIN, END = "<!-- trainer-table:begin -->", "<!-- trainer-table:end -->"

#: What the results hold, in words; in the JSON file too.
COLUMNS = {
    "steps": "the run's own logs, one row a step (see WLBTrainer); of the overhead run pairs of steps over the same "
    "micro-batches, trainer_seconds and bare_seconds",
    "mfu": "model FLOPs (6 x weights without embedding lookups x tokens + causal attention per document, forward and "
    "backward, no recomputation) over seconds, GPUs and 989 TFLOP/s; of all steps after the warm-up together",
    "tokens_per_second_per_gpu": "of wall-clock time, all of a step's work included; of those steps together as well",
    "overhead": "median over pairs of steps of trainer_seconds / bare_seconds - 1",
}


def counted(run: Mapping[str, Any], warmups: int) -> list[dict[str, float]]:
    """The steps after the warm-up."""
    steps: list[dict[str, float]] = run.get("steps", [])
    return steps[warmups:]


def seconds(run: Mapping[str, Any], warmups: int) -> list[float]:
    """Of every counted step."""
    return [
        row["tokens_per_step"] / row["tokens_per_second_per_gpu"] / run["processes"]
        for row in counted(run, warmups)
        if "tokens_per_second_per_gpu" in row
    ]


def over_time(run: Mapping[str, Any], name: str, warmups: int) -> float | None:
    """A rate's mean over the time of the counted steps; None where it was not logged."""
    times = seconds(run, warmups)
    rates = [row[name] for row in counted(run, warmups) if name in row]
    if not rates:
        return None
    return sum(rate * time for rate, time in zip(rates, times, strict=True)) / sum(times)


def overhead(run: Mapping[str, Any], warmups: int) -> float | None:
    """What the trainer adds to a bare loop."""
    ratios = [row["trainer_seconds"] / row["bare_seconds"] for row in counted(run, warmups) if "bare_seconds" in row]
    return median(ratios) - 1 if ratios else None


def result(runs: Mapping[str, Any], warmups: int) -> dict[str, float | None]:
    """The RESULT line."""
    shares = [share for run in runs.values() if (share := over_time(run, "mfu", warmups)) is not None]
    extra = [value for run in runs.values() if (value := overhead(run, warmups)) is not None]
    found: dict[str, float | None] = {
        "mfu_best": round(max(shares), 4) if shares else None,
        "overhead": round(extra[0], 4) if extra else None,
    }
    found |= loss_differences(runs)
    for name, run in runs.items():
        speed = over_time(run, "tokens_per_second_per_gpu", warmups)
        if speed is not None:
            found["tokens_per_second_per_gpu_" + re.sub(r"\W+", "_", name)] = round(speed, 1)
    return found


def loss_differences(runs: Mapping[str, Any]) -> dict[str, float | None]:
    """How far losses of pipelines are from those of the first run without one, and how far such runs are apart.

    Returns:
        Largest difference over all steps, of any pipeline (``loss_difference_pipelines``) and of any other split of
        the same documents (``loss_difference_others``), which only add up in another order; empty without pipelines.
    """
    losses = {name: [row["loss"] for row in run.get("steps", []) if "loss" in row] for name, run in runs.items()}
    pipelines = {name for name, run in runs.items() if "pp_size" in run.get("options", {})}
    first, *others = [name for name in losses if losses[name] and name not in pipelines] or [None]
    if first is None or not pipelines:
        return {}

    def furthest(names: Iterable[str]) -> float | None:
        apart = [abs(a - b) for name in names for a, b in zip(losses[name], losses[first], strict=False)]
        return round(max(apart), 6) if apart else None

    return {"loss_difference_pipelines": furthest(pipelines), "loss_difference_others": furthest(others)}


def run_line(name: str, run: Mapping[str, Any], warmups: int) -> str:
    """What a run came to."""
    if "problem" in run:
        return f"{name}: failed after {run['seconds']} s"
    extra = overhead(run, warmups)
    if extra is not None:
        return f"{name}: {extra:+.2%} ({run['seconds']} s)"
    share, speed = over_time(run, "mfu", warmups), over_time(run, "tokens_per_second_per_gpu", warmups)
    memory = run["machine"].get("peak_memory_gib")
    return (
        f"{name}: MFU {'-' if share is None else f'{share:.1%}'}, {speed:,.0f} tokens/s/GPU, "
        f"{'-' if memory is None else f'{memory:.0f} GiB'} ({run['seconds']} s)"
    )


def results_table(results: Mapping[str, Any]) -> str:
    """The table of docs/results.md and what it says."""
    settings, about = results["settings"], results["environment"]
    machine, warmups = about["machine"], settings["warmups"]
    lines = [
        f"`recipes/llama_long_context.py` with a {settings['model']} Llama, micro-batches of "
        f"{settings['context_length']:,} tokens, {settings['micro_batches']} a step, bfloat16, "
        f"{machine['devices']} x {machine['device']}, attention kernel `{machine['attention_kernel']}`; documents "
        f"drawn from {about['lengths']}, cut at the context length. {settings['steps'] - warmups} steps, "
        "the time of the median one.",
        "",
        "| split | MFU | tokens/s/GPU | step s | slowest rank over mean | peak GiB | recomputation | compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in results["runs"].items():
        share, speed = (over_time(run, figure, warmups) for figure in ("mfu", "tokens_per_second_per_gpu"))
        if share is None or speed is None:
            continue
        even = median(row["rank_imbalance"] for row in counted(run, warmups))
        options = run["options"]
        cells = (
            name.removesuffix(", not compiled"),
            f"{share:.1%}",
            f"{speed:,.0f}",
            f"{median(seconds(run, warmups)):.2f}",
            f"{even:.3f}",
            f"{run['machine']['peak_memory_gib']:.0f}",
            "yes" if "activation_checkpointing" in options else "no",
            "yes" if "torch_compile" in options else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    extra = results["result"]["overhead"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += [
        "",
        "MFU counts 6 x weights (no embedding lookups) x tokens and causal attention within documents, forward and "
        "backward, no recomputation, against 989 TFLOP/s. On one GPU a step of `WLBTrainer` takes "
        f"{extra:+.1%} of that of a bare loop over the same micro-batches. {versions}; {about['date']}, commit "
        f"{about['commit']}; `python recipes/benchmarks/trainer.py`.",
    ]
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with another table."""
    return between_marks(page, table, BEGIN, END)
