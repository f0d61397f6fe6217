"""Steps of a pipeline put together from times that one GPU measured: their figures, tables, a picture. No torch.

See ``stage_times_compose`` for how they are put together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end_cases import VARIANTS, WLB
from end_to_end_report import (
    COMPARED,
    Launch,
    _with_interval,
    best_launches,
    on_each_replica,
    paper_lines,
    rounds_text,
    variant_row,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from readme_table import between_marks, marks
from stage_times_compose import PARTS, compose_replicas, part_seconds
from step_prices import StepPrices

from hf_wlb.plots.style import GREY, INK, quiet, save
from hf_wlb.sharding.types import FloatArray
from hf_wlb.simulator.measured import MeasuredLaunch, read_rounds
from hf_wlb.simulator.validation import LaunchCheck, VariantCheck

MARKS = marks("stage-times-table")
#: What the results hold besides what ``end_to_end_report.COLUMNS`` says, in words.
COLUMNS = {
    "composed": "true: seconds were not measured as a whole",
    "times": "seconds on one GPU by micro-batch, replica by replica as micro_batch_lengths: of one decoder layer "
    "(backward with its recomputation), of the embedding, of the last norm with head and loss; where ranks share "
    "micro-batches rank by rank, as each computed its shard on the one GPU with a stand-in for the exchange",
    "shards": "where ranks share micro-batches, their plans, replica by replica: every document's rank (-1 if it is "
    "cut), and the edges of the cut ones' chunks",
    "seconds": "of the step put together by 1F1B, from the first forward to the slowest replica's last backward; no "
    "reduction of gradients, no optimizer",
    "handover": "of a launch: whose NVLink, and the bytes of a token's hidden states",
    "exchange": "of a launch: by which preset the exchange of keys and values is priced; of a composed step: its share "
    "of the work of all micro-batches",
    "devices": "of a launch: that measured; the composed step has pp_size x cp_size on each of its replicas",
    "peak_gib": "of the one GPU, which holds no stage but one layer, embedding and head",
    "queue_seconds": "the host's, to queue all layers of the step; wall_seconds: of the whole measurement",
}

_WHAT = (
    "Measured on one GPU: one decoder layer (times the layers of a stage), embedding, and head with loss, forward "
    "and backward, of every micro-batch of the sampled steps. Put together by 1F1B, not measured: sends (the "
    "simulator's NVLink, without what they take from computing), the clocks of {gpus} GPUs at work, and the reduction "
    "of gradients and the optimizer, which are left out for all variants alike. Whole steps on as many GPUs are a "
    "separate benchmark, `end_to_end.py`.\n\n"
    "Every variant's steps are a sample of its own stream over the same documents, and hold other documents than "
    "another variant's. So the speed of the whole stream is that of the sample, corrected by what the simulator says "
    "of the sample and of the stream, by the profile that predictions go by: speed-ups are those of whole streams, and "
    "columns from *slowest* to *step* are not to be compared down a table. Intervals (95%) are by leaving out one "
    "round at a time (jackknife, Student's t). "
    "Launches of different commits ran on different machines, on which the same micro-batches took times 1 to "
    "3% apart in the median, and up to 6%."
)
#: Said below it where ranks share micro-batches.
_SHARED = (
    "With context parallelism (cp in the name) every rank's shard of a micro-batch, by the plan that the trainer would "
    "make, was run on the one GPU, one rank after the other, and the slowest rank counts in every part. **The exchange "
    "of keys and values between ranks is simulated, not measured**: a stand-in gave attention random numbers in the "
    "place of what other ranks would have sent, and a layer's time has on top what the simulator has a rank wait for "
    "under that plan: its links, less what hides behind attention to local documents, and ranks that have more to do "
    "on cut documents (copies around the exchange were measured with the rest). The column *exchange* is its share of "
    "all work. Predictions have the same exchange, so their errors say nothing of it; and where no profile says what "
    "it takes, shards were planned by it as well."
)
_SHORT = {
    "speedup": "over Plain-4D",
    "speedup_vs_concat_cut": "over Plain-4D that cuts",
    "speedup_vs_fixed": "over Fixed-4D",
}

Row = Mapping[str, Any]


# ---- read ----


def read_launches(text: str) -> list[Launch]:
    """Reads the lines of a results file; every step is put together anew, as on a device for every rank of every stage.

    Raises:
        ValueError: If a step's launch has no line before it, or has whole steps.
    """
    return [_composed(about, rounds) for about, rounds in read_rounds(text)]


def _composed(about: Row, rounds: Sequence[Mapping[str, Row]]) -> Launch:
    if not about.get("composed"):
        raise ValueError(
            f"Launch {about['launch']} has whole steps, which end_to_end.py shows; stage_times.py puts none together."
        )
    found = [{variant: {**step, **_whole(about, step)} for variant, step in steps.items()} for steps in rounds]
    measured = {"device": about["device"], "devices": about["devices"]}
    devices = len(about["stage_layers"]) * about["settings"]["cp_size"] * about["replicas"]
    return Launch({**about, "devices": devices, "measured_on": measured}, found)


def _whole(about: Row, step: Row) -> dict[str, Any]:
    """What the end-to-end benchmark would have measured of the step."""
    replicas = compose_replicas(about, step)
    seconds = max(replica.seconds for replica in replicas)
    begins, ends = (np.concatenate([getattr(own, name) for own in replicas]) for name in ("begins", "ends"))
    micro_batches = _micro_batches(about, step)
    found = {
        "seconds": seconds,
        "spans": np.stack([begins, ends], axis=2).reshape(len(begins), -1).tolist(),
        "bubble": 1 - float((ends - begins).sum()) / (len(begins) * seconds),
        "slowest": float(micro_batches.max() / micro_batches.mean()),
    }
    if "shards" in step:
        found["exchange"] = 1 - float(_micro_batches(about, step, exchange=False).sum() / micro_batches.sum())
    return found


def _micro_batches(about: Row, step: Row, *, exchange: bool = True) -> FloatArray:
    """Seconds that every micro-batch takes on all stages, ``[replicas, micro-batches]``."""
    layers = sum(about["stage_layers"])
    replicas = []
    for replica in range(len(step["micro_batch_lengths"])):
        seconds = part_seconds(about, step, replica, exchange=exchange)
        replicas.append(sum((layers if name.startswith("layer") else 1) * seconds[name] for name in PARTS))
    return np.array(replicas)


# ---- figures ----


def checked(launch: Launch) -> tuple[LaunchCheck | None, str]:
    """What the simulator says a step takes from the first forward to the last backward, and by what it says.

    By the committed profile of its model and kernel, which was not measured in the launch; else by the one that the
    launch was planned by, if it was, or by the preset of its kernel.

    Returns:
        (Steps as they were put together, and predicted; the source); None with the reason why nothing is predicted.
    """
    prices = StepPrices.of(launch.about)
    profile = prices.model.profile
    fingerprint = None if profile is None else profile.fingerprint
    return _checked(json.dumps([launch.about, launch.rounds]), prices.source, fingerprint)


@lru_cache(maxsize=64)
def _checked(launch: str, source: str, fingerprint: object) -> tuple[LaunchCheck | None, str]:
    """Several tables ask for the same, which takes a second a launch; another source of prices is another question."""
    about, rounds = json.loads(launch)
    measured, prices = MeasuredLaunch.of(about, rounds), StepPrices.of(about)
    if prices.misfit:
        return None, prices.misfit
    found = []
    for variant in measured.variants:
        price = prices.of_sharding(variant.system.sharding)
        predicted = [price(step.plan) for step in variant.steps]
        seconds = [step.seconds for step in variant.steps]
        found.append(
            VariantCheck(
                name=variant.system.name,
                steps=len(seconds),
                measured=float(np.mean(seconds)),
                predicted=float(np.mean(predicted)),
                measured_speed=variant.stream_speed(seconds),
                predicted_speed=variant.stream_speed(predicted),
                interval=variant.speed_interval,
            )
        )
    return LaunchCheck(measured.label, tuple(found)), source


def rows_of(launch: Launch) -> dict[str, dict[str, Any]]:
    """Every variant's figures in a launch with a whole round: those of the end-to-end benchmark, and some more."""
    check, _ = checked(launch)
    predicted = {} if check is None else {variant.name: variant.predicted for variant in check.variants}
    found = {}
    for variant in launch.variants:
        row = variant_row(launch, variant)
        seconds = float(launch.column(variant, "seconds").mean())
        said = predicted.get(variant)
        found[variant] = {
            **row,
            "slowest": round(float(launch.column(variant, "slowest").mean()), 4),
            "bubble": round(
                float((launch.column(variant, "bubble") * launch.column(variant, "seconds")).mean()) / seconds, 4
            ),
            **_exchange_share(launch, variant),
            "predicted_seconds": None if said is None else round(said, 4),
            "prediction_error": None if said is None else round(said / seconds - 1, 4),
            "ranks_equal": None if check is None else check.ranks_equal,
        }
    return found


def _exchange_share(launch: Launch, variant: str) -> dict[str, float]:
    """Of the exchange in a variant's work, where ranks share micro-batches."""
    if launch.about["settings"]["cp_size"] == 1:
        return {}
    return {"exchange": round(float(launch.column(variant, "exchange").mean()), 4)}


def summary(launches: Iterable[Launch]) -> dict[str, dict[str, dict[str, Any]]]:
    """Every variant's figures by label; of a label's launches the one with the most rounds."""
    return {label: rows_of(launch) for label, launch in best_launches(launches).items()}


def result(figures: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """The RESULT line: WLB's speed-ups by label with their intervals, and how well predictions are.

    That is their largest error, and whether variants whose intervals do not overlap are ranked as they were measured.
    """
    found: dict[str, Any] = {}
    for label, variants in figures.items():
        row = variants.get(WLB, {})
        for _, name in COMPARED:
            if name in row:
                found[f"composed_{name}_{label}"] = row[name]
                found[f"composed_{name}_{label}_interval"] = row[f"{name}_interval"]
    errors = [
        abs(row["prediction_error"])
        for rows in figures.values()
        for row in rows.values()
        if row["prediction_error"] is not None
    ]
    found["composed_prediction_error"] = max(errors, default=None)
    ranks = [row["ranks_equal"] for rows in figures.values() for row in rows.values() if row["ranks_equal"] is not None]
    found["composed_ranks_equal"] = all(ranks) if ranks else None
    return found


# ---- shown ----


def configuration_lines(label: str, launch: Launch, rows: Mapping[str, Row]) -> list[str]:
    """A Markdown table of a configuration's variants, and what was run."""
    cp_size = launch.about["settings"]["cp_size"]
    lines = [
        f"**{label}**, {rounds_text(len(launch.rounds))}, composed{', the exchange simulated' if cp_size > 1 else ''}",
        "",
        "| variant | tokens/s/GPU, whole stream | over Plain-4D | over cut | over Fixed-4D | slowest micro-batch over "
        f"mean | bubble | {'exchange | ' if cp_size > 1 else ''}MFU | step s | predicted s | error |",
        f"|---|---|---|---|---|---|---|{'---|' if cp_size > 1 else ''}---|---|---|---|",
    ]
    for name in (variant.name for variant in VARIANTS if variant.name in rows):
        row = rows[name]
        predicted = row["predicted_seconds"] is not None
        cells = (
            name,
            _with_interval(row, "stream_tokens_per_second_per_gpu", 0),
            *(_with_interval(row, column, 3) for _, column in COMPARED),
            f"{row['slowest']:.3f}",
            f"{row['bubble']:.1%}",
            *([f"{row['exchange']:.1%}"] if cp_size > 1 else []),
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['step_seconds']:.3f}",
            f"{row['predicted_seconds']:.3f}" if predicted else "-",
            f"{row['prediction_error']:+.1%}" if predicted else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    about, settings = launch.about, launch.about["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    check, by = checked(launch)
    ranked = {True: ", which ranks variants as measured", False: ", which ranks variants otherwise than measured"}
    shared = f", each shared by {cp_size} context-parallel ranks" if cp_size > 1 else ""
    said = f"Not predicted: {by}" if check is None else f"Predicted by {by}{ranked.get(check.ranks_equal, '')}."
    return [
        *lines,
        "",
        f"A {settings['model']} Llama of {settings['layers'] or 'all its'} layers on stages of "
        f"{', '.join(map(str, about['stage_layers']))}, {settings['micro_batches']} micro-batches of "
        f"{settings['context_length']:,} tokens a step{on_each_replica(about)}{shared}, measured on "
        f"{about['measured_on']['devices']} x {about['device']}, lengths `{settings['lengths']}`. "
        f"{said} {versions}; {about.get('date', '')}, commit "
        f"{about.get('commit', '')}; `{about.get('command', '')}`.",
    ]


def paper_tables(best: Mapping[str, Launch], figures: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """The parts beside the paper's Fig. 13, and WLB over Plain-4D by context beside its Fig. 14."""
    lines = paper_lines(best, figures, "configuration", ", composed")
    if not lines:
        return []
    longest = max(step["longest"] for launch in best.values() for steps in launch.rounds for step in steps.values())
    return [
        *lines,
        f"The longest document in these steps has {longest:,} tokens, so longer contexts hold more of them.",
    ]


def configuration_tables(launches: Sequence[Launch]) -> str:
    """The tables of all configurations, one below the other.

    Raises:
        ValueError: If there is no launch with a whole round.
    """
    best = best_launches(launches)
    if not best:
        raise ValueError("The results hold no launch with a whole round: run the benchmark first, or for longer.")
    figures = summary(launches)
    lines = [line for label in best for line in (*configuration_lines(label, best[label], figures[label]), "")]
    return "\n".join([*lines, *paper_tables(best, figures)])


def results_tables(launches: Sequence[Launch]) -> str:
    """The tables of docs/results.md and what they say.

    Raises:
        ValueError: If there is no launch with a whole round.
    """
    tables = configuration_tables(launches)
    best = best_launches(launches).values()
    gpus = sorted({launch.about["devices"] for launch in best})
    said = [_WHAT.format(gpus=" or ".join(map(str, gpus)))]
    if any(launch.about["settings"]["cp_size"] > 1 for launch in best):
        said += ["", _SHARED]
    return "\n".join([*said, "", tables])


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with other tables."""
    return between_marks(page, table, *MARKS)


# ---- drawn ----

_COLOURS = {"speedup": "#0072B2", "speedup_vs_concat_cut": "#56B4E9", "speedup_vs_fixed": "#E69F00"}


def drawn_speedups(figures: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, tuple[float, list[float] | None]]]:
    """What ``draw`` shows: WLB's speed-ups and their intervals, by label and by what it is compared with."""
    found = {}
    for label, rows in figures.items():
        row = rows.get(WLB, {})
        own = {name: (row[name], row[f"{name}_interval"]) for _, name in COMPARED if name in row}
        if own:
            found[label] = own
    return found


def draw(launches: Iterable[Launch], file: Path) -> Path:
    """Writes WLB's speed-ups by configuration, with intervals, beside 1.0.

    Raises:
        ValueError: If there is none.
    """
    figures = summary(launches)
    shown = drawn_speedups(figures)
    if not shown:
        raise ValueError("There is no configuration in which WLB and another variant were measured.")
    names = [name for _, name in COMPARED if any(name in own for own in shown.values())]
    height = 0.8 / len(names)
    figure = Figure(figsize=(9, 1.7 + 0.34 * len(names) * len(shown)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    quiet(axes)
    axes.set_title(
        "WLB's speed-up, stage times measured on one GPU and put together by 1F1B", fontsize=11, loc="left", color=INK
    )
    ends = [end for own in shown.values() for value, interval in own.values() for end in (value, *(interval or ()))]
    low, high = min(1.0, *ends), max(1.0, *ends)
    room = max(high - low, 0.05)
    for place, name in enumerate(names):
        for row, own in enumerate(shown.values()):
            if name not in own:
                continue
            value, interval = own[name]
            y = row + (place - (len(names) - 1) / 2) * height
            label = _SHORT[name] if row == _first(shown, name) else None
            axes.barh(y, value - 1, left=1, height=0.9 * height, color=_COLOURS[name], label=label)
            if interval is not None:
                errors = [[max(value - interval[0], 0.0)], [max(interval[1] - value, 0.0)]]
                axes.errorbar(value, y, xerr=errors, color=INK, linewidth=1, capsize=2.5)
            beside = max(1.0, value, *(interval or ())) + 0.015 * room
            axes.text(beside, y, f"{value:.3f}", va="center", fontsize=8.5, color=INK)
    axes.axvline(1.0, color=GREY, linewidth=1)
    axes.set_xlim(low - 0.05 * room, high + 0.15 * room)
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.set_yticks(range(len(shown)), list(shown))
    shared = any("exchange" in rows.get(WLB, {}) for rows in figures.values())
    simulated = "\n(cp: with a simulated exchange between ranks)" if shared else ""
    axes.set_xlabel(f"tokens per second over the same documents, 95% intervals{simulated}", color=INK)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    return save(figure, file)


def _first(shown: Mapping[str, Mapping[str, Any]], name: str) -> int:
    return next(row for row, own in enumerate(shown.values()) if name in own)
