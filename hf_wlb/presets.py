"""Llama shapes by name, so that a run needs no checkpoint and no download.

The paper names its models by size (550M, 7B, 30B, 70B) and prints no shapes. The shapes here are ours: 7B and
70B are those of Llama-2-7B and Llama-3-70B, 550M and 30B were chosen to give the parameter counts that their
names promise (with a vocabulary of 32,000). 1B, which the paper has not, is Llama-3.2-1B with heads of size 128
instead of 64, half as many, for the sake of attention kernels. ``tiny`` has 0.2 million parameters, for trying
things out on a CPU: one core trains it at about 10,000 tokens per second on documents of up to 4K or 8K tokens.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import LlamaConfig


@dataclass(frozen=True)
class ModelPreset:
    """The shape of a Llama model.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated feed-forward layer.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads; the head size is ``hidden_size / num_attention_heads``.
        num_key_value_heads: Key and value heads.
        vocab_size: Vocabulary entries, unless the tokenizer at hand has another number.
        max_position_embeddings: Longest document in tokens (positions restart at every document).
        tie_word_embeddings: Whether the LM head shares the weights of the embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 32_000
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = False


MODEL_PRESETS: "Mapping[str, ModelPreset]" = MappingProxyType(
    {
        "tiny": ModelPreset(64, 192, 2, 4, 2, 2_048, 16_384, tie_word_embeddings=True),
        "550M": ModelPreset(1_280, 3_456, 24, 20, 20),
        "1B": ModelPreset(2_048, 8_192, 16, 16, 4, 128_256, tie_word_embeddings=True),
        "7B": ModelPreset(4_096, 11_008, 32, 32, 32),
        "30B": ModelPreset(7_168, 19_456, 48, 56, 56),
        "70B": ModelPreset(8_192, 28_672, 80, 64, 8, 128_256),
    }
)
"""Name -> shape. 7B: Llama-2-7B; 70B: Llama-3-70B; the others: see the module."""

ROPE_THETA = 500_000.0
"""Base of the rotary embedding in all presets: Llama 3's, which suits long documents; Llama 2 had 10,000."""


def preset_config(
    name: str, vocab_size: int | None = None, max_position_embeddings: int | None = None
) -> "LlamaConfig":
    """Build the Transformers configuration of a preset; the weights are for the caller to initialise.

    Args:
        name: A key of ``MODEL_PRESETS``; upper and lower case are the same.
        vocab_size: Vocabulary entries, normally ``len(tokenizer)``; the preset's own unless given.
        max_position_embeddings: Longest document in tokens; the preset's own unless given.

    Returns:
        A ``LlamaConfig`` without special token ids (those belong to the tokenizer) and with
        ``use_cache=False``.

    Raises:
        ValueError: If there is no such preset, or a size is below 1.
    """
    by_lower_name = {key.lower(): preset for key, preset in MODEL_PRESETS.items()}
    preset = by_lower_name.get(name.lower())
    if preset is None:
        raise ValueError(f"There is no model preset {name!r}; the presets are {', '.join(MODEL_PRESETS)}.")
    for key, value in (("vocab_size", vocab_size), ("max_position_embeddings", max_position_embeddings)):
        if value is not None and value < 1:
            raise ValueError(f"{key}={value} was given for the model preset {name!r}; it must be 1 or more.")

    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=preset.vocab_size if vocab_size is None else vocab_size,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_hidden_layers,
        num_attention_heads=preset.num_attention_heads,
        num_key_value_heads=preset.num_key_value_heads,
        max_position_embeddings=(
            preset.max_position_embeddings if max_position_embeddings is None else max_position_embeddings
        ),
        tie_word_embeddings=preset.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
