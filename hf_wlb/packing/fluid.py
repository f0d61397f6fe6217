"""Predicts a step's time while its short documents are still a fluid: enough to decide which outliers may leave.

Outliers are solid: each has its place. The many short documents of a step fill up the rest almost continuously, so
their total workload is all that is known and needed. From that follow the time that the step will take, which replica
every outlier should go to, and the level up to which each replica's micro-batches should be filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.types import Document


@dataclass(frozen=True)
class Solid:
    """Micro-batches that hold outliers, heaviest first.

    Attributes:
        members: What each holds.
        loads: Their workloads.
        tokens: Their tokens.
    """

    members: list[list[Document]]
    loads: list[float]
    tokens: list[int]


@dataclass(frozen=True)
class FluidPlan:
    """A predicted step.

    Attributes:
        time: Predicted step time.
        heads: For every replica the range [first, last) of the solid micro-batches that it gets.
        levels: For every replica the workload up to which its micro-batches are filled.
    """

    time: float
    heads: list[tuple[int, int]]
    levels: list[float]


class FluidStep:
    """Predictions for one layout.

    Args:
        config: Layout, S_max and step-time model.
    """

    def __init__(self, config: PackingConfig) -> None:
        self._model = config.step_time
        self._dp_size = config.dp_size
        self._size = config.micro_batches_per_replica
        self._count = config.micro_batches
        self._s_max = config.s_max
        self._extra = config.pp_size - 1
        self._slots = config.micro_batches_per_replica + config.pp_size - 1

    @property
    def quick(self) -> bool:
        """Whether predictions are a matter of microseconds: no replicas to deal to."""
        return self._dp_size == 1 or self._model.lockstep

    def solidify(self, outliers: Sequence[Document]) -> Solid:
        """One micro-batch per outlier while there are enough of them, then the least loaded with room.

        Args:
            outliers: Heaviest first. One that fits nowhere is left out; the caller finds it missing.
        """
        alone = outliers[: self._count]
        members = [[document] for document in alone]
        loads = [document.workload for document in alone]
        tokens = [document.length for document in alone]
        for document in outliers[self._count :]:
            room = [j for j, used in enumerate(tokens) if used + document.length <= self._s_max]
            if room:
                place = min(room, key=lambda j: (loads[j], j))
                members[place].append(document)
                loads[place] += document.workload
                tokens[place] += document.length
        order = sorted(range(len(loads)), key=lambda j: (-loads[j], j))
        return Solid([members[j] for j in order], [loads[j] for j in order], [tokens[j] for j in order])

    def gap(self, solid: Solid, total: float, density: float) -> float:
        """Predicted time over that of perfect balance, minus 1.

        Args:
            solid: The outliers' micro-batches.
            total: Workload of the whole step.
            density: Workload per token of short documents.
        """
        return self.plan(solid, total, density, thorough=False).time / (total / self._count * self._slots) - 1

    def least_gap(self, heaviest: float, mean: float) -> float:
        """A quick lower bound of ``gap`` for a step whose micro-batches weigh ``mean`` on average.

        With several replicas those without outliers may stay below the mean, which 2% allow for.
        """
        extra = 1 if self._model.lockstep else self._extra
        slack = 0.0 if self._dp_size == 1 else 0.02
        return (heaviest / mean - 1) * extra / self._slots / self._dp_size - slack

    def plan(self, solid: Solid, total: float, density: float, thorough: bool = True) -> FluidPlan:
        """See ``gap`` for the arguments; ``thorough`` searches for a better deal to the replicas."""
        level = self._level(solid.loads, total, density)
        if self._model.lockstep:
            firsts = [max(level, load) for load in solid.loads[:: self._dp_size]]
            return FluidPlan(sum(firsts) + level * (self._size - len(firsts)), [], [level] * self._dp_size)
        if self._dp_size == 1 or not solid.loads:
            heaviest = max([level, *solid.loads[:1]])
            time = (total / self._dp_size) + self._extra * heaviest
            return FluidPlan(time, [(0, len(solid.loads))], [level] * self._dp_size)
        return _Deal(solid, total - sum(solid.loads), level, density * self._s_max, density, self).best(thorough)

    def _level(self, loads: Sequence[float], total: float, density: float) -> float:
        """Fills ``total`` up evenly: the workload that the micro-batches below it reach."""
        level = _water_level(loads, total, self._count)
        cap = density * self._s_max  # what a micro-batch without outliers can hold
        if level <= cap or not loads:
            return level
        solid = len(loads)
        return max(cap, _water_level(loads, total - cap * (self._count - solid), solid))


class _Deal:
    """Deals solid micro-batches to replicas: contiguous ranges, heaviest first, sizes found by coordinate descent.

    A replica's time is its workload plus ``extra`` times its heaviest; short documents level the replicas out as far as
    S_max lets them. Ranges of neighbours waste least, because every replica pays for its heaviest only.
    """

    def __init__(self, solid: Solid, fluid: float, level: float, cap: float, density: float, step: FluidStep) -> None:
        self._loads, self._fluid, self._level, self._cap = solid.loads, fluid, level, cap
        self._dp_size, self._size, self._extra = step._dp_size, step._size, step._extra
        self._sums = [0.0, *accumulate(solid.loads)]
        self._rooms = [0.0, *accumulate(density * (step._s_max - used) for used in solid.tokens)]
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def best(self, thorough: bool) -> FluidPlan:
        """The best of two descents: from an even split, and from few heavy micro-batches for the first replicas."""
        count, replicas = len(self._loads), self._dp_size
        even = [min(count, -(-count * r // replicas)) for r in range(replicas + 1)]
        steep = [
            min(max(count * r * r // replicas**2, count - self._size * (replicas - r)), r * self._size)
            for r in range(replicas + 1)
        ]
        time, bounds = self._descend(steep)
        if thorough:
            time, bounds = min((time, bounds), self._descend(even))
        heads = list(pairwise(bounds))
        levels = []
        for first, last in heads:
            base, capacity = self._replica(first, last)
            filled = self._sums[last] - self._sums[first] + min(max(time - base, 0.0), capacity)
            levels.append(_water_level(self._loads[first:last], filled, self._size))
        return FluidPlan(time, heads, levels)

    def _descend(self, bounds: list[int]) -> tuple[float, list[int]]:
        time = self._time(bounds)
        stride = max(1, self._size // 4)
        while stride:
            improved = False
            for r in range(1, self._dp_size):
                for change in (-stride, stride):
                    attempt = [*bounds[:r], bounds[r] + change, *bounds[r + 1 :]]
                    if not attempt[r - 1] <= attempt[r] <= attempt[r + 1]:
                        continue
                    attempt_time = self._time(attempt)
                    if attempt_time < time * (1 - 1e-9):
                        bounds, time, improved = attempt, attempt_time, True
            if not improved:
                stride //= 2
        return time, bounds

    def _replica(self, first: int, last: int) -> tuple[float, float]:
        """Time of a replica before short documents come, and how much of their workload it can take."""
        if (first, last) in self._known:
            return self._known[first, last]
        solid = self._sums[last] - self._sums[first]
        top = max(self._loads[first], self._level) if last > first else self._level
        room = min(self._rooms[last] - self._rooms[first], top * (last - first) - solid)
        empty = self._size - (last - first)
        known = solid + self._extra * top, empty * min(self._cap, top) + max(room, 0.0)
        self._known[first, last] = known
        return known

    def _time(self, bounds: list[int]) -> float:
        """Least time in which the replicas can take all short documents; infinite if a replica has too many."""
        replicas = []
        for first, last in pairwise(bounds):
            if last - first > self._size:
                return float("inf")
            replicas.append(self._replica(first, last))
        slowest = max(replicas)[0]
        poured = self._fluid
        left = self._dp_size
        bases = sum(base for base, _ in replicas)
        for base, capacity in sorted(replicas, key=sum):  # the first to be full first
            time = (poured + bases) / left
            if time <= base + capacity:
                return max(time, slowest)
            poured -= capacity
            bases -= base
            left -= 1
        return slowest + self._fluid  # more than S_max allows: what is left over waits for the next step


def _water_level(loads: Sequence[float], total: float, count: int) -> float:
    """Level of ``count`` vessels holding ``loads`` (heaviest first, the rest empty) filled up to ``total``.

    >>> _water_level([5.0, 1.0], 11.0, 3)
    3.0
    """
    above, poured = 0, total
    level = poured / count
    while above < len(loads) and above < count - 1 and loads[above] > level:
        poured -= loads[above]
        above += 1
        level = max(poured, 0.0) / (count - above)
    return level
