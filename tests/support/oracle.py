"""What is right, computed slowly and independently: dense attention in float64, and documents run one at a time.

Nothing here is packed, planned or imported from hf_wlb.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import log_softmax

IGNORED = -100


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| in the L2 norm; the absolute error where nothing is expected."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    scale = float(expected.norm())
    return float((found - expected).norm()) / (scale if scale > 0 else 1.0)


def worst_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of tensors by name.

    A tensor that is all but zero in exact arithmetic (a key's bias) is measured against the largest one.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    floor = 1e-9 * max(float(tensor.double().norm()) for tensor in expected.values())
    worst = 0.0
    for name, tensor in expected.items():
        if float(tensor.double().norm()) > floor:
            worst = max(worst, relative_error(found[name], tensor))
        else:
            assert float(found[name].double().norm()) <= 1e3 * floor, name
    return worst


# ---- attention ----


def dense_attention(
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
    """Attend with one mask over all tokens and a softmax written out; shapes as in ``attend_documents``."""
    tokens, heads = query.shape[2], query.shape[1]
    repeats = heads // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    document, position = torch.empty(tokens, dtype=torch.long), torch.arange(tokens)
    for number, (first, last) in enumerate(pairwise(boundaries)):
        document[first:last] = number
    seen = (document[:, None] == document[None]) & (position[:, None] >= position[None])
    if sliding_window is not None:
        seen &= position[:, None] - position[None] < sliding_window
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    powers = torch.where(seen, scores, -torch.inf)
    largest = powers.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.reshape(1, -1, 1, 1))
    powers = torch.exp(powers - largest)
    total = powers.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.reshape(1, -1, 1, 1) - largest)
    return (powers / total) @ value


def dense_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: Sequence[int],
    key_bounds: Sequence[int],
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [queries, heads, value head size] and log-sum-exp [heads, queries] of segments, with one dense mask.

    Shapes as in ``AttentionKernel.forward``. In every segment the queries are the last of the keys.
    """
    (queries, heads, _), keys = query.shape, key.shape[0]
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for (first, last), (start, stop) in zip(pairwise(query_bounds), pairwise(key_bounds), strict=True):
        for row in range(first, last):
            newest = stop - (last - row)  # the key of this query's own token
            seen[row, (start if sliding_window is None else max(start, newest - sliding_window + 1)) : newest + 1] = (
                True
            )
    repeats = heads // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(heads, queries, 1)], -1)
    largest = scores.detach().amax(-1, keepdim=True) if scores.numel() else scores.new_zeros(heads, queries, 1)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    output = torch.einsum("hqk,khd->qhd", (powers / total)[..., :keys], value)
    return output, (total.log() + largest)[..., 0]


# ---- models ----

Row = Sequence[int] | Mapping[str, Any]


def tokens_and_targets(row: Row) -> tuple[list[int], list[int]]:
    """A document's tokens, and each position's target: the next token, or IGNORED."""
    ids = list(row["input_ids"]) if isinstance(row, Mapping) else list(row)
    labels = list(row["labels"]) if isinstance(row, Mapping) and "labels" in row else ids
    return ids, [*labels[1:], IGNORED]


def document_loss(model: Any, row: Row, label_smoothing: float = 0.0) -> tuple[torch.Tensor, int]:
    """One document by itself: the sum of its token losses, and how many there are."""
    ids, targets = tokens_and_targets(row)
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    log_probabilities = log_softmax(logits, -1)
    total, count = logits.sum() * 0, 0
    for position, target in enumerate(targets):
        if target != IGNORED:
            own = log_probabilities[position]
            total = total - (1 - label_smoothing) * own[target] - label_smoothing * own.mean()
            count += 1
    return total, count


def in_double(model: Any, implementation: str = "eager") -> Any:
    """A copy in float64 without dropout, with one of Transformers' own attention implementations."""
    double = copy.deepcopy(model).double().eval()
    double.set_attn_implementation(implementation)
    return double


def mean_loss(model: Any, rows: Iterable[Row], label_smoothing: float = 0.0) -> torch.Tensor:
    """Sum of all token losses over their number; 0 where there is none. On the given model, with its graph."""
    found = [document_loss(model, row, label_smoothing) for row in rows]
    return sum((loss for loss, _ in found), torch.zeros(())) / max(1, sum(count for _, count in found))


def loss_and_gradients(
    model: Any, rows: Iterable[Row], label_smoothing: float = 0.0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Token mean over the documents, each run alone in float64, and the gradient of every trained parameter."""
    double = in_double(model)
    double.zero_grad()
    loss = mean_loss(double, rows, label_smoothing)
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach()), gradients_of(double)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all gradients by parameter name; zeros where a parameter got none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
