"""What ``report.py`` reads, draws and takes for RESULT of benchmarks whose modules have no function just for that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import context_parallel_report
import contexts_report
import convergence_report
import end_to_end_report
import pilot_report
import stage_times_report
import trainer_report
from end_to_end_timeline import draw_timeline


def stored(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures of the results, see ``read_sharding`` and ``read_trainer``."""
    figures: Mapping[str, Any] = found["result"]
    return figures


def read_sharding(text: str) -> dict[str, Any]:
    """Results of ``context_parallel.py``, with the figures of the last line as their samples give them."""
    found: dict[str, Any] = json.loads(text)
    return {**found, "result": context_parallel_report.result_line(found) | contexts_report.result(found)}


def read_trainer(text: str) -> dict[str, Any]:
    """Results of ``trainer.py``, likewise."""
    found: dict[str, Any] = json.loads(text)
    return {**found, "result": trainer_report.result(found["runs"], found["settings"]["warmups"])}


def end_to_end_figures(launches: Sequence[end_to_end_report.Launch]) -> Mapping[str, Any]:
    """The figures of the launches with the most rounds."""
    return end_to_end_report.result(end_to_end_report.summary(launches)) | pilot_report.whole_figures(launches)


def draw_timelines(launches: Sequence[end_to_end_report.Launch], folder: Path) -> None:
    """Timelines of launches, where there is one already: ``end_to_end.py --pictures`` makes the first."""
    for label, launch in end_to_end_report.best_launches(launches).items():
        picture = folder / f"end_to_end_{label}.png"
        if picture.is_file():
            draw_timeline(launch, picture)


def stage_times_figures(launches: Sequence[end_to_end_report.Launch]) -> Mapping[str, Any]:
    """The figures of the launches with the most rounds."""
    return stage_times_report.result(stage_times_report.summary(launches))


def draw_stage_times(launches: Sequence[end_to_end_report.Launch], folder: Path) -> None:
    """The speed-ups."""
    stage_times_report.draw(launches, folder / "stage_times.png")


def convergence_figures(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """How far losses are apart; the benchmark's other figures have names that say nothing among others."""
    figures = convergence_report.result(found)
    apart = {key: value for key, value in figures.items() if key.startswith(("convergence_diff", "convergence_change"))}
    return {**apart, "convergence_noise": figures["noise"]}


def draw_convergence(found: Mapping[str, Any], folder: Path) -> None:
    """The loss curves."""
    convergence_report.draw(found, folder / "convergence.png")


def packing_pictures(found: Mapping[str, Any]) -> Sequence[str]:
    """Those that ``packing.draw`` makes: without sweeps only the first."""
    sweeps = found["sources"][found["result"]["lengths"]]["sweeps"]
    pictures = ("packing_time", "time_against_delay", "time_against_waiting", "time_against_waiting_64")
    return [f"{name}.png" for name in pictures[: None if sweeps else 1]]


def paper_pictures(found: Mapping[str, Any]) -> Sequence[str]:
    """Those that ``draw_all`` makes."""
    names = ("fig12", "fig13", "fig14", "fig15", "sensitivity", "explanation")
    return [f"simulated_{name}.png" for name in names]
