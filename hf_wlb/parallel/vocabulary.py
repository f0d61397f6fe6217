"""A vocabulary whose rows tensor parallelism splits: what the loss needs of the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class VocabularyGroup:
    """Equal and adjoining parts of a vocabulary, one a rank, in the order of ranks; a ``loss.VocabularySlices``.

    Attributes:
        group: The ranks, as ``ParallelMesh.tp_group``.
        size: Rows of the whole vocabulary.

    Raises:
        ValueError: If the ranks do not divide the rows.
    """

    group: dist.ProcessGroup | None
    size: int

    def __post_init__(self) -> None:
        ranks = dist.get_world_size(self.group)
        if self.size % ranks:
            raise ValueError(f"a vocabulary of {self.size} rows cannot be split over {ranks} ranks in equal parts")

    @property
    def first_row(self) -> int:
        """This rank's first row in the whole vocabulary."""
        return dist.get_rank(self.group) * (self.size // dist.get_world_size(self.group))

    def max_(self, tensor: torch.Tensor) -> None:
        """Makes every element the largest of all ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Makes every element the sum over all ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
