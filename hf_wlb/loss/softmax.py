"""Softmax over the logits of a chunk of tokens: its sums and the gradient, between the loss's matrix products.

One operation after the other in one buffer, or as two compiled kernels. The latter read every logit three times
(largest, sums, gradient) and write it once; the former read and write it more than ten times, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Compiler = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Compiles a function for tensors of any size; what it is called is for error messages."""


class Softmax(Protocol):
    """Over a chunk's logits [tokens, words]; to be asked in this order, each once."""

    words: int

    def largest(self) -> torch.Tensor:
        """Each token's largest logit, after the softcap: [tokens, 1]."""

    def sums(self, largest: torch.Tensor, row: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """See ``softmax_sums``."""

    def slope(self, total: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """See ``logit_gradient``."""


class InPlaceSoftmax:
    """One pass after the other in one buffer: logits -> logits - largest -> exponentials -> gradient.

    Args:
        logits: [tokens, words].
        softcap: See ``linear_cross_entropy``.
        smoothing: Likewise.
        dtype: To compute in.
    """

    def __init__(self, logits: torch.Tensor, softcap: float | None, smoothing: float, dtype: torch.dtype) -> None:
        self.words = logits.shape[1]
        self._smoothing, self._dtype = smoothing, dtype
        self._bent: torch.Tensor | None = None
        if softcap is not None:
            self._bent = logits.to(dtype).div_(softcap).tanh_()
            logits = self._bent * softcap
        self._buffer = logits

    def largest(self) -> torch.Tensor:
        """See ``Softmax``."""
        return self._buffer.amax(-1, keepdim=True).to(self._dtype)

    def sums(self, largest: torch.Tensor, row: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """See ``softmax_sums``; keeps the exponentials."""
        scores = self._buffer - largest  # in the type of largest
        self._target = torch.arange(len(row), device=row.device), row, here
        sums = [scores[self._target[:2]].masked_fill(~here, 0)]
        if self._smoothing:
            sums.append(scores.sum(-1))
        self._buffer = scores.exp_()
        sums.append(self._buffer.sum(-1))
        return torch.stack(sums)

    def slope(self, total: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """See ``logit_gradient``."""
        token, row, here = self._target
        slope = self._buffer.mul_((counted / total)[:, None])
        slope[token, row] -= here.to(self._dtype) * (1 - self._smoothing)
        if self._smoothing:
            slope.sub_(counted.to(self._dtype)[:, None], alpha=self._smoothing / size)
        if self._bent is not None:
            slope.mul_(self._bent.square_().neg_().add_(1))
        return slope


class CompiledPieces:
    """``softmax_sums`` and ``logit_gradient``, compiled.

    Args:
        compiler: What compiles them.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.softmax_sums = compiler(softmax_sums, "the loss's softmax")
        self.logit_gradient = compiler(logit_gradient, "the loss's gradient")


class CompiledSoftmax:
    """The same by compiled kernels, which compute the exponentials twice instead of keeping them.

    Args:
        pieces: The kernels.
        logits: [tokens, words].
        softcap: See ``linear_cross_entropy``.
        smoothing: Likewise.
        dtype: To compute in.
        slope_dtype: Of the gradient; None for ``dtype``.
    """

    def __init__(
        self,
        pieces: CompiledPieces,
        logits: torch.Tensor,
        softcap: float | None,
        smoothing: float,
        dtype: torch.dtype,
        slope_dtype: torch.dtype | None = None,
    ) -> None:
        self.words = logits.shape[1]
        self._pieces, self._logits = pieces, logits
        self._softcap, self._smoothing = softcap, smoothing
        self._dtype, self._slope_dtype = dtype, slope_dtype or dtype

    def largest(self) -> torch.Tensor:
        """See ``Softmax``; the softcap never falls where logits rise."""
        return capped(self._logits.amax(-1, keepdim=True), self._softcap, self._dtype)

    def sums(self, largest: torch.Tensor, row: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """See ``softmax_sums``."""
        self._asked = largest, row, here
        sums: torch.Tensor = self._pieces.softmax_sums(
            self._logits, largest, row, here, self._softcap, bool(self._smoothing)
        )
        return sums

    def slope(self, total: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """See ``logit_gradient``."""
        largest, row, here = self._asked
        share = self._smoothing / size
        slope: torch.Tensor = self._pieces.logit_gradient(
            self._logits, largest, total, counted, row, here, self._softcap, self._smoothing, share, self._slope_dtype
        )
        return slope


def softmax_sums(
    logits: torch.Tensor,
    largest: torch.Tensor,
    row: torch.Tensor,
    here: torch.Tensor,
    softcap: float | None,
    smoothed: bool,
) -> torch.Tensor:
    """What the loss of every token is made of, over the words that are here.

    Args:
        logits: [tokens, words], before the softcap.
        largest: [tokens, 1], each token's largest logit, after the softcap; its type is computed in.
        row: int64 [tokens], the column of each token's target, or any other if it is not here.
        here: bool [tokens], whether the target is among these words.
        softcap: See ``linear_cross_entropy``.
        smoothed: Whether the sum of all logits is wanted.

    Returns:
        [2 or 3, tokens]: the target's logit less ``largest`` (0 where it is not here); the sum of all of these, if
        ``smoothed``; the sum of their exponentials.

    >>> first = torch.zeros(1, dtype=torch.int64)
    >>> softmax_sums(torch.tensor([[0.0, 2.0]]), torch.tensor([[2.0]]), first, first == 0, None, False).tolist()
    [[-2.0], [1.135...]]
    """
    scores = capped(logits, softcap, largest.dtype) - largest
    target = scores.gather(1, row[:, None])[:, 0].masked_fill(~here, 0)
    powers = scores.exp().sum(-1)
    return torch.stack([target, scores.sum(-1), powers] if smoothed else [target, powers])


def logit_gradient(
    logits: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    counted: torch.Tensor,
    row: torch.Tensor,
    here: torch.Tensor,
    softcap: float | None,
    smoothing: float,
    share: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the sum of the tokens' losses with respect to logits before the softcap.

    Args:
        logits: As are ``largest``, ``row``, ``here`` and ``softcap``, see ``softmax_sums``.
        largest: Likewise.
        total: [tokens], the sum of exponentials over the whole vocabulary.
        counted: bool [tokens], whether a token has a target.
        row: Likewise.
        here: Likewise.
        softcap: Likewise.
        smoothing: See ``linear_cross_entropy``.
        share: What every word of the vocabulary has of ``smoothing``.
        dtype: Of the result; it is computed in the type of ``largest``.

    Returns:
        [tokens, words].

    >>> first, yes = torch.zeros(1, dtype=torch.int64), torch.tensor([True])
    >>> given = torch.zeros(1, 4), torch.zeros(1, 1), torch.tensor([4.0]), yes, first, yes
    >>> logit_gradient(*given, softcap=None, smoothing=0.0, share=0.0, dtype=torch.float32).tolist()
    [[-0.75, 0.25, 0.25, 0.25]]
    """
    bent = capped(logits, softcap, largest.dtype)
    slope = (bent - largest).exp() * (counted / total)[:, None]
    words = torch.arange(logits.shape[1], device=logits.device)
    slope = slope - ((words == row[:, None]) & here[:, None]).to(slope.dtype) * (1 - smoothing)
    if smoothing:
        slope = slope - counted.to(slope.dtype)[:, None] * share
    if softcap is not None:
        slope = slope * (1 - (bent / softcap) ** 2)
    return slope.to(dtype)


def capped(logits: torch.Tensor, softcap: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Logits in a type, bent by the softcap if there is one."""
    wide = logits.to(dtype)
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)
