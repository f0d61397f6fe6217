"""Whether ranks that share matrices agree on the gradients of what they hold whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from hf_wlb.parallel.collectives import all_gather
from hf_wlb.parallel.mesh import ParallelMesh
from hf_wlb.parallel.parameter_layout import TensorShard

#: How much norms of one gradient may differ: atomics on a GPU round differently, a missing head's part is more.
TOLERANCE = 0.02
#: And relative to the largest gradient's, for those that are nothing but rounding (a key's bias).
FLOOR = 1e-5


def verify_gradients(model: torch.nn.Module, mesh: ParallelMesh, shards: Mapping[str, TensorShard]) -> None:
    """Refuses a model whose plan forgot a parameter between a column and a row, after its first backward.

    Such a parameter (a norm of own heads, say) is whole on every rank, but its gradient would be that of a rank's own
    part alone, and the ranks' copies would drift apart without a word. All tensor-parallel ranks must call this
    together.

    Args:
        model: Split, with gradients.
        mesh: This process's place.
        shards: What ``split_model`` returned.

    Raises:
        ValueError: On every rank: names the parameters.
    """
    if mesh.tp_group is None:
        return
    named = {n: p.grad for n, p in model.named_parameters() if n not in shards and p.grad is not None}
    if not named:
        return
    local = [g.to_local() if isinstance(g, DTensor) else g for g in named.values()]
    own = torch.stack([gradient.float().norm() for gradient in local])
    gathered = own.new_empty(mesh.tp_size * len(own))
    all_gather(gathered, own, group=mesh.tp_group)
    norms = gathered.view(mesh.tp_size, -1)
    allowed = torch.maximum(TOLERANCE * norms.amax(0), FLOOR * norms.max())
    apart = norms.amax(0) - norms.amin(0) > allowed
    wrong = [name for name, differs in zip(named, apart.tolist(), strict=True) if differs]
    if wrong:
        others = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"tensor-parallel ranks found different gradients of {', '.join(wrong[:3])}{others}, which they hold "
            f"whole: the tensor-parallel plan of {type(model).__name__} does not say that these work on a rank's own "
            "heads or features only. Add them to model.tp_plan as 'replicated_with_grad_allreduce', or set tp_size=1."
        )
