"""How the trainer's benchmark is shown: a line a run, the RESULT line, the table of docs/results.md. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from readme_table import between_marks
from trainer_cases import CASES

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
    """How far losses and gradient norms of pipelines are from those of the first run without one, and such runs apart.

    Returns:
        Largest difference over all steps, of any pipeline (``loss_difference_pipelines``) and of any other split whose
        steps hold the same documents (``loss_difference_others``), which only adds up in another order: where data
        parallelism shares a step's micro-batches out, steps are packed otherwise. Of gradient norms likewise, relative
        to the first run's (``grad_norm_difference_pipelines`` and ``..._others``): they say more, since the loss of
        random tokens hardly moves. Empty without pipelines.
    """
    first, pipelines = _reference(runs), _pipelines(runs)
    if first is None:
        return {}
    others = [name for name in runs if name not in pipelines]

    def furthest(names: Iterable[str], figure: str, relative: bool) -> float | None:
        apart = []
        for name in names:
            for row, expected in _pairs(runs[name], runs[first]):
                if figure in row and figure in expected:
                    scale = (expected[figure] or 1.0) if relative else 1.0
                    apart.append(abs(row[figure] - expected[figure]) / scale)
        if not all(map(math.isfinite, apart)):
            raise ValueError(f"A {figure} of {', '.join([*names, first])} is not finite, so they cannot be compared.")
        return round(max(apart), 6) if apart else None

    return {
        f"{figure}_difference_{which}": furthest(names, figure, relative)
        for figure, relative in (("loss", False), ("grad_norm", True))
        for which, names in (("pipelines", sorted(pipelines)), ("others", [name for name in others if name != first]))
    }


def _reference(runs: Mapping[str, Any]) -> str | None:
    """The first run without a pipeline whose steps are those of one with a pipeline."""
    pipelines = _pipelines(runs)
    others = (name for name in runs if name not in pipelines)
    return next((name for name in others if any(_pairs(runs[pipe], runs[name]) for pipe in pipelines)), None)


def _pairs(run: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Steps of two runs beside each other, as many as both have; none if any holds other documents, or losses lack."""
    pairs = list(zip(run.get("steps", []), other.get("steps", []), strict=False))
    alike = all(a.get("tokens_per_step") == b.get("tokens_per_step") for a, b in pairs)
    return pairs if alike and pairs and "loss" in pairs[0][0] and "loss" in pairs[0][1] else []


def _pipelines(runs: Mapping[str, Any]) -> set[str]:
    return {name for name, run in runs.items() if "pp_size" in run.get("options", {})}


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


def best_mfu(results: Mapping[str, Any]) -> tuple[str, float, str] | None:
    """The run with the highest MFU: (name, MFU, where it ran); None without any."""
    warmups = results["settings"]["warmups"]
    shares = {name: over_time(run, "mfu", warmups) for name, run in results["runs"].items()}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return None
    best = max(known, key=lambda name: known[name])
    return best, known[best], where(results["runs"][best]["machine"])


def trainer_overhead(results: Mapping[str, Any]) -> tuple[float, str] | None:
    """What the trainer adds to a bare loop, and where that was measured; None where it was not."""
    run = _overhead_run(results)
    extra = None if run is None else overhead(run, results["settings"]["warmups"])
    return None if run is None or extra is None else (extra, where(run["machine"]))


def _overhead_run(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The one that compares with a bare loop; None without."""
    runs: Mapping[str, Mapping[str, Any]] = results["runs"]
    warmups = results["settings"]["warmups"]
    return next((run for run in runs.values() if overhead(run, warmups) is not None), None)


def where(machine: Mapping[str, Any]) -> str:
    """Devices in words, such as ``2 x NVIDIA H100``."""
    return f"{machine['devices']} x {machine['device']}"


def results_table(results: Mapping[str, Any]) -> str:
    """The table of docs/results.md and what it says."""
    settings, about, runs = results["settings"], results["environment"], results["runs"]
    rows = {name: row for name, run in runs.items() if (row := _markdown_row(name, run, settings["warmups"]))}
    # The environment's machine is the first run's, which need not be a split: the overhead is measured on one GPU
    machine = runs[next(iter(rows))]["machine"] if rows else about["machine"]
    head = (
        f"`recipes/llama_long_context.py` with a {settings['model']} Llama, micro-batches of "
        f"{settings['context_length']:,} tokens, {settings['micro_batches']} a step, bfloat16, {where(machine)}, "
        f"attention kernel `{machine['attention_kernel']}`; documents drawn from {about['lengths']}, cut at the "
        f"context length. MFU and tokens/s of {settings['steps'] - settings['warmups']} steps together, the time of "
        f"the median one.{_left_out(runs)}"
    )
    mfu = (
        "MFU counts 6 x weights (no embedding lookups) x tokens and causal attention within documents, forward and "
        "backward, no recomputation, against 989 TFLOP/s."
    )
    sentences = [
        *([mfu] if rows else []),
        _overhead_sentence(results),
        *_loss_sentences(runs),
        *_other_steps_sentence(runs),
        *(f"`{name}` failed." for name, run in runs.items() if "problem" in run),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    table = [
        head,
        "",
        "| split | MFU | tokens/s/GPU | step s | median of slowest rank over mean | peak GiB | recomputation "
        "| compiled |",
        "|---|---|---|---|---|---|---|---|",
        *rows.values(),
        "",
    ]
    rest = f"{versions}; {about['date']}, commit {about['commit']}; `python recipes/benchmarks/trainer.py`."
    return "\n".join([*(table if rows else ["No split was measured.", ""]), f"{' '.join(sentences)} {rest}"])


def _markdown_row(name: str, run: Mapping[str, Any], warmups: int) -> str | None:
    """A split's line of the table; None for a run without rates."""
    share, speed = (over_time(run, figure, warmups) for figure in ("mfu", "tokens_per_second_per_gpu"))
    if share is None or speed is None:
        return None
    options, even = run["options"], [row["rank_imbalance"] for row in counted(run, warmups) if "rank_imbalance" in row]
    cells = (
        name.removesuffix(", not compiled"),
        f"{share:.1%}",
        f"{speed:,.0f}",
        f"{median(seconds(run, warmups)):.2f}",
        f"{median(even):.3f}" if even else "-",
        f"{run['machine']['peak_memory_gib']:.0f}",
        "yes" if "activation_checkpointing" in options else "no",
        "yes" if "torch_compile" in options else "no",
    )
    return f"| {' | '.join(cells)} |"


def _overhead_sentence(results: Mapping[str, Any]) -> str:
    run, found = _overhead_run(results), trainer_overhead(results)
    if run is None or found is None:
        return "What `WLBTrainer` adds to a bare loop was not measured."
    tokens, commit = run.get("options", {}).get("context_length"), run.get("commit")
    at = f", micro-batches of {int(tokens):,} tokens" if tokens else ""
    earlier = f", commit {commit}" if commit not in (None, results["environment"]["commit"]) else ""
    return (
        f"On {found[1]} a step of `WLBTrainer` takes {abs(found[0]):.1%} {'longer' if found[0] >= 0 else 'less'} "
        f"than that of a bare loop over the same micro-batches, of a {results['settings']['model']} Llama{at}{earlier}."
    )


def _loss_sentences(runs: Mapping[str, Any]) -> list[str]:
    """How far the losses of splits are apart; nothing without pipelines."""
    found = loss_differences(runs)
    pipelines, others = (found.get(f"loss_difference_{which}") for which in ("pipelines", "others"))
    if pipelines is None:
        return []
    first = _reference(runs)
    more = "" if others is None else f", and that of another split, which adds up in another order, at most {others:g}"
    return [
        f"On the same documents the loss of a pipeline's step is at most {pipelines:g} off that of `{first}`{more}.",
        *_norm_sentence(found),
    ]


def _left_out(runs: Mapping[str, Any]) -> str:
    """What else the benchmark can run on as many GPUs."""
    known = max(({case.name for case in cases} for cases in CASES.values()), key=lambda names: len(names & set(runs)))
    missing = ", ".join(f"`{name}`" for name in sorted(known - set(runs)))
    return f" Not measured: {missing}." if missing else ""


def _other_steps_sentence(runs: Mapping[str, Any]) -> list[str]:
    """Which splits did not train the same steps as the first one."""
    splits = [name for name, run in runs.items() if run.get("steps") and "loss" in run["steps"][0]]
    other = [f"`{name}`" for name in splits if not _pairs(runs[name], runs[splits[0]])]
    if not other:
        return []
    return [
        f"{' and '.join(other)} trained the same documents in other steps than `{splits[0]}`: replicas share a step's "
        "micro-batches out."
    ]


def _norm_sentence(found: Mapping[str, float | None]) -> list[str]:
    pipelines, others = (found.get(f"grad_norm_difference_{which}") for which in ("pipelines", "others"))
    if pipelines is None:
        return []
    more = "" if others is None else f" and {others:.2%}"
    return [f"Gradient norms are at most {pipelines:.2%}{more} apart."]


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with another table."""
    return between_marks(page, table, BEGIN, END)
