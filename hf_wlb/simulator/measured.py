"""Measured training steps to compare simulated ones with: what a results file of the end-to-end benchmark holds.

``recipes/benchmarks/end_to_end.py`` writes a line of JSON for every launch and one for every step it ran, with the
lengths of all documents and the cost model that the launch went by. So its steps can be shared out again as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hf_wlb.packing import Document, MicroBatch, StepPlan
from hf_wlb.simulator.paper import shape_of
from hf_wlb.simulator.schedules import ScheduleConfig, stage_orders
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.systems import System
from hf_wlb.simulator.timeline import OpTimes, run_schedule
from hf_wlb.staging import StageLayout
from hf_wlb.workload import WorkloadModel, load_workload

FEWEST_STEPS = 3
"""Fewer steps have no interval."""

Line = Mapping[str, Any]
Rounds = Sequence[Mapping[str, Line]]


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was run.

    Attributes:
        plan: Its documents, replica by replica and micro-batch by micro-batch, as they were run.
        seconds: From all ranks' common beginning to the end of the slowest one, optimizer included.
        modelled: Seconds of it, as the simulator has it.
        spans: Seconds that every forward and backward of every stage took, in the order of the pipeline's schedule, on
            the slowest rank of each, ``[stages][2 x micro-batches]``; empty without a pipeline.
        planning: Seconds that one rank took to pack the step and to plan its shards; None where the line does not say.
    """

    plan: StepPlan
    seconds: float
    modelled: float
    spans: tuple[tuple[float, ...], ...] = ()
    planning: float | None = None

    def composed(self, sends: Sequence[float]) -> float:
        """Seconds from the first forward to the last backward, put together of ``spans`` by the 1F1B schedule.

        What it differs by from ``seconds`` is what the simulator's schedule does not know of a pipeline.

        Args:
            sends: Seconds that every micro-batch's hidden states, or their gradients, take to the next stage.

        Raises:
            ValueError: If there are no spans, or not as many as the schedule has.

        >>> row = {"step": 0, "seconds": 6.1, "predicted": 0.0, "micro_batch_lengths": [[[5]]]}
        >>> spans = [[0.0, 1.0, 4.0, 6.0], [1.0, 2.0, 2.0, 4.0]]  # begin and end of forward and backward
        >>> _step({**row, "spans": spans}, [0, 1]).composed(sends=[0.0])
        6.0
        """
        if not self.spans:
            raise ValueError(f"Step {self.plan.step} has no spans: it had no pipeline, or several replicas.")
        micro_batches = len(self.plan.replicas[0])
        shape = len(self.spans), micro_batches, 1
        forward, backward = np.zeros(shape), np.zeros(shape)
        for stage, order in enumerate(stage_orders(ScheduleConfig(), len(self.spans), micro_batches)):
            for op, seconds in zip(order, self.spans[stage], strict=True):
                (forward if op.forward else backward)[stage, op.micro_batch] = seconds
        times = OpTimes(forward, backward, np.reshape(sends, shape[1:]))
        return run_schedule(ScheduleConfig(), len(self.spans), times).seconds


@dataclass(frozen=True)
class MeasuredVariant:
    """A variant of the benchmark in one launch.

    Attributes:
        system: Its name, packer and sharding.
        steps: One a round, a sample of its stream.
        stream_tokens: Of the whole stream, the same documents for all variants.
        stream_modelled: Seconds of the whole stream's steps, as the simulator has them.
    """

    system: System
    steps: tuple[MeasuredStep, ...]
    stream_tokens: int
    stream_modelled: float

    @property
    def planning_share(self) -> float | None:
        """What packing and sharding takes on one rank, as a share of the steps' time; None where it is not known."""
        known = [step.planning for step in self.steps if step.planning is not None]
        return sum(known) / sum(step.seconds for step in self.steps) if len(known) == len(self.steps) else None

    def stream_speed(self, seconds: Sequence[float]) -> float:
        """Tokens per second of the whole stream, all GPUs together, if the sampled steps take so long.

        As the benchmark reports it: the simulator says how the sample compares with the stream, so that the luck of
        the draw, which steps were sampled, mostly cancels.

        Args:
            seconds: Of every step, ``[steps]``.
        """
        modelled = sum(step.modelled for step in self.steps)
        return self.stream_tokens / (float(np.sum(seconds)) / modelled * self.stream_modelled)

    @property
    def speed_interval(self) -> tuple[float, float] | None:
        """95% interval of the measured ``stream_speed``, see ``interval_of``; None for under ``FEWEST_STEPS``."""
        few = len(self.steps) < FEWEST_STEPS
        return None if few else interval_of(self._speeds(np.array([step.seconds for step in self.steps])))

    def _speeds(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of all steps, and without each."""
        modelled = without_each(np.array([step.modelled for step in self.steps]))
        speeds: NDArray[np.float64] = self.stream_tokens / (without_each(seconds) / modelled * self.stream_modelled)
        return speeds


@dataclass(frozen=True)
class MeasuredLaunch:
    """A launch of the end-to-end benchmark.

    Attributes:
        name: When it began, as its lines say.
        kernel: Of attention, as ``AttentionKernel.name`` has it; several of them joined by commas.
        device: What the driver calls the GPUs; None where the line does not say.
        model: Name of its preset.
        config: The model's shape, with the attributes of a Transformers config.
        split: Over which GPUs it ran.
        layout: Layers of every stage; None without a pipeline.
        gradient_checkpointing: Whether layers' forwards ran twice.
        compiled: Whether layers were compiled.
        context_length: Tokens of a micro-batch on average.
        workload: The cost model that steps were planned and shared out by.
        variants: What was run.
    """

    name: str
    kernel: str
    device: str | None
    model: str
    config: Any
    split: Split
    layout: StageLayout | None
    gradient_checkpointing: bool
    compiled: bool
    context_length: int
    workload: WorkloadModel
    variants: tuple[MeasuredVariant, ...]

    @classmethod
    def of(cls, about: Line, rounds: Rounds) -> MeasuredLaunch:
        """From the lines of a results file, as ``read_rounds`` gives them.

        Raises:
            ValueError: If the lines do not hold documents or cost model, or the model is no preset.
        """
        settings, name = about["settings"], about["launch"]
        if "workload" not in about or any("micro_batch_lengths" not in row for rows in rounds for row in rows.values()):
            raise ValueError(
                f"Launch {name} cannot be predicted: its lines lack workload or micro_batch_lengths, so an older "
                "version of the benchmark wrote them. Run recipes/benchmarks/end_to_end.py again."
            )
        shape, pp_size = shape_of(settings["model"]), settings["pp_size"]
        shape.num_hidden_layers = settings["layers"] or shape.num_hidden_layers
        layers = about["stage_layers"]
        layout = StageLayout.from_sizes(layers, shape.num_hidden_layers, pp_size) if pp_size > 1 else None
        return cls(
            name=name,
            kernel=about["kernel"],
            device=about.get("device"),
            model=settings["model"],
            config=shape,
            split=Split(settings["tp_size"], settings["cp_size"], pp_size, about["replicas"]),
            layout=layout,
            gradient_checkpointing=settings["recompute"],
            compiled=settings["compiled"],
            context_length=settings["context_length"],
            workload=load_workload(about["workload"]),
            variants=tuple(
                MeasuredVariant(
                    System(variant, stream["packer"], stream["sharding"]),
                    tuple(_step(rows[variant], about.get("stage_of_rank", ()) if layout else ()) for rows in rounds),
                    stream["pass_tokens"],
                    stream["pass_predicted"],
                )
                for variant, stream in about["streams"].items()
            ),
        )

    @property
    def label(self) -> str:
        """What was run, in words."""
        return f"{self.split.label}, {self.context_length // 1024}K, {self.kernel}, launch {self.name}"


def read_measured(text: str) -> list[MeasuredLaunch]:
    """The launches of a results file that have a complete round.

    Raises:
        ValueError: See ``read_rounds`` and ``MeasuredLaunch.of``.
    """
    return [MeasuredLaunch.of(about, rounds) for about, rounds in read_rounds(text) if rounds]


def read_rounds(text: str) -> list[tuple[Line, Rounds]]:
    """The lines of a results file: of every launch its own, and its rounds, in which every variant ran a step.

    The warm-up, rounds that are not complete and a last line that was broken off are left out.

    Raises:
        ValueError: If a step's launch has no line before it.
    """
    about: dict[str, Line] = {}
    steps: dict[str, dict[int, dict[str, Line]]] = {}
    for line in complete_lines(text).splitlines():
        row = json.loads(line)
        if row["kind"] == "launch":
            about[row["launch"]], steps[row["launch"]] = row, {}
        elif row["launch"] not in about:
            raise ValueError(f"A step of launch {row['launch']} comes before the launch itself: the file is damaged.")
        elif row["round"] >= 0:  # the others are the warm-up
            steps[row["launch"]].setdefault(row["round"], {})[row["variant"]] = row
    return [
        (found, [rows for _, rows in sorted(steps[name].items()) if rows.keys() == found["streams"].keys()])
        for name, found in about.items()
    ]


def complete_lines(text: str) -> str:
    r"""Without a last line that was broken off.

    >>> complete_lines('{"a": 1}\n{"b"')
    '{"a": 1}\n'
    """
    return text[: text.rfind("\n") + 1]


def without_each(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of all values, and behind it the sums without the first, without the second, ...: ``[1 + values]``.

    >>> without_each(np.array([1.0, 2.0, 4.0])).tolist()
    [7.0, 6.0, 5.0, 3.0]
    """
    sums: NDArray[np.float64] = values.sum() - np.concatenate([[0.0], values])
    return sums


def interval_of(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """95% interval of a positive figure of rounds: the jackknife on its logarithm, with Student's t.

    Unlike percentiles of resampled rounds it keeps its 95% with few of them. It says how far other rounds would come
    out elsewhere; what all rounds have in common, such as an error of the simulator, is not in it.

    Args:
        values: The figure of all rounds, and without each of them, ``[1 + rounds]``, see ``without_each``.

    Returns:
        None for fewer than ``FEWEST_STEPS`` rounds.

    >>> low, high = interval_of(np.array([2.0, 1.9, 2.0, 2.1]))
    >>> round(low, 2), round(high, 2)
    (1.56, 2.56)
    """
    rounds = len(values) - 1
    if rounds < FEWEST_STEPS:
        return None
    logs = np.log(values)
    alike = rounds * logs[0] - (rounds - 1) * logs[1:]  # pseudo-values: as if every round had a figure of its own
    margin = float(stdtrit(rounds - 1, 0.975) * alike.std(ddof=1) / np.sqrt(rounds))
    return float(np.exp(logs[0] - margin)), float(np.exp(logs[0] + margin))


def _step(row: Line, stage_of_rank: Sequence[int]) -> MeasuredStep:
    """Documents in their order of layout, and times; of several replicas no spans, of which each has its own."""
    step = row["step"]
    replicas = tuple(
        tuple(
            MicroBatch(tuple(Document(0, 0, length, 0.0, step) for length in lengths), sum(lengths), 0.0)
            for lengths in micro_batches
        )
        for micro_batches in row["micro_batch_lengths"]
    )
    spans = _slowest(row["spans"], stage_of_rank) if "spans" in row and len(replicas) == 1 else ()
    known = {"plan_seconds", "shard_seconds"} <= row.keys()
    planning = row["plan_seconds"] + row["shard_seconds"] if known else None
    return MeasuredStep(StepPlan(step, replicas), row["seconds"], row["predicted"], spans, planning)


def _slowest(spans: Sequence[Sequence[float]], stage_of_rank: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Lengths of every rank's spans (begin, end, begin, ...), the longest of a stage's ranks."""
    found: list[tuple[float, ...]] = []
    for stage in range(max(stage_of_rank, default=-1) + 1):
        rows = [np.diff(row)[::2] for row, own in zip(spans, stage_of_rank, strict=True) if own == stage]
        found.append(tuple(np.max(rows, axis=0).tolist()))
    return tuple(found)
