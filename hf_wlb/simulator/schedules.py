"""Pipeline schedules: which forwards and backwards every stage runs, in which order.

All have one form: forwards to warm up, then one forward and one backward in turn, then the backwards left.

- ``1f1b``: stage p of ``pp_size`` warms up with ``pp_size - p - 1`` micro-batches. DeepSpeed's ``TrainSchedule`` and
  this library's own pipeline.
- ``interleaved``: every stage holds ``model_chunks`` runs of layers. What leaves the last stage goes on to the next
  chunk on the first one, so a pipeline fills and drains in 1 / ``model_chunks`` of the time. Order and warm-up are
  Megatron-LM's (Narayanan et al., 2021), with groups of ``pp_size`` micro-batches.
- ``seq1f1b``: every micro-batch is cut into ``pieces`` that pass one after another (Sun et al., 2024). A piece reads
  the keys of the pieces before it, so forwards go in order and the backwards of a micro-batch in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_wlb.staging.partition import check_pp_size
from hf_wlb.workload.base import is_whole_number

SCHEDULES = ("1f1b", "interleaved", "seq1f1b")
"""Names of the schedules."""


@dataclass(frozen=True)
class ScheduleConfig:
    """A schedule and what it cuts up.

    Args:
        name: one of ``SCHEDULES``.
        model_chunks: runs of layers on every stage ("interleaved": 2 or more; others: 1).
        pieces: parts of every micro-batch ("seq1f1b": 2 or more; others: 1).

    Raises:
        ValueError: if the name is unknown, or the schedule cannot have that many chunks or pieces.

    >>> ScheduleConfig("interleaved", model_chunks=2).pieces
    1
    """

    name: str = "1f1b"
    model_chunks: int = 1
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"There is no schedule {self.name!r}; choose one of {', '.join(SCHEDULES)}.")
        for field, cutting, value in (
            ("model_chunks", "interleaved", self.model_chunks),
            ("pieces", "seq1f1b", self.pieces),
        ):
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"{field} must be a whole number of at least 1, got {value!r}.")
            if self.name == cutting and value < 2:
                raise ValueError(
                    f"The {cutting} schedule needs {field} of at least 2, but {value} was given; with 1 it is 1f1b."
                )
            if self.name != cutting and value != 1:
                raise ValueError(
                    f"{field}={value} was given with the {self.name} schedule, but only the {cutting} schedule has "
                    f"more than 1; set {field}=1 or name={cutting!r}."
                )


class Op(NamedTuple):
    """One forward or backward of one stage."""

    micro_batch: int
    """Which of the step's micro-batches, from 0 in the order they go."""
    piece: int
    """Which of its pieces, from 0 at its first token."""
    chunk: int
    """Which of the stage's model chunks, from 0 at the layers nearest to the embedding."""
    forward: bool
    """A forward; otherwise a backward."""


def stage_orders(config: ScheduleConfig, pp_size: int, micro_batches: int) -> list[list[Op]]:
    """What every stage runs, in order.

    Args:
        config: the schedule.
        pp_size: number of stages.
        micro_batches: of a step on one replica.

    Returns:
        Per stage ``2 * micro_batches * model_chunks * pieces`` operations.

    Raises:
        ValueError: if ``pp_size`` is below 1, ``micro_batches`` below 0, or the schedule is interleaved and
            ``micro_batches`` no multiple of ``pp_size``.

    The second of two stages runs backwards at once, the first one a forward later:

    >>> for order in stage_orders(ScheduleConfig(), pp_size=2, micro_batches=2):
    ...     print(" ".join(f"{'F' if op.forward else 'B'}{op.micro_batch}" for op in order))
    F0 F1 B0 B1
    F0 B0 F1 B1
    """
    check_pp_size(pp_size)
    if not is_whole_number(micro_batches) or micro_batches < 0:
        raise ValueError(f"micro_batches must be a whole number of at least 0, got {micro_batches!r}.")
    if config.name == "interleaved":
        return _interleaved(pp_size, micro_batches, config.model_chunks)
    # 1F1B is Seq1F1B of whole micro-batches.
    pieces = config.pieces
    forwards = [Op(i, piece, 0, True) for i in range(micro_batches) for piece in range(pieces)]
    backwards = [Op(i, piece, 0, False) for i in range(micro_batches) for piece in reversed(range(pieces))]
    return [_in_turn(forwards, backwards, pp_size - stage - 2 + pieces) for stage in range(pp_size)]


def _interleaved(pp_size: int, micro_batches: int, chunks: int) -> list[list[Op]]:
    """Groups of ``pp_size`` micro-batches, each through one chunk after another."""
    if micro_batches % pp_size:
        raise ValueError(
            f"The interleaved schedule takes micro-batches in groups of pp_size={pp_size}, but {micro_batches} a step "
            f"were given; give a multiple of {pp_size}, or take 1f1b or seq1f1b."
        )
    groups = [range(first, first + pp_size) for first in range(0, micro_batches, pp_size)]
    forwards = [Op(i, 0, chunk, True) for group in groups for chunk in range(chunks) for i in group]
    backwards = [Op(i, 0, chunk, False) for group in groups for chunk in reversed(range(chunks)) for i in group]
    return [
        _in_turn(forwards, backwards, 2 * (pp_size - stage - 1) + (chunks - 1) * pp_size) for stage in range(pp_size)
    ]


def _in_turn(forwards: Sequence[Op], backwards: Sequence[Op], warm_up: int) -> list[Op]:
    """So many forwards, then one forward and one backward in turn, then the backwards left."""
    warm_up = min(warm_up, len(forwards))
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[len(forwards) - warm_up :])
