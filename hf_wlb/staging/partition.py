"""Which decoder layers a pipeline stage holds: contiguous ranges whose costs are as even as they can be."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from hf_wlb.workload.base import is_whole_number


@dataclass(frozen=True)
class StageLayout:
    """Contiguous layers of every pipeline stage.

    Args:
        bounds: first layer of every stage, then the number of layers: ``pp_size + 1`` rising numbers from 0.

    Raises:
        ValueError: if the bounds are no whole numbers, do not begin with 0, or leave a stage without a layer.

    >>> layout = StageLayout((0, 9, 17, 25, 32))
    >>> print(layout)
    layers 0-8 | 9-16 | 17-24 | 25-31
    >>> layout.pp_size, layout.layers, layout.sizes
    (4, 32, (9, 8, 8, 7))
    >>> layout.range_of(1), layout.stage_of(16)
    (range(9, 17), 1)
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds = tuple(self.bounds)
        whole = all(is_whole_number(bound) for bound in bounds)
        if len(bounds) < 2 or not whole or bounds[0] != 0 or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(
                f"The bounds of a stage layout must be whole numbers that rise from 0 to the number of layers, "
                f"one more than there are stages, but {self.bounds!r} was given."
            )
        object.__setattr__(self, "bounds", tuple(int(bound) for bound in bounds))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int], layers: int, pp_size: int) -> StageLayout:
        """The layout that a user asks for by ``pp_stage_layers``.

        Args:
            sizes: layers of every stage, from the first.
            layers: the model's number of layers.
            pp_size: the number of stages.

        Raises:
            ValueError: if the sizes are not one number of at least 1 for every stage, or do not add up to the
                model's layers; if there are more stages than layers.

        >>> StageLayout.from_sizes([9, 8, 8, 7], layers=32, pp_size=4).bounds
        (0, 9, 17, 25, 32)
        """
        check_stages(layers, pp_size)
        sizes = list(sizes)
        given = f"pp_stage_layers={sizes}"
        if len(sizes) != pp_size:
            stages = f"{len(sizes)} stage{'s' if len(sizes) != 1 else ''}"
            raise ValueError(f"{given} names {stages}, but pp_size={pp_size}; give one number of layers a stage.")
        for stage, size in enumerate(sizes):
            if not is_whole_number(size) or size < 0:
                raise ValueError(f"{given} must hold whole numbers of at least 1, but stage {stage} has {size!r}.")
            if size == 0:
                raise ValueError(f"{given} leaves stage {stage} empty; every stage needs one layer at least.")
        if sum(sizes) != layers:
            raise ValueError(f"{given} adds up to {sum(sizes)} layers, but the model has {layers}; spread all of them.")
        return cls((0, *accumulate(sizes)))

    @property
    def pp_size(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> int:
        """Number of layers of all stages together."""
        return self.bounds[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of layers of every stage."""
        return tuple(high - low for low, high in pairwise(self.bounds))

    def range_of(self, stage: int) -> range:
        """Layers of a stage, counted from 0.

        Raises:
            IndexError: if there is no such stage.
        """
        if not 0 <= stage < self.pp_size:
            raise IndexError(f"There is no stage {stage}; the layout has stages 0 to {self.pp_size - 1}.")
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, layer: int) -> int:
        """Stage that holds a layer, both counted from 0.

        Raises:
            IndexError: if there is no such layer.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"There is no layer {layer}; the layout has layers 0 to {self.layers - 1}.")
        return bisect_right(self.bounds, layer) - 1

    def __str__(self) -> str:
        spans = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(self.bounds)]
        return f"layers {' | '.join(spans)}"


def check_pp_size(pp_size: int) -> None:
    """Refuse a number of stages that is no whole number of at least 1.

    Raises:
        ValueError: saying what was given.
    """
    if not is_whole_number(pp_size) or pp_size < 1:
        raise ValueError(f"pp_size must be a whole number of at least 1, got {pp_size!r}.")


def check_stages(layers: int, pp_size: int) -> None:
    """Refuse a number of stages that a model of so many layers cannot have.

    Raises:
        ValueError: if ``pp_size`` is no whole number of at least 1, or above the number of layers.
    """
    check_pp_size(pp_size)
    if pp_size > layers:
        raise ValueError(
            f"pp_size={pp_size} is more than the model's {layers} layer{'s' if layers != 1 else ''}; every stage "
            f"needs one layer at least, so set pp_size to at most {layers}."
        )


def balance_stages(costs: Sequence[float], pp_size: int, *, before: float = 0.0, after: float = 0.0) -> StageLayout:
    """Cut the layers into stages so that the costliest stage, which paces the pipeline, costs as little as it can.

    Of several such layouts it takes the most even one, by the least sum of squared stage costs, and of those the one
    whose earlier stages have fewer layers: under 1F1B they keep the activations of more micro-batches. Exact, in the
    arithmetic too: costs are added up without rounding, so that layers of equal cost tie.

    Args:
        costs: of every layer, in any unit (seconds, FLOPs), at least 0.
        pp_size: number of stages.
        before: cost of what comes before the first layer (the embedding) and stays on the first stage.
        after: cost of what comes after the last layer (final norm, LM head, loss) and stays on the last stage.

    Raises:
        ValueError: if there are no layers or fewer than stages, or a cost is negative or not finite.

    A head that costs as much as two layers:

    >>> print(balance_stages([1.0] * 10, 4, after=2.0))
    layers 0-2 | 3-5 | 6-8 | 9
    >>> print(balance_stages([1, 1, 1, 5, 1, 1], 2))
    layers 0-2 | 3-5
    """
    check_stages(len(costs), pp_size)
    check_costs(costs, before, after)
    *layers, first, last = _whole_numbers([*costs, before, after])
    layers[0] += first  # the first stage always has layer 0, the last one the last layer
    layers[-1] += last
    prefix = [0, *accumulate(layers)]
    return StageLayout(_most_even(prefix, pp_size, _least_maximum(prefix, pp_size)))


def check_costs(costs: Sequence[float], before: float, after: float) -> None:
    """Refuse costs of layers, embedding and head that cannot be costs.

    Raises:
        ValueError: naming the one that is negative, not finite or no number.
    """
    named = [(f"layer {index}", cost) for index, cost in enumerate(costs)]
    for name, cost in [*named, ("what comes before the layers", before), ("what comes after the layers", after)]:
        try:
            fits = not isinstance(cost, bool) and math.isfinite(cost) and cost >= 0
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"The cost of {name} must be a finite number of at least 0, but {cost!r} was given.")


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs, all multiplied by the one number that makes them whole: floats are fractions of powers of two."""
    exact = [Fraction(float(cost)) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def _least_maximum(prefix: list[int], pp_size: int) -> int:
    """The least cost that no stage need exceed; ``prefix`` sums the layers up."""
    layers = len(prefix) - 1
    # The answer is the cost of some run of layers.
    limits = sorted({prefix[high] - prefix[low] for low in range(layers) for high in range(low + 1, layers + 1)})

    def enough(limit: int) -> bool:
        """Whether ``pp_size`` stages of at most ``limit`` hold all layers, each stage taking as many as fit."""
        low = 0
        for _ in range(pp_size):
            low = bisect_right(prefix, prefix[low] + limit) - 1
            if low == layers:
                return True  # stages left over take layers from others, which costs nobody more
        return False

    return limits[bisect_left(limits, True, key=enough)]


def _most_even(prefix: list[int], pp_size: int, limit: int) -> tuple[int, ...]:
    """Bounds of the layout of least sum of squares among those without a stage above ``limit``."""
    layers = len(prefix) - 1
    # squares[first]: of the stages from here to the last, where they begin with layer `first`; None: no way to.
    squares: list[int | None] = [None] * layers + [0]
    choices: list[list[int]] = []
    for stage in reversed(range(pp_size)):
        later = squares
        squares, choice = [None] * (layers + 1), [layers] * (layers + 1)
        for low in range(stage, layers - (pp_size - 1 - stage)):
            for high in range(low + 1, layers - (pp_size - 1 - stage) + 1):
                cost = prefix[high] - prefix[low]
                if cost > limit:
                    break
                rest = later[high]
                if rest is None:
                    continue
                total, best = cost * cost + rest, squares[low]
                if best is None or total < best:  # not <=: of equals the fewest layers here
                    squares[low], choice[low] = total, high
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(bounds)
