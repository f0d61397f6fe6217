"""Micro-batches of many lengths, and how much is compiled while a model sees them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_wlb.attention import AttentionContext, ShardTensors, document_attention_enabled
from hf_wlb.data import WLBDataCollator
from hf_wlb.sharding import Sharder, ShardingConfig
from tests.support.documents import WORKLOAD
from tests.support.oracle import gradients_of
from tests.support.tiny_llama import random_documents

LONGEST = 12


def compile_arguments(folder: Path | str, backend: str | None = "aot_eager", **options: Any) -> TrainingArguments:
    """Trainer's own arguments."""
    settings = {"torch_compile": True, "torch_compile_backend": backend, "use_cpu": True, "report_to": "none"}
    return TrainingArguments(output_dir=str(folder), **{**settings, **options})


def graphs() -> int:
    """Graphs compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def micro_batches(count: int, vocabulary: int = 64) -> Iterator[list[list[int]]]:
    """Documents of micro-batches that all have other lengths, and differ in their number of documents."""
    made, seen = random.Random(0), set()
    while len(seen) < count:
        lengths = tuple(made.randint(1, LONGEST) for _ in range(made.randint(1, 9)))
        if sum(lengths) not in seen and sum(lengths) > len(lengths) + 2:
            seen.add(sum(lengths))
            yield [[token % (vocabulary - 3) + 3 for token in row] for row in random_documents(lengths, len(seen))]


def inputs_of(rows: list[list[int]], context: AttentionContext) -> dict[str, Any]:
    """A rank's arguments for the model's forward, as the trainer gives them."""
    collator = WLBDataCollator()
    if context.cp_size > 1:
        collator = collator.for_rank(Sharder(ShardingConfig(context.cp_size), WORKLOAD), context.cp_rank)
    inputs = collator([{"input_ids": row} for row in rows])
    inputs.pop("wlb_info", None)
    if context.cp_size == 1:
        tokens = sum(map(len, rows))
        inputs["wlb_shard"] = ShardTensors.whole(inputs["cu_seq_lens_q"], max(map(len, rows)), tokens)
    number = torch.tensor(sum(len(row) - 1 for row in rows))
    return {**inputs, "wlb_context": context, "num_items_in_batch": number}


def loss_and_gradients_of(
    model: torch.nn.Module, inputs: dict[str, Any], gradients: Callable[[Any], Any] = gradients_of
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of one forward and backward with document attention."""
    causal_lm: Any = getattr(model, "module", model)
    model.zero_grad()
    with document_attention_enabled(causal_lm):
        loss = model(**inputs).loss
        loss.backward()
    return loss.detach(), gradients(causal_lm)
