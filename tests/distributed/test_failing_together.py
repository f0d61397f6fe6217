"""Ranks that cannot work together: every rank gets an error that says why, and none waits for another."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_wlb.attention import AttentionContext, AttentionOptions, ShardTensors, attend
from hf_wlb.attention.kernels import KERNELS
from hf_wlb.parallel import ProcessGroupExchange, failing_together, verify_agreement, verify_settings
from hf_wlb.sharding import per_document, per_sequence, shard_layout
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import tiny_llama
from tests.support.training import rows_of, trainer_of


def told(action: Callable[[], Any]) -> str:
    try:
        action()
        return "nothing"
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


#: Of 8 arguments no more than 6 are named.
MANY: dict[str, Any] = {
    "learning_rate": 0.2,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "weight_decay": 0.1,
    "max_grad_norm": 2.0,
    "logging_steps": 2,
    "save_strategy": "epoch",
    "max_steps": 3,
}
#: What ranks need not share.
OWN: dict[str, Any] = {
    "dataloader_num_workers": 1,
    "disable_tqdm": False,
    "report_to": [],
    "run_name": "rank 1",
    "log_level": "error",
    "attention_kernel": "reference",
    "hub_token": "its own",
}


def trainers(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What making a trainer comes to, where rank 1 differs."""
    other = rank == 1
    dropout = tiny_llama()
    dropout.config.attention_dropout = 0.1 * other
    one_layer = another_llama(num_hidden_layers=1) if other else tiny_llama()
    heads = another_llama(num_attention_heads=2, num_key_value_heads=1, head_dim=16) if other else tiny_llama()
    cases: dict[str, dict[str, Any]] = {
        "checkpointing": {"gradient_checkpointing": other, "regather_key_values": True},
        "bf16": {"bf16": other},
        "type": {"model": tiny_llama().to(torch.bfloat16 if other else torch.float32)},
        "learning rate": {"cp_size": 1, "learning_rate": 1e-2 if other else 1e-3},
        "many": {"cp_size": 1, **(MANY if other else {})},
        "a machine's own": {"cp_size": 1, **(OWN if other else {})},
        "a function": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": function_elsewhere(rank)},
        "evaluation in bf16": {"bf16_full_eval": other},
        "smoothing": {"label_smoothing_factor": 0.1 * other},
        "deterministic": {"full_determinism": other},
        "dropout": {"model": dropout},
        "kernel": {"attention_kernel": "torch" if other else "reference"},
        "layers": {"model": one_layer},
        "heads": {"model": heads},
        "sizes": {"cp_size": 3 if other else 2},
    }
    found = {name: told(partial(trainer_of, folder, **{"cp_size": 2, **case})) for name, case in cases.items()}
    torch.use_deterministic_algorithms(False)
    with pytest.MonkeyPatch.context() as patch:
        if other:
            patch.setattr(KERNELS["reference"], "missing", lambda: "is not installed")
        found["missing"] = told(lambda: trainer_of(folder, cp_size=2))
        found["missing on a replica"] = told(lambda: trainer_of(folder))
    evaluated = {"eval_dataset": rows_of((5, 9, 3)), "compute_metrics": (lambda _: {}) if other else None}
    found["metrics"] = told(lambda: trainer_of(folder, cp_size=2, **evaluated)[0].evaluate())
    found["none"] = told(lambda: trainer_of(folder, cp_size=2))
    verify_agreement(len(found), "how many were tried")  # the ranks still talk to each other
    return found


def function_elsewhere(rank: int) -> dict[str, Any]:
    """The same option everywhere; but what it says of itself has an address in it, another one on every rank."""
    made = [lambda: None for _ in range(1 + 1000 * rank)]
    return {"use_reentrant": False, "context_fn": partial(made[-1])}


def another_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(tiny_llama().config.to_dict() | changes)))


DIFFERING = {
    "checkpointing": "gradient_checkpointing (rank 0 has False; rank 1 has True). They",
    "bf16": "bf16 (rank 0 has False; rank 1 has True). They",
    "type": "the type to train in, by bf16, fp16 and the model (rank 0 has float32; rank 1 has bfloat16). They",
    "learning rate": "learning_rate (rank 0 has 0.001; rank 1 has 0.01). They",
    "many": "max_steps (rank 0 has -1; rank 1 has 3), learning_rate (rank 0 has 0.1; rank 1 has 0.2), lr_scheduler_typ",
    "evaluation in bf16": "bf16_full_eval (rank 0 has False; rank 1 has True). They",
    "smoothing": "label_smoothing_factor (rank 0 has 0.0; rank 1 has 0.1). They",
    "metrics": "whether to predict, by compute_metrics and prediction_loss_only (rank 0 has False; rank 1 has True). T",
    "deterministic": "full_determinism (rank 0 has False; rank 1 has True). They",
    "layers": "the model's attention (rank 0 has 2 layers of 4 heads and 2 KV heads of sizes 8 and 8; rank 1 has 1 lay",
    "heads": "the model's attention (rank 0 has 2 layers of 4 heads and 2 KV heads of sizes 8 and 8; rank 1 has 2 lay",
    "sizes": "cp_size (rank 0 has 2; rank 1 has 3). They",
}
FAILING = {
    "dropout": "LlamaForCausalLM has attention_dropout=0.1",
    "kernel": "attention kernel 'torch' was asked for",
    "missing": "no attention kernel can do float32 on cpu",
    "missing on a replica": "no attention kernel can do float32 on cpu",
}


def test_trainers_that_differ_or_fail(tmp_path: Path) -> None:
    ranks = run_distributed(trainers, 2, str(tmp_path), timeout_s=400)
    for rank, found in enumerate(ranks):
        assert found.pop("none") == found.pop("a machine's own") == found.pop("a function") == "nothing"
        assert " and 2 more. They train one model together: give all of them the same arguments" in found["many"]
        assert found.keys() == DIFFERING.keys() | FAILING.keys()
        for name, sentence in DIFFERING.items():
            assert found[name].startswith(f"RuntimeError: The ranks do not agree on {sentence}"), found[name]
        for name, sentence in FAILING.items():
            others = "RuntimeError: This rank stops because others failed: rank 1 with "
            assert found[name].startswith(f"{'' if rank else others}ValueError: {sentence}"), found[name]


def blocks(rank: int, world_size: int) -> list[str]:
    def one_fails() -> None:
        with failing_together():
            if rank == 1:
                raise KeyError("a")

    found = []
    for failing in ((), (0, 2)):
        try:
            with failing_together():
                if rank in failing:
                    raise ValueError(f"no {rank}")
            found.append("nothing")
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="a"):
        one_fails()
    verify_settings({"a": 1, "b": "c"})
    found.append(told(lambda: verify_settings({"a": 1, "b": rank % 2, "c": rank})))
    place = f"stage {rank % 2}"
    verify_settings({"a": 1}, place=place, of_place={"layers": rank % 2})  # stages need not be alike
    found.append(told(lambda: verify_settings({"a": 1}, place=place, of_place={"layers": rank})))
    return found


def test_three_ranks() -> None:
    ranks = run_distributed(blocks, 3, timeout_s=400)
    assert [rank[0] for rank in ranks] == ["nothing"] * 3
    others = "RuntimeError: This rank stops because others failed: rank 0 with ValueError: no 0; rank 2 with ValueErro"
    assert ranks[0][1] == "ValueError: no 0" and ranks[2][1] == "ValueError: no 2" and ranks[1][1].startswith(others)
    differing = "b (ranks 0, 2 have 0; rank 1 has 1), c (rank 0 has 0; rank 1 has 1; rank 2 has 2)"
    assert all(rank[2].startswith(f"RuntimeError: The ranks do not agree on {differing}. They") for rank in ranks)
    differing = "layers (rank 0 (stage 0) has 0; rank 2 (stage 0) has 2)"
    assert all(rank[3].startswith(f"RuntimeError: The ranks do not agree on {differing}. They") for rank in ranks)


# ---- loops of one's own ----


def calls(rank: int, world_size: int) -> dict[str, str]:
    """What ``attend`` says, where rank 1 differs; each case with an exchange of its own."""
    other = rank == 1

    def once(
        context: AttentionContext, lengths: Any = (40, 9), make: Any = per_document, extra: int = 0, **shape: Any
    ) -> None:
        shard = ShardTensors.of(shard_layout(make(lengths, world_size), rank))
        tensors = [
            torch.ones(shard.tokens + extra, heads, shape.get("size", 8), dtype=shape.get("dtype"), requires_grad=True)
            for heads in (shape.get("heads", 4), 2, 2)
        ]
        for _ in range(2):  # layers
            attend(*tensors, shard, context, AttentionOptions(0.3, shape.get("window"))).sum().backward()

    def then(context: AttentionContext, **second: Any) -> None:
        once(context)
        once(context, **second)

    def of(**settings: Any) -> AttentionContext:
        return AttentionContext(exchange=ProcessGroupExchange(), **settings)

    return {
        "groups": told(lambda: once(of(kv_head_groups=1 + other))),
        "regather": told(lambda: once(of(regather=other))),
        "type": told(lambda: once(of(), dtype=torch.float64 if other else torch.float32)),
        "heads": told(lambda: once(of(), heads=6 if other else 4)),
        "size": told(lambda: once(of(), size=16 if other else 8)),
        "window": told(lambda: once(of(), window=5 if other else None)),
        "plan": told(lambda: once(of(), make=per_sequence if other else per_document)),
        "kernel": told(lambda: once(of(kernel=KERNELS["torch"] if other else None))),
        "later tokens": told(lambda: then(of(), extra=int(other))),
        "later plan": told(lambda: then(of(), make=per_sequence if other else per_document)),
        "later plan, kept": told(lambda: then(of(regather=False), lengths=(60, 9) if other else (40, 9))),
        "later window": told(lambda: then(of(), window=3)),
    }


def test_attention_of_ranks_that_differ() -> None:
    first, second = run_distributed(calls, 2, timeout_s=400)
    for found in (first, second):
        for name in ("groups", "regather", "type", "heads", "size", "window"):
            assert found[name].startswith(
                "ValueError: the context-parallel ranks attend in different ways: rank 0 has "
            )
        assert "kv_head_groups 1, regather True; rank 1 has 4 heads, " in found["groups"]
        for name in ("plan", "later plan", "later plan, kept"):
            assert "were given plans of different micro-batches or settings: rank 0 has plan " in found[name], name
        assert found["later window"] == "nothing"
    for name, sentence in (
        ("kernel", "the context's attention kernel 'torch' was given float32 on cpu, head size 8, but it runs on CUDA"),
        ("later tokens", "the plan is for a shard of"),
    ):
        assert second[name].startswith(f"ValueError: {sentence}")
        assert first[name].startswith(f"ValueError: context-parallel rank 1 cannot attend: {sentence}")


def comparisons(rank: int, world_size: int) -> list[int]:
    """How often ranks met: once a micro-batch, however many layers, and once for a new kind of layer."""
    from hf_wlb.parallel import exchange as module

    count = 0
    gather = module.all_gather

    def counting(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        nonlocal count
        count += not async_op
        return gather(*args, async_op=async_op, **kwargs)

    module.all_gather = counting
    context, found = AttentionContext(exchange=ProcessGroupExchange()), []
    shard = ShardTensors.of(shard_layout(per_document([40], world_size), rank))
    tensors = [torch.ones(shard.tokens, 2, 8)] * 3
    for micro_batch, windows in (
        (shard, (None, 3, None, 3)),
        (dataclasses.replace(shard), (None, 3, None)),
        (shard, (3,)),
    ):
        for window in windows:
            attend(*tensors, micro_batch, context, AttentionOptions(1.0, window))
        found.append(count)
    return found


def test_ranks_are_compared_once_a_micro_batch() -> None:
    assert run_distributed(comparisons, 2, timeout_s=400) == [[2, 3, 4]] * 2
