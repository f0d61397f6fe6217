"""What the mean speed-up of Figure 12's configurations owes to each assumption: swap one, keep the rest.

Nothing here is chosen by what comes out. The constants of a cluster are changed by a fifth either way; other
assumptions are swapped for what is as plausible, or for an extreme that shows how far they reach.

A mean over some hundred steps has an error of about a percent, because few documents are long. So most swaps are
compared on the same few steps with and without them, micro-batches staying as they are, and the mean of many steps is
changed by the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_wlb.lengths import IntArray
from hf_wlb.simulator.cluster import ASSUMED, Cluster, Link, changed
from hf_wlb.simulator.comparison import BASELINE, FixedPlans
from hf_wlb.simulator.paper import CONFIGURATIONS, Configuration
from hf_wlb.simulator.reproduction import MAIN_SYSTEMS, PAPER, PLACED, Setup, Tell, figure_12, mean_speedups
from hf_wlb.simulator.schedules import ScheduleConfig

FACTORS = (0.8, 1.2)
"""What every constant is multiplied by."""

Row = Mapping[str, Any]


def _everywhere(_: Configuration) -> bool:
    return True


def _nothing(_: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Swap:
    """An assumption swapped.

    Attributes:
        label: What is assumed instead.
        change: What becomes of a setup.
        concerns: Whether a configuration's figures change; those of others stay.
        whole: Whether it is simulated on all steps and not on few: where documents or micro-batches are others, so that
            the same steps cannot be compared.
    """

    label: str
    change: Callable[[Setup], Setup]
    concerns: Callable[[Configuration], bool] = _everywhere
    whole: bool = False


def sensitivity(
    setup: Setup, configurations: Sequence[Configuration] = CONFIGURATIONS, tell: Tell = _nothing
) -> list[dict[str, Any]]:
    """Means of the paper's method and of ours with every constant of ``ASSUMED`` a fifth lower and higher.

    Args:
        setup: What is assumed otherwise; micro-batches stay as they are packed with the constants unchanged.
        configurations: Means are over these.
        tell: Told what is changed next.

    Returns:
        The first row is that of no change, the others have means ``"low"`` and ``"high"``, each by system.
    """
    systems = (BASELINE, PAPER, PLACED)
    setup = replace(setup, plans=FixedPlans(), whole=())

    def means(cluster: Cluster) -> dict[str, float]:
        rows = figure_12(replace(setup, cluster=cluster), systems, configurations)
        return {name: mean_speedups(rows, name)["all"] for name in (PAPER, PLACED)}

    tell("sensitivity: as assumed")
    base = means(setup.cluster)
    found: list[dict[str, Any]] = [{"constant": "as assumed", "what": "", "low": base, "high": base}]
    for constant, what in ASSUMED.items():
        row: dict[str, Any] = {"constant": constant, "what": what}
        for which, factor in zip(("low", "high"), FACTORS, strict=True):
            tell(f"sensitivity: {constant} x {factor:g}")
            row[which] = means(changed(setup.cluster, constant, factor))
        found.append(row)
    return found


def swaps(sampled: IntArray | None = None) -> list[Swap]:
    """Assumptions worth swapping, one at a time.

    Args:
        sampled: Lengths of the built-in sampler, if the setup's are others.
    """
    found = [
        Swap("other order of the documents (seed 1)", lambda setup: replace(setup, seed=setup.seed + 1), whole=True),
        Swap("no gradient checkpointing, whatever memory says", lambda setup: _checkpointing(setup, False)),
        Swap("gradient checkpointing everywhere", lambda setup: _checkpointing(setup, True)),
        Swap("2 x PP micro-batches a step", _twice_the_micro_batches, whole=True),
        Swap("interleaved 1F1B, 2 model chunks", lambda setup: replace(setup, schedule=_INTERLEAVED)),
        Swap("element-wise kernels eager, not fused", lambda setup: replace(setup, compiled=False)),
        Swap("550M: matrix products at half the rate", _half_matmul, lambda own: own.model == "550M"),
        Swap("all GPUs on one NVLink", lambda setup: replace(setup, cluster=one_node(setup.cluster))),
        Swap("communication free", lambda setup: replace(setup, cluster=free_links(setup.cluster))),
        Swap(
            DEFAULT_ROOM,
            lambda setup: replace(setup, waiting_contexts=None),
            lambda own: own.micro_batches > DEFAULT_ROOM_ENOUGH,
            whole=True,
        ),
    ]
    if sampled is not None:
        found.append(Swap("lengths of the built-in sampler", lambda own: replace(own, lengths=sampled), whole=True))
    return found


DEFAULT_ROOM = "steady's default room for waiting"
DEFAULT_ROOM_ENOUGH = 4
"""Micro-batches of a step for which ``steady``'s default room for waiting is what ``Setup`` gives it anyway."""
_INTERLEAVED = ScheduleConfig("interleaved", model_chunks=2)


def _checkpointing(setup: Setup, on: bool) -> Setup:
    return replace(setup, gradient_checkpointing=on)


def _twice_the_micro_batches(setup: Setup) -> Setup:
    """In half as many steps, so that the documents are the same."""
    return replace(setup, micro_batches=2 * setup.micro_batches, steps=max(1, setup.steps // 2))


def _half_matmul(setup: Setup) -> Setup:
    """Matrices of 1,280 columns, halved by tensor parallelism, are small for a GPU; 0.75 of its peak is for large."""
    return replace(setup, cluster=changed(setup.cluster, "matmul", 0.5))


def one_node(cluster: Cluster) -> Cluster:
    """The cluster with all GPUs in one node.

    >>> from hf_wlb.simulator.cluster import CLUSTERS
    >>> one_node(CLUSTERS["h100"]).gpus_per_node
    1048576
    """
    return replace(cluster, gpus_per_node=2**20)


def free_links(cluster: Cluster) -> Cluster:
    """The cluster with links that take no time (copies around an exchange still do)."""
    free = Link(1e30, 0.0)
    return replace(cluster, inside=free, between=free)


def explanation(
    rows: Sequence[Row],
    whole: Setup,
    few: Setup,
    chosen: Sequence[Swap],
    known: Mapping[str, Sequence[Row]] | None = None,
    configurations: Sequence[Configuration] = CONFIGURATIONS,
    tell: Tell = _nothing,
) -> list[dict[str, Any]]:
    """Means over configurations with one assumption swapped at a time.

    Args:
        rows: Of ``figure_12`` as assumed, all configurations.
        whole: The setup that they were made with.
        few: The same with fewer steps.
        chosen: The swaps, see ``swaps``.
        known: What is swapped -> rows of ``figure_12`` with it, made with as many steps as ``rows``.
        configurations: Means are over these.
        tell: Told what is swapped next.

    Returns:
        Rows with the mean of the paper's method over ``BASELINE`` (``paper``), without the smallest model
        (``paper_without_550M``) and over ``CUT`` (``paper_over_cut``), that of ours (``placed``), and the least gain of
        ours over the paper's method; the first is that of no swap. ``few`` says whether the means are those of
        ``rows`` times what the swap changes on few steps; the least gain is then left out.
    """
    base = summary(rows)
    found: list[dict[str, Any]] = [{"assumption": "as assumed", "few": False, **base}]
    found += [{"assumption": label, "few": False, **summary(own)} for label, own in (known or {}).items()]
    few = replace(few, plans=FixedPlans(), whole=())
    tell("swapped: nothing, few steps")
    few_rows = figure_12(few, MAIN_SYSTEMS, configurations)
    for swap in chosen:
        tell(f"swapped: {swap.label}")
        usual = rows if swap.whole else few_rows
        own = swap.change(whole if swap.whole else few)
        swapped = [
            figure_12(own, MAIN_SYSTEMS, [configuration])[0] if swap.concerns(configuration) else row
            for configuration, row in zip(configurations, usual, strict=True)
        ]
        means = summary(swapped) if swap.whole else _scaled(base, summary(swapped), summary(few_rows))
        found.append({"assumption": swap.label, "few": not swap.whole, **means})
    return found


def _scaled(base: Mapping[str, Any], swapped: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The means times what a swap changes."""
    return {
        key: None if value is None or key == "least_placed_over_paper" else value * swapped[key] / usual[key]
        for key, value in base.items()
    }


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """Means that ``explanation`` compares, and the least gain of ours over the paper's method.

    Args:
        rows: Of ``figure_12``, with ``MAIN_SYSTEMS`` at least.
    """
    paper = mean_speedups(rows, PAPER)
    return {
        "paper": paper["all"],
        "paper_without_550M": paper.get("without 550M"),
        "paper_over_cut": mean_speedups(rows, PAPER, "speedup_over_cut")["all"],
        "placed": mean_speedups(rows, PLACED)["all"],
        "least_placed_over_paper": least_gain(rows),
    }


def least_gain(rows: Sequence[Row], name: str = PLACED, over: str = PAPER) -> float:
    """The least gain of one system over another in any configuration.

    Args:
        rows: Of ``figure_12``.
        name: The system.
        over: The other.

    >>> least_gain([{"systems": {"placed": {"seconds": 2.0}, "paper": {"seconds": 3.0}}}])
    1.5
    """
    return float(np.min([row["systems"][over]["seconds"] / row["systems"][name]["seconds"] for row in rows]))
