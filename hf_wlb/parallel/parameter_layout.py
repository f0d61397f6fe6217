"""Which part of every parameter a process holds, and how the parts make the whole again.

A stage of a pipeline has some of a model's parameters. Each is first split over tensor-parallel ranks
(``TensorShard``) and its part then, where parameters are sharded, over ``dp_shard x cp`` by FSDP2, which makes it a
``DTensor``. Names are those of the Hugging Face model, whatever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_wlb.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class TensorShard:
    """One rank's slice of a parameter.

    Attributes:
        dim: The dimension that is split.
        blocks: Sizes along it of the parts that are split one by one: several where one matrix packs some (gate and
            up), else one. Every one is a multiple of ``count``.
        index: Which slice this is.
        count: Slices. Where there are more ranks than slices (KV heads), several ranks next to each other hold the
            same one.

    >>> shard = TensorShard(dim=0, blocks=(4, 4), index=1, count=2)  # gate rows 0-3, up rows 4-7
    >>> shard.take(torch.arange(8))
    tensor([2, 3, 6, 7])
    >>> shard.join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])])
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """

    dim: int
    blocks: tuple[int, ...]
    index: int
    count: int

    def ranges(self) -> list[tuple[int, int]]:
        """First row along ``dim`` and the one behind the last, of every block's part, in the whole parameter."""
        found, start = [], 0
        for size in self.blocks:
            part = size // self.count
            found.append((start + part * self.index, start + part * (self.index + 1)))
            start += size
        return found

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole parameter, a copy."""
        return torch.cat([whole.narrow(self.dim, first, last - first) for first, last in self.ranges()], self.dim)

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole parameter, of all ``count`` slices in their order."""
        sizes = [size // self.count for size in self.blocks]
        parts = [piece.split(sizes, self.dim) for piece in slices]
        return torch.cat([part[block] for block in range(len(sizes)) for part in parts], self.dim)


@dataclass(frozen=True)
class ParameterLayout:
    """How this process's parameters are parts of the model's.

    Attributes:
        mesh: This process's place.
        tensor_shards: By parameter name; those that are missing are whole on every tensor-parallel rank.
        copies: Parameters of this stage that another stage owns (tied), see ``PipelineStage.copies``; values are their
            names there.
        elsewhere: Names of the whole model's tensors where this process has one stage of it, see
            ``hf_wlb.parallel.checkpoint.all_names``: what a checkpoint may hold besides this stage's own.
    """

    mesh: ParallelMesh
    tensor_shards: Mapping[str, TensorShard] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    elsewhere: AbstractSet[str] = frozenset()

    def whole_name(self, name: str) -> str:
        """What a parameter is called in the whole model and its checkpoints: a copy has its owner's name.

        >>> layout = ParameterLayout(ParallelMesh(), copies={"lm_head.weight": "model.embed_tokens.weight"})
        >>> layout.whole_name("lm_head.weight"), layout.whole_name("model.norm.weight")
        ('model.embed_tokens.weight', 'model.norm.weight')
        """
        return self.copies.get(name, name)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which every process of a stage holds a part, the same on all of them.

        All processes of the stage must call this together.

        Args:
            name: Of the parameter; ``part`` is it, its gradient, or optimizer state of its shape.
            part: As this process holds it: plain, or FSDP2's ``DTensor``.

        Returns:
            A plain tensor on the part's device. Not a copy where nothing is split.
        """
        local = part.full_tensor() if isinstance(part, DTensor) else part
        shard = self.tensor_shards.get(name)
        if shard is None or shard.count == 1:
            return local
        gathered = [torch.empty_like(local) for _ in range(self.mesh.tp_size)]
        dist.all_gather(gathered, local.contiguous(), group=self.mesh.tp_group)
        return shard.join(gathered[:: self.mesh.tp_size // shard.count])

    def owners(self, name: str) -> int:
        """Tensor-parallel ranks that hold the same elements of a parameter."""
        shard = self.tensor_shards.get(name)
        return self.mesh.tp_size if shard is None else self.mesh.tp_size // shard.count

    def total_norm(self, named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """L2 norm over all processes' parts, every element once; all processes must call this together.

        Copies of tied parameters are left out: the stage that owns them counts them.

        Args:
            named: Parameter names and, say, their gradients; the same names on every process of a stage. A stage may
                have none.

        Returns:
            Scalar of at least float32, the same on every process.
        """
        groups: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        weights: dict[bool, list[float]] = {False: [], True: []}
        for name, tensor in named:
            if name in self.copies:
                continue
            sharded = isinstance(tensor, DTensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            groups[sharded].append(local if local.dtype.itemsize >= 4 else local.float())
            weights[sharded].append(1 / self.owners(name))
        some = next((tensor for found in groups.values() for tensor in found), torch.zeros(()))
        total = torch.zeros((), dtype=some.dtype, device=self.mesh.communication_device(some.device))
        for sharded, tensors in groups.items():
            squares = torch.zeros_like(total)
            if tensors:
                norms = torch.stack([norm.to(total) for norm in torch._foreach_norm(tensors)])
                squares = (norms.square() * torch.tensor(weights[sharded]).to(norms)).sum()
            if sharded and self.mesh.shard_group is not None:
                dist.all_reduce(squares, group=self.mesh.shard_group)
            total += squares
        if self.mesh.tp_group is not None:
            dist.all_reduce(total, group=self.mesh.tp_group)
        if self.mesh.pp_group is None:
            return total.sqrt()
        # A stage without any tensors has nobody's type: all sum in float64, and say whether it is their own.
        sums = torch.stack([total.double(), torch.full_like(total, total.dtype is torch.float64).double()])
        dist.all_reduce(sums, group=self.mesh.pp_group)
        return sums[0].sqrt() if sums[1] > 0 else sums[0].sqrt().float()
