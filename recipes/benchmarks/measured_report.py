"""README's summary of what was measured of whole training steps: speed-ups, MFU, overhead, convergence. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import end_to_end_report
import stage_times_report
import trainer_report
from convergence_report import PLAIN
from end_to_end_cases import WLB
from end_to_end_report import Launch

#: Launches that shall be measured: what they are called, and the options of ``end_to_end.py`` that make them.
LAUNCHES = {
    "pp4_128k_fa2": "--kernel flash-attn-2",
    "pp4_128k_fa4": "--kernel flash-attn-4",
    "pp2cp2_128k_fa4": "--pp_size 2 --cp_size 2 --kernel flash-attn-4",
    "pp4_64k_fa2": "--context_length 65536 --kernel flash-attn-2",
}
#: What WLB is compared with, by the name of its speed-up.
COMPARED = {"speedup": "Plain-4D", "speedup_vs_concat_cut": "Plain-4D that cuts documents"}
_SPEED_UPS = (
    "Measured. Speed-ups: tokens per second of whole training steps over the same documents, all systems taking turns "
    "in one launch (split, context, attention kernel); intervals by resampling its rounds, where there are 3 or more."
)
_COMPOSED = (
    "Rows that are *put together by 1F1B* come from every micro-batch's layer and head times on one GPU: neither "
    "what sends take from computing nor the clocks of several GPUs at work nor the optimizer was measured; all "
    "configurations, and what else there is to know of them, are in "
    "[results](docs/results.md#stages-measured-on-one-gpu)."
)

Row = tuple[str, str, str, str]


def summary(
    launches: Sequence[Launch] | None,
    trainer: Mapping[str, Any] | None,
    convergence: Mapping[str, Any] | None,
    composed: Mapping[str, Sequence[Row]] | None = None,
    pilot: Mapping[str, Any] | None = None,
) -> str:
    """The Markdown between the marks of README.md; what is not measured is said in a sentence.

    Args:
        launches: Of the end-to-end benchmark.
        trainer: Results of the trainer's benchmark.
        convergence: Of the convergence benchmark: ``changes`` of the held-out loss by packer, the ``noise`` and what
            it is of (``noise_of``), and ``on``, where it ran.
        composed: See ``composed_rows``; of these, the ones of launches whose whole steps were not measured are shown.
        pilot: Figures of the pilot's steps: ``pilot_planning_share``, and ``on``, where it ran.
    """
    speed_ups = [] if launches is None else speed_up_rows(launches)
    parts: dict[str, list[Row]] = {
        "MFU": mfu_rows(launches, trainer),
        "packing and planning": planning_rows(launches, pilot),
        "what `WLBTrainer` adds to a bare loop": overhead_rows(trainer),
        "convergence": convergence_rows(convergence),
    }
    figures = {} if launches is None else end_to_end_report.summary(launches)
    missing = [f"`{label}`" for label in LAUNCHES if "speedup" not in figures.get(label, {}).get(WLB, {})]
    stages = [row for label, found in (composed or {}).items() if f"`{label}`" in missing for row in found]
    absent = [f"whole steps against Plain-4D ({', '.join(missing)})"] if missing else []
    absent += [name for name, found in parts.items() if not found]
    rows = [*speed_ups, *stages, *(row for found in parts.values() for row in found)]
    lines: list[str] = []
    if rows:
        lines = [
            _said_before(bool(speed_ups), bool(stages)),
            "",
            "| measured | figure | 95% interval | on |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    if absent:
        lines += [""] if lines else []
        lines.append(f"Not measured in this version: {'; '.join(absent)}.")
    return "\n".join(lines)


def _said_before(speed_ups: bool, composed: bool) -> str:
    """Above the table; whether it has rows of either kind."""
    if not speed_ups and not composed:
        return "Measured:"
    return " ".join([_SPEED_UPS if speed_ups else "Measured.", *([_COMPOSED] if composed else [])])


def speed_up_rows(launches: Sequence[Launch]) -> list[Row]:
    """WLB's speed-ups, launch by launch."""
    best, figures = end_to_end_report.best_launches(launches), end_to_end_report.summary(launches)
    rows: list[Row] = []
    for label, launch in best.items():
        found = figures[label].get(WLB, {})
        on = f"{trainer_report.where(launch.about)}, {len(launch.rounds)} rounds"
        rows += [
            (f"WLB over {other}, `{label}`", f"{found[name]:.3f}x", _interval(found[f"{name}_interval"]), on)
            for name, other in COMPARED.items()
            if name in found
        ]
    return rows


def composed_rows(launches: Sequence[Launch]) -> dict[str, list[Row]]:
    """WLB's speed-ups of steps that are put together from stage times, by label; see ``stage_times_report``."""
    best, figures = end_to_end_report.best_launches(launches), stage_times_report.summary(launches)
    rows: dict[str, list[Row]] = {}
    for label, launch in best.items():
        found, device = figures[label].get(WLB, {}), launch.about["device"]
        on = f"{trainer_report.where(launch.about['measured_on'])}, {len(launch.rounds)} rounds"
        made = f"stages measured on one {device}, put together by 1F1B"
        rows[label] = [
            (f"WLB over {other}, `{label}`, {made}", f"{found[name]:.3f}x", _interval(found[f"{name}_interval"]), on)
            for name, other in COMPARED.items()
            if name in found
        ]
    return rows


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def mfu_rows(launches: Sequence[Launch] | None, trainer: Mapping[str, Any] | None) -> list[Row]:
    """The highest MFU of WLB's steps, and of the splits of the trainer's benchmark."""
    rows: list[Row] = []
    best = {} if launches is None else end_to_end_report.best_launches(launches)
    figures = {} if launches is None else end_to_end_report.summary(launches)
    shares = {label: variants[WLB]["mfu"] for label, variants in figures.items() if WLB in variants}
    known = {label: share for label, share in shares.items() if share is not None}
    if known:
        label = max(known, key=lambda label: known[label])
        where = trainer_report.where(best[label].about)
        rows.append((f"highest MFU of WLB's steps, `{label}`", f"{known[label]:.1%}", "", where))
    split = None if trainer is None else trainer_report.best_mfu(trainer)
    if split is not None:
        rows.append((f"highest MFU of a split, `{split[0]}`", f"{split[1]:.1%}", "", split[2]))
    return rows


def planning_rows(launches: Sequence[Launch] | None, pilot: Mapping[str, Any] | None) -> list[Row]:
    """The largest share of a step that packing and planning shards take: of WLB's steps, else of the pilot's."""
    best = {} if launches is None else end_to_end_report.best_launches(launches)
    figures = {} if launches is None else end_to_end_report.summary(launches)
    shares = {label: variants[WLB]["planning_share"] for label, variants in figures.items() if WLB in variants}
    name = "packing and planning, largest share of a step"
    if shares:
        label = max(shares, key=lambda label: shares[label])
        return [(f"{name}, `{label}`", f"{shares[label]:.3%}", "", trainer_report.where(best[label].about))]
    return [] if pilot is None else [(f"{name}, pilot", f"{pilot['pilot_planning_share']:.3%}", "", pilot["on"])]


def overhead_rows(trainer: Mapping[str, Any] | None) -> list[Row]:
    """What the trainer adds to a bare loop."""
    found = None if trainer is None else trainer_report.trainer_overhead(trainer)
    return [] if found is None else [("a step of `WLBTrainer` against a bare loop's", f"{found[0]:+.1%}", "", found[1])]


def convergence_rows(convergence: Mapping[str, Any] | None) -> list[Row]:
    """How far the losses are apart, and what of it may be chance."""
    if convergence is None:
        return []
    noise = convergence["noise"]
    chance = "" if noise is None else f"; {PLAIN} with {convergence['noise_of']}: up to {noise:.2%} apart"
    return [
        (f"held-out loss after `{name}` against {PLAIN} packing", f"{change:+.2%}", "", f"{convergence['on']}{chance}")
        for name, change in convergence["changes"].items()
    ]
