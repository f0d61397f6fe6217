"""What a model's parts hold, multiply and move, from its Transformers config: the counts behind ``costs``.

Element-wise work is counted in bytes that kernels read and write, in bf16, for a decoder layer with two RMSNorms, two
residual connections, rotary embeddings and a gated (or plain) MLP, as the layers of Llama are. In units of one number
(h: hidden width; q, k: widths of queries and of keys; f: feed-forward width):

================  ================================================  =================================================
compiled          forward                                           backward
================  ================================================  =================================================
norm + residual   reads 2 h, writes 2 h; twice                      reads 3 h, writes h; twice
inputs' sums                                                        gradients from q, k, v and from gate, up: reads 3 h
rotary            reads q + k, writes q + k                         the same
activation        reads 2 f, writes f (plain MLP: 1 and 1)          reads 3 f, writes 2 f (plain MLP: 2 and 1)
================  ================================================  =================================================

These are single passes, as ``torch_compile`` and hand-written fused kernels have them. Eager Transformers code makes
many of each, some in float32: counted kernel by kernel for its Llama, about four times as many bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_wlb.simulator.split import text_config
from hf_wlb.workload import count_model
from hf_wlb.workload.model_config import LayerCount

NUMBER_BYTES = 2  # bf16: keys and values, matrices as they are multiplied, and hidden states where these are bf16 too
STREAM_BYTES = 4
"""Of hidden states between layers under autocast: embeddings of float32 weights are float32, and what layers add to
them does not change that. FSDP2 casts parameters instead, so that they are bf16."""
GRADIENT_BYTES = 4  # gradients are kept and summed in float32, see hf_wlb.parallel.data_parallel

CAST_BYTES = 6
"""Of a weight in every forward: its float32 is read, its bf16 written. Autocast does so in every micro-batch."""
ACCUMULATE_BYTES = 18
"""Of a weight in every backward: its gradient is read in bf16 and written in float32, then added to what is there."""


@dataclass(frozen=True)
class _Numbers:
    """Bytes a token by width, of all kernels that are no products."""

    hidden: float
    rotated: float
    gated: float
    plain: float


_COMPILED = (_Numbers(16, 4, 6, 4), _Numbers(22, 4, 10, 6))
# Eager, forward. Norm: to float32 6, square 8, mean 4, scale 8, to bf16 6, weight 4, so 36, twice; residual 6, twice.
# Rotary: two products 8, half turned 6, sum 6. Activation: itself 4, product 6.
# Backward. Norm: weight 4 and its gradient 8, to float32 6, scale 8, its factor 16, square 8, sum 12, to bf16 6, so 68,
# twice; sums of gradients at residuals 12, of inputs 18. Rotary: products 8, halves 16, sum 6. Activation: products
# 12, itself 6.
_EAGER = (_Numbers(84, 20, 10, 4), _Numbers(166, 30, 18, 6))


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        count: What a token multiplies there.
        parameters: Weights that it holds; of a mixture of experts all of them.
        ffn: Feed-forward width that a token passes, of experts those chosen and shared.
        gated: Whether the MLP has three matrices.
    """

    count: LayerCount
    parameters: int
    ffn: int
    gated: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    Attributes:
        layers: In their order.
        hidden: Width of the residual stream.
        vocabulary: Entries.
        heads: Query heads.
        kv_heads: Heads of keys and values, as they are exchanged.
        tied: Whether the head shares the embedding's weights.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read it off a Transformers config, or any object with its attributes.

        Raises:
            ValueError: See ``hf_wlb.workload.count_model``.
        """
        text = text_config(config)
        count = count_model(text)
        hidden = int(text.hidden_size)
        # Layers whose MLP is 1 and 2 wide tell attention's weights, and how many matrices an MLP has.
        narrow, wide = (count_model(_Changed(text, {**_DENSE, **_width(size)})).layers for size in (1, 2))
        everything = count_model(_Changed(text, _all_experts(text))).layers
        layers = []
        for layer, one, two, whole in zip(count.layers, narrow, wide, everything, strict=True):
            matrix = two.weights - one.weights  # of one more unit of width: 2 or 3 columns
            attention = one.weights - matrix
            ffn = (layer.weights - attention) // matrix
            layers.append(LayerShape(layer, whole.weights, ffn, gated=matrix == 3 * hidden))
        heads = count.num_attention_heads
        latent = getattr(text, "kv_lora_rank", None) is not None
        kv_heads = heads if latent else int(getattr(text, "num_key_value_heads", None) or heads)
        tied = bool(getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))
        return cls(tuple(layers), hidden, int(text.vocab_size), heads, kv_heads, tied)

    @cached_property
    def vocabulary_parameters(self) -> int:
        """Weights of the embedding, and as many of the head."""
        return self.vocabulary * self.hidden

    def kv_width(self, layer: LayerShape, tp_size: int) -> float:
        """Numbers that a token's keys and values hold on one tensor-parallel rank; it has one KV head at least."""
        return layer.count.kv_width / min(tp_size, self.kv_heads)

    def stage_parameters(self, first: int, stop: int) -> int:
        """Weights of the stage that holds layers ``first`` up to ``stop``, embedding and head included."""
        total = sum(layer.parameters for layer in self.layers[first:stop])
        is_first, is_last = first == 0, stop == len(self.layers)
        copies = is_first + is_last
        if self.tied and is_first and is_last:
            copies = 1
        return total + copies * self.vocabulary_parameters

    def element_wise_bytes(self, layer: LayerShape, tp_size: int, *, compiled: bool) -> tuple[float, float]:
        """Bytes a token moves on one rank besides matrix products and attention, forward and backward."""
        rotated = (layer.count.qk_width + self.kv_width(layer, tp_size) / 2 * tp_size) / tp_size
        ffn = layer.ffn / tp_size
        forward, backward = (
            moved.hidden * self.hidden + moved.rotated * rotated + (moved.gated if layer.gated else moved.plain) * ffn
            for moved in (_COMPILED if compiled else _EAGER)
        )
        return forward, backward


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k", "moe_topk")
_DENSE = dict.fromkeys((*_EXPERTS, *_ACTIVE, "mlp_layer_types", "moe_layer_interval"), None)


def _width(size: int) -> dict[str, int]:
    return {"intermediate_size": size, "n_inner": size}


def _all_experts(text: Any) -> dict[str, int]:
    """As if every token were sent to all experts."""
    experts = next((number for name in _EXPERTS if (number := getattr(text, name, None))), None)
    return {} if experts is None else dict.fromkeys(_ACTIVE, experts)


class _Changed:
    """A config with some attributes of another value."""

    def __init__(self, config: Any, changes: Mapping[str, Any]) -> None:
        self._config, self._changes = config, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._config, name)
