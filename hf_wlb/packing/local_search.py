"""Moves and swaps out of the heaviest micro-batch, where longest-first placement left something to gain."""

from __future__ import annotations

import numpy as np

from hf_wlb.packing.base import Bins

#: Give up when the heaviest micro-batch is this close to the mean, after so many exchanges, or with so many partners.
CLOSE_ENOUGH = 1.001
MAX_EXCHANGES = 24
PARTNERS = 4


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
