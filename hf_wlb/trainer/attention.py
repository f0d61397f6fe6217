"""How the trainer's model attends: its kernel, the exchange with other ranks, and the plan of every micro-batch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_wlb.attention import (
    AttentionContext,
    AttentionKernel,
    KernelMeter,
    KernelRequest,
    ShardTensors,
    choose_kernel,
)
from hf_wlb.parallel import ParallelMesh, ProcessGroupExchange, verify_agreement
from hf_wlb.training_args import WLBTrainingArguments

logger = logging.getLogger(__name__)


class TrainerAttention:
    """What every forward of a run needs besides its tokens.

    Args:
        args: The run's arguments.
        requests: What the model's layers ask of a kernel, see ``check_isolation``.
        mesh: This process's place.

    Attributes:
        kernels: Names of the kernels that will be used.
        meter: Times the kernels in training; None where there is nobody to compare with.

    Raises:
        ValueError: If there is no kernel for some layer, or the one asked for cannot do it.
        RuntimeError: On every rank, if their settings differ.
    """

    def __init__(self, args: WLBTrainingArguments, requests: Sequence[KernelRequest], mesh: ParallelMesh) -> None:
        chosen = [choose_kernel(_in_training(request, args), args.attention_kernel) for request in requests]
        self.kernels = tuple(dict.fromkeys(kernel.name for kernel in chosen))
        self.meter = KernelMeter() if mesh.cp_size > 1 else None
        regather = args.regather_key_values
        settings: dict[str, Any] = {
            "kv_head_groups": args.kv_head_groups,
            "regather": not args.gradient_checkpointing if regather is None else regather,
            "deterministic": args.full_determinism,
        }
        if mesh.cp_size > 1:
            _compare(settings)
            settings["exchange"] = ProcessGroupExchange(mesh.cp_group)
        # Layers that need different kernels choose for themselves in every call.
        kernel = chosen[0] if len(self.kernels) == 1 else None
        self._training = AttentionContext(kernel=kernel, meter=self.meter, **settings)
        self._evaluation = replace(self._training, kernel=_in_evaluation(kernel, args), meter=None)
        self._device = args.device

    def plan_of(self, inputs: dict[str, Any], training: bool) -> dict[str, Any]:
        """Take the plan out of a collated micro-batch, before it goes to the device.

        A shard brings its plan. Whole documents get theirs from ``cu_seq_lens_q`` while that is in the CPU's memory:
        read back from a GPU, it would be waited for in every layer.

        Returns:
            ``wlb_shard`` on the device and ``wlb_context``, arguments of the model's forward.
        """
        inputs.pop("wlb_info", None)
        shard: ShardTensors | None = inputs.pop("wlb_shard", None)
        bounds = inputs.get("cu_seq_lens_q")
        if shard is None and isinstance(bounds, torch.Tensor) and bounds.device.type == "cpu":
            longest = int(np.diff(bounds.numpy()).max())
            shard = ShardTensors.whole(bounds.to(torch.int32), longest, inputs["input_ids"].shape[1])
        plan: dict[str, Any] = {"wlb_context": self._training if training else self._evaluation}
        if shard is not None:
            plan["wlb_shard"] = shard.to(self._device, non_blocking=True)
        return plan


def _in_training(request: KernelRequest, args: WLBTrainingArguments) -> KernelRequest:
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else request.dtype
    return replace(request, dtype=dtype, deterministic=args.full_determinism)


def _in_evaluation(kernel: AttentionKernel | None, args: WLBTrainingArguments) -> AttentionKernel | None:
    """The same kernel, unless the whole model is cast to another type, for which the fastest may be another one."""
    cast = args.bf16_full_eval or args.fp16_full_eval
    return None if cast and args.attention_kernel is None else kernel


def _compare(settings: dict[str, Any]) -> None:
    """Ranks with other settings would exchange other things, and wait for each other for ever."""
    digest = zlib.crc32(repr(sorted(settings.items())).encode())
    verify_agreement(digest, "kv_head_groups, regather_key_values and full_determinism (compared by a checksum)")
