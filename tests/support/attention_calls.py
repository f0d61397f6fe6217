"""Calls of attention kernels by segments: random inputs, what a kernel makes of them, and what the oracle says."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tests.support.oracle import dense_segments


@dataclass(frozen=True)
class Call:
    """Segments given by their lengths, the shape of the heads, and what shapes the scores."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    value_size: int = 8
    scaling: float = 0.3
    sliding_window: int | None = None
    softcap: float | None = None

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        return list(accumulate(self.q_lengths, initial=0)), list(accumulate(self.k_lengths, initial=0))

    @property
    def options(self) -> dict[str, Any]:
        return {"scaling": self.scaling, "sliding_window": self.sliding_window, "softcap": self.softcap}

    def unread(self) -> torch.Tensor:
        """Which keys lie in segments without queries."""
        flags = torch.tensor([queries == 0 for queries in self.q_lengths], dtype=torch.bool)
        return flags.repeat_interleave(torch.tensor(self.k_lengths, dtype=torch.long))

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Random q, k, v and dout in float64, of values that ``dtype`` can hold."""
        generator = torch.Generator().manual_seed(sum(self.k_lengths) + self.heads)
        queries, keys = sum(self.q_lengths), sum(self.k_lengths)
        shapes = {
            "q": (queries, self.heads, self.size),
            "k": (keys, self.kv_heads, self.size),
            "v": (keys, self.kv_heads, self.value_size),
            "dout": (queries, self.heads, self.value_size),
        }
        return {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()
            for name, shape in shapes.items()
        }


def expected_of(call: Call, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and gradients by the dense oracle in float64."""
    q, k, v = (inputs[name].clone().requires_grad_() for name in ("q", "k", "v"))
    out, lse = dense_segments(q, k, v, *call.bounds, **call.options)
    (out * inputs["dout"]).sum().backward()
    gradients = {f"d{name}": tensor.grad for name, tensor in (("q", q), ("k", k), ("v", v))}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def outcome_of(
    kernel: Any,
    call: Call,
    inputs: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    deterministic: bool = False,
) -> dict[str, torch.Tensor]:
    """The same by a kernel, in ``dtype``."""
    from hf_wlb.attention.kernels import AttentionOptions
    from hf_wlb.attention.segments import Segments

    q, k, v, dout = (inputs[name].to(device, dtype) for name in ("q", "k", "v", "dout"))
    segments = Segments.from_lengths(call.q_lengths, call.k_lengths, device)
    options = AttentionOptions(**call.options, deterministic=deterministic)
    out, lse = kernel.forward(q, k, v, segments, options)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, segments, options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
