"""Cross-entropy of a linear layer's outputs without ever holding all of them.

Micro-batches are long and vocabularies large: the logits of 128K tokens over 128K words are 64 GiB in float32. Here
they exist for a chunk of tokens at a time. Each chunk's gradients are computed right away, in forward, while its logits
are there; backward only scales them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from hf_wlb.loss.softmax import CompiledPieces, CompiledSoftmax, InPlaceSoftmax, Softmax
from hf_wlb.sharding import IGNORE_INDEX

# Logits that a chunk holds by default: enough rows for matrix products at full speed, 512 MiB in float32 on a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 24}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 27
_CHUNK_ELEMENTS_COMPILED = 1 << 28  # which never has them in float32


class VocabularySlices(Protocol):
    """A vocabulary whose rows are split over processes, in equal and adjoining parts."""

    @property
    def first_row(self) -> int:
        """This process's first row in the whole vocabulary."""

    @property
    def size(self) -> int:
        """Rows of the whole vocabulary."""

    def max_(self, tensor: torch.Tensor) -> None:
        """Makes every element the largest of all processes, in place."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Makes every element the sum over all processes, in place."""


class LossFunction(Protocol):
    """What computes the loss from hidden states: ``linear_cross_entropy`` or another one of its signature."""

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        softcap: float | None = None,
        label_smoothing: float = 0.0,
        vocabulary: VocabularySlices | None = None,
    ) -> torch.Tensor:
        """See ``linear_cross_entropy``."""


@dataclass(frozen=True)
class _Call:
    """What does not take part in autograd.

    ``wanted`` says which of hidden, weight and bias need a gradient, ``slope_dtype`` the type in which compiled pieces
    shall give that of the logits; None for the one it is computed in.
    """

    softcap: float | None
    smoothing: float
    chunk_tokens: int
    vocabulary: VocabularySlices | None
    first_row: int
    size: int
    wanted: tuple[bool, ...]
    pieces: CompiledPieces | None
    slope_dtype: torch.dtype | None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
    vocabulary: VocabularySlices | None = None,
    pieces: CompiledPieces | None = None,
) -> torch.Tensor:
    """Sum of the token losses of ``cross_entropy(hidden @ weight.T + bias, labels)``, one chunk of tokens at a time.

    Matrix products run in the type of ``hidden`` (under autocast, in its type), the softmax and the sums over tokens in
    float32. Gradients of the weight are accumulated in float32 and kept in the weight's type until backward.

    Args:
        hidden: [tokens, hidden size].
        weight: [vocabulary, hidden size]; with ``vocabulary`` this process's rows.
        labels: int64 [tokens], each the next token's; -100 where there is none.
        bias: [vocabulary], or this process's part.
        softcap: Logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        label_smoothing: Share of each target that is spread evenly over the vocabulary.
        chunk_tokens: Tokens whose logits exist at once; by default 16 million logits on a CPU, 128 million elsewhere,
            256 million there with ``pieces``.
        vocabulary: Where the vocabulary is split over processes. All of them must call this together, with the same
            hidden states and labels; each gets the whole loss, the gradient of its own rows, and the gradient of the
            hidden states summed over all of them.
        pieces: What lies between the matrix products, compiled; None to go one operation after the other.

    Returns:
        Scalar, float32 (float64 for float64 input); 0 where every label is -100.

    Raises:
        ValueError: If shapes, types or labels do not fit.

    Two tokens, the second without a target:
        >>> hidden, weight = torch.tensor([[1.0, 0.0], [5.0, 5.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> float(linear_cross_entropy(hidden, weight, torch.tensor([0, -100])))  # log(e^2 + e^0) - 2
        0.1269...
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    elif hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; without autocast they must be of one type"
        )
    _check_shapes(hidden, weight, labels, bias)
    size = weight.shape[0] if vocabulary is None else vocabulary.size
    _check_labels(labels, size)
    wanted = tuple(_wants_gradient(tensor) for tensor in (hidden, weight, bias))
    call = _Call(
        softcap=softcap,
        smoothing=label_smoothing,
        chunk_tokens=_chunk_tokens(chunk_tokens, weight, compiled=pieces is not None),
        vocabulary=vocabulary,
        first_row=0 if vocabulary is None else vocabulary.first_row,
        size=size,
        wanted=wanted,
        pieces=pieces,
        slope_dtype=hidden.dtype if hidden.is_cuda and not wanted[2] else None,  # as ``_Gradients.add`` takes it
    )
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, call)  # type: ignore[no-untyped-call]
    return loss


def _wants_gradient(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _chunk_tokens(asked: int | None, weight: torch.Tensor, *, compiled: bool) -> int:
    if asked is None:
        elsewhere = _CHUNK_ELEMENTS_COMPILED if compiled else _CHUNK_ELEMENTS_ELSEWHERE
        return max(1, _CHUNK_ELEMENTS.get(weight.device.type, elsewhere) // weight.shape[0])
    if asked < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {asked}")
    return asked


def _check_shapes(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None) -> None:
    fits = hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or labels.shape != hidden.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [tuple(tensor.shape) for tensor in (hidden, weight, labels)]
        raise ValueError(
            "hidden must be [tokens, hidden size], weight [vocabulary, hidden size], labels [tokens] and bias "
            f"[vocabulary], got {shapes[0]}, {shapes[1]}, {shapes[2]} and "
            f"{None if bias is None else tuple(bias.shape)}"
        )


def _check_labels(labels: torch.Tensor, size: int) -> None:
    """Without waiting for a GPU, which then fails later, and with torch's words."""
    fits = (((labels >= 0) & (labels < size)) | (labels == IGNORE_INDEX)).all()
    if labels.device.type != "cpu":
        torch._assert_async(fits, f"labels must be {IGNORE_INDEX} or from 0 to {size - 1}")
    elif not fits:
        raise ValueError(
            f"labels must be {IGNORE_INDEX} or from 0 to {size - 1} (a vocabulary of {size}), got values from "
            f"{int(labels.min())} to {int(labels.max())}"
        )


class _ChunkedLoss(torch.autograd.Function):
    """See ``linear_cross_entropy``; saves gradients only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(hidden.dtype)  # a copy only under autocast
            head_bias = None if bias is None else bias.to(hidden.dtype)
            into = _Gradients.empty(hidden, weight, bias, call.wanted)
            for rows in _chunks(hidden.shape[0], call.chunk_tokens):
                logits = linear(hidden[rows], head, head_bias)
                losses, slope = _losses_and_slope(logits, labels[rows], call, wide)
                del logits
                total += losses
                if slope is not None:
                    into.add(rows, slope, hidden, head)
            if into.hidden is not None and call.vocabulary is not None:
                call.vocabulary.sum_(into.hidden)
        ctx.save_for_backward(
            into.hidden,
            None if into.weight is None else into.weight.to(weight.dtype),
            None if into.bias is None or bias is None else into.bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*(None if saved is None else _scaled(saved, upstream) for saved in ctx.saved_tensors), None, None)


def _chunks(tokens: int, most: int) -> Iterator[slice]:
    """As few as possible, and about equal."""
    if not tokens:
        return
    size = -(-tokens // -(-tokens // most))
    for first in range(0, tokens, size):
        yield slice(first, min(first + size, tokens))


def _losses_and_slope(
    logits: torch.Tensor, labels: torch.Tensor, call: _Call, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of a chunk's losses, and d(sum) / d(logits), where it is wanted."""
    counted = labels != IGNORE_INDEX
    row = labels - call.first_row
    here = counted & (row >= 0) & (row < logits.shape[1])
    softmax: Softmax
    if call.pieces is None:
        softmax = InPlaceSoftmax(logits, call.softcap, call.smoothing, wide)
    else:
        softmax = CompiledSoftmax(call.pieces, logits, call.softcap, call.smoothing, wide, call.slope_dtype)
    del logits
    largest = softmax.largest()
    if call.vocabulary is not None:
        call.vocabulary.max_(largest)
    row = row.clamp(0, softmax.words - 1)
    sums = softmax.sums(largest, row, here)
    if call.vocabulary is not None:
        call.vocabulary.sum_(sums)
    target, total = sums[0], sums[-1]
    losses = total.log() - (1 - call.smoothing) * target
    if call.smoothing:
        losses = losses - call.smoothing / call.size * sums[1]
    loss = losses.masked_fill(~counted, 0).sum()
    return loss, softmax.slope(total, counted, call.size) if any(call.wanted) else None


@dataclass(frozen=True)
class _Gradients:
    """Of the loss's sum, while chunks are added; None where it is not wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def empty(
        cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
    ) -> _Gradients:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return cls(
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None,
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None,
            torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None,
        )

    def add(self, rows: slice, slope: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> None:
        """Takes one chunk in; ``slope`` [tokens of the chunk, vocabulary]."""
        narrow = slope.to(hidden.dtype)
        if self.hidden is not None:
            torch.mm(narrow, head, out=self.hidden[rows])
        if self.weight is not None:
            if hidden.is_cuda and narrow.dtype != self.weight.dtype:  # tensor cores add up in float32 by themselves
                torch.addmm(self.weight, narrow.t(), hidden[rows], out_dtype=self.weight.dtype, out=self.weight)
            else:
                self.weight.addmm_(slope.t(), hidden[rows].to(slope.dtype))
        if self.bias is not None:
            self.bias.add_(slope.sum(0))


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The product, rounded once: a factor of no dimensions would be rounded to bfloat16 before."""
    factor = factor.reshape([1] * gradient.ndim)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient))
