"""Attention inside documents: kernels, context-parallel attention and its registration with Transformers."""

from hf_wlb.attention.context import AttentionContext, KeyValueExchange, ShardTensors
from hf_wlb.attention.function import attend
from hf_wlb.attention.isolation import LayerAttention, check_isolation
from hf_wlb.attention.kernels import (
    AttentionKernel,
    AttentionOptions,
    KernelRequest,
    available_kernels,
    choose_kernel,
    warm_up,
)
from hf_wlb.attention.meter import KernelMeter
from hf_wlb.attention.positions import PositionLimit, position_limit
from hf_wlb.attention.registration import (
    check_document_attention,
    document_attention_enabled,
    plain_attention,
    register,
)
from hf_wlb.attention.segments import Segments

__all__ = [
    "AttentionContext",
    "AttentionKernel",
    "AttentionOptions",
    "KernelMeter",
    "KernelRequest",
    "KeyValueExchange",
    "LayerAttention",
    "PositionLimit",
    "Segments",
    "ShardTensors",
    "attend",
    "available_kernels",
    "check_document_attention",
    "check_isolation",
    "choose_kernel",
    "document_attention_enabled",
    "plain_attention",
    "position_limit",
    "register",
    "warm_up",
]
