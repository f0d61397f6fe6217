"""Measures what the parts of a model cost that pipeline stages share out, for ``StageCosts``.

One layer of every kind, the embedding, and the final norm with head and loss: each is cut out of the model as a stage
is, run by the model's own code over one micro-batch, forward and backward, and let go of before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from hf_wlb.attention import AttentionContext
from hf_wlb.attention.kernels import KERNELS
from hf_wlb.profiling.assemble import device_name
from hf_wlb.profiling.pieces import ModelPieces, micro_batch
from hf_wlb.profiling.timing import median_seconds
from hf_wlb.staging import StageCosts
from hf_wlb.staging.costs import documents_to_cost, said

Timer = Callable[[Callable[[], None]], float]
"""Seconds that its argument takes on the device; may call it any number of times."""


def measure_stage_costs(
    config: PreTrainedConfig,
    lengths: NDArray[Any] | Sequence[int] | None = None,
    *,
    context_length: int | None = None,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    fused_loss: str = "auto",
    attention_kernel: str | None = None,
    gradient_checkpointing: bool = False,
    repeats: int = 5,
    timer: Timer | None = None,
    tell: Callable[[str], None] | None = None,
) -> StageCosts:
    """Time the parts of a model on this process's device, for one micro-batch, forward plus backward.

    Weights are random, and no more than one part of the model is in memory at a time, with its gradients and the
    activations of the micro-batch. A micro-batch that does not fit may be measured in part: only ratios matter for a
    layout, and of equal documents fewer cost less everywhere alike. For the same reason one process stands for those
    that share a stage by context or tensor parallelism.

    Args:
        config: a Transformers config; its layers are told apart by their modules, windows and shapes, and those of one
            kind are measured once.
        lengths: document lengths of the micro-batch in tokens, integers of shape ``(documents,)``.
        context_length: in place of ``lengths``: tokens of a micro-batch of ``typical_lengths``.
        device: where; of several GPUs the current one.
        dtype: to compute in, see ``ModelPieces``.
        fused_loss: how the loss is computed, as the trainer's argument of that name, see ``choose_fused_loss``.
        attention_kernel: name of the kernel; None for the one that the trainer would choose.
        gradient_checkpointing: whether every layer's forward runs a second time in the backward.
        repeats: measurements of each part, after two that are not counted; the median is taken.
        timer: how to time, instead of ``median_seconds`` with these repeats.
        tell: called with a line about every part.

    Raises:
        TypeError: if the lengths are no integers.
        ValueError: if not exactly one of ``lengths`` and ``context_length`` is given, there is no token, a document is
            longer than the model takes, ``repeats`` is below 1, there is no such kernel or loss for this device, or
            the model cannot be cut into stages.

    >>> from transformers import LlamaConfig
    >>> tiny = LlamaConfig(
    ...     hidden_size=16, intermediate_size=16, num_hidden_layers=8, num_attention_heads=2, vocab_size=64)
    >>> costs = measure_stage_costs(tiny, [20, 12], device="cpu", dtype=torch.float32, repeats=1)
    >>> len(costs.layers), len(set(costs.layers)), costs.source
    (8, 1, 'measured on cpu (...) in float32, documents of 20, 12 tokens')
    """
    where = torch.device(device)
    documents = documents_to_cost(lengths, context_length)
    if attention_kernel is not None and attention_kernel not in KERNELS:
        raise ValueError(f"attention_kernel must be one of {', '.join(KERNELS)}, got {attention_kernel!r}.")
    kernel = None if attention_kernel is None else KERNELS[attention_kernel]
    inputs = micro_batch(config, documents, where, AttentionContext(kernel=kernel))
    pieces = ModelPieces(config, where, dtype, inputs)
    time = timer or partial(median_seconds, device=where, repeats=repeats)
    try:
        costs = _measure(pieces, time, fused_loss, gradient_checkpointing, tell or (lambda line: None))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {int(documents.sum()):,} tokens does not fit one part of the model on {where}. Measure "
            "fewer documents of the same lengths: only ratios matter."
        ) from error
    source = f"measured on {device_name(where)} in {str(dtype).removeprefix('torch.')}, {said(documents)}"
    return StageCosts.from_measurements(costs, source)


def _measure(
    pieces: ModelPieces, timer: Timer, fused_loss: str, gradient_checkpointing: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    def measured(what: str, run: Callable[[], None]) -> float:
        seconds = timer(run)
        tell(f"{what}: {seconds * 1e3:.3f} ms")
        return seconds

    kinds = pieces.kinds()
    of_kind = {
        first: measured(f"layer {first} ({kinds.count(first)} alike)", pieces.layer(first, gradient_checkpointing))
        for first in dict.fromkeys(kinds)
    }
    return {
        "layers": [of_kind[kind] for kind in kinds],
        "before": measured("embedding", pieces.before()),
        "after": measured("final norm, head and loss", pieces.after(fused_loss)),
    }
