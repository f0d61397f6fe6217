"""When every forward and backward of a step begins and ends, given how long each takes.

A stage runs its operations in the order of its schedule, each as soon as what it needs is there: hidden states of the
layers before it, gradients of the layers behind it, and what the stage itself keeps from earlier operations. What a
stage sends arrives after the time of the transfer; the sender goes on at once, and a transfer waits for no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_wlb.simulator.schedules import Op, ScheduleConfig, stage_orders
from hf_wlb.staging.partition import check_pp_size


@dataclass(frozen=True, eq=False)
class OpTimes:
    """How long every operation takes, in seconds.

    Virtual stages count the model's runs of layers from the embedding to the head: of ``pp_size`` stages, stage ``s``
    holds virtual stage ``chunk * pp_size + s`` as its model chunk ``chunk``.

    Args:
        forward: float64 of shape ``(virtual stages, micro-batches, pieces)``.
        backward: the same of the backwards.
        send: float64 of shape ``(micro-batches, pieces)``: of hidden states, or their gradients, from a virtual stage
            to its neighbour on another stage.

    Raises:
        ValueError: if the shapes do not fit one another, or a time is negative or not finite.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    send: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "send"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        shape = self.forward.shape
        if len(shape) != 3 or not shape[0] or not shape[2] or self.backward.shape != shape:
            raise ValueError(
                "forward and backward must be times [virtual stage][micro-batch][piece] of one shape with one stage "
                f"and one piece at least, but shapes {shape} and {self.backward.shape} were given."
            )
        if self.send.shape != shape[1:]:
            raise ValueError(
                f"send must be times [micro-batch][piece] of shape {shape[1:]}, as forward has them, but shape "
                f"{self.send.shape} was given."
            )
        for name in ("forward", "backward", "send"):
            times = getattr(self, name)
            wrong = ~(np.isfinite(times) & (times >= 0))
            if wrong.any():
                raise ValueError(f"Times must be finite and at least 0, but {name} holds {float(times[wrong][0])!r}.")


class Span(NamedTuple):
    """When a stage runs an operation, in seconds from the step's first forward."""

    stage: int
    op: Op
    begin: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step on the stages of one replica.

    Attributes:
        ops: what every stage runs, in order: the fields of ``Op``, int64 of shape ``(stages, operations, 4)``.
        begins: when each begins, in seconds from the first forward, float64 of shape ``(stages, operations)``.
        ends: when each ends.
        model_chunks: runs of layers on every stage.

    >>> times = OpTimes(np.full((2, 2, 1), 1.0), np.full((2, 2, 1), 2.0), np.zeros((2, 1)))
    >>> timeline = run_schedule(ScheduleConfig(), 2, times)
    >>> timeline.seconds, timeline.waiting, timeline.peak_live(np.array([[10], [10]]))
    (9.0, (3.0, 3.0), [20.0, 10.0])
    >>> timeline.spans[1][0]
    Span(stage=1, op=Op(micro_batch=0, piece=0, chunk=0, forward=True), begin=1.0, end=2.0)
    """

    ops: NDArray[np.int64]
    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    model_chunks: int

    @property
    def pp_size(self) -> int:
        """Number of stages."""
        return len(self.ops)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Number of micro-batches, and of pieces of each."""
        micro_batches, pieces = (int(self.ops[..., field].max(initial=-1)) + 1 for field in (0, 1))
        return micro_batches, max(pieces, 1)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """When each operation runs: of every stage, in the order they run."""
        return tuple(
            tuple(
                Span(stage, Op(micro_batch, piece, chunk, bool(forward)), begin, end)
                for (micro_batch, piece, chunk, forward), begin, end in zip(ops, begins, ends, strict=True)
            )
            for stage, (ops, begins, ends) in enumerate(
                zip(self.ops.tolist(), self.begins.tolist(), self.ends.tolist(), strict=True)
            )
        )

    @cached_property
    def seconds(self) -> float:
        """From the first forward to the end of the last backward; 0.0 without micro-batches."""
        return float(self.ends.max(initial=0.0))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Share of the time that every stage works; 0.0 where the step takes no time."""
        return tuple(work / self.seconds if self.seconds else 0.0 for work in self._work)

    @cached_property
    def waiting(self) -> tuple[float, ...]:
        """Seconds that every stage does not work."""
        return tuple(self.seconds - work for work in self._work)

    def peak_live(self, tokens: NDArray[Any]) -> list[float]:
        """The most tokens whose activations each stage holds at once.

        A stage holds them from the begin of a forward to the end of its backward. A model chunk counts as its share of
        the stage's layers, 1 / ``model_chunks``, so times the activations of all of a stage's layers this is its peak.

        Args:
            tokens: of every piece on one rank, of shape ``(micro-batches, pieces)``.

        Returns:
            One number a stage.

        Raises:
            ValueError: if the shape is another.
        """
        tokens = np.asarray(tokens)
        if tokens.shape != self.shape:
            raise ValueError(
                f"tokens must be given [micro-batch][piece] in shape {self.shape}, but shape {tokens.shape} was given."
            )
        # Operations of a stage run one after another, so their order is all that matters.
        of_ops = tokens[self.ops[..., 0], self.ops[..., 1]]
        held = np.where(self.ops[..., 3] == 1, of_ops, -of_ops).cumsum(axis=1)
        peaks: list[float] = (held.max(axis=1, initial=0) / self.model_chunks).tolist()
        return peaks

    @cached_property
    def _work(self) -> list[float]:
        work: list[float] = (self.ends - self.begins).sum(axis=1).tolist()
        return work


def run_schedule(config: ScheduleConfig, pp_size: int, times: OpTimes) -> Timeline:
    """When a schedule's operations run. Takes time in proportion to their number.

    Args:
        config: the schedule.
        pp_size: number of stages.
        times: of ``pp_size * model_chunks`` virtual stages and the schedule's ``pieces``.

    Raises:
        ValueError: if ``times`` are of other numbers, or as ``stage_orders`` says.

    >>> times = OpTimes(np.full((4, 4, 1), 0.5), np.full((4, 4, 1), 1.0), np.zeros((4, 1)))
    >>> run_schedule(ScheduleConfig("interleaved", model_chunks=2), 2, times).seconds  # (4 + (2 - 1) / 2) x 3
    13.5
    """
    check_pp_size(pp_size)
    virtual, micro_batches, pieces = times.forward.shape
    if (virtual, pieces) != (pp_size * config.model_chunks, config.pieces):
        raise ValueError(
            f"The {config.name} schedule on pp_size={pp_size} stages of {config.model_chunks} model chunks needs times "
            f"of {pp_size * config.model_chunks} virtual stages and {config.pieces} pieces a micro-batch, but there "
            f"are times of {virtual} and {pieces}."
        )
    return _run(_planned(config, pp_size, micro_batches), times)


def run_orders(orders: Sequence[Sequence[Op]], times: OpTimes) -> Timeline:
    """When operations run in an order of your own.

    Args:
        orders: what every stage runs, in order: each forward and backward of ``times`` once.
        times: of as many virtual stages as stages times model chunks.

    Raises:
        ValueError: if there is no stage, the virtual stages are no multiple of them, a stage's operations are not
            those of ``times``, or operations wait for one another so that the step never ends.

    >>> orders = [[Op(0, 0, 0, True), Op(0, 0, 0, False)]]
    >>> run_orders(orders, OpTimes([[[1.0]]], [[[2.0]]], [[0.0]])).seconds
    3.0
    """
    virtual, micro_batches, pieces = times.forward.shape
    check_pp_size(len(orders))
    if virtual % len(orders):
        raise ValueError(
            f"There are times of {virtual} virtual stages, which {len(orders)} stages cannot share evenly; give "
            f"every stage as many model chunks."
        )
    return _run(_plan(orders, virtual // len(orders), micro_batches, pieces), times)


class _Plan(NamedTuple):
    """Orders with all that does not hang on times worked out; operations are numbered stage by stage."""

    ops: NDArray[np.int64]  # as a Timeline has them
    virtual: NDArray[np.int64]  # virtual stage of every operation, of shape (stages, operations)
    walk: list[tuple[int, int, int]]  # operation, its stage, what feeds it from another stage or -1; that comes first
    model_chunks: int


@lru_cache(maxsize=16)
def _planned(config: ScheduleConfig, pp_size: int, micro_batches: int) -> _Plan:
    return _plan(stage_orders(config, pp_size, micro_batches), config.model_chunks, micro_batches, config.pieces)


def _plan(orders: Sequence[Sequence[Op]], model_chunks: int, micro_batches: int, pieces: int) -> _Plan:
    pp_size = len(orders)
    _check_complete(orders, model_chunks, micro_batches, pieces)
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(orders)), dtype=np.int64)
    ops = flat.reshape(pp_size, 2 * micro_batches * pieces * model_chunks, 4)
    ops.flags.writeable = False  # the timelines of a plan share it
    micro_batch, piece, chunk, forward = np.moveaxis(ops, 2, 0)
    virtual = chunk * pp_size + np.arange(pp_size)[:, None]
    numbers = np.arange(forward.size).reshape(forward.shape)
    number_of = np.empty((pp_size * model_chunks, micro_batches, pieces, 2), dtype=np.int64)
    number_of[virtual, micro_batch, piece, forward] = numbers
    # What an operation needs of its own virtual stage: a forward the piece before, whose keys it reads; a backward the
    # piece behind, which has read its keys and so holds a part of their gradient, and the last piece's its forward.
    other = piece + np.where(forward, -1, 1)
    inside = (other >= 0) & (other < pieces)
    own = number_of[virtual, micro_batch, np.where(inside, other, piece), np.where(inside, forward, 1)]
    own[~inside & (forward == 1)] = -1
    # And of its neighbour: a forward of the virtual stage before it, a backward of the one behind.
    other = virtual + np.where(forward, -1, 1)
    inside = (other >= 0) & (other < len(number_of))
    source = np.where(inside, number_of[np.where(inside, other, virtual), micro_batch, piece, forward], -1)
    if pp_size == 1:  # all of them are the stage's own, and nothing is sent
        own, source = np.maximum(own, source), np.full_like(source, -1)
    too_early = np.flatnonzero(own > numbers)
    if too_early.size:
        raise ValueError(_deadlock(ops, [(int(too_early[0]), int(own.flat[too_early[0]]))]))
    walk, waits = _walk(source)
    if waits:
        raise ValueError(_deadlock(ops, waits))
    return _Plan(ops, virtual, walk, model_chunks)


def _walk(source: NDArray[np.int64]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Go through the operations in an order in which they could run.

    Args:
        source: per stage and operation, what feeds it from another stage, or -1.

    Returns:
        The walk as ``_Plan`` has it, and (operation, what feeds it) where stages never get any further.
    """
    stages, length = source.shape
    sources = source.ravel().tolist()
    walk: list[tuple[int, int, int]] = []
    done = [False] * len(sources)
    upcoming = [stage * length for stage in range(stages)]
    waiting: dict[int, int] = {}  # operation -> the stage that waits for it; every one feeds one other at most
    going = list(range(stages))
    while going:
        stage = going.pop()
        for number in range(upcoming[stage], (stage + 1) * length):
            upcoming[stage] = number
            need = sources[number]
            if need >= 0 and not done[need]:
                waiting[need] = stage
                break
            done[number] = True
            walk.append((number, stage, need))
            if number in waiting:
                going.append(waiting.pop(number))
    return walk, sorted((upcoming[stage], need) for need, stage in waiting.items())


def _run(plan: _Plan, times: OpTimes) -> Timeline:
    micro_batch, piece, _, forward = np.moveaxis(plan.ops, 2, 0)
    place = (plan.virtual, micro_batch, piece)
    durations = np.where(forward, times.forward[place], times.backward[place]).ravel().tolist()
    sends = times.send[micro_batch, piece].ravel().tolist()
    begins, ends = [0.0] * len(durations), [0.0] * len(durations)
    free = [0.0] * len(plan.ops)  # since when each stage has been
    for number, stage, source in plan.walk:
        begin = free[stage]
        if source >= 0 and (arrival := ends[source] + sends[number]) > begin:
            begin = arrival
        begins[number] = begin
        ends[number] = free[stage] = begin + durations[number]
    shape = forward.shape
    return Timeline(plan.ops, np.reshape(begins, shape), np.reshape(ends, shape), plan.model_chunks)


def _check_complete(orders: Sequence[Sequence[Op]], model_chunks: int, micro_batches: int, pieces: int) -> None:
    """Refuse orders in which a stage leaves out an operation, runs one twice, or runs one that there is not."""
    wanted = {
        Op(i, piece, chunk, forward)
        for i in range(micro_batches)
        for piece in range(pieces)
        for chunk in range(model_chunks)
        for forward in (True, False)
    }
    for stage, order in enumerate(orders):
        given = set(order)
        if given == wanted and len(order) == len(wanted):
            continue
        found = [
            f"the {_said(min(ops))} {fault}"
            for ops, fault in ((wanted - given, "is missing"), (given - wanted, "is none of them"))
            if ops
        ]
        raise ValueError(
            f"Stage {stage} must run each of {len(wanted)} operations once ({micro_batches} micro-batches of {pieces} "
            f"pieces through {model_chunks} model chunks, forward and backward), but of the {len(order)} given "
            f"{' and '.join(found) or 'some stand there twice'}."
        )


def _deadlock(ops: NDArray[np.int64], waits: Sequence[tuple[int, int]]) -> str:
    """Say which operations wait, each for which other; ``ops`` as in ``_Plan``, operations as it numbers them."""
    length = ops.shape[1]

    def said(number: int) -> str:
        return _said(Op(*ops.reshape(-1, 4)[number].tolist()))

    parts = [
        f"stage {number // length} waits to begin the {said(number)} until the {said(need)} ends on stage "
        f"{need // length}"
        for number, need in waits[:4]
    ]
    if len(waits) > 4:
        parts.append(f"{len(waits) - 4} more stages wait")
    return f"In this order of operations the step never ends: {', '.join(parts)}. Change the order."


def _said(op: Op) -> str:
    kind = "forward" if op.forward else "backward"
    return f"{kind} of micro-batch {op.micro_batch} (piece {op.piece}, model chunk {op.chunk})"


def to_trace(timelines: Mapping[str, Timeline] | Sequence[Timeline]) -> dict[str, Any]:
    """Trace events of timelines, to write as JSON and look at in Perfetto or ``chrome://tracing``.

    Args:
        timelines: by name; without names they are "replica 0", "replica 1", ... Each becomes a process with a thread a
            stage. Times are in microseconds, as the format wants them.

    Returns:
        JSON-serialisable, ``{"displayTimeUnit": "ms", "traceEvents": [...]}``.

    >>> timeline = run_orders([[Op(0, 0, 0, True), Op(0, 0, 0, False)]], OpTimes([[[1.0]]], [[[2.0]]], [[0.0]]))
    >>> [event["name"] for event in to_trace({"steady": timeline})["traceEvents"] if event["ph"] == "X"]
    ['forward 0', 'backward 0']
    """
    if not isinstance(timelines, Mapping):
        timelines = {f"replica {index}": timeline for index, timeline in enumerate(timelines)}
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_named("process_name", process, 0, name))
        for stage, row in enumerate(timeline.spans):
            events.append(_named("thread_name", process, stage, f"stage {stage}"))
            events += [_event(process, span) for span in row]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(process: int, span: Span) -> dict[str, Any]:
    kind = "forward" if span.op.forward else "backward"
    return {
        "ph": "X",
        "name": f"{kind} {span.op.micro_batch}",
        "cat": kind,
        "pid": process,
        "tid": span.stage,
        "ts": span.begin * 1e6,
        "dur": (span.end - span.begin) * 1e6,
        "args": {"micro-batch": span.op.micro_batch, "piece": span.op.piece, "model chunk": span.op.chunk},
    }
