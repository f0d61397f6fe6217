"""Refusing models whose loss would be another one if it were computed from hidden states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_wlb.loss.chunked import linear_cross_entropy
from hf_wlb.loss.head import HeadLoss, plain_head, softcap_of
from hf_wlb.sharding import IGNORE_INDEX

# Logits of a fresh model are so small that a softcap hardly bends them, so hidden states are stretched until one is 30
# (or as large as the softcap that is known: much beyond it nothing has a gradient).
_LARGEST_LOGIT = 30.0
_TOKENS = [1, 2, 1, 2, 1]
_COUNTED = [False, True, False, True, True]
_NUMBER = 7


def check_head_loss(model: PreTrainedModel) -> None:
    """Refuses a model that ``HeadLoss`` would give another loss, by three forward passes over five tokens.

    For whole models: before parameters are split or sharded. Leaves no gradients.

    Raises:
        ValueError: If the head is not plain, or the model does more with logits than multiply them and cap them by
            ``final_logit_softcapping``; names ``fused_loss="off"``.
    """
    head = plain_head(model)
    _check_head(model, head)
    training = model.training
    model.eval()
    try:
        softcap = softcap_of(model)
        stretch = _Stretch(head, min(_LARGEST_LOGIT, softcap or _LARGEST_LOGIT))
        labels = _unlikely_labels(model, head, stretch)
        own_loss, own_gradient = _loss_and_gradient(model, head, stretch, labels)
        reached: list[torch.Tensor] = []

        def listening(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            reached.append(hidden.detach())
            return linear_cross_entropy(hidden, *args, **kwargs)

        head_loss = HeadLoss(model, listening)
        try:
            with head_loss.enabled():
                loss, gradient = _loss_and_gradient(model, head_loss.stand_in, stretch, labels)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"{_refusal(model)} ({type(error).__name__}: {error})") from error
    finally:
        model.train(training)
    multiplied = not torch.equal(reached[0], stretch.hidden.flatten(0, 1))
    # In half precision a factor rounds hidden states otherwise than logits, and models cap logits in that precision;
    # else both sides see the very same logits.
    half = head.weight.dtype.itemsize < 4
    rough = half and (multiplied or softcap is not None)
    loss_tolerance, gradient_tolerance = (3e-2, 0.25) if rough else (1e-4, 1e-2 if half else 1e-3)
    if not math.isclose(loss, own_loss, rel_tol=loss_tolerance, abs_tol=loss_tolerance):
        raise ValueError(f"{_refusal(model)}: in a trial it is {loss:.4f} instead of {own_loss:.4f}")
    if (gradient - own_gradient).norm() > gradient_tolerance * own_gradient.norm():
        raise ValueError(f"{_refusal(model)}: in a trial hidden states have another gradient")
    if multiplied and head._parameters["bias"] is not None:
        raise ValueError(
            f"{type(model).__name__} multiplies logits that have a bias, which cannot be done to hidden states "
            "instead. Set fused_loss='off'."
        )


def _check_head(model: PreTrainedModel, head: torch.nn.Linear) -> None:
    name = type(model).__name__
    if head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__:
        raise ValueError(
            f"the head of {name} has hooks or a forward of its own, which would not be called where its loss is "
            "computed without whole logits. Set fused_loss='off', or remove them."
        )
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"the loss_function of {name} is not Transformers' own for causal language models, so it cannot be "
            "computed without whole logits. Set fused_loss='off'."
        )


def _refusal(model: PreTrainedModel) -> str:
    return (
        f"the loss of {type(model).__name__} cannot be computed from hidden states, without whole logits; it does more "
        "with logits than multiply and cap them (set fused_loss='off' to compute it from whole logits)"
    )


class _Stretch:
    """Multiplies the head's input so that logits are large, and makes it the leaf of a graph."""

    def __init__(self, head: torch.nn.Linear, largest_logit: float) -> None:
        self._head = head
        self._largest_logit = largest_logit
        self._factor: float | None = None
        self.hidden = torch.empty(0)

    def __call__(self, module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = given[0].detach()
        if self._factor is None:
            largest = float(linear(hidden, self._head.weight.detach()).abs().max())
            self._factor = self._largest_logit / largest if largest > 0 else 1.0
        leaf = (hidden * self._factor).requires_grad_()
        self.hidden = leaf
        return (leaf, *given[1:])


def _unlikely_labels(model: PreTrainedModel, head: torch.nn.Linear, stretch: _Stretch) -> torch.Tensor:
    """[1, tokens]: of tokens counted the first has itself as label, the others one of a middling logit.

    A label that a trained model is sure of has a loss and a gradient of next to nothing: rounding would be compared.
    """
    tokens = torch.tensor([_TOKENS], device=model.device)
    with head.register_forward_pre_hook(stretch), torch.no_grad():
        logits = _trial(model, tokens).logits
    labels = tokens.masked_fill(~torch.tensor([_COUNTED], device=model.device), IGNORE_INDEX)
    if logits is not None:  # of a model that gives any with its loss
        middling = pad(logits[:, :-1].float().median(dim=-1).indices.to(model.device), (1, 0))
        later = torch.tensor([_COUNTED], device=model.device)
        later[:, : _COUNTED.index(True) + 1] = False
        labels = torch.where(later, middling, labels)
    return labels


def _loss_and_gradient(
    model: PreTrainedModel, module: torch.nn.Module, stretch: _Stretch, labels: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Of a trial, in which ``stretch`` makes the input of ``module``; the gradient is that input's."""
    with module.register_forward_pre_hook(stretch), torch.enable_grad():
        output = _trial(model, labels)
        (gradient,) = torch.autograd.grad(output.loss, [stretch.hidden])
    return float(output.loss.detach()), gradient.float()


def _trial(model: PreTrainedModel, labels: torch.Tensor) -> Any:
    return model(
        input_ids=torch.tensor([_TOKENS], device=model.device),
        labels=labels,
        num_items_in_batch=torch.tensor(_NUMBER, device=model.device),
        use_cache=False,
    )
