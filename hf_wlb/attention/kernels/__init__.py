"""Attention kernels behind one signature, and the choice among them."""

from hf_wlb.attention.kernels.base import AttentionKernel, AttentionOptions, Gradients, KernelRequest
from hf_wlb.attention.kernels.reference import ReferenceKernel
from hf_wlb.attention.kernels.selection import KERNELS, available_kernels, choose_kernel
from hf_wlb.attention.kernels.warming import warm_up

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionOptions",
    "Gradients",
    "KernelRequest",
    "ReferenceKernel",
    "available_kernels",
    "choose_kernel",
    "warm_up",
]
