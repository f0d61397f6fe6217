"""Moves and swaps of documents, where longest-first placement left something to gain.

Out of the heaviest micro-batch (``level_out``), and out of the slowest replica (``even_out_replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_wlb.packing.base import Bins
from hf_wlb.packing.step_time import StepTimeModel

#: Give up when the heaviest micro-batch is this close to the mean, after so many exchanges, or with so many partners.
CLOSE_ENOUGH = 1.001
MAX_EXCHANGES = 24
PARTNERS = 4

#: The same for replicas: documents moved at most.
MAX_MOVES = 96


def level_out(bins: Bins) -> int:
    """Lowers the heaviest micro-batch as long as one move or swap with one of the lightest can.

    Args:
        bins: Changed in place; S_max is respected.

    Returns:
        Number of exchanges made.

    >>> from hf_wlb.packing.types import Document
    >>> bins = Bins(2, capacity=100)
    >>> for place, length in [(0, 3), (0, 3), (1, 2), (1, 2), (0, 2)]:  # longest first gives 3 + 2 + 2 against 3 + 2
    ...     bins.add(place, Document(place, 0, length, float(length), 0))
    >>> level_out(bins), bins.workloads
    (1, [6.0, 6.0])
    """
    for exchanges in range(MAX_EXCHANGES):
        levels = np.add(bins.workloads, bins.offsets)
        heaviest = int(levels.argmax())
        if levels[heaviest] <= CLOSE_ENOUGH * levels.mean() or not _improve(bins, levels, heaviest):
            return exchanges
    return MAX_EXCHANGES


def _improve(bins: Bins, levels: np.ndarray, heavy: int) -> bool:
    """Makes the exchange with the lightest micro-batches that lowers the larger of the two levels most."""
    if not bins.documents[heavy]:  # its offset alone makes it the highest
        return False
    lightest = [int(place) for place in np.argsort(levels, kind="stable")[:PARTNERS] if place != heavy]
    out_work, out_tokens = _columns(bins, heavy)
    best: tuple[float, int, int, int] | None = None
    for light in lightest:
        back_work, back_tokens = _columns(bins, light, nothing=True)
        gain = out_work[:, None] - back_work[None, :]
        grown = out_tokens[:, None] - back_tokens[None, :]
        level = np.maximum(levels[heavy] - gain, levels[light] + gain)
        level[(bins.tokens[light] + grown > bins.capacity) | (bins.tokens[heavy] - grown > bins.capacity)] = np.inf
        out, back = np.unravel_index(int(level.argmin()), level.shape)
        if level[out, back] < levels[heavy] * (1 - 1e-9) and (best is None or level[out, back] < best[0]):
            best = (float(level[out, back]), light, int(out), int(back))
    if best is None:
        return False
    _, partner, gone, given = best
    bins.exchange(heavy, gone, partner, given if given < len(bins.documents[partner]) else None)
    return True


def _columns(bins: Bins, place: int, nothing: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Workloads and tokens of a micro-batch's documents; ``nothing`` adds an empty one, for moves."""
    extra = [0] if nothing else []
    documents = bins.documents[place]
    work = np.array([*(document.workload for document in documents), *extra], dtype=np.float64)
    tokens = np.array([*(document.length for document in documents), *extra], dtype=np.int64)
    return work, tokens


def even_out_replicas(bins: Bins, groups: Sequence[Sequence[int]], model: StepTimeModel) -> int:
    """Moves documents from the slowest replica to faster ones while that makes the step faster.

    A document goes where S_max has room for it and where it does not make another micro-batch the heaviest.

    Args:
        bins: Changed in place.
        groups: The micro-batches of every replica.
        model: Says how long a replica takes.

    Returns:
        Number of documents moved.

    >>> from hf_wlb.packing.types import Document
    >>> bins = Bins(4, capacity=100)
    >>> for place, length in enumerate([9, 4, 3, 9]):
    ...     bins.add(place, Document(place, 0, length, float(length), 0))
    >>> bins.add(1, Document(4, 0, 3, 3.0, 0))
    >>> even_out_replicas(bins, [[0, 1], [2, 3]], StepTimeModel(pp_size=2)), bins.workloads
    (1, [9.0, 4.0, 6.0, 9.0])
    """
    for moved in range(MAX_MOVES):
        times = [model.replica_time([bins.workloads[place] for place in group]) for group in groups]
        slow = max(range(len(groups)), key=lambda replica: times[replica])
        faster = sorted(range(len(groups)), key=lambda replica: times[replica])[:-1]
        if times[slow] <= CLOSE_ENOUGH * sum(times) / len(times) or not any(
            _move_between(bins, groups[slow], groups[fast], times[slow] - times[fast]) for fast in faster
        ):
            return moved
    return MAX_MOVES


def _move_between(bins: Bins, slow: Sequence[int], fast: Sequence[int], difference: float) -> bool:
    """Moves the document that brings two replicas, ``difference`` apart, closest together; False if none does."""
    heaviest = max(bins.workloads[place] for place in fast)
    rooms = np.array([bins.capacity - bins.tokens[place] for place in fast])
    below = np.array([heaviest - bins.workloads[place] for place in fast])
    places = [(place, number) for place in slow for number in range(len(bins.documents[place]))]
    work = np.array([bins.documents[place][number].workload for place, number in places])
    tokens = np.array([bins.documents[place][number].length for place, number in places])
    fits = (tokens[:, None] <= rooms) & (work[:, None] <= below)
    left = np.where(fits.any(1), np.abs(difference - 2 * work), np.inf)
    best = int(left.argmin())
    if not left[best] < difference * (1 - 1e-9):
        return False
    place, number = places[best]
    bins.exchange(place, number, fast[int(np.where(fits[best], rooms, -1).argmax())], None)
    return True
