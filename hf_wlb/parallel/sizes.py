"""How many processes each kind of parallelism takes, and whether that fits the processes that run."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

#: From the outside in: ranks that talk most are neighbours (paper, section 5: DP > PP > CP > TP).
AXES = ("dp_replicate", "pp", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the mesh's axes; their product is the number of processes.

    Attributes:
        dp_replicate: Data parallel: copies of the parameters.
        pp: Pipeline stages.
        dp_shard: Data parallel: replicas that share one copy of the parameters (FSDP2).
        cp: Context parallel: ranks that share every micro-batch.
        tp: Tensor parallel: ranks that share every matrix.
    """

    dp_replicate: int = 1
    pp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """Replicas: groups of ranks that train micro-batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def total(self) -> int:
        """Processes."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def active(self) -> dict[str, int]:
        """The axes of more than one process, from the outside in.

        >>> ParallelSizes(dp_replicate=2, cp=4).active
        {'dp_replicate': 2, 'cp': 4}
        """
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    def __str__(self) -> str:
        """Such as ``"dp 2 x cp 2"``."""
        parts = {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}
        if self.dp_shard > 1:
            del parts["dp"]
            parts = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, **parts}
        found = {name: size for name, size in parts.items() if size > 1 or name == "dp"}
        return " x ".join(f"{name} {size}" for name, size in found.items())

    @classmethod
    def of(
        cls,
        processes: int,
        *,
        cp_size: int = 1,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        shard_all: bool = False,
    ) -> ParallelSizes:
        """What is left of the processes becomes data parallel.

        Args:
            processes: That run.
            cp_size: See the attributes; at least 1.
            tp_size: As well.
            pp_size: As well.
            dp_replicate_size: None to take what the others leave.
            dp_shard_size: None for 1, or with ``shard_all`` for what the others leave.
            shard_all: Whether parameters are to be shared out over all replicas.

        Raises:
            ValueError: If the sizes do not multiply to the processes; says what would.

        >>> ParallelSizes.of(8, cp_size=2, tp_size=2)
        ParallelSizes(dp_replicate=2, pp=1, dp_shard=1, cp=2, tp=2)
        >>> str(ParallelSizes.of(8, cp_size=2, shard_all=True))
        'dp_shard 4 x cp 2'
        >>> ParallelSizes.of(4, cp_size=3)
        Traceback (most recent call last):
        ValueError: cp_size=3 does not divide the 4 processes; set it to 1, 2 or 4, or start another number of them.
        """
        inner = {"pp_size": pp_size, "cp_size": cp_size, "tp_size": tp_size}
        given = {"dp_replicate_size": dp_replicate_size, "dp_shard_size": dp_shard_size, **inner}
        for name, size in given.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}.")
        fixed = {name: size for name, size in given.items() if size is not None and size > 1}
        taken = prod(fixed.values())
        if processes % taken:
            raise ValueError(_does_not_divide(fixed, processes))
        rest = processes // taken
        if dp_shard_size is None and shard_all:
            dp_shard_size, rest = rest, 1
        if dp_replicate_size is None:
            dp_replicate_size, rest = rest, 1
        if rest > 1:
            listed = " x ".join(f"{name}={size}" for name, size in given.items() if size is not None)
            raise ValueError(
                f"{listed} is {taken}, but {processes} processes run. Leave dp_replicate_size out to have the other "
                f"processes train replicas of their own, or start {taken}."
            )
        return cls(dp_replicate_size, pp_size, dp_shard_size or 1, cp_size, tp_size)


def _does_not_divide(fixed: dict[str, int], processes: int) -> str:
    listed = " x ".join(f"{name}={size}" for name, size in fixed.items())
    taken, plain = prod(fixed.values()), " and ".join(f"{name}=1" for name in fixed)
    what = listed if len(fixed) == 1 else f"{listed} is {taken}, which"
    if processes == 1:
        return (
            f"{what} does not divide the 1 process that runs; start {taken} of them, or a multiple "
            f"(accelerate launch --num_processes {taken}, or torchrun --nproc_per_node {taken}), or set {plain}."
        )
    able = [str(size) for size in range(1, processes + 1) if processes % size == 0]
    choices = f"{', '.join(able[:-1])} or {able[-1]}"
    them = f"set it to {choices}" if len(fixed) == 1 else f"their product must be {choices}"
    return f"{what} does not divide the {processes} processes; {them}, or start another number of them."
