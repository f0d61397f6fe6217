"""The loss of unmodified Transformers models, from hidden states instead of logits.

A causal language model ends in ``logits = self.lm_head(hidden)``, perhaps a factor, and ``self.loss_function(logits,
labels, ...)``. While the loss is computed, a stand-in takes the head's place that hands hidden states through, and ours
that of the loss function, which applies the head itself. A factor in between (Cohere, Granite) then multiplies hidden
states instead of logits, which is the same; a softcap (Gemma 2) is taken out and done in the loss.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_wlb.loss.chunked import LossFunction, VocabularySlices, linear_cross_entropy
from hf_wlb.sharding import IGNORE_INDEX

_SOFTCAP = "final_logit_softcapping"
_NO_OWN = object()


class HeadLoss:
    """Computes a causal language model's loss without whole logits, inside ``enabled()``.

    The model's output then has the loss and no logits. Calls without ``labels`` are left as they are, and so is
    everything outside the block: generation and predictions have their logits.

    May be made before or after parameters are split or sharded, and works inside DDP and FSDP2: the head's weight is
    looked up when the loss is computed. It must be whole then, or this process's slice of the vocabulary: under FSDP2
    the head belongs to the root's parameters, and is not sharded by itself.

    Args:
        model: The causal language model itself, without wrappers; ``check_head_loss`` says whether it can be.
        function: What computes the loss, see ``choose_fused_loss``.
        label_smoothing: As Trainer's ``label_smoothing_factor``.
        vocabulary: Where tensor parallelism splits the head's rows. It sums the gradient of the hidden states, so
            nothing else may.

    Raises:
        ValueError: If the head is not a plain linear layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        function: LossFunction = linear_cross_entropy,
        *,
        label_smoothing: float = 0.0,
        vocabulary: VocabularySlices | None = None,
    ) -> None:
        self.model = model
        self.function = function
        self.label_smoothing = label_smoothing
        self.vocabulary = vocabulary
        self.head = plain_head(model)
        self.stand_in = _StandIn(self.head)
        self._parent, self._name = _place_of(model, self.head)
        self._labels_at = list(inspect.signature(type(model).forward).parameters).index("labels") - 1
        self._softcap: float | None = None
        self._calls = 0
        self._enabled = False
        self._undo = contextlib.ExitStack()
        self._standing_in = False

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Inside the block the model's calls with labels compute their loss this way; may be nested."""
        if self._enabled:
            yield
            return
        handles = (
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        )
        self._enabled = True
        try:
            yield
        finally:
            self._enabled = False
            for handle in handles:
                handle.remove()
            self._give_back()  # if the model's forward raised

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positional = args[self._labels_at] if len(args) > self._labels_at else None
        if kwargs.get("labels", positional) is not None:
            self._stand_in()

    def _stand_in(self) -> None:
        model, modules = self.model, self._parent._modules
        if modules.get(self._name) is not self.head:
            raise RuntimeError(
                f"the head of {type(model).__name__} was replaced after its loss had been set up, as "
                "resize_token_embeddings does. Resize before the trainer is made: make a new WLBTrainer of this model "
                "(or a new HeadLoss, in a loop of your own)."
            )
        self._calls, self._standing_in = 0, True
        modules[self._name] = self.stand_in
        self._undo.callback(modules.__setitem__, self._name, self.head)
        own = model.__dict__.get("_loss_function", _NO_OWN)
        model.loss_function = self._loss
        self._undo.callback(_restore_loss_function, model, own)
        self._softcap = softcap_of(model)
        if self._softcap is not None:
            config = model.config.get_text_config()
            setattr(config, _SOFTCAP, None)
            self._undo.callback(setattr, config, _SOFTCAP, self._softcap)

    def _give_back(self) -> None:
        self._standing_in = False
        self._undo.close()

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._standing_in:
            return output
        self._give_back()
        if self._calls != 1:
            raise RuntimeError(
                f"{type(model).__name__} called its loss_function {self._calls} times in a forward pass with labels, "
                "so its loss cannot be computed without whole logits. Set fused_loss='off'."
            )
        return _without_logits(output)

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transformers' ``ForCausalLMLoss``; ``logits`` are hidden states [1, tokens, hidden size]."""
        self._calls += 1
        weight = self.head.weight
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            raise RuntimeError(
                f"the head's weight is a {type(weight).__name__} when the loss is computed: it must not be sharded "
                "apart from the model it belongs to. Set fused_loss='off', or shard the head with the root."
            )
        hidden = logits.to(self.stand_in.dtype).reshape(-1, logits.shape[-1])  # some models ask for float32 logits
        targets = pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        targets = targets.reshape(-1).to(hidden.device)
        if ignore_index != IGNORE_INDEX:
            targets = targets.masked_fill(targets == ignore_index, IGNORE_INDEX)
        total = self.function(
            hidden,
            weight,
            targets,
            bias=self.head.bias,
            softcap=self._softcap,
            label_smoothing=self.label_smoothing,
            vocabulary=self.vocabulary,
        )
        if num_items_in_batch is None:
            return total / (targets != IGNORE_INDEX).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def plain_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The model's head, if it is nothing but a linear layer.

    Raises:
        ValueError: With the reason, naming the model class.
    """
    name = type(model).__name__
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{name} names no head (get_output_embeddings() is None), so its loss cannot be computed without whole "
            "logits. Set fused_loss='off'."
        )
    kind = unusual_head(model)
    if kind is not None:
        raise ValueError(
            f"the head of {name} is a {kind} and not a plain torch.nn.Linear "
            "(an adapter on it, a copy of it or a quantized one?), so its loss cannot be computed without whole "
            "logits. Set fused_loss='off', or leave the head out of what is adapted."
        )
    return cast(torch.nn.Linear, head)


def unusual_head(model: PreTrainedModel) -> str | None:
    """What the model's head is, if it is there and no plain linear layer, as with an adapter on it or a copy of it."""
    head: Any = model.get_output_embeddings()
    if head is None or type(head) is torch.nn.Linear:
        return None
    return f"{type(head).__module__}.{type(head).__name__}"


def softcap_of(model: PreTrainedModel) -> float | None:
    """What the model caps its logits by before it computes their loss."""
    cap: float | None = getattr(model.config.get_text_config(), _SOFTCAP, None)
    return cap


class _StandIn(torch.nn.Module):
    """In the head's place: hands hidden states through and remembers their type."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.__dict__["_head"] = head  # not as a part of this module
        self.dtype: torch.dtype | None = None

    def __getattr__(self, name: str) -> Any:  # some models look at the head's weight
        return getattr(self.__dict__["_head"], name)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.dtype = hidden.dtype
        return hidden


def _place_of(model: torch.nn.Module, head: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is head:
                return parent, name
    raise ValueError(f"the head of {type(model).__name__} is none of its modules. Set fused_loss='off'.")


def _restore_loss_function(model: PreTrainedModel, own: Any) -> None:
    if own is _NO_OWN:
        del model.__dict__["_loss_function"]
    else:
        model.loss_function = own


def _without_logits(output: Any) -> Any:
    """What stands there are hidden states; nobody shall take them for logits."""
    if isinstance(output, ModelOutput):
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return (*output[:1], *output[2:])
