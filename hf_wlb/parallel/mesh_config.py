"""Accelerate's ``ParallelismConfig`` with our axes, which Accelerate itself leaves alone.

Upstream would act on sizes of its own: shard micro-batches that are sharded already, null their masks, ask for DTensor
parameters and refuse CPU runs. It therefore sees context, tensor and pipeline parallelism as switched off, while the
mesh, and whoever reads it, has all axes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_wlb.parallel.sizes import ParallelSizes

_VARIABLE = "PARALLELISM_CONFIG_"
#: Axes that are looked at as one, under the names that Accelerate uses.
_JOINT = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass(repr=False)
class WLBParallelismConfig(ParallelismConfig):  # type: ignore[misc]  # it has no types
    """The sizes of a run, for ``Accelerator(parallelism_config=...)``.

    Upstream's own fields say what Accelerate may act on: nothing but the number of replicas.

    Args:
        sizes: All of them, ours.

    Attributes:
        pp_size: Pipeline stages.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)

    def __post_init__(self) -> None:
        # Given explicitly, so that no PARALLELISM_CONFIG_* variable is read.
        self.dp_replicate_size, self.dp_shard_size = self.sizes.dp, 1
        self.cp_size = self.tp_size = self.sp_size = 1
        self.cp_backend, self.sp_backend = "torch", "deepspeed"
        super().__post_init__()
        self.pp_size = self.sizes.pp

    def __repr__(self) -> str:
        return f"WLBParallelismConfig({self.sizes})"

    @property
    def total_size(self) -> int:
        """Processes."""
        return self.sizes.total

    @property
    def active_mesh_dims(self) -> list[str]:
        """The mesh's axes, from the outside in."""
        return list(self.sizes.active)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh with all axes of more than one process; None for a single process. All must call this together."""
        active = self.sizes.active
        if not active:
            return None
        mesh = init_device_mesh(device_type, tuple(active.values()), mesh_dim_names=tuple(active))
        for name, axes in _JOINT.items():
            present = tuple(axis for axis in axes if axis in active)
            if present:
                mesh[present]._flatten(name)
        return mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Upstream's knows neither CPU runs nor axes inside a replica; ours is ``ParallelSizes.of``."""
        if self.total_size != accelerator.num_processes:
            raise ValueError(f"{self.sizes} makes {self.total_size} processes, but {accelerator.num_processes} run.")


def check_launcher(sizes: ParallelSizes, environment: Mapping[str, str] | None = None) -> None:
    """Refuses what an Accelerate configuration asks for besides, and would be ignored or done twice.

    Args:
        sizes: Of the run's own arguments.
        environment: Of the process; ``accelerate launch`` passes its YAML on through it.

    Raises:
        ValueError: A size there differs, or it switches a plugin on.

    >>> check_launcher(ParallelSizes(cp=2), {"PARALLELISM_CONFIG_CP_SIZE": "4"})
    Traceback (most recent call last):
    ValueError: the Accelerate configuration says cp_size=4 (PARALLELISM_CONFIG_CP_SIZE), but the arguments of this \
run say 2. Take its parallelism block away: sizes come from WLBTrainingArguments.
    """
    given = os.environ if environment is None else environment
    ours = {
        "dp_replicate_size": sizes.dp_replicate,
        "dp_shard_size": sizes.dp_shard,
        "tp_size": sizes.tp,
        "cp_size": sizes.cp,
        "sp_size": 1,
        "pp_size": sizes.pp,
    }
    for name, size in ours.items():
        theirs = given.get(variable := _VARIABLE + name.upper())
        # A block that leaves a size out arrives as 1.
        if theirs is None or theirs == str(size) or (theirs == "1" and name.startswith("dp_")):
            continue
        raise ValueError(
            f"the Accelerate configuration says {name}={theirs} ({variable}), but the arguments of this run say "
            f"{size}. Take its parallelism block away: sizes come from WLBTrainingArguments."
        )
    for variable, what, instead in (
        ("ACCELERATE_USE_FSDP", "FSDP", "set fsdp=True or dp_shard_size in WLBTrainingArguments instead"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed", "WLBTrainer runs without it"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM", "WLBTrainer runs without it"),
    ):
        if given.get(variable, "false").lower() == "true":
            raise ValueError(f"the Accelerate configuration switches {what} on ({variable}); {instead}.")
