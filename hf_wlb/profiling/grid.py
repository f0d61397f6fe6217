"""Which shapes of attention to measure in the time that there is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hf_wlb.profiling.attention import Point, attention_points, per_call

_SECONDS_ENOUGH = 1.0
_FEWEST_REPEATS = 3
_SHORTEST = 64
_LONGEST_SHARE = 0.25


@dataclass(frozen=True)
class AttentionBudget:
    """What attention may cost to measure.

    Attributes:
        seconds: For all shapes together.
        seconds_per_pair: Of forward plus backward, about.
        queries_per_call: See ``time_attention``.
        keys_per_call: See ``time_attention``.
        repeats: See ``time_attention``.
        overhead: Seconds that a forward and backward take in any case.
    """

    seconds: float
    seconds_per_pair: float
    queries_per_call: int = 65_536
    keys_per_call: int = 262_144
    repeats: int = 5
    overhead: float = 0.012

    def cost(self, point: Point) -> float:
        """Seconds that measuring a shape takes, about."""
        queries, keys = point
        count = per_call(point, self.queries_per_call, self.keys_per_call)
        once = count * queries * (keys - (queries - 1) / 2) * self.seconds_per_pair + self.overhead
        return once * (1 + min(self.repeats, max(_FEWEST_REPEATS, math.ceil(_SECONDS_ENOUGH / once))))

    def points(self, longest: int) -> list[Point]:
        """Documents, as long as the longest one takes a quarter of the time or less, then the cheapest chunks.

        >>> budget = AttentionBudget(seconds=100.0, seconds_per_pair=1e-11)
        >>> budget.points(131_072) == attention_points(131_072)
        True
        >>> max(AttentionBudget(seconds=10.0, seconds_per_pair=1e-9).points(131_072))
        (16384, 16384)
        """
        while longest > _SHORTEST and self.cost((longest, longest)) > _LONGEST_SHARE * self.seconds:
            longest //= 2
        points = attention_points(longest)
        taken = [point for point in points if point[0] == point[1]]
        spent = sum(map(self.cost, taken))
        for point in sorted((point for point in points if point[0] < point[1]), key=self.cost):
            spent += self.cost(point)
            if spent > self.seconds:
                break
            taken.append(point)
        return sorted(taken)

    def random_points(self, longest: int, count: int, seed: int) -> list[Point]:
        """Up to ``count`` random shapes, documents and chunks in turn; four of them at least, if there are.

        Lengths are even in the logarithm, from 64 tokens on.

        >>> budget = AttentionBudget(seconds=100.0, seconds_per_pair=1e-11)
        >>> points = budget.random_points(4096, 6, seed=0)
        >>> len(points), sum(q == kv for q, kv in points), all(64 <= q <= kv <= 4096 for q, kv in points)
        (6, 3, True)
        """
        random = np.random.default_rng(seed)
        shortest = min(_SHORTEST, longest)
        points: dict[Point, None] = {}
        spent = 0.0
        for number in range(4 * count):  # some come twice
            first = _between(random, shortest, longest)
            keys = first if number % 2 == 0 else _between(random, min(first + 1, longest), longest)
            point = (first, keys)
            if point in points or len(points) == count:
                continue
            spent += self.cost(point)
            if spent > self.seconds and len(points) >= 4:
                break
            points[point] = None
        return sorted(points)


def _between(random: np.random.Generator, first: int, last: int) -> int:
    """A whole number, even in the logarithm."""
    return min(last, round(math.exp(random.uniform(math.log(first), math.log(last)))))
