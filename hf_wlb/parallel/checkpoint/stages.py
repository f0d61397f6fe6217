"""What the stages of a pipeline know of each other's tensors."""

from __future__ import annotations

from typing import TypeVar

from hf_wlb.parallel.collectives import gather_objects
from hf_wlb.parallel.mesh import ParallelMesh

Value = TypeVar("Value")


def of_stages(mesh: ParallelMesh, value: Value) -> list[Value]:
    """Every stage's value, in the order of stages; all processes must call this together.

    Args:
        mesh: This process's place.
        value: Anything that can be pickled, the same on all processes of a stage.

    >>> of_stages(ParallelMesh(), 7)  # without a pipeline all is one stage
    [7]
    """
    return [value] if mesh.pp_group is None else gather_objects(value, mesh.pp_group)
