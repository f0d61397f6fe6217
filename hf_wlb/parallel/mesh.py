"""Which ranks do what: data-parallel replicas, each of them several context-parallel ranks.

The mesh has the axes ``dp`` and ``cp``, from the outside in, so that context-parallel ranks, who exchange keys and
values in every layer, are neighbours on one machine. With 4 processes and ``cp_size=2``:

    rank    0  1  2  3
    dp      0  0  1  1      which replica: ranks that read the same micro-batches
    cp      0  1  0  1      which shard of each micro-batch

Who uses what: the data loader ``dp_rank`` and ``dp_size``, the collator ``cp_rank``, attention ``cp_group``. The loss
and the gradients are summed over all ranks, because every token is on exactly one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_wlb.parallel.agreement import verify_agreement
from hf_wlb.parallel.collectives import all_gather, group_device, process_count


@dataclass(frozen=True)
class ParallelMesh:
    """This process's place.

    Attributes:
        dp_size: Data-parallel replicas.
        cp_size: Ranks that share every micro-batch of a replica.
        dp_rank: The replica that this process belongs to.
        cp_rank: The shard of it that this process holds.
        cp_group: The ranks of the replica; None where ``cp_size`` is 1.
    """

    dp_size: int
    cp_size: int
    dp_rank: int
    cp_rank: int
    cp_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, cp_size: int, device_type: str) -> ParallelMesh:
        """Lays the mesh over all processes, which must call this together.

        Args:
            cp_size: Ranks that share a micro-batch.
            device_type: ``"cuda"``, ``"cpu"``, ...

        Raises:
            RuntimeError: On every rank, if their sizes differ.
            ValueError: On every rank, if ``cp_size`` does not divide the number of processes.

        >>> ParallelMesh.of(1, "cpu")
        ParallelMesh(dp_size=1, cp_size=1, dp_rank=0, cp_rank=0, cp_group=None)
        """
        world_size = process_count()
        verify_agreement(cp_size, "cp_size")  # first: some sizes may divide and others not
        check_cp_size(cp_size, world_size)
        if cp_size == 1:  # needs no groups of its own
            return cls(world_size, 1, dist.get_rank() if world_size > 1 else 0, 0)
        mesh = init_device_mesh(device_type, (world_size // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
        return cls(
            dp_size=mesh["dp"].size(),
            cp_size=mesh["cp"].size(),
            dp_rank=mesh.get_local_rank("dp"),
            cp_rank=mesh.get_local_rank("cp"),
            cp_group=mesh.get_group("cp"),
        )

    def gather_shards(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All shards of this replica, one after the other in the order of ranks; its ranks must call this together.

        Args:
            shard: [tokens, ...], this rank's.
            sizes: Tokens of every rank's.

        Returns:
            [all tokens, ...], the same on every rank.
        """
        if self.cp_size == 1:
            return shard
        padded = shard.new_zeros(max(sizes), *shard.shape[1:])
        padded[: len(shard)] = shard
        gathered = padded.new_empty(self.cp_size * len(padded), *shard.shape[1:])
        all_gather(gathered, padded, group=self.cp_group)
        parts = zip(gathered.split(len(padded)), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def shard_mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over this replica's ranks, the same on all of them; they must call this together."""
        if self.cp_size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total, group=self.cp_group)
        return total / self.cp_size


def check_cp_size(cp_size: int, processes: int) -> None:
    """Refuses a number of context-parallel ranks that the processes cannot be dealt to.

    Raises:
        ValueError: Saying what would do.

    >>> check_cp_size(3, 4)
    Traceback (most recent call last):
    ValueError: cp_size=3 does not divide the 4 processes; set it to 1, 2 or 4, or start another number of processes.
    """
    if cp_size < 1:
        raise ValueError(f"cp_size must be a whole number of at least 1, got {cp_size!r}.")
    if processes % cp_size == 0:
        return
    if processes == 1:
        raise ValueError(
            f"cp_size={cp_size} does not divide the 1 process that runs; start {cp_size} of them, or a multiple "
            f"(accelerate launch --num_processes {cp_size}, or torchrun --nproc_per_node {cp_size}), or set cp_size=1."
        )
    able = [str(size) for size in range(1, processes + 1) if processes % size == 0]
    listed = f"{', '.join(able[:-1])} or {able[-1]}"
    raise ValueError(
        f"cp_size={cp_size} does not divide the {processes} processes; set it to {listed}, or start another number of "
        "processes."
    )


def gather_figures(figures: Sequence[float]) -> list[list[float]]:
    """Every rank's figures, in rank order; all processes must call this together, with as many each.

    Meant for logs: waits for all ranks.

    >>> gather_figures([1.5, 2.0])
    [[1.5, 2.0]]
    """
    if process_count() == 1:
        return [list(figures)]
    own = torch.tensor(figures, dtype=torch.float64, device=group_device(None))
    gathered = own.new_empty(process_count() * len(figures))
    all_gather(gathered, own)
    return [[float(figure) for figure in row] for row in gathered.view(-1, len(figures)).tolist()]
