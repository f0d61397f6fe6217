"""Measured steps beside simulated ones in Markdown, for docs/results.md: a four-GPU pilot's and others. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from end_to_end_report import Launch, other_micro_batches

from hf_wlb.analysis.simulation import committed_profile
from hf_wlb.simulator.measured import MeasuredLaunch, read_measured
from hf_wlb.simulator.validation import LaunchCheck, check_launch, step_model

_COLUMNS = (
    "from all ranks' common beginning to the end of the slowest one, against the same documents "
    "simulated. *Predicted* is by the profile of the model and kernel (`results/profile_*.json`), measured on one GPU "
    "in another run, or else by the kernel's preset; *of its spans* is the step put together by 1F1B of the forwards "
    "and backwards as they were measured in it, with simulated sends: what it lacks is the schedule's error alone. "
    "*Planning* is the time that a rank takes to pack a step and to plan its shards, as a share of the step's."
)
_PILOT = (
    " The pilot was packed by a profile that was measured wrongly, and is short: its speeds say nothing about packers."
)


@lru_cache(maxsize=1)
def read_checks(text: str) -> list[tuple[MeasuredLaunch, LaunchCheck]]:
    """The launches of a results file of ``end_to_end.py``, and how far they are from their simulation.

    Kept, for the simulation takes seconds and is asked for several times.

    Raises:
        ValueError: If it cannot be read or simulated.
    """
    return [_checked(launch) for launch in read_measured(text)]


def _checked(launch: MeasuredLaunch) -> tuple[MeasuredLaunch, LaunchCheck]:
    return launch, check_launch(launch, step_model(launch, profile=committed_profile(launch)))


def with_documents(launches: Iterable[Launch]) -> list[MeasuredLaunch]:
    """The launches of ``end_to_end.py`` with a whole round; those of versions that wrote no documents down are not."""
    return [
        MeasuredLaunch.of(launch.about, launch.rounds)
        for launch in launches
        if launch.rounds and "workload" in launch.about
    ]


def whole_table(launches: Iterable[Launch]) -> str:
    """The steps of ``end_to_end.py`` beside simulated ones, as the pilot's are shown."""
    found = _whole(launches)
    if not found:
        return "No launch holds the documents of its steps, so none is simulated."
    return "\n".join(
        [
            f"Steps of `end_to_end.py`, also of launches of few rounds, {_COLUMNS}",
            "",
            *_rows(found),
        ]
    )


def whole_figures(launches: Iterable[Launch]) -> dict[str, float | None]:
    """For RESULT: the largest error of a variant's mean step, and whether variants are ranked as measured."""
    found = _whole(launches)
    ranks = [check.ranks_equal for _, check in found if check.ranks_equal is not None]
    return {
        "whole_prediction_error": round(max(check.worst_error for _, check in found), 4) if found else None,
        "whole_ranks_equal": all(ranks) if ranks else None,
    }


def _whole(launches: Iterable[Launch]) -> list[tuple[MeasuredLaunch, LaunchCheck]]:
    return _whole_of(json.dumps([[launch.about, launch.rounds] for launch in launches]))


@lru_cache(maxsize=4)
def _whole_of(launches: str) -> list[tuple[MeasuredLaunch, LaunchCheck]]:
    """The table and the figures ask for the same, which takes seconds."""
    return [_checked(one) for one in with_documents(Launch(*given) for given in json.loads(launches))]


def results_table(checks: Sequence[tuple[MeasuredLaunch, LaunchCheck]]) -> str:
    """A row for every launch and variant of the pilot, and what the columns are."""
    first = checks[0][0]
    return "\n".join(
        [
            f"Steps of a pilot, {_COLUMNS}{_PILOT}",
            "",
            *_rows(checks),
            "",
            f"A {first.model} Llama of {first.config.num_hidden_layers} layers on {first.split.gpus} x {first.device}.",
        ]
    )


def _rows(checks: Sequence[tuple[MeasuredLaunch, LaunchCheck]]) -> list[str]:
    lines = [
        "| split, context, kernel | variant | steps | measured s | predicted s | error | of its spans | planning |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for launch, check in checks:
        layers = [launch.config.num_hidden_layers] if launch.layout is None else launch.layout.sizes
        where = f"{launch.split.label}, {launch.context_length // 1024}K, {launch.kernel}"
        where += f", {' + '.join(map(str, layers))} layers{other_micro_batches(launch)}"
        for variant, measured in zip(check.variants, launch.variants, strict=True):
            spans = "" if variant.composed is None else f"{variant.composed / variant.measured - 1:+.1%}"
            lines.append(
                f"| {where} | {variant.name} | {variant.steps} | {variant.measured:.3f} | {variant.predicted:.3f} | "
                f"{variant.error:+.1%} | {spans} | {_share(measured.planning_share)} |"
            )
    return lines


def figures(checks: Sequence[tuple[MeasuredLaunch, LaunchCheck]]) -> Mapping[str, Any]:
    """The largest error of a prediction and of a step put together of its own spans, the largest share of planning."""
    variants = [variant for _, check in checks for variant in check.variants]
    composed = [abs(one.composed / one.measured - 1) for one in variants if one.composed is not None]
    shares = [variant.planning_share for launch, _ in checks for variant in launch.variants]
    planning = [share for share in shares if share is not None]
    return {
        "pilot_planning_share": round(max(planning), 5) if planning else None,
        "prediction_error": round(max(check.worst_error for _, check in checks), 4),
        "schedule_error": round(max(composed), 4) if composed else None,
    }


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"
