"""The part of ``WLBTrainer`` that computes the loss: from hidden states where nobody asks for logits."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from transformers import PreTrainedModel, Trainer

from hf_wlb.compilation import function_compiler
from hf_wlb.loss import HeadLoss, check_head_loss, choose_fused_loss, plain_head, unusual_head
from hf_wlb.parallel import ParallelMesh, ParameterLayout, VocabularyGroup
from hf_wlb.training_args import WLBTrainingArguments

logger = logging.getLogger(__name__)


def causal_lm_of(model: Any) -> PreTrainedModel:
    """Transformers' model, without PEFT's around it."""
    return cast(PreTrainedModel, model.get_base_model() if hasattr(model, "get_base_model") else model)


class TrainingLoss(Trainer):
    """``Trainer`` whose logits never exist as a whole in training; ``WLBTrainer`` sets the attributes."""

    mesh: ParallelMesh
    layout: ParameterLayout
    _head_loss: HeadLoss | None = None
    _logits_needed = False
    _loss_computed = False  # in the present step, by this class
    _unwrapped: tuple[Callable[[], Any], Callable[[], PreTrainedModel | None]] = (lambda: None, lambda: None)

    @property
    def _causal_lm(self) -> PreTrainedModel:
        # Remembered as long as the trainer has this model: Accelerate looks into installed packages' metadata every
        # time, which takes some milliseconds, and every micro-batch asks.
        wrapped, found = self._unwrapped
        model = found() if wrapped() is self.model else None
        if model is None:
            model = causal_lm_of(self.accelerator.unwrap_model(self.model))
            self._unwrapped = weakref.ref(self.model), weakref.ref(model)
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_unwrapped"}  # of weak references

    def _check_head(self, model: PreTrainedModel) -> None:
        """Refuses a head whose loss cannot be computed so, before it is split. Does not talk to other ranks."""
        args = cast(WLBTrainingArguments, self.args)
        if self.compute_loss_func is not None and args.fused_loss not in ("auto", "off"):
            raise ValueError(
                f"compute_loss_func gets logits, but fused_loss={args.fused_loss!r} computes the loss without them. "
                "Leave one of them away."
            )
        if self.compute_loss_func is not None or args.fused_loss == "off":
            return
        if _chosen_loss(args, model) != "off":
            check_head_loss(model)
        elif self.is_world_process_zero():
            vocabulary, tokens = model.config.get_text_config().vocab_size, args.packing_config(1).capacity
            logger.warning(
                "The head of %s is a %s and no plain linear layer (an adapter, a copy that is trained, or quantized): "
                "the loss is computed from whole logits, as with fused_loss='off'. Those of a micro-batch of %s tokens "
                "take up to %.1f GiB on a device, in float32, and their gradient as much.",
                *(type(model).__name__, unusual_head(model), f"{tokens:,}"),
                4 * vocabulary * tokens / self.mesh.cp_size / 2**30,
            )

    def _set_up_loss(self, model: PreTrainedModel) -> None:
        """Once each process has its part of the model."""
        args = cast(WLBTrainingArguments, self.args)
        if self.compute_loss_func is not None or not self.mesh.is_last_stage or _chosen_loss(args, model) == "off":
            return
        head = plain_head(model)
        name = next(name for name, parameter in model.named_parameters() if parameter is head.weight)
        splits = name in self.layout.tensor_shards
        dtype = args.compute_dtype or head.weight.dtype
        function = choose_fused_loss(
            args.fused_loss, args.device.type, dtype, split_vocabulary=splits, compiler=function_compiler(args)
        )
        assert function is not None
        rows = sum(self.layout.tensor_shards[name].blocks) if splits else 0
        vocabulary = VocabularyGroup(self.mesh.tp_group, rows) if splits else None
        self._head_loss = HeadLoss(model, function, label_smoothing=args.label_smoothing_factor, vocabulary=vocabulary)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; from hidden states, chunk by chunk, unless logits are to be predicted, too."""
        self._loss_computed = True
        if self._head_loss is None or self._logits_needed:
            return super().compute_loss(model, inputs, *args, **kwargs)
        smoother, self.label_smoother = self.label_smoother, None  # the fused loss smooths by itself
        try:
            with self._head_loss.enabled():
                return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.label_smoother = smoother

    def _check_own_loss(self) -> None:
        """Refuses a subclass's loss that was computed from a shard's labels by itself, after a step with one."""
        if self.mesh.cp_size == 1 or self._loss_computed or not self.mesh.is_last_stage:
            return
        raise ValueError(
            f"compute_loss of {type(self).__name__} computes a loss by itself, which is not supported with "
            f"cp_size={self.mesh.cp_size}: labels are shifted already and in a shard's order. Let it call "
            "super().compute_loss(...), or set cp_size=1."
        )

    @contextlib.contextmanager
    def _with_logits(self, needed: bool) -> Iterator[None]:
        before, self._logits_needed = self._logits_needed, needed
        try:
            yield
        finally:
            self._logits_needed = before


def _chosen_loss(args: WLBTrainingArguments, model: PreTrainedModel) -> str:
    """``fused_loss``; for ``auto`` what can be done with this head, whose loss may need whole logits."""
    return "off" if args.fused_loss == "auto" and unusual_head(model) is not None else args.fused_loss
