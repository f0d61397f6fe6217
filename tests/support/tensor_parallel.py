"""Models split over tensor-parallel ranks, run on micro-batches and compared with their documents alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_wlb.attention import AttentionContext, ShardTensors, document_attention_enabled
from hf_wlb.data import WLBDataCollator
from hf_wlb.parallel import ParallelMesh, ParallelSizes, ParameterLayout, ProcessGroupExchange
from hf_wlb.parallel.tensor_parallel import split_model
from hf_wlb.sharding import Sharder, ShardingConfig, shard_layout, shift_labels
from hf_wlb.workload import AnalyticWorkload
from tests.numerics.test_families import ACCEPTED, ALTERNATING, LATENT, VOCABULARY, WINDOW, Family, build, documents
from tests.support.oracle import loss_and_gradients

Rows = list[list[int]]
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
FAMILIES = ACCEPTED | {
    "llama, one KV head": Family("llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "qwen3, one KV head": Family("qwen3", {"num_key_value_heads": 1}),
    "granite_swa, sinks of own heads": Family("granite_swa", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "aria, experts packed the other way": Family("aria_text", {"moe_num_experts": 4, "moe_topk": 2}, experts=True),
    "deepseek_v2, latent of own heads": Family(
        "deepseek_v2",
        {
            **LATENT,
            **EXPERTS,
            "num_key_value_heads": 4,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        experts=True,
    ),
}


def micro_batches() -> list[Rows]:
    """Two different ones; the second has tokens that are padding where a model says so."""
    generator = torch.Generator().manual_seed(5)
    return [documents(), [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (9, 3, 4)]]


class Errors(NamedTuple):
    """Relative errors in the L2 norm."""

    loss: float
    worst: float
    mean: float
    name: str  # of the worst gradient


class Expected(NamedTuple):
    """Documents alone, one process, float64."""

    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, loss: float, gradients: dict[str, torch.Tensor]) -> Errors:
        assert gradients.keys() == self.gradients.keys()
        # A key's bias has no gradient in exact arithmetic: measured against the largest one.
        floor = 1e-6 * max(float(gradient.norm()) for gradient in self.gradients.values())
        found = {
            name: float((gradients[name].double() - expected).norm()) / max(float(expected.norm()), floor)
            for name, expected in self.gradients.items()
        }
        worst = max(found, key=lambda name: found[name])
        return Errors(abs(loss - self.loss) / self.loss, found[worst], sum(found.values()) / len(found), worst)


def expected_of(model: Any) -> Expected:
    return Expected(*loss_and_gradients(model, [row for rows in micro_batches() for row in rows]))


def target_count() -> int:
    return sum(len(row) - 1 for rows in micro_batches() for row in rows)


def mesh_of(**sizes: int) -> ParallelMesh:
    return ParallelMesh.of(ParallelSizes(**sizes), "cpu")


def split(name: str, mesh: ParallelMesh) -> tuple[Any, ParameterLayout, Expected]:
    """A model's part on this rank, and what all parts together should find."""
    model = build(FAMILIES[name])
    expected = expected_of(model)
    return model, ParameterLayout(mesh, split_model(model, mesh)), expected


def run(model: Any, mesh: ParallelMesh, given: Sequence[Rows] | None = None) -> float:
    """Forward and backward of micro-batches (of this replica), each scaled to the mean over all tokens."""
    total = 0.0
    with document_attention_enabled(model):
        for rows in micro_batches() if given is None else given:
            loss = model(**inputs_of(rows, mesh), num_items_in_batch=target_count()).loss
            loss.backward()
            total += float(loss.detach())
    return total


def inputs_of(rows: Rows, mesh: ParallelMesh) -> dict[str, Any]:
    whole = WLBDataCollator()([{"input_ids": row} for row in rows])
    if mesh.cp_size == 1:
        return whole
    sharder = Sharder(ShardingConfig(mesh.cp_size, "per_document"), AnalyticWorkload.from_crossover(8))
    plan = sharder.plan([len(row) for row in rows])
    layout = shard_layout(plan, mesh.cp_rank)
    tokens = torch.from_numpy(layout.tokens)
    targets = torch.from_numpy(shift_labels(whole["labels"][0].numpy(), plan.lengths))[tokens][None]
    return {
        "input_ids": whole["input_ids"][:, tokens],
        "position_ids": torch.from_numpy(layout.position_ids)[None],
        "labels": targets,
        "shift_labels": targets,
        "use_cache": False,
        "wlb_shard": ShardTensors.of(layout),
        "wlb_context": AttentionContext(exchange=ProcessGroupExchange(mesh.cp_group)),
    }


def whole_gradients(model: Any, layout: ParameterLayout) -> dict[str, torch.Tensor]:
    """Put together from all tensor-parallel ranks (and shards); zeros where there is none."""
    return {
        name: layout.whole(name, torch.zeros_like(p) if p.grad is None else p.grad).clone()
        for name, p in model.named_parameters()
    }


def summed(
    loss: float, gradients: dict[str, torch.Tensor], mesh: ParallelMesh
) -> tuple[float, dict[str, torch.Tensor]]:
    """Over the ranks that hold other tokens."""
    total = torch.tensor(loss, dtype=torch.float64)
    for tensor in (total, *gradients.values()):
        dist.all_reduce(tensor, group=mesh.token_group)
    return float(total), gradients
