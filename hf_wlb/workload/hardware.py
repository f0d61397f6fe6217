"""Rates that turn counted FLOPs into seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HardwareFigures:
    """What one device achieves, not what its data sheet says.

    Args:
        name: what the figures belong to.
        matmul_flops_per_second: large matrix products in the training dtype.
        attention_flops_per_second: causal attention kernel, forward; only pairs under the mask are counted.
        attention_backward_flops_per_second: the same, backward, counted as 2.5 times the forward FLOPs;
            ``None`` takes the forward rate.
        linear_overhead_seconds_per_token: what a token costs besides matmuls, forward plus backward over the
            whole model: norms, activations, optimizer, collectives. It depends on the model, so the presets
            leave it at 0 and therefore put the crossover length too low; measure a profile to do better.
        interconnect_bytes_per_second: what a rank receives per second in an all-gather with its neighbours.

    Raises:
        ValueError: for a rate that is not positive and finite, or a negative overhead.
    """

    name: str
    matmul_flops_per_second: float
    attention_flops_per_second: float
    attention_backward_flops_per_second: float | None = None
    linear_overhead_seconds_per_token: float = 0.0
    interconnect_bytes_per_second: float = 3e11

    def __post_init__(self) -> None:
        rates = {
            "matmul_flops_per_second": self.matmul_flops_per_second,
            "attention_flops_per_second": self.attention_flops_per_second,
            "attention_backward_flops_per_second": self.attention_backward_rate,
            "interconnect_bytes_per_second": self.interconnect_bytes_per_second,
        }
        for key, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{key} of {self.name!r} must be above 0 and finite, but {rate!r} was given.")
        overhead = self.linear_overhead_seconds_per_token
        if not (math.isfinite(overhead) and overhead >= 0):
            raise ValueError(
                f"linear_overhead_seconds_per_token of {self.name!r} must be at least 0 and finite, "
                f"but {overhead!r} was given."
            )

    @property
    def attention_backward_rate(self) -> float:
        """FLOP/s of the attention kernel's backward; its forward rate where none was given."""
        if self.attention_backward_flops_per_second is None:
            return self.attention_flops_per_second
        return self.attention_backward_flops_per_second


# bf16 peak of an H100 SXM without sparsity, from its data sheet.
_H100_PEAK = 989e12
# Large bf16 matmuls reach 0.7 to 0.8 of the peak; an assumption, not a measurement of ours.
_H100_MATMUL = 0.75 * _H100_PEAK

HARDWARE_PRESETS: dict[str, HardwareFigures] = {
    # Attention forward / backward measured at 64K tokens, bf16, head size 128, 32 query heads, on an H200 (an
    # H100 with faster memory): flash-attn 2 reaches 350 / 321 TFLOP/s, flash-attn 4 reaches 657 / 595. All-gather
    # on NVLink there, 4 GPUs: 0.40 GB received in 1.28 ms.
    "h100": HardwareFigures("h100", _H100_MATMUL, 350e12, 321e12),
    "h100-flash-attn-4": HardwareFigures("h100-flash-attn-4", _H100_MATMUL, 657e12, 595e12),
    # Order of magnitude only: two cores of a busy server, fp32, hidden size 1024 (matmul) and documents of 2K
    # to 4K tokens (attention), measured with torch 2.13. Short documents run several times slower.
    "cpu": HardwareFigures("cpu", 9e10, 6e10, 5e10, interconnect_bytes_per_second=1e9),
}
"""Figures by name: "h100" (with flash-attn 2), "h100-flash-attn-4" and "cpu"."""


def hardware_figures(hardware: HardwareFigures | str) -> HardwareFigures:
    """Look a preset's name up; figures are returned as they are.

    Raises:
        ValueError: for an unknown name.
    """
    if isinstance(hardware, HardwareFigures):
        return hardware
    if hardware not in HARDWARE_PRESETS:
        raise ValueError(
            f"There are no hardware figures called {hardware!r}; known are {', '.join(HARDWARE_PRESETS)}, "
            f"or give your own HardwareFigures."
        )
    return HARDWARE_PRESETS[hardware]
