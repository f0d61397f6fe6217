"""What a planner is told: the context, the parallel layout and the packer with its options."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from hf_wlb.packing.reader import EmptyPolicy, OversizePolicy
from hf_wlb.packing.step_time import StepTimeModel

PackerName = Literal["steady", "wlb", "greedy", "solver", "next-fit", "concat-and-cut"]
PACKER_NAMES: tuple[str, ...] = get_args(PackerName)

#: S_max over the context length. 1.25 gets nearly all of the gain of 2; 1.0 leaves documents stranded.
DEFAULT_MEMORY_FACTOR = 1.25

#: Levels of the outlier queue, as shares of the context length, where none are given. The paper prints none.
DEFAULT_THRESHOLDS = (0.25, 0.5)


@dataclass(frozen=True)
class PackingConfig:
    """Settings of a step planner. Lengths are in tokens.

    Attributes:
        context_length: Tokens that a micro-batch holds on average; the fixed-length packers never exceed it.
        micro_batches_per_replica: Micro-batches of one optimizer step on one data-parallel replica
            (gradient accumulation steps).
        dp_size: Data-parallel replicas.
        pp_size: Pipeline stages.
        sharded_parameters: FSDP or ZeRO-3, see ``StepTimeModel``.
        packer: One of ``PACKER_NAMES``.
        max_tokens_per_micro_batch: S_max, what fits in memory. Default 1.25 x ``context_length``.
        max_document_tokens: Longest document left whole. Default: S_max for the variable-length packers, the context
            length for the fixed-length ones, none for concat-and-cut, which cuts at every context boundary anyway.
        oversize: ``split`` (default), ``truncate`` or ``error`` for longer documents.
        empty: ``error`` (default) or ``skip`` (counted) for documents without tokens.
        thresholds: ``wlb``: ascending lower bounds of the outlier queue's levels. Default: two levels from 1/4 and
            1/2 of the context length; ``hf-wlb tune`` finds better ones for given data.
        outlier_tokens: ``steady``: documents at least this long may have to wait. Default context / 8.
        max_time_gap: ``steady``: outliers leave as soon as the step that takes them is predicted to need no more than
            this share over perfect balance.
        max_wait_steps: ``steady``: a document that has waited so long goes before all others; it waits on only where
            more such documents are due than fit into a step. Where a step is one micro-batch there is nothing to wait
            for but room.
        max_waiting_contexts: ``steady``: when more than this many contexts' worth of tokens wait, the cheapest outliers
            to release leave in the next step that has room for them; at half as much again reading stops until they
            have. Default 10, or 0.47 of a step's micro-batches where that is more.
        window_steps: ``greedy`` and ``solver``: global batches that are packed together.
        solver_seconds: ``solver``: time limit for one window.
    """

    context_length: int
    micro_batches_per_replica: int
    dp_size: int = 1
    pp_size: int = 1
    sharded_parameters: bool = False
    packer: PackerName = "steady"
    max_tokens_per_micro_batch: int | None = None
    max_document_tokens: int | None = None
    oversize: OversizePolicy = "split"
    empty: EmptyPolicy = "error"
    thresholds: tuple[int, ...] | None = None
    outlier_tokens: int | None = None
    max_time_gap: float = 0.03
    max_wait_steps: int = 20
    max_waiting_contexts: float | None = None
    window_steps: int = 1
    solver_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Fails on settings that cannot work, in the words of the caller."""
        for name in ("context_length", "micro_batches_per_replica", "dp_size", "pp_size", "window_steps"):
            given = getattr(self, name)
            _require(
                isinstance(given, int) and given >= 1, f"{name} must be a whole number of at least 1, got {given!r}"
            )
        _require(
            self.packer in PACKER_NAMES,
            f"unknown packer {self.packer!r}; choose one of {', '.join(PACKER_NAMES)}",
        )
        for name in ("max_tokens_per_micro_batch", "max_document_tokens"):
            given = getattr(self, name)
            _require(given is None or isinstance(given, int), f"{name} must be a whole number or None, got {given!r}")
        for name, allowed in (("oversize", get_args(OversizePolicy)), ("empty", get_args(EmptyPolicy))):
            given = getattr(self, name)
            _require(given in allowed, f"{name} must be one of {', '.join(allowed)}, got {given!r}")
        _require(
            self.s_max >= self.context_length,
            f"max_tokens_per_micro_batch={self.s_max:,} is below context_length={self.context_length:,}: micro-batches "
            "hold context_length tokens on average, so documents would pile up. Raise the former or lower the latter.",
        )
        longest = self.max_document_tokens
        limit = "context_length" if self.fixed_length else "max_tokens_per_micro_batch"
        by_default = "" if self.fixed_length else f" (S_max, by default {DEFAULT_MEMORY_FACTOR:g} x context_length)"
        _require(
            longest is None or 1 <= longest <= self.capacity,
            f"max_document_tokens={longest} must lie between 1 and the {self.capacity:,} tokens that the "
            f"{self.packer} packer puts into a micro-batch: {limit}{by_default}. Raise that, or lower "
            "max_document_tokens, above which documents are split",
        )
        _require(self.max_time_gap >= 0, f"max_time_gap must not be negative, got {self.max_time_gap}")
        _require(self.max_wait_steps >= 1, f"max_wait_steps must be at least 1, got {self.max_wait_steps}")
        _require(
            self.max_waiting_contexts is None or self.max_waiting_contexts > 0,
            f"max_waiting_contexts must be positive or None, got {self.max_waiting_contexts}",
        )
        _require(self.solver_seconds > 0, f"solver_seconds must be positive, got {self.solver_seconds}")
        _require(
            self.outlier_tokens is None or self.outlier_tokens >= 1,
            f"outlier_tokens must be at least 1 or None, got {self.outlier_tokens}",
        )
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", tuple(int(t) for t in self.thresholds))
            _check_thresholds(self.thresholds)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on all replicas (the paper's global batch, N of Algorithm 1)."""
        return self.micro_batches_per_replica * self.dp_size

    @property
    def balances(self) -> bool:
        """Whether it matters for time what trains together: there are replicas, or stages and several micro-batches."""
        return self.dp_size > 1 or (self.pp_size > 1 and self.micro_batches > 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step trains on average."""
        return self.micro_batches * self.context_length

    @property
    def s_max(self) -> int:
        """Tokens that fit into a micro-batch."""
        if self.max_tokens_per_micro_batch is None:
            return int(self.context_length * DEFAULT_MEMORY_FACTOR)
        return self.max_tokens_per_micro_batch

    @property
    def fixed_length(self) -> bool:
        """Whether the packer keeps to the context length instead of S_max."""
        return self.packer not in ("steady", "wlb")

    @property
    def capacity(self) -> int:
        """Tokens that the packer at most puts into a micro-batch."""
        return self.context_length if self.fixed_length else self.s_max

    @property
    def longest_document(self) -> int | None:
        """Longest document that stays whole, None where the packer cuts everywhere."""
        if self.packer == "concat-and-cut":
            return None
        return self.capacity if self.max_document_tokens is None else self.max_document_tokens

    @property
    def outlier_levels(self) -> tuple[int, ...]:
        """Ascending lengths from which the outlier queue's levels begin (``wlb``)."""
        default = {max(1, int(share * self.context_length)) for share in DEFAULT_THRESHOLDS}
        return self.thresholds or tuple(sorted(default))

    @property
    def least_outlier(self) -> int:
        """Tokens from which on a document may have to wait (``steady``)."""
        return max(1, self.context_length // 8) if self.outlier_tokens is None else self.outlier_tokens

    @property
    def waiting_limit(self) -> float:
        """Tokens that may wait at once (``steady``)."""
        contexts = self.max_waiting_contexts
        return (max(10.0, 0.47 * self.micro_batches) if contexts is None else contexts) * self.context_length

    @property
    def step_time(self) -> StepTimeModel:
        """The step-time model of this layout; one replica that shares parameters out waits for no other."""
        return StepTimeModel(self.pp_size, self.sharded_parameters and self.dp_size > 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; ``PackingConfig.from_dict`` reverses it."""
        values = asdict(self)
        values["thresholds"] = None if self.thresholds is None else list(self.thresholds)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PackingConfig:
        """Reads what ``to_dict`` wrote; unknown names are an error."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        _require(not unknown, f"unknown packing settings: {', '.join(unknown)}")
        thresholds = values.get("thresholds")
        return cls(**{**values, "thresholds": None if thresholds is None else tuple(thresholds)})


def _check_thresholds(thresholds: tuple[int, ...]) -> None:
    _require(len(thresholds) >= 1, "thresholds must name at least one level of the outlier queue")
    _require(thresholds[0] >= 1, f"thresholds are lengths of at least 1 token, got {thresholds[0]}")
    ascending = all(a < b for a, b in pairwise(thresholds))
    _require(
        ascending,
        f"thresholds must ascend strictly, got {list(thresholds)}; sort them and remove repetitions",
    )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
