"""The paper's evaluation, simulated: everything that ``hf-wlb simulate --paper`` shows, as one object of JSON types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_wlb.analysis.environment import environment
from hf_wlb.analysis.inputs import LengthSource, read_lengths
from hf_wlb.lengths import IntArray
from hf_wlb.simulator.assumptions import DEFAULT_ROOM, explanation, least_gain, sensitivity, summary, swaps
from hf_wlb.simulator.cluster import ASSUMED, CLUSTERS
from hf_wlb.simulator.comparison import FIGURES
from hf_wlb.simulator.measured import MeasuredLaunch, read_measured
from hf_wlb.simulator.paper import (
    CONFIGURATIONS,
    FIGURE_12,
    FIGURE_14_CONTEXTS,
    FIGURE_15,
    JOB_8192_SLOWEST,
    MAIN,
    Configuration,
)
from hf_wlb.simulator.reproduction import (
    FIGURE_12_SYSTEMS,
    MAIN_SYSTEMS,
    MIXED,
    OURS,
    PAPER,
    PLACED,
    Setup,
    figure_12,
    figure_13,
    figure_14,
    figure_15,
    job_8192,
    mean_speedups,
    table_2,
)
from hf_wlb.simulator.validation import check_launch, step_model
from hf_wlb.workload import ProfiledWorkload

SCHEMA = "hf_wlb.simulated_paper/1"
FILE = "simulated_paper.json"
"""What the results are called in their folder."""
_COMMITTED = Path(__file__).resolve().parents[2] / "recipes/benchmarks/results"
FLAT_LIMIT = 32 * 1024
"""Where documents of the built-in sampler are cut to have a mix with a lighter tail."""
FAST_KERNEL = "h100-flash-attn-4"


@dataclass(frozen=True)
class Extent:
    """How much is simulated.

    Attributes:
        steps: Steps' worth of documents of Figures 12 to 15.
        simulated: Steps simulated of them, of Plain-4D all.
        few_steps: Steps' worth of documents where the same few steps are compared with and without a swap.
        few_simulated: Steps simulated of them.
        packing_steps: Of Table 2.
        job_steps: Of the job on 8,192 GPUs.
        job_simulated: Steps simulated of these.
        configurations: Of Figure 12.
        contexts: Of Figure 14.
        solver: Of Table 2: window -> (windows solved, seconds allowed for each).
    """

    steps: int
    simulated: int | None
    few_steps: int
    few_simulated: int | None
    packing_steps: int
    job_steps: int
    job_simulated: int
    configurations: tuple[Configuration, ...]
    contexts: tuple[int, ...]
    solver: Mapping[int, tuple[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        named = [configuration.name for configuration in self.configurations]
        solver = {str(window): list(limits) for window, limits in self.solver.items()}
        return {**asdict(self), "configurations": named, "contexts": list(self.contexts), "solver": solver}


FULL = Extent(
    steps=200,
    simulated=48,
    few_steps=60,
    few_simulated=10,
    packing_steps=200,
    job_steps=24,
    job_simulated=4,
    configurations=CONFIGURATIONS,
    contexts=FIGURE_14_CONTEXTS,
    solver={1: (6, 0.4), 2: (3, 0.7), 4: (1, 2.0)},
)
QUICK = Extent(
    steps=12,
    simulated=None,
    few_steps=6,
    few_simulated=3,
    packing_steps=12,
    job_steps=2,
    job_simulated=1,
    configurations=(CONFIGURATIONS[1], CONFIGURATIONS[3]),
    contexts=(FIGURE_14_CONTEXTS[1], FIGURE_14_CONTEXTS[3]),
    solver={1: (1, 0.5)},
)


def reproduce(
    data: str | None = None,
    flat_data: str | None = None,
    *,
    extent: Extent = FULL,
    seed: int = 0,
    measured: Sequence[Path] | None = None,
    command: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Simulates the paper's evaluation.

    Args:
        data: As ``read_lengths`` takes it; None for the built-in sampler.
        flat_data: Lengths with a lighter tail; None for the sampler's, cut at ``FLAT_LIMIT``.
        extent: How much of it.
        seed: Of the documents' order, and of the sampler.
        measured: Results files of the end-to-end benchmark; None for those of this repository, if there are any.
        command: What was typed.
        tell: Told what is simulated next.

    Returns:
        The content of ``FILE``, schema ``hf_wlb.simulated_paper/1``; ``result`` is what the command's last line holds.

    Raises:
        FileNotFoundError, ValueError: For data or measured results that cannot be read.
    """
    checked = prediction_error(committed_results() if measured is None else measured)
    source, flat = read_lengths(data, seed=seed), flat_lengths(flat_data, seed)
    lengths = _whole(source)
    full = Setup(lengths, steps=extent.steps, simulated=extent.simulated, seed=seed)
    few = replace(full, steps=extent.few_steps, simulated=extent.few_simulated)
    where = extent.configurations
    sampled = None if data is None else _whole(read_lengths(None, seed=seed))
    flatter = replace(full, lengths=_whole(flat))
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(command, seed),
        "extent": extent.to_dict(),
        "data": {"name": source.description, **_described(lengths)},
        "flat_data": {"name": flat.description, **_described(flatter.lengths)},
        "columns": dict(FIGURES),
        "clusters": {name: asdict(cluster) for name, cluster in CLUSTERS.items()},
        "assumed": dict(ASSUMED),
        "table2": table_2(replace(full, steps=extent.packing_steps), extent.solver, tell),
        "fig12": _figure_12(full, flatter, where, tell),
        "fig13": figure_13(full, tell),
        "fig14": figure_14(full, extent.contexts, tell),
        "fig15": {
            "rows": figure_15(few, tell),
            "paper": [
                {"sharding": sharding, "over": over, "context": context, "speedup": speedup}
                for (sharding, over, context), speedup in FIGURE_15.items()
            ],
        },
        "job8192": {
            **job_8192(replace(full, steps=extent.job_steps, simulated=extent.job_simulated), tell=tell),
            "paper_gpu_imbalance": JOB_8192_SLOWEST,
        },
        "sensitivity": sensitivity(few, where, tell),
    }
    known = {
        "flash-attn 4": found["fig12"]["fast_kernel"]["rows"],
        f"flatter lengths ({flat.description})": found["fig12"]["flat_data"]["rows"],
    }
    found["explanation"] = explanation(found["fig12"]["rows"], full, few, swaps(sampled), known, where, tell)
    found["result"] = result_line(found, checked)
    return found


def _figure_12(
    setup: Setup, flatter: Setup, configurations: Sequence[Configuration], tell: Callable[[str], None]
) -> dict[str, Any]:
    """All systems, and the main ones with the faster kernel and with the other documents."""
    rows = figure_12(setup, tuple(FIGURE_12_SYSTEMS), configurations, tell)
    fast = replace(setup, cluster=CLUSTERS[FAST_KERNEL])
    return {
        "rows": rows,
        "means": _means(rows, tuple(FIGURE_12_SYSTEMS)),
        "paper": {name: dict(means) for name, means in FIGURE_12.items()},
        "fast_kernel": _with_means(figure_12(fast, MAIN_SYSTEMS, configurations, tell)),
        "flat_data": _with_means(figure_12(flatter, MAIN_SYSTEMS, configurations, tell)),
    }


def result_line(found: Mapping[str, Any], checked: float | None) -> dict[str, Any]:
    """The figures of the command's last line.

    Args:
        found: What ``reproduce`` found.
        checked: See ``prediction_error``.
    """
    fig12 = found["fig12"]
    means = fig12["means"]
    wlb = next(row for row in found["table2"] if row["packer"] == "wlb, 2 queues")
    figures = {
        "fig12_mean_paper_method": means[PAPER]["over_plain"]["all"],
        "fig12_mean_placed": means[PLACED]["over_plain"]["all"],
        "table2_wlb_imbalance": wlb["imbalance"],
        "seconds_8192": found["job8192"]["seconds_8192"],
        "prediction_error": checked,
        "fig12_mean_paper_method_over_cut": means[PAPER]["over_cut"]["all"],
        "fig12_mean_placed_over_cut": means[PLACED]["over_cut"]["all"],
        "fig12_mean_adaptive": means[OURS]["over_plain"]["all"],
        "fig12_mean_bound": means["balanced"]["over_plain"]["all"],
        "fig12_mean_paper_method_flash_attn_4": fig12["fast_kernel"]["summary"]["paper"],
        "fig12_mean_placed_flash_attn_4": fig12["fast_kernel"]["summary"]["placed"],
        "fig12_mean_paper_method_flat": fig12["flat_data"]["summary"]["paper"],
        "fig12_mean_placed_flat": fig12["flat_data"]["summary"]["placed"],
        "least_placed_over_paper_method": least_gain(fig12["rows"]),
        "least_placed_with_default_room_over_paper_method": default_room(found)["least_placed_over_paper"],
        "least_placed_with_papers_packing_over_paper_method": least_gain(fig12["rows"], MIXED),
        "least_adaptive_over_paper_method": least_gain(fig12["rows"], OURS),
        "paper_fig12_mean": FIGURE_12[PAPER]["all"],
    }
    return {name: None if value is None else round(value, 4) for name, value in figures.items()} | {
        "data": found["data"]["name"]
    }


def default_room(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of the explanation in which ``steady`` has its default room for waiting."""
    row: Mapping[str, Any] = next(row for row in found["explanation"] if row["assumption"] == DEFAULT_ROOM)
    return row


def prediction_error(files: Sequence[Path]) -> float | None:
    """The largest error of a variant's predicted mean step time over measured launches; None where there are none.

    Args:
        files: Results of ``recipes/benchmarks/end_to_end.py``.

    Raises:
        OSError, ValueError: If a file cannot be read, or its steps cannot be predicted.
    """
    errors = [
        check_launch(launch, step_model(launch, profile=committed_profile(launch))).worst_error
        for file in files
        for launch in read_measured(file.read_text(encoding="utf-8"))
    ]
    return max(errors, default=None)


def committed_results() -> list[Path]:
    """Results files of the end-to-end benchmark that lie in this repository; none where only the package is."""
    return sorted(_COMMITTED.glob("end_to_end*.json*"))


def committed_profile(launch: MeasuredLaunch) -> ProfiledWorkload | None:
    """The profile in this repository of a launch's model, attention kernel, device and layers, if there is one.

    It was not measured in the launch, so what it predicts of it is a prediction.

    Args:
        launch: As it was measured.
    """
    file = _COMMITTED / f"profile_{launch.model}_{launch.kernel}.json"
    if launch.split.tp_size > 1 or not file.is_file():
        return None
    profile = ProfiledWorkload.load(file)
    fits = profile.compiled == launch.compiled and profile.profile.metadata.get("device") == launch.device
    return profile if fits else None


def flat_lengths(data: str | None, seed: int) -> LengthSource:
    """Lengths with a lighter tail: those given, else the built-in sampler's with documents cut at ``FLAT_LIMIT``.

    Args:
        data: As ``read_lengths`` takes it, or None.
        seed: Of the sampler.
    """
    source = read_lengths(data, seed=seed)
    if data is not None:
        return source
    lengths = _whole(source)
    rest = lengths % FLAT_LIMIT
    pieces = np.full(int((lengths // FLAT_LIMIT).sum()), FLAT_LIMIT, dtype=np.int64)
    return LengthSource(
        np.concatenate([pieces, rest[rest > 0]]), f"built-in sampler, documents cut at {FLAT_LIMIT // 1024}K"
    )


def _whole(source: LengthSource) -> IntArray:
    return np.asarray(source.lengths, dtype=np.int64)


def _described(lengths: IntArray) -> dict[str, Any]:
    """At the context of ``MAIN``, where longer documents are split."""
    context = MAIN.context_length
    kept = lengths % context
    squares = float(np.sum(kept.astype(float) ** 2)) + float((lengths // context).sum()) * context**2
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "squared_over_mean": squares / float(lengths.sum()),
    }


def _means(rows: Sequence[Mapping[str, Any]], systems: Sequence[str]) -> dict[str, Any]:
    return {
        name: {
            "over_plain": mean_speedups(rows, name),
            "over_cut": mean_speedups(rows, name, "speedup_over_cut"),
            "regular_over_plain": float(np.mean([row["regular_speedup"][name] for row in rows])),
        }
        for name in systems
    }


def _with_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"rows": rows, "means": _means(rows, MAIN_SYSTEMS), "summary": summary(rows)}
