"""What context parallelism logs, and the loss check for labels shifted already; one process plays all ranks."""

from typing import Any

import pytest
import torch

from hf_wlb.accounting import check_loss
from hf_wlb.attention import KernelMeter
from hf_wlb.data.shards import ShardInfo
from hf_wlb.parallel import ParallelMesh, ParallelSizes, gather_figures
from hf_wlb.sharding import Sharder, ShardingConfig
from hf_wlb.trainer import shard_window
from tests.support.documents import WORKLOAD
from tests.support.tiny_llama import tiny_llama


class Meter(KernelMeter):
    """Tells what it is told to."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = [0.0, *seconds]  # the first is asked for at the beginning

    def take(self) -> float:
        return self.seconds.pop(0) if self.seconds else 0.0

    drain = take


def plan_of(*lengths: int, strategy: Any = "per_sequence") -> ShardInfo:
    return ShardInfo(Sharder(ShardingConfig(2, strategy), WORKLOAD).plan(lengths), topped_up=False)


def window_of(rank: int, *seconds: float) -> shard_window.ShardWindow:
    return shard_window.ShardWindow(ParallelMesh(ParallelSizes(cp=2), cp_rank=rank), Meter(*seconds))


def test_means_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [plan_of(40, 3, 3), plan_of(9, 20, strategy="per_document")]
    dummy = ShardInfo(plan_of(1, 4).plan, topped_up=True)
    told: list[list[float]] = []
    windows = [window_of(0, 0.0, 0.1, 0.2), window_of(1, 0.0, 0.2, 0.4)]
    for window in windows:
        window.add([infos[0], dummy])
        window.add([infos[1]])
    monkeypatch.setattr(shard_window, "gather_figures", lambda own: told.append(list(own)) or [list(own)] * 2)
    windows[1].means()
    monkeypatch.setattr(shard_window, "gather_figures", lambda own: [list(own), told[0]])
    found = windows[0].means()
    first, second = (info.plan.predicted for info in infos)
    assert first is not None and second is not None
    total = first.sum() + second.sum()
    assert found.pop("cp_workload_rank_0") == pytest.approx((first[0] + second[0]) / total)
    assert found.pop("cp_workload_rank_1") == pytest.approx((first[1] + second[1]) / total)
    assert found.pop("cp_imbalance") == pytest.approx(2 * (first.max() + second.max()) / total)
    assert found.pop("cp_token_skew") == pytest.approx(sum(info.plan.token_skew for info in infos) / 2)
    assert found == pytest.approx(
        {
            "cp_per_sequence": 0.5,
            "cp_per_document": 0.5,
            "cp_placed": 0.0,
            "cp_attention_ms_rank_0": 150.0,  # in each of two steps
            "cp_attention_ms_rank_1": 300.0,
            "cp_attention_imbalance": 0.6 / 0.45,
        }
    )


def test_dummies_alone_predict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_window, "gather_figures", lambda own: [list(own)] * 2)
    window = window_of(0, 0.0, 0.1, 0.0)
    window.add([ShardInfo(plan_of(1, 4).plan, topped_up=True)])
    assert window.means() == pytest.approx(
        {"cp_attention_imbalance": 1.0, "cp_attention_ms_rank_0": 100.0, "cp_attention_ms_rank_1": 100.0}
    )
    assert window.means() == {}  # it begins anew after every log


def test_a_mesh_of_one_process_needs_no_groups() -> None:
    mesh = ParallelMesh.of(ParallelSizes(), "cpu")
    assert mesh == ParallelMesh(ParallelSizes(), 0, 0, 0)
    assert (mesh.cp_group, mesh.tp_group, mesh.token_group, mesh.shard_group) == (None,) * 4
    part = torch.ones(3, 2)
    assert mesh.gather_shards(part, [3]) is part
    assert gather_figures([1.0, 2.0]) == [[1.0, 2.0]]


def test_a_loss_that_shifts_in_any_case_is_refused() -> None:
    def shifts(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        lost = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        return lost / num_items_in_batch

    model = tiny_llama()
    check_loss(model, shifted=True)
    model.loss_function = shifts
    check_loss(model)
    with pytest.raises(ValueError, match=r"loss of LlamaForCausalLM, with labels that are shifted already"):
        check_loss(model, shifted=True)
