"""Ways of training that are compared: which packer makes micro-batches, and how they are shared out over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from hf_wlb.packing import PACKER_NAMES, PackingConfig
from hf_wlb.packing.config import PackerName
from hf_wlb.sharding import SHARDING_STRATEGIES, Sharder, ShardingConfig
from hf_wlb.simulator.placement import BalancedAttention, StaticChoice, WholeDocuments
from hf_wlb.workload import WorkloadModel

SHARDINGS: Mapping[str, str] = MappingProxyType(
    {
        "per_sequence": "the packed micro-batch cut as if it were one document",
        "per_document": "every document cut into 2 cp_size chunks",
        "static": "for every micro-batch the faster of these two: the paper's adaptive sharding",
        "fixed": "of the two the one that is faster for the whole run",
        "placed": "short documents whole on one rank, long ones cut: ours, never the static ones",
        "adaptive": "for every micro-batch the fastest of all: ours",
        "whole": "every document on as few ranks as hold it",
        "balanced": "attention even over all ranks, micro-batches and replicas, at no cost: a bound",
    }
)
"""Name -> what it does."""

_OF_THE_RUN = (  # packing settings that all systems of a comparison share
    *("context_length", "micro_batches_per_replica", "dp_size", "pp_size", "sharded_parameters", "packer"),
    *("max_tokens_per_micro_batch", "max_document_tokens", "oversize", "empty"),
)


@dataclass(frozen=True)
class System:
    """A way of training.

    Args:
        name: As in tables.
        packer: Makes micro-batches, one of ``hf_wlb.packing.PACKER_NAMES``.
        sharding: Shares them out over context-parallel ranks, a key of ``SHARDINGS``.
        packing: Settings of the packer besides those that all systems share, by their names in ``PackingConfig``.

    Raises:
        ValueError: For a name that there is not, or a setting that is no packer's own.
    """

    name: str
    packer: PackerName
    sharding: str
    packing: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.packer not in PACKER_NAMES:
            raise ValueError(
                f"The packer of system {self.name!r} must be one of {', '.join(PACKER_NAMES)}, got {self.packer!r}."
            )
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"The sharding of system {self.name!r} must be one of {', '.join(SHARDINGS)}, got {self.sharding!r}."
            )
        allowed = [setting.name for setting in fields(PackingConfig) if setting.name not in _OF_THE_RUN]
        unknown = sorted(set(self.packing) - set(allowed))
        if unknown:
            raise ValueError(
                f"System {self.name!r} cannot set {', '.join(unknown)} of packing for itself; it may set "
                f"{', '.join(allowed)}."
            )
        object.__setattr__(self, "packing", MappingProxyType(dict(self.packing)))

    def sharders(self, cp_size: int, workload: WorkloadModel, max_tokens_per_micro_batch: int) -> tuple[Sharder, ...]:
        """What shares micro-batches out: for ``"fixed"`` the two of which the run's faster one counts, else one.

        Args:
            cp_size: Context-parallel ranks.
            workload: What attention, linear work and the exchange cost.
            max_tokens_per_micro_batch: S_max, see ``sharder_of``.

        >>> from hf_wlb.workload import AnalyticWorkload
        >>> workload = AnalyticWorkload.from_crossover(1000)
        >>> [type(sharder).__name__ for sharder in SYSTEMS["paper"].sharders(2, workload, 4096)]
        ['StaticChoice']
        >>> [sharder.config.strategy for sharder in SYSTEMS["fixed-4d"].sharders(2, workload, 4096)]
        ['per_sequence', 'per_document']
        """
        names: tuple[str, ...] = (self.sharding,)
        if self.sharding == "fixed":  # without context parallelism the two are one
            names = ("per_sequence",) if cp_size == 1 else ("per_sequence", "per_document")
        return tuple(sharder_of(name, cp_size, workload, max_tokens_per_micro_batch) for name in names)


def sharder_of(
    sharding: str, cp_size: int, workload: WorkloadModel, max_tokens_per_micro_batch: int | None = None
) -> Sharder:
    """What shares micro-batches out, by a name of ``SHARDINGS``.

    Args:
        sharding: The name; not ``"fixed"``, which is decided by a whole run.
        cp_size: Context-parallel ranks.
        workload: What attention, linear work and the exchange cost.
        max_tokens_per_micro_batch: S_max; only ``"whole"`` needs it, to give every rank room for an even share of it.

    Raises:
        ValueError: For another name, or ``"whole"`` without S_max.
    """
    if sharding == "static":
        return StaticChoice(cp_size, workload)
    if sharding == "balanced":
        return BalancedAttention(cp_size, workload)
    if sharding == "whole":
        if max_tokens_per_micro_batch is None:
            raise ValueError(
                "Sharing out whole documents needs max_tokens_per_micro_batch: a rank has room for an even share of it."
            )
        return WholeDocuments(cp_size, workload, math.ceil(max_tokens_per_micro_batch / cp_size))
    if sharding not in SHARDING_STRATEGIES:
        names = (*(name for name in SHARDINGS if name != "fixed"),)
        raise ValueError(f"sharding must be one of {', '.join(names)} here, got {sharding!r}.")
    return Sharder(ShardingConfig(cp_size, sharding), workload)  # type: ignore[arg-type]  # checked above


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            System("plain-4d", "next-fit", "per_sequence"),
            System("plain-4d, cut", "concat-and-cut", "per_sequence"),
            System("fixed-4d", "greedy", "fixed"),
            System("paper", "wlb", "static"),
            System("wlb", "steady", "adaptive"),
            System("placed", "steady", "placed"),
            System("whole", "steady", "whole"),
            System("balanced", "steady", "balanced"),
        )
    }
)
"""Name -> system. "plain-4d" and "fixed-4d" are the paper's baselines, "paper" its method (Algorithm 1 and the static
choice), "wlb" what this library trains with. "plain-4d, cut" concatenates documents and cuts at every context boundary,
so it does less attention: its documents are others. "balanced" is a bound and no system."""
