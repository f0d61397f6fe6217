"""Liger Kernel's fused linear cross-entropy, optional: one Triton kernel where torch needs several passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hf_wlb.loss.chunked import VocabularySlices
from hf_wlb.sharding import IGNORE_INDEX

_CHUNK_LOGITS = 1 << 28  # 512 MiB in bfloat16; Liger rounds tokens up to a power of two, so at most twice as much


def liger_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    vocabulary: VocabularySlices | None = None,
) -> torch.Tensor:
    """See ``linear_cross_entropy``; on CUDA devices, and for a whole vocabulary.

    Logits are rounded to the type of ``hidden``, the softmax is float32, and the weight's gradient is accumulated in
    float32. Backward runs once: it scales what is kept in place.

    Raises:
        ValueError: Where it cannot do what is asked, see ``refusal``, or is not installed.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # here: inside, the weight would be cast again for every chunk
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    reason = refusal(device, hidden.dtype, vocabulary is not None) or missing()
    if reason is not None:
        raise ValueError(f"Liger's fused loss {reason}; take fused_loss='chunked'")
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and trained and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()  # without it, Liger would leave out the weight's gradient too
    # In the order of the function's arguments, up to the last one that is needed; autograd takes no names.
    arguments = [bias, None, IGNORE_INDEX, 0.0, label_smoothing, "sum", softcap, False, torch.float32]
    function = _function()
    if _takes_budget(function):
        arguments += [False, False, False, None, None, logits_budget(*hidden.shape)]
    loss: torch.Tensor = function.apply(hidden, weight, labels, *arguments)[0]
    return loss


def logits_budget(tokens: int, hidden_size: int) -> int:
    """Liger's ``chunk_mem_const``: how many times the size of the hidden states a chunk's logits may have.

    Liger's own, 1, makes chunks of tokens x hidden size / vocabulary tokens. Each of them reads and writes the weight's
    whole gradient, which for few tokens takes longer than its products: with a vocabulary of 128K, 16K tokens and a
    hidden size of 2,048, 57 ms on an H200 against 44 ms in chunks four times as long, at the same peak of memory.

    >>> logits_budget(16_384, 2_048), logits_budget(131_072, 4_096)
    (8, 1)
    """
    return max(1, _CHUNK_LOGITS // max(1, tokens * hidden_size))


def refusal(device_type: str, dtype: torch.dtype, split_vocabulary: bool) -> str | None:
    """Why it cannot do what is asked, a phrase that follows its name, or None.

    >>> refusal("cpu", torch.float32, False)
    'runs on CUDA devices only, not on cpu'
    """
    if split_vocabulary:
        return "needs the whole vocabulary in one process, and tensor parallelism splits it"
    if device_type != "cuda":
        return f"runs on CUDA devices only, not on {device_type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"does not know {dtype}"
    return None


def missing() -> str | None:
    """Why it is not here, a phrase that follows its name, or None."""
    found = _load()
    return found if isinstance(found, str) else None


def _function() -> Any:
    found = _load()
    assert not isinstance(found, str), found
    return found


@cache
def _takes_budget(function: Callable[..., Any]) -> bool:
    """Whether this version can be told how many logits a chunk may hold (``chunk_mem_const``)."""
    names = list(inspect.signature(function.forward).parameters)  # type: ignore[attr-defined]
    return names[13:19] == [
        "use_token_scaling",
        "return_token_accuracy",
        "return_predicted_tokens",
        "ce_impl",
        "ce_mode",
        "chunk_mem_const",
    ]


@cache
def _load() -> str | Callable[..., Any]:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function
    except ModuleNotFoundError as error:
        if error.name == "liger_kernel":
            return "is not installed (pip install liger-kernel)"
        return f"cannot be imported ({error})"
    except Exception as error:
        # Whatever its own imports of Triton run into: the reason goes to whoever asked for it.
        return f"cannot be imported ({type(error).__name__}: {error})"
    names = list(inspect.signature(Function.forward).parameters)
    if names[4:13] != [
        "bias",
        "ce_weight",
        "ignore_index",
        "lse_square_scale",
        "label_smoothing",
        "reduction",
        "softcap",
        "return_z_loss",
        "accum_dtype",
    ]:
        return "has other arguments in this version; liger-kernel 0.6.2 to 0.8 are known to fit"
    found: Callable[..., Any] = Function
    return found
