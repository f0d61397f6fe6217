"""Segments: what one variable-length attention call works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, eq=False)
class Segments:
    """The rows of one variable-length attention call.

    Segment ``i`` lets queries ``q[i]:q[i + 1]`` attend to keys ``k[i]:k[i + 1]``. They are the *last* tokens of these
    keys: the last query sees every key, the one before it all but the last key, and so on. So a segment has at most as
    many queries as keys. A segment without queries is allowed: its keys are skipped and get gradients of exactly 0,
    which is how a call passes over keys that none of its queries may see.

    Segments lie one behind the other and cover all rows of the tensors: ``q[0] == k[0] == 0``, ``q[-1]`` is the number
    of queries and ``k[-1]`` that of keys.

    Attributes:
        q: int32 [segments + 1], first query of every segment and the number of queries.
        k: int32 [segments + 1], first key of every segment and the number of keys.
        max_q: At least the most queries of a segment.
        max_k: At least the most keys of a segment, those without queries included: kernels zero only so many.

    Three queries that are the last of five keys, two keys to skip, and a document of two tokens:

    >>> segments = Segments.from_lengths([3, 0, 2], [5, 2, 2])
    >>> segments.q.tolist(), segments.k.tolist(), segments.max_q, segments.max_k
    ([0, 3, 3, 5], [0, 5, 7, 9], 3, 5)
    """

    q: torch.Tensor
    k: torch.Tensor
    max_q: int
    max_k: int

    def __len__(self) -> int:
        return self.q.shape[0] - 1

    @classmethod
    def from_lengths(
        cls, q_lengths: Sequence[int], k_lengths: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Segments:
        """Segments of so many queries and keys each, one behind the other.

        Args:
            q_lengths: Queries of every segment.
            k_lengths: Keys of every segment; None for whole documents, which have as many as queries.
            device: Where the bounds go.

        Raises:
            ValueError: A segment has more queries than keys, or a length is negative.
        """
        k_lengths = q_lengths if k_lengths is None else k_lengths
        if len(q_lengths) != len(k_lengths):
            raise ValueError(f"{len(q_lengths)} lengths of queries do not fit {len(k_lengths)} lengths of keys")
        for number, (queries, keys) in enumerate(zip(q_lengths, k_lengths, strict=True)):
            if not 0 <= queries <= keys:
                raise ValueError(
                    f"segment {number} has {queries} queries and {keys} keys; queries are the last of the keys, so "
                    "there must be 0 to as many as keys"
                )
        bounds = torch.tensor(
            [list(accumulate(lengths, initial=0)) for lengths in (q_lengths, k_lengths)],
            dtype=torch.int32,
            device=device,
        )
        return cls(bounds[0], bounds[1], max(q_lengths, default=0), max(k_lengths, default=0))
