"""Attention kernels behind one signature, and the choice among them."""

from hf_wlb.attention.kernels.base import AttentionKernel, AttentionOptions, KernelRequest
from hf_wlb.attention.kernels.reference import ReferenceKernel
from hf_wlb.attention.kernels.selection import KERNELS, available_kernels, choose_kernel

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionOptions",
    "KernelRequest",
    "ReferenceKernel",
    "available_kernels",
    "choose_kernel",
]
