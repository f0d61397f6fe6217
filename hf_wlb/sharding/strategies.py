"""The static strategies: one way of cutting, whatever the documents cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.sharding.types import FloatArray, IntArray, ShardPlan


def check_micro_batch(lengths: Sequence[int] | NDArray[Any], cp_size: int) -> IntArray:
    """The lengths as an array.

    Raises:
        ValueError: For lengths that are no positive whole numbers, a cp_size below 1, or fewer tokens than ranks.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be a flat list of whole numbers, one a document, got {lengths!r}.")
    if array.size and int(array.min()) < 1:
        raise ValueError(f"every document of a micro-batch has at least 1 token, but one of {int(array.min())} came.")
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}.")
    total = int(array.sum()) if array.size else 0
    if total < cp_size:
        raise ValueError(
            f"A micro-batch of {total} tokens cannot be shared by {cp_size} context-parallel ranks: every rank needs "
            "at least one. Use a smaller cp_size or longer micro-batches."
        )
    return array.astype(np.int64, copy=False)


def per_sequence(lengths: Sequence[int] | NDArray[Any], cp_size: int) -> ShardPlan:
    """Cut the packed micro-batch as if it were one document (PAPER "Sharding"); blind to where documents begin.

    Tokens are even, to one or two; attention is not. Documents that happen to lie on one rank stay local, which the
    paper's version, exchanging everything, does not make use of.

    Raises:
        ValueError: See ``check_micro_batch``.

    >>> plan = per_sequence([6, 2], cp_size=2)  # chunks of 2 tokens: rank 0 has the first and the last
    >>> plan.owner.tolist(), plan.edges.tolist(), plan.tokens.tolist()
    ([-1, 0], [[0, 2, 4, 6, 6]], [4, 4])
    """
    checked = check_micro_batch(lengths, cp_size)
    stops = np.cumsum(checked)
    cuts = np.concatenate([[0], np.cumsum(deal(stops[-1:], np.full(2 * cp_size, 0.5 / cp_size))[0])])
    edges = np.clip(cuts[None, :] - (stops - checked)[:, None], 0, checked[:, None])
    return ShardPlan.from_edges(checked, cp_size, edges, "per_sequence")


def per_document(lengths: Sequence[int] | NDArray[Any], cp_size: int) -> ShardPlan:
    """Cut every document into 2 cp_size chunks, without padding (PAPER "Sharding").

    A remainder is dealt one token each to chunks in turn, the turn carrying over from document to document, so that
    attention and tokens are even.

    Raises:
        ValueError: See ``check_micro_batch``.

    >>> per_document([9, 6], cp_size=2).edges.tolist()
    [[0, 3, 5, 7, 9], [0, 1, 3, 5, 6]]
    """
    checked = check_micro_batch(lengths, cp_size)
    widths = deal(checked, np.full(2 * cp_size, 0.5 / cp_size))
    return ShardPlan.from_edges(checked, cp_size, chunk_edges(widths), "per_document")


def deal(lengths: IntArray, shares: FloatArray) -> IntArray:
    """Widths of the chunks of documents, ``[documents, chunks]``: by shares (which sum to 1), without padding.

    What rounding down leaves over goes one token each to the chunks of some share: where those shares are equal in
    turn, the turn carrying over (PAPER "Sharding"); else to the chunks that rounding has kept shortest so far. Either
    way no chunk's total strays from its share by more than a few tokens, however many documents there are.

    >>> deal(np.array([9, 6]), np.full(4, 0.25)).tolist()
    [[3, 2, 2, 2], [1, 2, 2, 1]]
    >>> deal(np.array([8, 8, 8, 8]), np.array([0.1, 0.9])).tolist()
    [[1, 7], [1, 7], [0, 8], [1, 7]]
    """
    taking = np.flatnonzero(shares > 0)
    widths = np.zeros((len(lengths), len(shares)), dtype=np.int64)
    exact = lengths[:, None] * shares[taking][None, :]
    floor = np.floor(exact + 1e-9).astype(np.int64)  # 0.3 + 0.7 shares of whole tokens shall not lose one
    left = lengths - floor.sum(axis=1)
    if np.ptp(shares[taking]) > 0:
        widths[:, taking] = floor + _owed_most(exact - floor, left)
        return widths
    turn = np.concatenate([[0], np.cumsum(left)[:-1]])
    place = (np.arange(len(taking))[None, :] - turn[:, None]) % len(taking)
    widths[:, taking] = floor + (place < left[:, None])
    return widths


def _owed_most(fractions: FloatArray, left: IntArray) -> IntArray:
    """One token more for the ``left[i]`` chunks that rounding owes most by document i, ``[documents, chunks]``."""
    more = np.zeros(fractions.shape, dtype=np.int64)
    owed = [0.0] * fractions.shape[1]
    for document, (added, count) in enumerate(zip(fractions.tolist(), left.tolist(), strict=True)):
        owed = [a + b for a, b in zip(owed, added, strict=True)]
        for chunk in sorted(range(len(owed)), key=owed.__getitem__, reverse=True)[:count]:
            more[document, chunk] = 1
            owed[chunk] -= 1
    return more


def chunk_edges(widths: IntArray) -> IntArray:
    """Where chunks begin and the last ends, from their widths."""
    edges = np.zeros((widths.shape[0], widths.shape[1] + 1), dtype=np.int64)
    np.cumsum(widths, axis=1, out=edges[:, 1:])
    return edges
