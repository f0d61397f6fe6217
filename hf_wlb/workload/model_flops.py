"""Model FLOPs of a step, and the share of the hardware's peak that they are (MFU).

They are what the mathematics of the model asks for, forward and backward; what an implementation computes on top
(recomputation under gradient checkpointing, scores that attention's backward computes again, padding) does not count,
so it lowers the MFU. With N weights and documents of d_1, d_2, ... tokens in a step on G devices:

    MFU = (6 N sum_i d_i  +  3 sum_layers 4 H D sum_i pairs(d_i, window)) / (seconds x G x peak)

N holds the matrices that a token is multiplied with: no embedding look-up, the LM head once (tied or not), of a mixture
of experts those chosen, shared and the router; norms and biases are left out (under 0.01%). H D is heads x head size; a
pair takes 2 H D FLOPs for its score and as much for its output, by their own sizes where a value's head is of another
one. pairs are those under the causal mask of each document alone: d (d + 1) / 2, fewer in a sliding window. (The paper
reports speed-ups only; the formula is that of PaLM's appendix B, with the pairs under the mask instead of all.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.workload.base import causal_pairs, check_lengths
from hf_wlb.workload.model_config import count_model

HOPPER_BF16_PEAK = 989e12
"""FLOP/s of an H100 or H200 SXM in bf16, dense, by their data sheets."""
# The PCIe and NVL cards of the same names are slower, a GH200 is another device.
_HOPPER = re.compile(r"\bH[12]00\b(?!.*\b(?:PCIe|NVL)\b)")


def bf16_peak(device_name: str) -> float | None:
    """FLOP/s that a device can do at most in bf16 without sparsity; None where it is not known here.

    Args:
        device_name: As the driver calls it.

    >>> bf16_peak("NVIDIA H100 80GB HBM3"), bf16_peak("NVIDIA H200"), bf16_peak("NVIDIA H100 PCIe")
    (989000000000000.0, 989000000000000.0, None)
    """
    return HOPPER_BF16_PEAK if _HOPPER.search(device_name) else None


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of documents, forward and backward.

    Args:
        per_token: Of all matrices.
        per_pair: (FLOPs a pair of all layers with that window together, window in tokens or None for full attention).

    Llama-3 8B and one document of 8192 tokens, by hand. A layer has 4096 x (2 x 4096 + 2 x 1024) = 41,943,040 weights
    in attention and 3 x 4096 x 14336 = 176,160,768 in its MLP, 32 layers 6,979,321,856; the head 4096 x 128,256 =
    525,336,576; N = 7,504,658,432. Linear: 6 N x 8192 = 368,868,971,249,664. Pairs: 8192 x 8193 / 2 = 33,558,528, each
    of 3 x 4 x 32 x 128 = 49,152 FLOPs in each of 32 layers: 52,783,000,584,192.

    >>> from types import SimpleNamespace
    >>> llama_3_8b = SimpleNamespace(
    ...     model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256,
    ...     num_attention_heads=32, num_key_value_heads=8)
    >>> flops = ModelFlops.from_config(llama_3_8b)
    >>> f"{flops.linear([8192]):,.0f}", f"{flops.attention([8192]):,.0f}"
    ('368,868,971,249,664', '52,783,000,584,192')
    """

    per_token: float
    per_pair: tuple[tuple[float, int | None], ...]

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        trainable_share: float = 1.0,
        adapter_weights: int = 0,
        gated_mlp: bool | None = None,
    ) -> ModelFlops:
        """Counts a model from its Transformers config.

        Frozen weights take 4 FLOPs a token instead of 6: their own gradients are not asked for, but those of their
        inputs are. So LoRA counts 4 N + 6 x the adapters' weights. Not taken off is what lies below the lowest
        trainable weight, where backward could end.

        Args:
            config: As ``count_model`` takes it.
            trainable_share: Share of the model's own weights that get gradients.
            adapter_weights: Trainable weights that were added to it (LoRA).
            gated_mlp: See ``count_model``; needed for families it does not know.

        Raises:
            ValueError: For a model that cannot be counted, a share outside 0 to 1, or a negative number of weights.
        """
        if not 0 <= trainable_share <= 1:
            raise ValueError(f"trainable_share must lie between 0 and 1, but {trainable_share!r} was given.")
        if adapter_weights < 0:
            raise ValueError(f"adapter_weights must be at least 0, but {adapter_weights!r} was given.")
        count = count_model(config, gated_mlp=gated_mlp)
        per_pair: dict[int | None, float] = {}
        for layer in count.layers:
            flops = 3 * 2 * (layer.qk_width + layer.v_width)
            per_pair[layer.window] = per_pair.get(layer.window, 0.0) + flops
        per_token = count.weights * (4 + 2 * trainable_share) + 6 * adapter_weights
        return cls(per_token, tuple((flops, window) for window, flops in per_pair.items()))

    def linear(self, lengths: NDArray[Any] | Sequence[int]) -> float:
        """Of all matrices, for documents of these lengths in tokens."""
        return self.per_token * float(check_lengths(lengths).sum())

    def attention(self, lengths: NDArray[Any] | Sequence[int]) -> float:
        """Of the pairs, for documents of these lengths in tokens."""
        checked = check_lengths(lengths)
        # Summed as floats: the pairs of a step's documents may together exceed 64 bits.
        return float(sum(flops * np.sum(causal_pairs(checked, window), dtype=float) for flops, window in self.per_pair))

    def documents(self, lengths: NDArray[Any] | Sequence[int]) -> float:
        """Of both together, for documents of these lengths in tokens.

        Raises:
            TypeError, ValueError: If they are no lengths.

        >>> ModelFlops(6.0, ((12.0, None), (24.0, 2))).documents([4, 3])  # 6 x 7 + 12 x (10 + 6) + 24 x (7 + 5)
        522.0
        """
        return self.linear(lengths) + self.attention(lengths)


def check_peak(peak: float) -> float:
    """Returns a peak that was given by hand, in FLOP/s.

    Raises:
        ValueError: If it is not positive and finite.
    """
    if not (math.isfinite(peak) and peak > 0):
        raise ValueError(f"The peak must be above 0 FLOP/s and finite, but {peak!r} was given; an H100 has 989e12.")
    return float(peak)
