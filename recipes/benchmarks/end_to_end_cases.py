"""What the end-to-end benchmark runs: variants, their planned streams, and the steps sampled from them. No torch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_wlb.lengths import IntArray
from hf_wlb.packing import ArraySource, PackingConfig, StepPlan, StepPlanner, length_stream
from hf_wlb.packing.types import MicroBatch
from hf_wlb.sharding import Sharder
from hf_wlb.simulator import systems
from hf_wlb.workload import WorkloadModel

K = 1024
STATIC = "static"  # the paper's adaptive sharding: per-sequence or per-document, nothing placed
BASELINE, CUT, FIXED, WLB, NOT_PLACED = "plain-4d", "plain-4d, cut", "fixed-4d", "wlb", "wlb, not placed"
#: Steps behind the window that is sampled, so that no packer is at the end of the data in it.
STEPS_BEHIND = 20


@dataclass(frozen=True)
class Settings:
    """What all variants of a launch have in common; figures of launches with other settings are never put together.

    Attributes:
        model: Preset.
        layers: So many of the preset's layers; 0 for all of them. 11 on four stages are 3, 3, 3 and 2 with the head,
            which takes over a third of a layer's time: with 8 the last stage was 18% longer than the others, whatever
            a micro-batch holds, and hid a part of what balance brings.
        context_length: Tokens of a micro-batch on average, and of the longest document.
        micro_batches: Of a step, on one replica.
        pp_size: Pipeline stages.
        cp_size: Context-parallel ranks.
        tp_size: Tensor-parallel ranks.
        stage_layers: Layers of every stage, such as "3,2,2,1"; "" so that stages cost the same.
        s_max_factor: Most tokens of a micro-batch over the context length, for packers of variable length.
        kernel: Attention kernel; "auto" for the fastest one.
        recompute: Whether activations are recomputed in backward.
        compiled: Whether decoder layers are compiled.
        crossover: Length at which attention costs as much as linear work; 0 for what the model's shape says.
        profile: Name of a file with measured costs instead; "" for none.
        lengths: Name of the document lengths.
        shrink: Lengths are divided by it.
        warm_steps: Steps at the beginning of a stream that are not sampled: whoever holds long documents back looks
            fast in them.
        window_steps: Steps after them that are.
        seed: Of the documents' order, the sample and the weights.
    """

    model: str = "7B"
    layers: int = 11
    context_length: int = 128 * K
    micro_batches: int = 8
    pp_size: int = 4
    cp_size: int = 1
    tp_size: int = 1
    stage_layers: str = ""
    s_max_factor: float = 1.25
    kernel: str = "auto"
    recompute: bool = True
    compiled: bool = True
    crossover: float = 0.0
    profile: str = ""
    lengths: str = ""
    shrink: int = 1
    warm_steps: int = 25
    window_steps: int = 120
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("context_length", "micro_batches", "pp_size", "cp_size", "tp_size", "shrink", "window_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.crossover and self.profile:
            raise ValueError("crossover and profile both say what documents cost. Leave one of them out.")

    @property
    def s_max(self) -> int:
        """Most tokens of a micro-batch."""
        return int(self.context_length * self.s_max_factor)

    @property
    def replica_size(self) -> int:
        """Processes of one replica."""
        return self.pp_size * self.cp_size * self.tp_size

    def replicas(self, processes: int) -> int:
        """Data-parallel replicas.

        Raises:
            ValueError: If the processes do not make whole ones.
        """
        size = self.replica_size
        if processes % size:
            raise ValueError(
                f"{processes} processes are no multiple of pp_size x cp_size x tp_size = {size}: change --processes or "
                "the split."
            )
        return processes // size

    def packing(self, packer: str, replicas: int) -> PackingConfig:
        """How a packer of this name plans; all train the same documents, those above the context length in pieces."""
        return PackingConfig(
            context_length=self.context_length,
            micro_batches_per_replica=self.micro_batches,
            dp_size=replicas,
            pp_size=self.pp_size,
            packer=packer,  # type: ignore[arg-type]  # checked by PackingConfig
            max_tokens_per_micro_batch=self.s_max,
            max_document_tokens=self.context_length,
        )


QUICK = Settings(
    model="tiny",
    layers=2,
    context_length=512,
    micro_batches=4,
    pp_size=2,
    recompute=False,
    compiled=False,
    shrink=256,
    warm_steps=4,
    window_steps=8,
)


@dataclass(frozen=True)
class Variant:
    """A way of training.

    Attributes:
        name: As in the results.
        packer: Makes micro-batches.
        sharding: Shares them out over context-parallel ranks: a strategy of ours, or ``STATIC``.
    """

    name: str
    packer: str
    sharding: str


#: The first of those that are equal without context parallelism is the one that is run then.
VARIANTS = (
    Variant(BASELINE, "next-fit", "per_sequence"),
    Variant(CUT, "concat-and-cut", "per_sequence"),
    Variant(FIXED, "greedy", "per_document"),
    Variant(WLB, "steady", "adaptive"),
    Variant("fixed-4d, per-sequence", "greedy", "per_sequence"),
    Variant("per-document alone", "next-fit", "per_document"),
    Variant("adaptive alone", "next-fit", STATIC),
    Variant("packing + delay alone", "steady", "per_sequence"),
    Variant(NOT_PLACED, "steady", STATIC),
)


def chosen_variants(cp_size: int, names: Sequence[str] = ()) -> tuple[list[Variant], dict[str, str]]:
    """The variants to run, and which others are the same as one of them.

    Args:
        cp_size: Without context parallelism only packers differ.
        names: Only these; none for all.

    Raises:
        ValueError: For a name that there is not.

    >>> run, same = chosen_variants(1, ["plain-4d", "adaptive alone", "wlb"])
    >>> [variant.name for variant in run], same
    (['plain-4d', 'wlb'], {'adaptive alone': 'plain-4d'})
    """
    unknown = sorted(set(names) - {variant.name for variant in VARIANTS})
    if unknown:
        raise ValueError(
            f"There is no variant {', '.join(unknown)}; choose of: {'; '.join(variant.name for variant in VARIANTS)}."
        )
    first: dict[tuple[str, str], Variant] = {}
    same: dict[str, str] = {}
    for variant in VARIANTS:
        if names and variant.name not in names:
            continue
        kept = first.setdefault((variant.packer, variant.sharding if cp_size > 1 else ""), variant)
        if kept is not variant:
            same[variant.name] = kept.name
    return list(first.values()), same


def sharder_of(variant: Variant, cp_size: int, workload: WorkloadModel) -> Sharder:
    """Shares a variant's micro-batches out."""
    return systems.sharder_of(variant.sharding, cp_size, workload)


@dataclass(frozen=True)
class StreamStep:
    """A planned step.

    Attributes:
        plan: Of all replicas.
        plan_seconds: Time that the packer took.
    """

    plan: StepPlan
    plan_seconds: float


def documents(lengths: IntArray, settings: Settings, replicas: int) -> IntArray:
    """The stream's documents: in random order, over and over until there are enough for all steps."""
    steps = settings.warm_steps + settings.window_steps + STEPS_BEHIND
    tokens = steps * settings.micro_batches * replicas * settings.context_length
    shrunk = np.asarray(lengths) // settings.shrink
    return length_stream(shrunk[shrunk > 1], tokens, settings.seed, first_pass_stored=False)


def plan_stream(given: IntArray, workload: WorkloadModel, config: PackingConfig) -> list[StreamStep]:
    """Every step of one whole pass over the documents, those at its end included."""
    planner = StepPlanner(ArraySource(given), workload, config)
    found: list[StreamStep] = []
    while True:
        begin = time.perf_counter()
        plan = next(planner, None)
        if plan is None:
            return found
        found.append(StreamStep(plan, time.perf_counter() - begin))


def lengths_of(micro_batch: MicroBatch) -> list[int]:
    """Of its documents, in layout order."""
    return [document.length for document in micro_batch.documents]


@dataclass(frozen=True, eq=False)
class Stream:
    """A variant's whole stream.

    Attributes:
        variant: Whose.
        steps: Of the whole pass.
        predicted: Seconds of every step, as the simulator has it.
        window: First step that may be sampled, and the one after the last.
    """

    variant: Variant
    steps: Sequence[StreamStep]
    predicted: Sequence[float]
    window: tuple[int, int]

    def figures(self) -> dict[str, Any]:
        """What the results keep of it, see ``end_to_end_report.COLUMNS``."""
        first, last = self.window
        return {
            "packer": self.variant.packer,
            "sharding": self.variant.sharding,
            "pass_steps": len(self.steps),
            "pass_tokens": sum(step.plan.tokens for step in self.steps),
            "pass_predicted": sum(self.predicted),
            "window": [first, last],
            "window_tokens": sum(step.plan.tokens for step in self.steps[first:last]),
            "window_predicted": sum(self.predicted[first:last]),
            "plan_seconds": float(np.mean([step.plan_seconds for step in self.steps[first:last]])),
        }

    def sample(self, seed: int) -> list[int]:
        """The window's steps in random order, the same one for variants that share a packer."""
        steps = list(range(*self.window))
        random.Random(f"{seed}/{self.variant.packer}").shuffle(steps)
        return steps


def streams(
    variants: Sequence[Variant],
    given: IntArray,
    settings: Settings,
    replicas: int,
    workload: WorkloadModel,
    price: Callable[[str], Callable[[StepPlan], float]],
) -> list[Stream]:
    """Plans every variant's stream over the same documents.

    Args:
        variants: Whose.
        given: Lengths of the documents.
        settings: How steps are packed.
        replicas: So many.
        workload: What documents cost, to pack them by.
        price: Seconds of a step by how its micro-batches are shared out, see ``StepPrices.of_sharding``.

    Raises:
        ValueError: If a stream ends in its window.
    """
    planned: dict[str, list[StreamStep]] = {}
    found = []
    window = (settings.warm_steps, settings.warm_steps + settings.window_steps)
    for variant in variants:
        if variant.packer not in planned:
            planned[variant.packer] = plan_stream(given, workload, settings.packing(variant.packer, replicas))
        steps = planned[variant.packer]
        if any(step.plan.flush for step in steps[: window[1]]) or len(steps) < window[1]:
            raise ValueError(f"The documents end before step {window[1]} of {variant.name}: give more of them.")
        seconds = price(variant.sharding)
        found.append(Stream(variant, steps, [seconds(step.plan) for step in steps], window))
    return found


@dataclass(frozen=True)
class Turn:
    """One step to run.

    Attributes:
        variant: Whose it is; in the warm-up, by whose sharding micro-batches are shared out.
        round: Number of the round, over all launches; -1 in the warm-up.
        step: The step, and how long it took to plan.
        predicted: Seconds of it, as the simulator has it.
        closes: Whether it is the last one of its round.
    """

    variant: str
    round: int
    step: StreamStep
    predicted: float = 0.0
    closes: bool = False


def turns(found: Sequence[Stream], first_round: int, rounds: int, warmups: int, seed: int) -> list[Turn]:
    """The warm-up, and then rounds in each of which every variant runs one step, in ever another order.

    The warm-up's steps take turns in how micro-batches are shared out.

    Raises:
        ValueError: If all of the window has been sampled.
    """
    most = min(stream.window[1] - stream.window[0] for stream in found)
    if first_round >= most:
        raise ValueError(
            f"All {most} steps of the window have been run: give more --window_steps, or another --output."
        )
    samples = {stream.variant.name: stream.sample(seed) for stream in found}
    counted: list[Turn] = []
    for number in range(first_round, min(first_round + rounds, most)):
        order = list(found)
        random.Random(f"{seed}/round {number}").shuffle(order)
        for place, stream in enumerate(order):
            at = samples[stream.variant.name][number]
            last = place == len(order) - 1
            counted.append(Turn(stream.variant.name, number, stream.steps[at], stream.predicted[at], last))
    plans = warm_up_plans([turn.step.plan for turn in counted], warmups)
    shardings = list({stream.variant.sharding: stream.variant.name for stream in found}.values())
    warm = [Turn(shardings[place % len(shardings)], -1, StreamStep(plan, 0.0)) for place, plan in enumerate(plans)]
    return [*warm, *counted]


def warm_up_plans(plans: Sequence[StepPlan], steps: int) -> list[StepPlan]:
    """Steps made of the micro-batches of others: the extreme ones first, then some of all sizes.

    So that memory has grown and kernels are compiled, for all shapes that come, before anything is counted.
    """
    replicas, size = len(plans[0].replicas), len(plans[0].replicas[0])
    pool = sorted(
        (m for plan in plans for m in plan.micro_batches if m.documents), key=lambda m: (m.tokens, len(m.documents))
    )
    keys: tuple[Callable[[MicroBatch], int], ...] = (
        lambda m: m.tokens,
        lambda m: len(m.documents),
        lambda m: m.documents[0].length,
    )
    picked = [pick(pool, key=key) for key in keys for pick in (max, min)]
    wanted = steps * replicas * size
    others = max(wanted - len(picked), 0)
    picked += [pool[round(place)] for place in np.linspace(0, len(pool) - 1, others)]
    found = []
    for step in range(steps):
        rows = picked[step * replicas * size : (step + 1) * replicas * size]
        parts = tuple(tuple(rows[r * size : (r + 1) * size]) for r in range(replicas))
        arrived = max(document.arrived for row in rows for document in row.documents)
        found.append(replace(plans[0], step=arrived, replicas=parts))
    return found
