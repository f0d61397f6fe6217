"""The part of ``WLBTrainer`` that takes micro-batches to the device, without waiting for what is computed there."""

from __future__ import annotations

from typing import Any

import torch

from hf_wlb.attention import check_document_attention
from hf_wlb.trainer.attention import TrainerAttention
from hf_wlb.trainer.tokens import Vocabulary
from hf_wlb.trainer.training_loss import TrainingLoss


class PlannedInputs(TrainingLoss):
    """``Trainer`` whose micro-batches bring their plan; ``WLBTrainer`` sets the attributes."""

    _attention: TrainerAttention
    _vocabulary: Vocabulary

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """To the device, with the plan as arguments of the model's forward.

        Raises:
            ValueError: On every rank that has it so, before any of them waits for another: the model would not keep
                documents apart, since something has switched its attention.
        """
        inputs = dict(inputs)
        if "cu_seq_lens_q" in inputs or "wlb_shard" in inputs:
            check_document_attention(self._causal_lm)
        self._vocabulary.check(inputs, self._causal_lm, labels=self.compute_loss_func is None)
        plan = self._attention.plan_of(inputs, training=self._causal_lm.training)
        return {**super()._prepare_inputs(inputs), **plan}

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's waits until the device is done with all micro-batches before; from pinned memory nothing must."""
        if isinstance(data, torch.Tensor) and data.is_pinned():
            data = data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)
