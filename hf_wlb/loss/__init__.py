"""The loss without whole logits: chunked or fused linear cross-entropy inside unmodified Transformers models."""

from hf_wlb.loss.check import check_head_loss
from hf_wlb.loss.chunked import LossFunction, VocabularySlices, linear_cross_entropy
from hf_wlb.loss.head import HeadLoss, plain_head, unusual_head
from hf_wlb.loss.liger import liger_cross_entropy
from hf_wlb.loss.selection import FUSED_LOSSES, choose_fused_loss

__all__ = [
    "FUSED_LOSSES",
    "HeadLoss",
    "LossFunction",
    "VocabularySlices",
    "check_head_loss",
    "choose_fused_loss",
    "liger_cross_entropy",
    "linear_cross_entropy",
    "plain_head",
    "unusual_head",
]
