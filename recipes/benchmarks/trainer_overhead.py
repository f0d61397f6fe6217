"""What a step of WLBTrainer takes beyond a bare loop: the same model, kernels and micro-batches, in turns."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_run import describe, recipe
from transformers import TrainerCallback

from hf_wlb.attention import AttentionContext, ShardTensors, document_attention_enabled
from hf_wlb.loss import HeadLoss, choose_fused_loss

ROUNDS = 2


def now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock(TrainerCallback):
    """When every step ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stamps: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is trained yet."""
        self.stamps = [now(self.device)]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Behind the optimizer's step."""
        self.stamps.append(now(self.device))


def trained(trainer: Any, clock: Clock) -> list[float]:
    """Seconds of every step of WLBTrainer."""
    trainer.train()
    return np.diff(clock.stamps).tolist()


def micro_batches(loader: Any) -> Iterator[Any]:
    """One epoch after the other, as Trainer takes them."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def bare(trainer: Any) -> list[float]:
    """Seconds of every step of a loop that does nothing else; its micro-batches are collated beforehand."""
    args, model, device = trainer.args, trainer.model, trainer.args.device
    batches = micro_batches(trainer.get_train_dataloader())
    steps = [[next(batches) for _ in range(args.gradient_accumulation_steps)] for _ in range(args.max_steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=device.type == "cuda")
    dtype = args.compute_dtype or torch.float32
    function = choose_fused_loss(args.fused_loss, device.type, dtype)
    assert function is not None
    head_loss, context = HeadLoss(model, function), AttentionContext()
    stamps = [now(device)]
    model.train()
    with document_attention_enabled(model):
        for step in steps:
            number = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
            for batch in step:
                bounds = batch["cu_seq_lens_q"]
                longest = int(np.diff(bounds.numpy()).max())
                plan = ShardTensors.whole(bounds.to(torch.int32), longest, batch["input_ids"].shape[1]).to(device)
                inputs = {name: batch[name].to(device) for name in ("input_ids", "position_ids", "labels")}
                with (
                    torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16),
                    head_loss.enabled(),
                ):
                    loss = model(
                        **inputs, wlb_shard=plan, wlb_context=context, num_items_in_batch=number, use_cache=False
                    ).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            stamps.append(now(device))
    return np.diff(stamps).tolist()


def main() -> None:
    """Takes turns and writes the pairs where the recipe writes its logs."""
    given, training = recipe.parse_arguments(sys.argv[1:])
    trainer, _ = recipe.prepare(given, training)
    clock = Clock(training.device)
    trainer.add_callback(clock)
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(ROUNDS):
        first, second = trained(trainer, clock), bare(trainer)
        skipped = 0 if turn == 0 else 2  # the benchmark leaves out the first steps of all
        ours, theirs = ours + first[skipped:], theirs + second[skipped:]
    rows = [{"trainer_seconds": a, "bare_seconds": b} for a, b in zip(ours, theirs, strict=True)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (Path(training.output_dir) / "metrics.jsonl").write_text(text, encoding="utf-8")
    describe(trainer)


if __name__ == "__main__":
    main()
