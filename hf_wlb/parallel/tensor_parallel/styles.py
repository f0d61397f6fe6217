"""The styles that a tensor-parallel plan may name: how parameters are split, and what modules do then."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_wlb.parallel.tensor_parallel import forwards


@dataclass(frozen=True)
class StyleRule:
    """What a style means.

    Attributes:
        forward: Of a module; None to leave it as it is.
        dim: Of a parameter, counted from its end, that is split; None for none.
        blocks: Matrices packed along it (gate and up), each split by itself.
        bias: Whether a bias is split, too.
        of: The class of modules that it can be done to.
    """

    forward: forwards.Style | None = None
    dim: int | None = None
    blocks: int = 1
    bias: bool = True
    of: type[torch.nn.Module] = torch.nn.Module

    def dim_of(self, name: str, parameter: torch.Tensor) -> int | None:
        """The dimension of this parameter that is split.

        >>> STYLES["rowwise"].dim_of("weight", torch.empty(4, 8)), STYLES["rowwise"].dim_of("bias", torch.empty(4))
        (1, None)
        """
        if self.dim is None or (name == "bias" and not self.bias):
            return None
        return max(0, parameter.dim() + self.dim)

    def fits(self, module: torch.nn.Module) -> bool:
        """Whether the style can be done to a module of this class."""
        return isinstance(module, self.of)


_GATHERED = StyleRule(forwards.gathered_column, dim=-2, of=torch.nn.Linear)
_CUT_ROW = StyleRule(forwards.cut_row, dim=-1, bias=False, of=torch.nn.Linear)
#: By the names that Transformers gives them.
STYLES: dict[str, StyleRule] = {
    "colwise": StyleRule(forwards.column, dim=-2, of=torch.nn.Linear),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": StyleRule(forwards.row, dim=-1, bias=False, of=torch.nn.Linear),
    "rowwise_split_input": _CUT_ROW,
    "rowwise_rep": _CUT_ROW,
    "embedding_rowwise": StyleRule(forwards.embedding, dim=-2, of=torch.nn.Embedding),
    "packed_colwise": StyleRule(forwards.column, dim=-2, blocks=2, of=torch.nn.Linear),
    "packed_rowwise": StyleRule(forwards.row, dim=-1, blocks=2, bias=False, of=torch.nn.Linear),
    "replicated_with_grad_allreduce": StyleRule(forwards.summed_gradient),
    "moe_tp_experts": StyleRule(forwards.experts),
    "mla_kv_a_proj": StyleRule(forwards.compressed_key, of=torch.nn.Linear),
    "all_reduce": StyleRule(forwards.summed_output),
    "local_params": StyleRule(),
    "replicate": StyleRule(),
}
#: Styles of modules whose output is a rank's own features only.
LOCAL_COLUMNS = ("colwise", "packed_colwise")
