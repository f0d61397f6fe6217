"""What must also hold on a GPU: bf16 attention, the trainer's loss and resume, and plans compared over NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracle import dense_attention, loss_and_gradients, relative_error
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import random_documents, tiny_llama
from tests.support.tolerances import GPU_BF16_OVER_PLAIN_KERNEL, GPU_TRAINER

BOUNDARIES = [0, 1, 8, 145, 1169, 3210]


def _error(attend: Any, inputs: list[torch.Tensor], weights: torch.Tensor, expected: list[torch.Tensor]) -> float:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    (output.double() * weights).sum().backward()
    found = [output, *(leaf.grad for leaf in leaves)]
    return max(relative_error(f.cpu(), e) for f, e in zip(found, expected, strict=True))


def test_attention_in_bf16_is_as_exact_as_the_plain_kernel() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    from hf_wlb.attention.registration import wlb_attention

    def attend_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: list[int]) -> torch.Tensor:
        bounds = torch.tensor(boundaries, dtype=torch.int32, device="cuda")
        return wlb_attention(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=bounds)[0].transpose(1, 2)

    torch.manual_seed(0)
    tokens = BOUNDARIES[-1]
    inputs = [torch.randn(1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    weights = torch.randn(1, 8, tokens, 64, device="cuda", dtype=torch.float64)

    def expected_of(boundaries: list[int]) -> list[torch.Tensor]:
        leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
        output = dense_attention(*leaves, boundaries)
        (output * weights.cpu()).sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    packed = _error(lambda q, k, v: attend_documents(q, k, v, BOUNDARIES), inputs, weights, expected_of(BOUNDARIES))
    plain = _error(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        inputs,
        weights,
        expected_of([0, tokens]),
    )
    assert packed <= GPU_BF16_OVER_PLAIN_KERNEL * plain
    # Control: documents that see each other are far off.
    together = _error(lambda q, k, v: attend_documents(q, k, v, [0, tokens]), inputs, weights, expected_of(BOUNDARIES))
    assert together > 20 * plain


def _trainer(folder: Path, documents: list[dict[str, Any]], model: Any = None, **options: Any) -> Any:
    from hf_wlb import WLBTrainer, WLBTrainingArguments

    arguments = WLBTrainingArguments(
        str(folder),
        **{
            "context_length": 64,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "learning_rate": 1e-3,
            "workload_crossover": 64,
            **options,
        },
    )
    assert arguments.n_gpu >= 1
    arguments._n_gpu = 1  # on a machine with several, Trainer would use them all from this one process
    return WLBTrainer(model or tiny_llama(), arguments, train_dataset=documents, eval_dataset=documents[:8])


def test_the_trainer_gives_the_oracles_loss_and_resumes(tmp_path: Path) -> None:
    documents = [{"input_ids": ids} for ids in random_documents([9, 4, 33, 1, 7, 48, 5, 11, 2, 16, 6, 8, 30, 22] * 3)]
    trainer = _trainer(tmp_path / "whole", documents)
    first_plan = next(trainer.get_train_dataloader().sampler.planner(0))
    rows = [documents[document.index]["input_ids"] for document in first_plan.documents]
    expected, _ = loss_and_gradients(tiny_llama(), rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert abs(losses[0] - expected) <= GPU_TRAINER * expected
    resumed = _trainer(tmp_path / "resumed", documents)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    again = [row["loss"] for row in resumed.state.log_history if "loss" in row]
    assert max(abs(a - b) for a, b in zip(again, losses, strict=True)) <= 1e-5
    assert resumed.evaluate()["eval_loss"] > 0


def test_bf16_autocast_trains(tmp_path: Path) -> None:
    documents = [{"input_ids": ids} for ids in random_documents([9, 4, 33, 1, 7, 48, 5, 11] * 4)]
    trainer = _trainer(tmp_path, documents, bf16=True)
    trainer.train()
    assert all(0 < row["loss"] < 20 for row in trainer.state.log_history if "loss" in row)


def test_micro_batches_are_queued_without_waiting_for_the_gpu(tmp_path: Path) -> None:
    """Once shapes are known; within a micro-batch nothing is read back, and nothing copied from pageable memory."""
    documents = [{"input_ids": ids} for ids in random_documents([9, 4, 33, 1, 7, 48, 5, 11] * 8)]

    def train(name: str, **options: Any) -> None:
        options |= {"bf16": True, "save_strategy": "no", "logging_steps": 100, "fused_loss": "chunked"}
        trainer = _trainer(tmp_path / name, documents, tiny_llama(head_dim=64), **options)
        assert "reference" not in trainer.attention_kernels  # which reads the documents' bounds
        step = trainer.training_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error" if trainer.state.global_step else "default")
            try:
                return step(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        trainer.training_step = watched
        trainer.train()

    train("pinned")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        train("pageable", dataloader_pin_memory=False)


def _agree(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    from hf_wlb.parallel import verify_agreement

    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    verify_agreement(7, "a number", group)
    try:
        verify_agreement(rank, "a number", group)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_plans_are_compared_over_nccl() -> None:
    for message in run_distributed(_agree, 2):
        assert "do not agree on a number" in message
