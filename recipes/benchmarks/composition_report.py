"""Whole steps on several GPUs beside the same steps put together from what one GPU measured. No torch.

``end_to_end.py`` measures whole steps, ``stage_times.py`` the parts of micro-batches. Both run the same documents, so
many of the first's steps consist of micro-batches that the second measured, alone, on one GPU: put together by 1F1B on
the stages of the whole step they say how far such steps are from real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from end_to_end_cases import WLB
from end_to_end_report import Launch, other_micro_batches
from stage_times_compose import PARTS, compose

from hf_wlb.sharding.types import FloatArray
from hf_wlb.simulator.measured import MeasuredLaunch, MeasuredStep

#: Strategies whose plans depend on documents alone, not on the cost model of the launch.
_SAME_EVERYWHERE = ("per_sequence", "per_document")
_WHAT = (
    "Whole steps on several GPUs, from all ranks' common beginning to the end of the slowest one, whose micro-batches "
    "were also measured one by one on one GPU, in other runs on other machines: put together by 1F1B on the stages "
    "that the whole step ran on (*composed*, without the optimizer; with context parallelism the exchange is "
    "simulated in it). A micro-batch that was measured several times counts with the mean. Steps of which one was not "
    "measured so are left out, and with context parallelism those of strategies whose plans depend on the launch's "
    "cost model."
)


@dataclass(frozen=True)
class Pair:
    """A step, measured whole and put together.

    Attributes:
        launch: The whole one's name.
        where: Split, context, kernel and layers, in words.
        variant: Of the whole step.
        gpus: That it ran on.
        shared: Whether ranks shared its micro-batches.
        whole: Its seconds.
        composed: Seconds of the same step put together.
    """

    launch: str
    where: str
    variant: str
    gpus: int
    shared: bool
    whole: float
    composed: float

    @property
    def error(self) -> float:
        """Of the composed step, relative to the whole one."""
        return self.composed / self.whole - 1


@dataclass(frozen=True)
class _Sample:
    """A micro-batch that one GPU measured: its launch's line, seconds of every rank by part, and its plan if shared."""

    about: Mapping[str, Any]
    times: Mapping[str, FloatArray]
    shard: Mapping[str, Any] | None

    @classmethod
    def mean(cls, several: Sequence[_Sample]) -> _Sample:
        """Of several measurements of one micro-batch."""
        times = {name: np.mean([own.times[name] for own in several], axis=0) for name in PARTS}
        return cls(several[-1].about, times, several[-1].shard)


def pairs(whole: Sequence[MeasuredLaunch], stages: Sequence[Launch]) -> list[Pair]:
    """The steps that can be compared.

    Args:
        whole: Launches of ``end_to_end.py``; of these, those of one replica without tensor parallelism count.
        stages: Launches of ``stage_times.py``.
    """
    known = _samples(stages)
    return [
        pair
        for launch in whole
        if launch.split.dp_size == launch.split.tp_size == 1 and launch.split.gpus > 1
        for pair in _pairs_of(launch, known)
    ]


def figures(found: Sequence[Pair]) -> dict[str, float]:
    """For RESULT: the largest error of a step, and the largest difference of variants' mean errors in a launch.

    The second is what ratios of these variants are wrong by if they are composed. Without steps there is neither.
    """
    if not found:
        return {}
    spreads = [max(errors) - min(errors) for errors in _variant_errors(found).values()]
    worst = {"composition_error": round(max(abs(pair.error) for pair in found), 4)}
    return worst | ({"composition_spread": round(max(spreads), 4)} if spreads else {})


def table(found: Sequence[Pair]) -> str:
    """A row for every launch and variant, and what the columns are."""
    if not found:
        return "No step was measured both whole and in parts."
    lines = [
        _WHAT,
        "",
        "| split, context, kernel, layers of the stages | variant | steps | whole s | composed s | difference |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in found:
        rows.setdefault((pair.launch, pair.where, pair.variant), []).append(pair)
    for (_, where, variant), own in rows.items():
        whole, composed = (float(np.mean([getattr(pair, name) for pair in own])) for name in ("whole", "composed"))
        lines.append(
            f"| {where} | {variant} | {len(own)} | {whole:.3f} | {composed:.3f} | {composed / whole - 1:+.1%} |"
        )
    return "\n".join([*lines, "", _said(found)])


def sentence(found: Sequence[Pair]) -> str:
    """What README says of it; nothing without a step."""
    return f"{_said(found)} [All of them](docs/results.md#composed-steps-beside-whole-ones)." if found else ""


def _said(found: Sequence[Pair]) -> str:
    """Context parallelism apart, whose exchange is simulated; and of which variants there is no step."""
    parts = [
        (f"of {len(own)} {name}", [pair.error for pair in own])
        for name, own in (
            ("without context parallelism", [pair for pair in found if not pair.shared]),
            ("with it and its simulated exchange", [pair for pair in found if pair.shared]),
        )
        if own
    ]
    ranges = "; ".join(f"{name} by {min(errors):+.1%} to {max(errors):+.1%}" for name, errors in parts)
    gpus = " and ".join(map(str, sorted({pair.gpus for pair in found})))
    spread = figures(found).get("composition_spread")
    alike = "" if spread is None else f" In a launch, variants differ in that by {spread:.1%} at most."
    own = sum(pair.variant == WLB for pair in found)
    wlb = f" {own or 'None'} of them {'are' if own > 1 else 'is'} `{WLB}`'s, which packs differently in each."
    return f"Composed steps differ from those that were measured whole as well, on {gpus} GPUs: {ranges}.{alike}{wlb}"


def _variant_errors(found: Sequence[Pair]) -> dict[str, list[float]]:
    """Mean error of every variant, for launches with several."""
    grouped: dict[str, dict[str, list[float]]] = {}
    for pair in found:
        grouped.setdefault(pair.launch, {}).setdefault(pair.variant, []).append(pair.error)
    means = {launch: [float(np.mean(own)) for own in variants.values()] for launch, variants in grouped.items()}
    return {launch: errors for launch, errors in means.items() if len(errors) > 1}


# ---- micro-batches ----


def _samples(stages: Sequence[Launch]) -> dict[tuple[Any, ...], _Sample]:
    """Every measured micro-batch by what its time depends on; of several measurements the mean."""
    found: dict[tuple[Any, ...], list[_Sample]] = {}
    for launch in stages:
        about, settings = launch.about, launch.about["settings"]
        kind = (settings["model"], about["kernel"], about["measured_on"]["device"])
        kind += (settings["recompute"], settings["compiled"])
        for steps in launch.rounds:
            for variant, step in steps.items():
                sharding = _sharding(settings["cp_size"], about["streams"][variant]["sharding"])
                if sharding is not None:
                    for lengths, own in _micro_batches(about, step):
                        found.setdefault((*kind, *sharding, lengths), []).append(own)
    return {key: _Sample.mean(several) for key, several in found.items()}


def _micro_batches(about: Mapping[str, Any], step: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], _Sample]]:
    for replica, micro_batches in enumerate(step["micro_batch_lengths"]):
        seconds = {name: np.atleast_2d(np.array(step["times"][name][replica])) for name in PARTS}  # [ranks, micro]
        for place, lengths in enumerate(micro_batches):
            shard = step["shards"][replica][place] if "shards" in step else None
            yield tuple(lengths), _Sample(about, {name: own[:, place] for name, own in seconds.items()}, shard)


def _sharding(cp_size: int, strategy: str) -> tuple[int, str] | None:
    """What a plan of shards depends on besides the documents; None if that is more than its strategy."""
    if cp_size == 1:
        return 1, ""
    return (cp_size, strategy) if strategy in _SAME_EVERYWHERE else None


def _pairs_of(launch: MeasuredLaunch, known: Mapping[tuple[Any, ...], _Sample]) -> Iterator[Pair]:
    sizes = [launch.config.num_hidden_layers] if launch.layout is None else launch.layout.sizes
    where = f"{launch.split.label}, {launch.context_length // 1024}K, {launch.kernel}, {', '.join(map(str, sizes))}"
    where += other_micro_batches(launch)
    kind = (launch.model, launch.kernel, launch.device, launch.gradient_checkpointing, launch.compiled)
    for variant in launch.variants:
        sharding = _sharding(launch.split.cp_size, variant.system.sharding)
        if sharding is None:
            continue
        for step in variant.steps:
            keys = [(*kind, *sharding, lengths) for lengths in _lengths(step)]
            if all(key in known for key in keys):
                composed = _composed([known[key] for key in keys], _lengths(step), sizes)
                gpus, shared = launch.split.gpus, launch.split.cp_size > 1
                yield Pair(launch.name, where, variant.system.name, gpus, shared, step.seconds, composed)


def _lengths(step: MeasuredStep) -> list[tuple[int, ...]]:
    (replica,) = step.plan.replicas
    return [tuple(document.length for document in micro_batch.documents) for micro_batch in replica]


def _composed(samples: Sequence[_Sample], lengths: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> float:
    """Seconds of a step of these micro-batches, on stages of so many layers."""
    about = samples[0].about
    settings = {**about["settings"], "layers": sum(sizes), "pp_size": len(sizes)}
    times = {name: np.array([own.times[name] for own in samples]).T for name in PARTS}  # [ranks, micro-batches]
    shared = samples[0].shard is not None
    step = {
        "micro_batch_lengths": [[list(own) for own in lengths]],
        "times": {name: [own.tolist() if shared else own[0].tolist()] for name, own in times.items()},
        **({"shards": [[own.shard for own in samples]]} if shared else {}),
    }
    return compose({**about, "stage_layers": list(sizes), "settings": settings, "replicas": 1}, step).seconds
