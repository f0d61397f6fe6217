"""The one signature that all attention kernels share.

Tensors lie as tokens, heads, head size: ``q`` [queries, heads, head size], ``k`` [keys, KV heads, head size], ``v``
[keys, KV heads, value head size]. KV heads divide heads and are never repeated: query head ``h`` reads KV head
``h // (heads // KV heads)``. The log-sum-exp ``lse`` is [heads, queries], natural logarithm, float32 (float64 for
float64 inputs).

Attention sinks need no kernel of their own: with sink ``s``, ``out * sigmoid(lse - s)`` and ``logaddexp(lse, s)`` are
what the softmax with the sink gives, and ``backward`` gives its gradients when it gets them for ``out`` and ``lse``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from hf_wlb.attention.segments import Segments

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk and dv."""


@dataclass(frozen=True)
class AttentionOptions:
    """What shapes the scores of a call.

    Attributes:
        scaling: Factor on the scores.
        sliding_window: Tokens that a query sees, itself included; None for all.
        softcap: Scores become ``softcap * tanh(scaling * score / softcap)``; None for as they are.
        deterministic: Whether ``backward`` must give the same bits every time.

    Raises:
        ValueError: A window below 1 or a softcap that is not above 0.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window counts the query itself and must be at least 1, not {self.sliding_window}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, not {self.softcap}; None leaves scores as they are")


@dataclass(frozen=True)
class KernelRequest:
    """What a model asks of a kernel: enough to say beforehand whether the kernel can.

    Attributes:
        device_type: "cuda", "cpu", ...
        dtype: Of q, k and v.
        head_size: Of queries and keys.
        value_head_size: Of values.
        sliding_window: Whether some layer has one.
        softcap: Whether some layer has one.
        deterministic: Whether gradients must be the same bits every time.
        grouped: Whether several query heads share a KV head.
    """

    device_type: str
    dtype: torch.dtype
    head_size: int
    value_head_size: int
    sliding_window: bool = False
    softcap: bool = False
    deterministic: bool = False
    grouped: bool = True

    def __str__(self) -> str:
        sizes = f"head size {self.head_size}"
        if self.value_head_size != self.head_size:
            sizes += f" and value head size {self.value_head_size}"
        wishes = {
            "sliding window": self.sliding_window,
            "softcap": self.softcap,
            "deterministic gradients": self.deterministic,
        }
        named = "".join(f", {wish}" for wish, wanted in wishes.items() if wanted)
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device_type}, {sizes}{named}"


class AttentionKernel(ABC):
    """Exact attention of segments, forward and backward apart, outside autograd.

    ``forward`` and ``backward`` trust that ``refusal`` had nothing to say about what they are called with.
    """

    #: What a user calls it by.
    name: str
    #: Whether the first call of a kind takes seconds, see ``warm_up``.
    compiles_at_first_use: bool = False

    def missing(self) -> str | None:
        """Why it cannot be used on this machine at all (a phrase like "x is not installed"), or None."""
        return None

    @abstractmethod
    def refusal(self, request: KernelRequest) -> str | None:
        """Why it cannot do what is asked, a phrase that follows its name ("has no softcap"), or None."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of every segment.

        Args:
            q: [queries, heads, head size].
            k: [keys, KV heads, head size].
            v: [keys, KV heads, value head size].
            segments: Which queries see which keys.
            options: What shapes the scores.
            out: Contiguous memory for the output; None for new memory.

        Returns:
            The output [queries, heads, value head size] and the log-sum-exp [heads, queries].
        """

    @abstractmethod
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        options: AttentionOptions,
        into: Gradients | None = None,
    ) -> Gradients:
        """Gradients of ``forward``, from its results.

        Args:
            dout: Gradient of the output, shaped like it.
            q: As in ``forward``, like k, v, segments and options.
            k: See q.
            v: See q.
            out: What ``forward`` gave.
            lse: What ``forward`` gave with it.
            segments: See q.
            options: See q.
            into: Contiguous memory for dq, dk and dv; None for new memory.

        Returns:
            dq, dk and dv, shaped and typed like q, k and v. Keys of segments without queries get exactly 0.
        """
