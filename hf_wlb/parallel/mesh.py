"""Which ranks do what: the place of this process among replicas, stages, context- and tensor-parallel ranks.

The mesh has the axes ``dp_replicate``, ``pp``, ``dp_shard``, ``cp``, ``tp``, from the outside in, so that ranks that
talk most are neighbours on one machine. With 8 processes, ``cp_size=2`` and ``tp_size=2``:

    rank    0  1  2  3  4  5  6  7
    dp      0  0  0  0  1  1  1  1      which replica: ranks that read the same micro-batches
    cp      0  0  1  1  0  0  1  1      which shard of each micro-batch
    tp      0  1  0  1  0  1  0  1      which part of every matrix

With ``pp_size=2`` besides, and one replica, ``dp`` above is ``pp``: which layers.

Who uses what: the data loader ``dp_rank`` and ``dp_size``, the collator ``cp_rank``, attention ``cp_group``, the matrix
products ``tp_group``; hidden states go along ``pp_group``. The loss and the gradients are summed over ``dp`` and
``cp``, because every token is on exactly one of these ranks; parameters are split over ``dp_shard`` and ``cp`` where
they are sharded (FSDP2), and every matrix over ``tp``. Each stage of a pipeline has its own parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_wlb.parallel.collectives import all_gather, group_device, process_count
from hf_wlb.parallel.mesh_config import WLBParallelismConfig
from hf_wlb.parallel.sizes import ParallelSizes


@dataclass(frozen=True)
class ParallelMesh:
    """This process's place.

    Attributes:
        sizes: Of all axes.
        dp_rank: The replica that this process belongs to.
        pp_rank: The pipeline stage that this process is.
        cp_rank: The shard of a micro-batch that this process holds.
        tp_rank: The part of a matrix that this process holds.
        device_mesh: torch's; None in a single process.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    dp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
    device_mesh: DeviceMesh | None = field(default=None, compare=False)

    @classmethod
    def of(cls, sizes: ParallelSizes, device_type: str) -> ParallelMesh:
        """Lays the mesh over all processes, which must call this together and with the same sizes.

        Args:
            sizes: Their product is the number of processes, see ``ParallelSizes.of``.
            device_type: ``"cuda"``, ``"cpu"``, ...

        >>> ParallelMesh.of(ParallelSizes(), "cpu").dp_size
        1
        """
        return cls.from_config(WLBParallelismConfig(sizes=sizes), device_type)

    @classmethod
    def from_config(cls, config: WLBParallelismConfig, device_type: str) -> ParallelMesh:
        """The place in a mesh that an ``Accelerator`` may have built already; see ``of``."""
        mesh: DeviceMesh | None = config.get_device_mesh(device_type)

        def rank(axis: str) -> int:
            return 0 if mesh is None or axis not in config.sizes.active else mesh.get_local_rank(axis)

        replica = rank("dp_replicate") * config.sizes.dp_shard + rank("dp_shard")
        return cls(config.sizes, replica, rank("cp"), rank("tp"), rank("pp"), mesh)

    @property
    def dp_size(self) -> int:
        """Replicas."""
        return self.sizes.dp

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.sizes.pp

    @property
    def is_first_stage(self) -> bool:
        """Whether this process embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def place(self) -> str:
        """What this process is besides its rank, for errors: ``"stage 1"``; empty without a pipeline."""
        return f"stage {self.pp_rank}" if self.pp_size > 1 else ""

    @property
    def cp_size(self) -> int:
        """Ranks that share every micro-batch of a replica."""
        return self.sizes.cp

    @property
    def tp_size(self) -> int:
        """Ranks that share every matrix."""
        return self.sizes.tp

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The stages that this one's hidden states go through; None where it is alone."""
        return self._group("pp", self.pp_size)

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this one's micro-batches; None where it is alone."""
        return self._group("cp", self.cp_size)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this one's matrices; None where it is alone."""
        return self._group("tp", self.tp_size)

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        """The ranks over which losses and gradients are summed; None where it is alone."""
        return self._group("dp_cp", self.dp_size * self.cp_size)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks over which parameters are sharded, where they are; None where it is alone."""
        return self._group("dp_shard_cp", self.sizes.dp_shard * self.cp_size)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """[dp_shard x cp], or [dp_replicate, dp_shard x cp], for ``fully_shard``."""
        assert self.device_mesh is not None
        outer = ("dp_replicate",) if self.sizes.dp_replicate > 1 else ()
        return self.device_mesh[(*outer, "dp_shard_cp")]

    def communication_device(self, device: torch.device) -> torch.device:
        """Where tensors must be to reach other ranks: there, unless offloading keeps them on the CPU."""
        talks = "cpu" if self.device_mesh is None else self.device_mesh.device_type
        return device if talks == device.type or self.device_mesh is None else torch.device(talks)

    def _group(self, name: str, size: int) -> dist.ProcessGroup | None:
        return None if size == 1 or self.device_mesh is None else self.device_mesh[name].get_group()

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

    def replica_leads(self) -> list[int]:
        """One process of every replica, in the order of replicas: the first of its first stage."""
        sizes, inner = self.sizes, self.cp_size * self.tp_size
        outer = self.pp_size * sizes.dp_shard * inner
        return [copy * outer + part * inner for copy in range(sizes.dp_replicate) for part in range(sizes.dp_shard)]


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
