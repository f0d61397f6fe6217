"""Causal attention document by document, in plain torch.

A dense mask over a whole micro-batch of 128K tokens would need 16 GiB a head; document by document the work is what
the documents need and memory stays small. Runs on every device; on a GPU each document goes to torch's own fused
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

#: Queries that are looked at together where the fused kernel cannot be used.
BLOCK = 256


def attend_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Sequence[int],
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token attends to its own document up to itself.

    Args:
        query: [1, heads, tokens, head size].
        key: [1, KV heads, tokens, head size]; KV heads divide heads and are not repeated.
        value: [1, KV heads, tokens, value head size].
        boundaries: First token of every document and, last, the number of tokens: ascending, from 0.
        scaling: Factor on the scores, default head size ** -0.5.
        sliding_window: Tokens that a query sees, itself included; None for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sinks: [heads], a score per head that takes part in the softmax without a value.

    Returns:
        [1, heads, tokens, value head size], dtype of ``value``.

    >>> q = torch.randn(1, 4, 5, 8, dtype=torch.float64); k = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    >>> whole = attend_documents(q, k, k, [0, 3, 5])
    >>> alone = attend_documents(q[:, :, 3:], k[:, :, 3:], k[:, :, 3:], [0, 2])
    >>> torch.allclose(whole[:, :, 3:], alone)
    True
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for first, last in pairwise(boundaries):
        q, k, v = query[:, :, first:last], key[:, :, first:last], value[:, :, first:last]
        window = sliding_window if sliding_window is not None and sliding_window < last - first else None
        if window is None and softcap is None and sinks is None:
            outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True))
        else:
            outputs.append(_attend_in_blocks(q, k, v, scale, window, softcap, sinks))
    return torch.cat(outputs, dim=2)


def _attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One document with features that torch's fused kernel lacks, ``BLOCK`` queries at a time."""
    _, heads, length, head_size = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, length, head_size)
    blocks = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen_from = 0 if window is None else max(0, start - window + 1)
        keys, values = key[:, :, None, seen_from:stop], value[:, :, None, seen_from:stop]
        scores = (grouped[:, :, :, start:stop] @ keys.transpose(-1, -2)) * scale
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = _positions(start, stop, query)[:, None] - _positions(seen_from, stop, query)[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = _softmax(scores, sinks).to(value.dtype)
        blocks.append((weights @ values).reshape(1, heads, stop - start, value.shape[-1]))
    return torch.cat(blocks, dim=2)


def _positions(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, stop, device=like.device)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).reshape(1, scores.shape[1], scores.shape[2], 1, 1)
    return torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
