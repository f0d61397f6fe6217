"""What the trainer's benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What all runs have in common.

    Attributes:
        model: Preset.
        vocabulary: Random tokens are below it.
        context_length: Tokens of a micro-batch on average, and of the longest document.
        micro_batches: Of a step, all replicas together.
        plan_pp_size: Pipeline stages that steps are packed for, so that pipelines and others train the same steps.
        steps: Of a run.
        warmups: The first of them, which are not counted: kernels are compiled in them, for ever new sizes at first.
        shrink: Lengths are divided by it.
        seed: Of documents and weights.
    """

    model: str = "1B"
    vocabulary: int = 128_256
    context_length: int = 65_536
    micro_batches: int = 4
    plan_pp_size: int = 4
    steps: int = 20
    warmups: int = 10
    shrink: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        name: As in the results.
        processes: One a GPU.
        replicas: Of the model.
        options: Arguments of the recipe besides.
        overhead: Whether it compares WLBTrainer with a bare loop instead.
        recompute_below_gib: Activations are recomputed on devices of less memory.
    """

    name: str
    processes: int
    replicas: int
    options: dict[str, Any] = field(default_factory=dict)
    overhead: bool = False
    recompute_below_gib: float = 0.0


SETTINGS = Settings()
QUICK = Settings(model="tiny", vocabulary=2_000, context_length=1_024, micro_batches=2, steps=4, warmups=1, shrink=128)
_COMPILED = {"torch_compile": True, "ddp_find_unused_parameters": False}
_EAGER = {"ddp_find_unused_parameters": False}
OVERHEAD = Case("overhead", 1, 1, {"context_length": 16_384, "max_document_tokens": 16_384, **_EAGER}, overhead=True)

CASES: dict[str, tuple[Case, ...]] = {
    "full": (
        Case("cp4", 4, 1, {"cp_size": 4, **_COMPILED}),
        Case("dp2 x cp2", 4, 2, {"cp_size": 2, **_COMPILED}, recompute_below_gib=120.0),
        Case("cp2 x tp2", 4, 1, {"cp_size": 2, "tp_size": 2, **_COMPILED}),
        Case("fsdp4", 4, 4, {"dp_shard_size": 4, **_COMPILED}, recompute_below_gib=250.0),
        Case("pp4", 4, 1, {"pp_size": 4, **_COMPILED}, recompute_below_gib=120.0),
        Case("pp2 x cp2", 4, 1, {"pp_size": 2, "cp_size": 2, **_COMPILED}, recompute_below_gib=120.0),
        Case("pp2 x tp2", 4, 1, {"pp_size": 2, "tp_size": 2, **_COMPILED}, recompute_below_gib=120.0),
        Case("fsdp over cp4", 4, 1, {"cp_size": 4, "dp_shard_size": 1, "fsdp": "true", **_COMPILED}),
        Case("cp4, not compiled", 4, 1, {"cp_size": 4, **_EAGER}),
        OVERHEAD,
    ),
    "two": (
        Case("cp2", 2, 1, {"cp_size": 2, **_COMPILED}),
        Case("pp2", 2, 1, {"pp_size": 2, **_COMPILED}, recompute_below_gib=120.0),
        Case("tp2", 2, 1, {"tp_size": 2, **_COMPILED}),
        Case("dp2", 2, 2, _COMPILED, recompute_below_gib=250.0),
        Case("fsdp2", 2, 2, {"dp_shard_size": 2, **_COMPILED}, recompute_below_gib=250.0),
        OVERHEAD,
    ),
    "quick": (
        Case("cp2", 2, 1, {"cp_size": 2}),
        Case("tp2", 2, 1, {"tp_size": 2}),
        Case("fsdp2", 2, 2, {"dp_shard_size": 2}),
        Case("pp2", 2, 1, {"pp_size": 2}),
        Case("overhead", 1, 1, overhead=True),
    ),
}
