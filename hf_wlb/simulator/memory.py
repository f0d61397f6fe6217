"""What a GPU holds, by the formula of docs/launching.md: a guide, not a measurement.

Activations were counted on the layers of Llama. A mixture of experts is taken to keep those of as many feed-forward
columns as a token passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_wlb.simulator.costs import StepModel

OVERHEAD_BYTES = 6e9
"""CUDA, NCCL and kernels, and gaps between blocks of memory: a guess."""
STATE_BYTES = 16
"""Of a weight in float32, with its gradient and AdamW's two moments."""
GATHERED_BYTES = 2 + 2 * 4
"""Of a weight that FSDP has gathered: itself in bf16, its gradient in float32 before and while it is reduced."""
CAST_COPY_BYTES = 2
"""Of a weight without FSDP: its copy in bf16 while it is multiplied."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one GPU.

    Attributes:
        states: Weights, gradients and AdamW's moments in float32.
        gathered: Weights of a layer, embedding and head as they are multiplied; under FSDP with their gradients.
        activations: Kept for backward, and those of the layer at work.
        exchange: Gathered keys and values and their gradients, one layer at a time.
        overhead: See ``OVERHEAD_BYTES``.
    """

    states: float
    gathered: float
    activations: float
    exchange: float
    overhead: float = OVERHEAD_BYTES

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.gathered + self.activations + self.exchange + self.overhead


def layer_token_bytes(hidden: int, ffn: float, keys: float, tp_size: int) -> float:
    """What autograd keeps of a token in one layer of Llama's kind, counted to the byte in bf16.

    Args:
        hidden: Width of the residual stream.
        ffn: Feed-forward width.
        keys: KV heads times head size.
        tp_size: Ranks that share every matrix; both halves of the residual stream are whole on each.

    >>> layer_token_bytes(4096, 14336, 1024, tp_size=1)
    200704.0
    """
    return (16 + 4 / tp_size) * hidden + (8 * ffn + 4 * keys) / tp_size


def activation_bytes(
    stream: float, layers: list[float], live_tokens: float, largest_tokens: float, *, recomputation: bool
) -> float:
    """Activations of the micro-batches that a stage has in flight.

    Args:
        stream: Bytes of a token's hidden states between layers.
        layers: What every layer of the stage keeps of a token, see ``layer_token_bytes``.
        live_tokens: Of the micro-batches whose activations are held, on one rank.
        largest_tokens: Of the largest of them.
        recomputation: Whether only every layer's input is kept, and one layer's activations made again.
    """
    if not recomputation:
        return live_tokens * sum(layers)
    return live_tokens * stream * len(layers) + largest_tokens * max(layers)


def exchanged_bytes(keys: float, tp_size: int, tokens: float) -> float:
    """Keys and values of a micro-batch's tokens as every rank gathers, picks and differentiates them, in one layer."""
    return 12 * keys / tp_size * tokens


def working_weight_bytes(parameters: float, tp_size: int, *, sharded: bool) -> float:
    """Of the weights that are multiplied next: a layer's, the embedding's and the head's."""
    return (GATHERED_BYTES if sharded else CAST_COPY_BYTES) * parameters / tp_size


def stage_memory(model: StepModel, stage: int, live_tokens: float, largest_tokens: float) -> MemoryUse:
    """What every GPU of a pipeline stage holds at its peak.

    Args:
        model: With its split and layout.
        stage: Counted from 0.
        live_tokens: Tokens on one context-parallel rank of all micro-batches whose activations the stage holds then
            (``Timeline.peak_live``).
        largest_tokens: Of its largest micro-batch, on one context-parallel rank.

    Raises:
        IndexError: If there is no such stage.
        ValueError: If the largest micro-batch has more tokens than all together, or one is negative.
    """
    if not 0 <= largest_tokens <= live_tokens:
        raise ValueError(
            f"largest_tokens must lie between 0 and live_tokens={live_tokens}, those of all micro-batches in flight, "
            f"but {largest_tokens} was given."
        )
    shape, split = model.shape, model.split
    span = model.layout.range_of(stage)
    own = [shape.layers[layer] for layer in span]
    parameters = shape.stage_parameters(span.start, span.stop)
    ends = parameters - sum(layer.parameters for layer in own)
    shards = split.cp_size * split.dp_size if split.fsdp else 1
    tp_size = split.tp_size
    # A rank has one KV head at least: with more ranks than KV heads, as if there were more of them.
    keys = [shape.kv_width(layer, tp_size) / 2 * tp_size for layer in own]
    kept = [layer_token_bytes(shape.hidden, layer.ffn, k, tp_size) for layer, k in zip(own, keys, strict=True)]
    largest_layer = max(layer.parameters for layer in own)
    return MemoryUse(
        states=STATE_BYTES * parameters / (shards * tp_size),
        gathered=working_weight_bytes(largest_layer + ends, tp_size, sharded=split.fsdp),
        activations=activation_bytes(
            model.stream_bytes * shape.hidden,
            kept,
            live_tokens,
            largest_tokens,
            recomputation=model.gradient_checkpointing,
        ),
        exchange=exchanged_bytes(max(keys), tp_size, largest_tokens * split.cp_size) if split.cp_size > 1 else 0.0,
    )


def stages_memory(model: StepModel, capacity: float) -> list[MemoryUse]:
    """What a GPU of every stage holds at its peak under 1F1B.

    A stage keeps as many micro-batches as there are stages from it to the last: one of them as large as they come, the
    others average.

    Args:
        model: With its split and layout.
        capacity: Tokens of the largest micro-batch over those of an average one.
    """
    usual = model.context_length / model.split.cp_size
    largest = capacity * usual
    stages = model.split.pp_size
    return [stage_memory(model, stage, largest + (stages - stage - 1) * usual, largest) for stage in range(stages)]
