"""README's summary of what was measured of whole training steps: speed-ups, MFU, overhead, convergence. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import end_to_end_report
import trainer_report
from convergence_report import DEFAULT, PAPER, PLAIN
from end_to_end_cases import WLB
from end_to_end_report import Launch

#: Launches that shall be measured: what they are called, and the options of ``end_to_end.py`` that make them.
LAUNCHES = {
    "pp4_128k_fa2": "--kernel flash-attn-2",
    "pp4_128k_fa4": "--kernel flash-attn-4",
    "pp2cp2_128k_fa2": "--pp_size 2 --cp_size 2 --kernel flash-attn-2",
    "pp2cp2_128k_fa4": "--pp_size 2 --cp_size 2 --kernel flash-attn-4",
    "pp4_64k_fa2": "--context_length 65536 --kernel flash-attn-2",
    "pp4cp2_128k_fa4": "--processes 8 --cp_size 2 --kernel flash-attn-4",
    "pp2dp2cp2_128k_fa4": "--processes 8 --pp_size 2 --cp_size 2 --kernel flash-attn-4",
    "pp2cp2tp2_128k_fa4": "--processes 8 --pp_size 2 --cp_size 2 --tp_size 2 --kernel flash-attn-4",
}
#: What WLB is compared with, by the name of its speed-up.
COMPARED = {"speedup": "Plain-4D", "speedup_vs_concat_cut": "Plain-4D that cuts documents"}
_SPEED_UPS = (
    "Measured. Speed-ups: tokens per second of whole training steps, all systems taking turns in one launch (split, "
    "context, attention kernel). Systems train the same stream of documents, of which each runs a sample of its own "
    "steps: what the simulator says of sample and stream corrects for that. Intervals are by leaving out one round at "
    "a time (jackknife, Student's t), where there are 3 or more. They hold what rounds differ in: not an error that "
    "the simulator makes between sample and stream, and not another machine."
)
_COMPOSED = (
    "Rows that are *put together by 1F1B* come from every micro-batch's layer and head times on one GPU: neither "
    "what sends take from computing nor the clocks of several GPUs at work nor the optimizer was measured; all "
    "configurations, and what else there is to know of them, are in "
    "[results](docs/results.md#stages-measured-on-one-gpu)."
)
#: Said after it where a row's ranks share micro-batches.
_SHARED = (
    "In those *with a simulated exchange* every context-parallel rank's computing was measured, on that one GPU, but "
    "the exchange of keys and values between ranks was not: it takes what the simulator says."
)
_SIMULATED = " with a simulated exchange"

_PLANNING = "packing and planning, largest share of WLB's steps"

Row = tuple[str, str, str, str]


def summary(
    launches: Sequence[Launch] | None,
    trainer: Mapping[str, Any] | None,
    convergence: Mapping[str, Any] | None,
    composed: Mapping[str, Sequence[Row]] | None = None,
    planned: Sequence[Row] = (),
    compared: str = "",
) -> str:
    """The Markdown between the marks of README.md; what is not measured is said in a sentence.

    Args:
        launches: Of the end-to-end benchmark.
        trainer: Results of the trainer's benchmark.
        convergence: Of the convergence benchmark: ``changes`` of the held-out loss by packer, the ``noise`` in
            words ("" without any), and ``on``, where it ran.
        composed: See ``composed_rows``; of these, the ones of launches whose whole steps were not measured are shown.
        planned: See ``composed_planning_rows``.
        compared: What is to be said of composed steps that were measured whole, too.
    """
    whole = WlbSteps.of(launches or ())
    speed_ups = speed_up_rows(whole)
    parts: dict[str, list[Row]] = {
        "MFU": mfu_rows(whole, trainer),
        "packing and planning": [*planning_rows(whole), *planned],
        "what `WLBTrainer` adds to a bare loop": overhead_rows(trainer),
        "convergence": convergence_rows(convergence),
    }
    missing = [f"`{label}`" for label in LAUNCHES if "speedup" not in whole.of_wlb.get(label, {})]
    stages = [row for label, found in (composed or {}).items() if f"`{label}`" in missing for row in found]
    absent = [f"whole steps against Plain-4D ({', '.join(missing)})"] if missing else []
    absent += [name for name, found in parts.items() if not found]
    if convergence is not None and parts["convergence"]:
        absent += [f"convergence with `{name}`" for name in (DEFAULT, PAPER) if name not in convergence["changes"]]
    rows = [*speed_ups, *stages, *(row for found in parts.values() for row in found)]
    lines: list[str] = []
    if rows:
        lines = [
            _said_before(bool(speed_ups), bool(stages), any(_SIMULATED in name for name, *_ in stages), compared),
            "",
            "| measured | figure | 95% interval | on |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    if absent:
        lines += [""] if lines else []
        lines.append(f"Not measured in this version: {'; '.join(absent)}.")
    return "\n".join(lines)


def _said_before(speed_ups: bool, composed: bool, shared: bool, compared: str) -> str:
    """Above the table; whether it has rows of either kind, and of the second some with a simulated exchange."""
    if not speed_ups and not composed:
        return "Measured:"
    said = [_SPEED_UPS if speed_ups else "Measured."]
    said += [_COMPOSED, _SHARED if shared else "", compared] if composed else []
    return " ".join(filter(None, said))


@dataclass(frozen=True)
class WlbSteps:
    """What launches say of WLB's steps, whole ones or put together of stages.

    Attributes:
        best: By label the launch with the most rounds.
        of_wlb: WLB's figures in these, of those that ran it.
    """

    best: Mapping[str, Launch]
    of_wlb: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> WlbSteps:
        """Of all launches that there are."""
        figures = end_to_end_report.summary(launches)
        of_wlb = {label: variants[WLB] for label, variants in figures.items() if WLB in variants}
        return cls(end_to_end_report.best_launches(launches), of_wlb)

    def on(self, label: str) -> str:
        """The machine of a launch, in words; of stages the one that measured them."""
        about = self.best[label].about
        return trainer_report.where(about.get("measured_on", about))


def speed_up_rows(whole: WlbSteps) -> list[Row]:
    """WLB's speed-ups, launch by launch."""
    rows: list[Row] = []
    for label, launch in whole.best.items():
        found = whole.of_wlb.get(label, {})
        layers = launch.about["settings"]["layers"]
        on = f"{whole.on(label)}, {end_to_end_report.rounds_text(len(launch.rounds))}"
        on += f", {layers} layers" if layers else ""
        rows += [
            (f"WLB over {other}, `{label}`", f"{found[name]:.3f}x", _interval(found[f"{name}_interval"]), on)
            for name, other in COMPARED.items()
            if name in found
        ]
    return rows


def composed_rows(steps: WlbSteps) -> dict[str, list[Row]]:
    """WLB's speed-ups of steps that are put together from stage times, by label; see ``stage_times_report``."""
    rows: dict[str, list[Row]] = {}
    for label, launch in steps.best.items():
        found, device = steps.of_wlb.get(label, {}), launch.about["device"]
        on = f"{steps.on(label)}, {end_to_end_report.rounds_text(len(launch.rounds))}"
        simulated = _SIMULATED if launch.about["settings"]["cp_size"] > 1 else ""
        made = f"stages measured on one {device}, put together by 1F1B{simulated}"
        rows[label] = [
            (f"WLB over {other}, `{label}`, {made}", f"{found[name]:.3f}x", _interval(found[f"{name}_interval"]), on)
            for name, other in COMPARED.items()
            if name in found
        ]
    return rows


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def mfu_rows(whole: WlbSteps, trainer: Mapping[str, Any] | None) -> list[Row]:
    """The highest MFU of WLB's steps, and of the splits of the trainer's benchmark."""
    rows: list[Row] = []
    known = {label: row["mfu"] for label, row in whole.of_wlb.items() if row["mfu"] is not None}
    if known:
        label = max(known, key=lambda label: known[label])
        rows.append((f"highest MFU of WLB's steps, `{label}`", f"{known[label]:.1%}", "", whole.on(label)))
    split = None if trainer is None else trainer_report.best_mfu(trainer)
    if split is not None:
        rows.append((f"highest MFU of a split, `{split[0]}`", f"{split[1]:.1%}", "", split[2]))
    return rows


def planning_rows(whole: WlbSteps) -> list[Row]:
    """The largest share of WLB's steps that packing and planning shards take on a rank."""
    shares = {label: row["planning_share"] for label, row in whole.of_wlb.items()}
    if not shares:
        return []
    label = max(shares, key=lambda label: shares[label])
    return [(f"{_PLANNING}, `{label}`", f"{shares[label]:.3%}", "", whole.on(label))]


def composed_planning_rows(steps: WlbSteps) -> list[Row]:
    """The same of steps with context parallelism, whose shards are planned, that are put together."""
    shares = {
        label: row["planning_share"]
        for label, row in steps.of_wlb.items()
        if steps.best[label].about["settings"]["cp_size"] > 1
    }
    if not shares:
        return []
    label = max(shares, key=lambda label: shares[label])
    return [(f"{_PLANNING}, with shards, `{label}`, put together", f"{shares[label]:.3%}", "", steps.on(label))]


def overhead_rows(trainer: Mapping[str, Any] | None) -> list[Row]:
    """What the trainer adds to a bare loop."""
    found = None if trainer is None else trainer_report.trainer_overhead(trainer)
    return [] if found is None else [("a step of `WLBTrainer` against a bare loop's", f"{found[0]:+.1%}", "", found[1])]


def convergence_rows(convergence: Mapping[str, Any] | None) -> list[Row]:
    """How far the losses are apart, and what of it may be chance."""
    if convergence is None:
        return []
    chance = f"; {convergence['noise']}" if convergence["noise"] else ""
    return [
        (f"held-out loss after `{name}` against {PLAIN} packing", f"{change:+.2%}", "", f"{convergence['on']}{chance}")
        for name, change in convergence["changes"].items()
    ]
