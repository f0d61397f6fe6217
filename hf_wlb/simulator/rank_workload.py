"""The workload model of one rank of a tensor-parallel group: what packers and sharders of a simulated run go by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_wlb.simulator.exchange import Exchange
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload, WorkloadModel, load_workload
from hf_wlb.workload.base import MAX_LENGTH, FloatArray, Lengths, check_chunk, check_lengths


@dataclass(frozen=True)
class RankWorkload(WorkloadModel):
    """Attention of one model, linear work at one rate, and the exchange of a group of ranks.

    Attributes:
        attention_model: Prices attention; its linear work and exchange are not used.
        linear_seconds_per_token: Of everything else but the exchange, over the whole model, forward plus backward.
        exchange_costs: Of the context-parallel group.
    """

    attention_model: WorkloadModel
    linear_seconds_per_token: float
    exchange_costs: Exchange

    schema: ClassVar[str] = "hf_wlb.rank_workload/1"

    def attention(self, lengths: Lengths) -> Any:
        """W_a of whole documents; see ``WorkloadModel``."""
        model: Any = self.attention_model
        return model.attention(lengths)

    def linear(self, lengths: Lengths) -> Any:
        """W_l of whole documents; see ``WorkloadModel``."""
        checked: Any = check_lengths(lengths)
        return checked * self.linear_seconds_per_token

    def chunk(self, q_len: Lengths, kv_len: Lengths) -> Any:
        """W of a chunk; see ``WorkloadModel``."""
        queries: Any
        keys: Any
        queries, keys = check_chunk(q_len, kv_len)
        model: Any = self.attention_model
        return model.chunk(queries, keys) - model.linear(queries) + queries * self.linear_seconds_per_token

    def segment(self, q_len: NDArray[Any] | Any, kv_len: NDArray[Any] | Any) -> FloatArray:
        """Attention of rows of a kernel call; see ``WorkloadModel``."""
        return self.attention_model.segment(q_len, kv_len)

    def exchange(self, tokens: int, cp_size: int) -> float:
        """Gathers of keys and values and the reduction of their gradients; see ``WorkloadModel``.

        Raises:
            ValueError: For another number of ranks than the group has: where others would lie is not known.
        """
        if cp_size == 1:
            return 0.0
        if cp_size != self.exchange_costs.cp_size:
            raise ValueError(
                f"This workload prices the exchange among {self.exchange_costs.cp_size} context-parallel ranks, but "
                f"cp_size={cp_size} was asked for; make a StepModel of that split."
            )
        return sum(self.exchange_costs.parts(tokens))

    @cached_property
    def crossover_length(self) -> float:
        """Length from which on attention outweighs linear work, to a millionth of it; see ``WorkloadModel``."""
        grid = np.unique(np.exp2(np.linspace(0, math.log2(MAX_LENGTH), 500)).astype(np.int64))
        lighter = np.flatnonzero(self.attention(grid) < self.linear(grid))
        if not lighter.size:
            return 0.0
        last = int(lighter[-1])
        if last == len(grid) - 1:
            return math.inf
        low, high = int(grid[last]), int(grid[last + 1])
        while high - low > 1:
            middle = (low + high) // 2
            if self.attention(middle) < self.linear(middle):
                low = middle
            else:
                high = middle
        return float(high)

    def to_dict(self) -> dict[str, Any]:
        """Its parts; see ``WorkloadModel``. ``load_workload`` does not know this kind, ``from_dict`` does."""
        return {
            "schema": self.schema,
            "attention": self.attention_model.to_dict(),
            "linear_seconds_per_token": self.linear_seconds_per_token,
            "exchange": self.exchange_costs.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "The workload") -> RankWorkload:
        """Rebuild a model from ``to_dict()``; ``where`` is how errors call it.

        Raises:
            ValueError: For another schema.
        """
        if data.get("schema") != cls.schema:
            raise ValueError(f"{where} must be of schema {cls.schema!r}, but it is of {data.get('schema')!r}.")
        attention = load_workload(data["attention"])
        return cls(attention, data["linear_seconds_per_token"], Exchange.from_dict(data["exchange"]))


def of_window(model: AnalyticWorkload | ProfiledWorkload, window: int | None) -> AnalyticWorkload | ProfiledWorkload:
    """Attention of the layers of one window alone (None: full attention)."""
    if isinstance(model, ProfiledWorkload):
        layers = tuple(layer for layer in model.profile.layers if layer[1] == window)
        return replace(model, profile=replace(model.profile, layers=layers))
    rate = next(rate for rate, own in model.groups if own == window)
    groups = () if window is None else ((rate, window),)
    return replace(
        model,
        attention_seconds_per_pair=rate if window is None else 0.0,
        sliding_groups=groups,
        linear_seconds_per_token=0.0,
    )
