"""Which kernel attends: the fastest one that is installed and can do what is asked, or the one that is named."""

from __future__ import annotations

import logging
from functools import cache

from hf_wlb.attention.kernels.base import AttentionKernel, KernelRequest
from hf_wlb.attention.kernels.flash2 import FlashAttention2Kernel
from hf_wlb.attention.kernels.flash4 import FlashAttention4Kernel
from hf_wlb.attention.kernels.reference import ReferenceKernel
from hf_wlb.attention.kernels.torch_varlen import TorchKernel

logger = logging.getLogger(__name__)

#: By name, the preferred first.
KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (FlashAttention4Kernel(), FlashAttention2Kernel(), TorchKernel(), ReferenceKernel())
}


def available_kernels() -> list[str]:
    """Names of the kernels that this machine has, the preferred first.

    >>> "reference" in available_kernels()
    True
    """
    return [name for name, kernel in KERNELS.items() if kernel.missing() is None]


def choose_kernel(request: KernelRequest, name: str | None = None) -> AttentionKernel:
    """The kernel for what a model asks; what was chosen is logged once.

    Args:
        request: What the kernel must do.
        name: The kernel to use, None for the first of ``KERNELS`` that can.

    Raises:
        ValueError: There is no kernel of that name, or it is not installed or cannot do what is asked; says why, and
            which kernels could.

    >>> import torch
    >>> choose_kernel(KernelRequest("cpu", torch.float32, 32, 32)).name
    'reference'
    """
    if name is not None:
        kernel = _named(name, request)
        _tell(logging.INFO, f"attention kernel {name!r}, as asked, for {request}")
        return kernel
    obstacles: dict[str, str] = {}
    for kernel in KERNELS.values():
        reason = obstacle(kernel, request)
        if reason is None:
            break
        obstacles[kernel.name] = reason
    else:
        raise ValueError(f"no attention kernel can do {request}: {_listed(obstacles)}")
    if kernel.name == ReferenceKernel.name and request.device_type == "cuda" and request.dtype.itemsize == 2:
        _tell(
            logging.WARNING,
            f"attention kernel {kernel.name!r}, which is slow, for {request}: no fused one can. {_listed(obstacles)}",
        )
    else:
        _tell(logging.INFO, f"attention kernel {kernel.name!r} for {request}")
    return kernel


def _named(name: str, request: KernelRequest) -> AttentionKernel:
    if name not in KERNELS:
        raise ValueError(f"there is no attention kernel {name!r}; there are {', '.join(KERNELS)}")
    reason = obstacle(KERNELS[name], request)
    if reason is None:
        return KERNELS[name]
    able = [other for other, kernel in KERNELS.items() if obstacle(kernel, request) is None]
    raise ValueError(
        f"attention kernel {name!r} was asked for, for {request}, but it {reason}. "
        + (f"Kernels that can: {', '.join(able)}." if able else "No other one can here.")
    )


def obstacle(kernel: AttentionKernel, request: KernelRequest) -> str | None:
    """Why a kernel cannot do what is asked on this machine, a phrase that follows its name, or None.

    What it refuses comes first: that needs no import of its library.
    """
    return kernel.refusal(request) or kernel.missing()


def _listed(obstacles: dict[str, str]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in obstacles.items())


@cache
def _tell(level: int, message: str) -> None:
    """Logs a message the first time that it comes up."""
    logger.log(level, message)
