"""Which function computes the loss: the fastest one that is here and can do what is asked, or the one that is named."""

from __future__ import annotations

import functools
import logging

import torch

from hf_wlb.loss import liger
from hf_wlb.loss.chunked import LossFunction, linear_cross_entropy
from hf_wlb.loss.softmax import CompiledPieces, Compiler

logger = logging.getLogger(__name__)

#: What ``fused_loss`` can be.
FUSED_LOSSES = ("auto", "chunked", "liger", "off")


def choose_fused_loss(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    split_vocabulary: bool = False,
    compiler: Compiler | None = None,
) -> LossFunction | None:
    """The function for what is asked; what was chosen is logged.

    Args:
        name: ``"liger"`` for Liger Kernel's, ``"chunked"`` for ours, ``"auto"`` for the first of these that can,
            ``"off"`` for the model's own loss from whole logits.
        device_type: Of the device that trains.
        dtype: Of the matrix products: the weights', or autocast's.
        split_vocabulary: Whether tensor parallelism splits the head.
        compiler: Compiles what ours does between its matrix products, see ``function_compiler``; Liger's is compiled.

    Returns:
        None for ``"off"``.

    Raises:
        ValueError: There is nothing of that name, or it cannot do what is asked; says why.

    >>> choose_fused_loss("auto", "cpu", torch.float32) is linear_cross_entropy
    True
    >>> choose_fused_loss("liger", "cpu", torch.float32)
    Traceback (most recent call last):
    ValueError: fused_loss='liger' was asked for, but it runs on CUDA devices only, not on cpu. Set ...
    """
    if name not in FUSED_LOSSES:
        raise ValueError(f"fused_loss must be one of {', '.join(FUSED_LOSSES)}, got {name!r}")
    if name == "off":
        return None
    if name == "chunked":
        return _chunked(compiler)
    reason = liger.refusal(device_type, dtype, split_vocabulary) or liger.missing()
    if reason is None:
        logger.info("fused loss 'liger' for %s on %s", dtype, device_type)
        return liger.liger_cross_entropy
    if name == "liger":
        raise ValueError(
            f"fused_loss='liger' was asked for, but it {reason}. Set fused_loss='chunked' or leave it at 'auto'."
        )
    logger.info("fused loss 'chunked' for %s on %s; liger %s", dtype, device_type, reason)
    return _chunked(compiler)


def _chunked(compiler: Compiler | None) -> LossFunction:
    if compiler is None:
        return linear_cross_entropy
    return functools.partial(linear_cross_entropy, pieces=CompiledPieces(compiler))
