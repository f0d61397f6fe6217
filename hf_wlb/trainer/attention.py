"""How the trainer's model attends: its kernel, the exchange with other ranks, and the plan of every micro-batch."""

from __future__ import annotations

import logging
from collections import Counter
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
    LayerAttention,
    ShardTensors,
    choose_kernel,
    warm_up,
)
from hf_wlb.parallel import ParallelMesh, ProcessGroupExchange, failing_together, verify_settings
from hf_wlb.training_args import WLBTrainingArguments

logger = logging.getLogger(__name__)


class TrainerAttention:
    """What every forward of a run needs besides its tokens. All ranks must make it together.

    Args:
        args: The run's arguments.
        layers: The model's attention layers, see ``check_isolation``.
        mesh: This process's place.

    Attributes:
        kernels: Names of the kernels that will be used.
        meter: Times the kernels in training; None where there is nobody to compare with.

    Raises:
        ValueError: If there is no kernel for some layer, or the one asked for cannot do it.
        RuntimeError: On every rank, if their settings differ; on the others, if there is no kernel on some rank.
    """

    def __init__(self, args: WLBTrainingArguments, layers: Sequence[LayerAttention], mesh: ParallelMesh) -> None:
        requests = list(dict.fromkeys(_in_training(layer.request, args) for layer in layers))
        with failing_together(place=mesh.place):
            chosen = [choose_kernel(request, args.attention_kernel) for request in requests]
            calls = {(_in_training(layer.request, args), layer.heads, layer.kv_heads) for layer in layers}
            for request, heads, kv_heads in calls:
                kernel = chosen[requests.index(request)]
                warm_up(kernel, request, heads // mesh.tp_size, max(1, kv_heads // mesh.tp_size))
        self.kernels = tuple(dict.fromkeys(kernel.name for kernel in chosen))
        self.meter = KernelMeter() if mesh.cp_size > 1 else None
        regather = args.regather_key_values
        settings: dict[str, Any] = {
            "kv_head_groups": args.kv_head_groups,
            "regather": not args.gradient_checkpointing if regather is None else regather,
            "deterministic": args.full_determinism,
        }
        if mesh.cp_size > 1:
            compared, of_stage = self._compared(args, layers, requests, settings["regather"])
            verify_settings(compared, place=mesh.place, of_place=of_stage)
            settings["exchange"] = ProcessGroupExchange(mesh.cp_group)
        # Layers that need different kernels choose for themselves in every call.
        for_all = chosen[0] if len(self.kernels) == 1 else None
        self._training = AttentionContext(kernel=for_all, meter=self.meter, **settings)
        self._evaluation = replace(self._training, kernel=_in_evaluation(for_all, args), meter=None)
        self._device = args.device

    def _compared(
        self,
        args: WLBTrainingArguments,
        layers: Sequence[LayerAttention],
        requests: Sequence[KernelRequest],
        regather: bool,
    ) -> tuple[dict[str, object], dict[str, object]]:
        """What must be the same: else ranks would exchange other things, or at other times, and wait for ever.

        The second ones only within a pipeline stage: stages need not have as many layers, or layers of the same kinds.
        """
        shapes = Counter(layer.shape for layer in layers)
        types = dict.fromkeys(str(request.dtype).removeprefix("torch.") for request in requests)
        everywhere: dict[str, object] = {
            "gradient_checkpointing": bool(args.gradient_checkpointing),
            "regather_key_values": regather,
            "kv_head_groups": args.kv_head_groups,
            "full_determinism": args.full_determinism,
            "the type to train in, by bf16, fp16 and the model": " and ".join(types),
            "bf16_full_eval": args.bf16_full_eval,
            "fp16_full_eval": args.fp16_full_eval,
            "label_smoothing_factor": args.label_smoothing_factor,
        }
        return everywhere, {
            "attention_kernel": " and ".join(self.kernels),
            "the model's attention": ", ".join(f"{count} layers of {shape}" for shape, count in shapes.items()),
        }

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
    dtype = args.compute_dtype or request.dtype
    # The model may still be on the CPU.
    return replace(request, device_type=args.device.type, dtype=dtype, deterministic=args.full_determinism)


def _in_evaluation(kernel: AttentionKernel | None, args: WLBTrainingArguments) -> AttentionKernel | None:
    """The same kernel, unless the whole model is cast to another type, for which the fastest may be another one."""
    cast = args.bf16_full_eval or args.fp16_full_eval
    return None if cast and args.attention_kernel is None else kernel
