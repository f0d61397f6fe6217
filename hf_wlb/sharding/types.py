"""What sharding decides: which context-parallel rank holds which tokens of a micro-batch.

A document is either *local*, whole on one rank, or *sharded*: cut into 2 cp_size contiguous chunks, of which rank r
holds the r-th from the front (its head chunk) and the r-th from the back (its tail chunk). Chunks may be of different
and of zero length. Every strategy is expressed in these terms.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

SHARDED = -1
"""Owner of a document that is not whole on one rank."""


def chunk_ranks(cp_size: int) -> IntArray:
    """Rank of each of the 2 cp_size chunks of a sharded document.

    >>> chunk_ranks(2).tolist()
    [0, 1, 1, 0]
    """
    ranks = np.arange(cp_size)
    return np.concatenate([ranks, ranks[::-1]])


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Who holds what of one micro-batch; the same on every rank.

    Attributes:
        lengths: Tokens of every document in layout order, shape ``[documents]``.
        cp_size: Ranks that share the micro-batch.
        owner: Rank of every local document, ``SHARDED`` for the others, shape ``[documents]``.
        edges: Chunk j of the i-th sharded document is its tokens ``edges[i, j]`` up to ``edges[i, j + 1]``, shape
            ``[sharded documents, 2 cp_size + 1]``.
        strategy: The strategy that made it.
        threshold: For ``placed``, the longest document that was left whole.
        predicted: Workload of every rank, exchange of keys and values included, shape ``[cp_size]``; in the workload
            model's units. None where no model was asked.
    """

    lengths: IntArray
    cp_size: int
    owner: IntArray
    edges: IntArray
    strategy: str
    threshold: int | None = None
    predicted: FloatArray | None = field(default=None, repr=False)

    @classmethod
    def from_edges(cls, lengths: IntArray, cp_size: int, edges: IntArray, strategy: str) -> ShardPlan:
        """Takes cuts of every document; those that fall to one rank entirely become local.

        >>> edges = np.array([[0, 2, 2, 2, 4], [0, 1, 2, 3, 3]])  # the first goes to rank 0 alone
        >>> ShardPlan.from_edges(np.array([4, 3]), 2, edges, "example").owner.tolist()
        [0, -1]
        """
        ranks = chunk_ranks(cp_size)
        held = np.diff(edges, axis=1) > 0
        lowest = np.where(held, ranks, cp_size).min(axis=1, initial=cp_size)
        highest = np.where(held, ranks, -1).max(axis=1, initial=-1)
        owner = np.where(lowest == highest, lowest, SHARDED)
        return cls(lengths, cp_size, owner, edges[owner == SHARDED], strategy)

    @cached_property
    def sharded(self) -> IntArray:
        """Indices of the sharded documents."""
        return np.flatnonzero(self.owner == SHARDED)

    @cached_property
    def local_tokens(self) -> IntArray:
        """Tokens of local documents on every rank, shape ``[cp_size]``."""
        local = self.owner != SHARDED
        tokens = np.bincount(self.owner[local], self.lengths[local], self.cp_size)
        return tokens.astype(np.int64)

    @cached_property
    def exchanged_tokens(self) -> IntArray:
        """Tokens of sharded documents on every rank, whose keys and values are exchanged, shape ``[cp_size]``."""
        widths = np.diff(self.edges, axis=1).sum(axis=0)
        both: IntArray = widths[: self.cp_size] + widths[: self.cp_size - 1 : -1]
        return both

    @property
    def tokens(self) -> IntArray:
        """Tokens of every rank, shape ``[cp_size]``."""
        return self.local_tokens + self.exchanged_tokens

    @property
    def token_skew(self) -> float:
        """Largest deviation of a rank's tokens from an even share, relative to it."""
        even = self.lengths.sum() / self.cp_size
        return float(np.abs(self.tokens / even - 1).max())

    @property
    def slowest(self) -> float:
        """Predicted workload of the slowest rank.

        Raises:
            ValueError: If the plan holds no prediction.
        """
        if self.predicted is None:
            raise ValueError("this plan was made without a workload model, so it predicts nothing")
        return float(self.predicted.max())

    @property
    def imbalance(self) -> float:
        """Predicted workload of the slowest rank over the mean.

        Raises:
            ValueError: If the plan holds no prediction.
        """
        slowest, predicted = self.slowest, self.predicted
        return slowest * len(predicted) / float(predicted.sum()) if predicted is not None and slowest else 1.0

    def check(self) -> None:
        """Refuses a plan, perhaps made by hand, that does not deal every token to one rank.

        Raises:
            ValueError: Saying what is wrong.
        """
        if self.owner.shape != self.lengths.shape or not ((self.owner >= SHARDED) & (self.owner < self.cp_size)).all():
            raise ValueError(
                f"owner must hold a rank below {self.cp_size}, or {SHARDED} for a sharded document, for each of the "
                f"{len(self.lengths)} documents, got {self.owner.tolist()}."
            )
        lengths = self.lengths[self.sharded]
        shape = (len(lengths), 2 * self.cp_size + 1)
        if self.edges.shape != shape:
            raise ValueError(
                f"edges must have the shape {shape}, a row for every sharded document and 2 cp_size + 1 edges, got "
                f"{self.edges.shape}."
            )
        whole = (self.edges[:, 0] == 0) & (self.edges[:, -1] == lengths) & (np.diff(self.edges, axis=1) >= 0).all(1)
        if not whole.all():
            row = int(np.flatnonzero(~whole)[0])
            raise ValueError(
                f"the edges of a document must rise from 0 to its length, but those of document "
                f"{int(self.sharded[row])}, {int(lengths[row])} tokens long, are {self.edges[row].tolist()}."
            )

    def digest(self) -> int:
        """A 63-bit hash of who holds what, for comparing ranks."""
        sizes = np.array([self.cp_size, len(self.lengths)])
        packed = b"".join(
            np.ascontiguousarray(a, dtype="<i8").tobytes() for a in (sizes, self.lengths, self.owner, self.edges)
        )
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
