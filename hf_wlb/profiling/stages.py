"""Measures what the parts of a model cost that pipeline stages share out, for ``StageCosts``.

One layer of every kind, the embedding, and the final norm with head and loss: each is cut out of the model as a stage
is, run by the model's own code over one micro-batch, forward and backward, and let go of before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from hf_wlb.attention import AttentionContext, ShardTensors, register
from hf_wlb.attention.kernels import KERNELS
from hf_wlb.attention.registration import IMPLEMENTATION
from hf_wlb.data import WLBDataCollator
from hf_wlb.loss import HeadLoss, choose_fused_loss
from hf_wlb.parallel import ParallelMesh, ParameterLayout
from hf_wlb.parallel.pipeline import PipelineStage, cut_stage, find_parts, materialise, skeleton
from hf_wlb.profiling.assemble import device_name
from hf_wlb.profiling.timing import median_seconds
from hf_wlb.staging import StageCosts
from hf_wlb.staging.costs import documents_to_cost, said
from hf_wlb.workload.base import IntArray

Timer = Callable[[Callable[[], None]], float]
"""Seconds that its argument takes on the device; may call it any number of times."""


def measure_stage_costs(
    config: PreTrainedConfig,
    lengths: NDArray[Any] | Sequence[int] | None = None,
    *,
    context_length: int | None = None,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    fused_loss: str = "auto",
    attention_kernel: str | None = None,
    gradient_checkpointing: bool = False,
    repeats: int = 5,
    timer: Timer | None = None,
    tell: Callable[[str], None] | None = None,
) -> StageCosts:
    """Time the parts of a model on this process's device, for one micro-batch, forward plus backward.

    Weights are random, and no more than one part of the model is in memory at a time, with its gradients and the
    activations of the micro-batch. A micro-batch that does not fit may be measured in part: only ratios matter for a
    layout, and of equal documents fewer cost less everywhere alike. For the same reason one process stands for those
    that share a stage by context or tensor parallelism.

    Args:
        config: a Transformers config; its layers are told apart by their modules, windows and shapes, and those of one
            kind are measured once.
        lengths: document lengths of the micro-batch in tokens, integers of shape ``(documents,)``.
        context_length: in place of ``lengths``: tokens of a micro-batch of ``typical_lengths``.
        device: where; of several GPUs the current one.
        dtype: of weights and hidden states.
        fused_loss: how the loss is computed, as the trainer's argument of that name, see ``choose_fused_loss``.
        attention_kernel: name of the kernel; None for the one that the trainer would choose.
        gradient_checkpointing: whether every layer's forward runs a second time in the backward.
        repeats: measurements of each part, after two that are not counted; the median is taken.
        timer: how to time, instead of ``median_seconds`` with these repeats.
        tell: called with a line about every part.

    Raises:
        TypeError: if the lengths are no integers.
        ValueError: if not exactly one of ``lengths`` and ``context_length`` is given, there is no token, a document is
            longer than the model takes, ``repeats`` is below 1, there is no such kernel or loss for this device, or
            the model cannot be cut into stages.

    >>> from transformers import LlamaConfig
    >>> tiny = LlamaConfig(
    ...     hidden_size=16, intermediate_size=16, num_hidden_layers=8, num_attention_heads=2, vocab_size=64)
    >>> costs = measure_stage_costs(tiny, [20, 12], device="cpu", dtype=torch.float32, repeats=1)
    >>> len(costs.layers), len(set(costs.layers)), costs.source
    (8, 1, 'measured on cpu (...) in float32, documents of 20, 12 tokens')
    """
    where = torch.device(device)
    documents = documents_to_cost(lengths, context_length)
    if attention_kernel is not None and attention_kernel not in KERNELS:
        raise ValueError(f"attention_kernel must be one of {', '.join(KERNELS)}, got {attention_kernel!r}.")
    kernel = None if attention_kernel is None else KERNELS[attention_kernel]
    micro_batch = _micro_batch(config, documents, where, AttentionContext(kernel=kernel))
    pieces = _Pieces(config, where, dtype, micro_batch)
    time = timer or partial(median_seconds, device=where, repeats=repeats)
    try:
        costs = _measure(pieces, time, fused_loss, gradient_checkpointing, tell or (lambda line: None))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {int(documents.sum()):,} tokens does not fit one part of the model on {where}. Measure "
            "fewer documents of the same lengths: only ratios matter."
        ) from error
    source = f"measured on {device_name(where)} in {str(dtype).removeprefix('torch.')}, {said(documents)}"
    return StageCosts.from_measurements(costs, source)


def _measure(
    pieces: _Pieces, timer: Timer, fused_loss: str, gradient_checkpointing: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    def measured(what: str, run: Callable[[], None]) -> float:
        seconds = timer(run)
        tell(f"{what}: {seconds * 1e3:.3f} ms")
        return seconds

    kinds = pieces.kinds()
    of_kind = {
        first: measured(f"layer {first} ({kinds.count(first)} alike)", pieces.layer(first, gradient_checkpointing))
        for first in dict.fromkeys(kinds)
    }
    return {
        "layers": [of_kind[kind] for kind in kinds],
        "before": measured("embedding", pieces.before()),
        "after": measured("final norm, head and loss", pieces.after(fused_loss)),
    }


def _micro_batch(
    config: PreTrainedConfig, documents: IntArray, device: torch.device, context: AttentionContext
) -> dict[str, Any]:
    """Documents of random tokens, and the plan of their attention, as the trainer gives both to the model."""
    text = config.get_text_config()
    tokens = np.random.default_rng(0)
    rows = [{"input_ids": tokens.integers(text.vocab_size, size=size)} for size in documents[documents > 0].tolist()]
    collator = WLBDataCollator(max_position_embeddings=getattr(text, "max_position_embeddings", None))
    inputs = collator(rows)
    shard = ShardTensors.whole(inputs["cu_seq_lens_q"], inputs["max_length_q"], int(documents.sum()))
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return {**moved, "wlb_shard": shard.to(device), "wlb_context": context}


class _ArgumentsTaken(Exception):  # noqa: N818 # no error: it ends a forward pass whose rest is not needed
    pass


@dataclass(frozen=True)
class _Pieces:
    """Pieces of a model, each ready to run forward and backward.

    Attributes:
        config: Of the whole model.
        device: Where.
        dtype: Of weights and hidden states.
        inputs: Of the whole model.
    """

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    inputs: dict[str, Any]

    def kinds(self) -> list[int]:
        """For every layer the first one that is like it."""
        model = self._skeleton()
        layers = [*model.get_submodule(find_parts(model).layers).children()]
        types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
        first: dict[Any, int] = {}
        looks = (_look(layer, kind) for layer, kind in zip(layers, types, strict=True))
        return [first.setdefault(look, place) for place, look in enumerate(looks)]

    def layer(self, place: int, gradient_checkpointing: bool) -> Callable[[], None]:
        """One layer, called with what the model gives it."""
        stage, name = self._stage(lambda count: range(place, place + 1))
        model = stage.model
        if gradient_checkpointing:
            model.activation_checkpointing_enable()
        layer = model.get_submodule(f"{name}.{place}")
        args, kwargs = self._arguments(stage, layer)
        hidden = self._hidden()
        gradient = torch.ones_like(hidden)

        def run() -> None:
            given = hidden.detach().requires_grad_()
            out = layer(given, *args[1:], **kwargs) if args else layer(**{**kwargs, "hidden_states": given})
            out.backward(gradient)

        return run

    def before(self) -> Callable[[], None]:
        """What comes before the first layer."""
        stage, _ = self._stage(lambda count: range(0))
        gradient = torch.ones_like(self._hidden())

        def run() -> None:
            stage.run(lambda given: stage.model(**given), self.inputs, None).backward(gradient)

        return run

    def after(self, fused_loss: str) -> Callable[[], None]:
        """What comes after the last layer, to the loss."""
        function = choose_fused_loss(fused_loss, self.device.type, self.dtype)
        stage, _ = self._stage(lambda count: range(count, count))
        head_loss = None if function is None else HeadLoss(stage.model, function)
        hidden = self._hidden()

        def loss(given: dict[str, Any]) -> torch.Tensor:
            if head_loss is None:
                return torch.as_tensor(stage.model(**given).loss)
            with head_loss.enabled():
                return torch.as_tensor(stage.model(**given).loss)

        def run() -> None:
            stage.run(loss, self.inputs, hidden.detach().requires_grad_()).backward()

        return run

    def _stage(self, layers: Callable[[int], range]) -> tuple[PipelineStage, str]:
        """Those layers of the model, of a model of so many, on the device and ready to be trained."""
        model = self._skeleton()
        parts = find_parts(model)
        stage = cut_stage(model, parts, layers(parts.count))
        materialise(model, ParameterLayout(ParallelMesh(), copies=stage.copies), device=self.device)
        model.train()
        return stage, parts.layers

    def _skeleton(self) -> PreTrainedModel:
        register()
        return skeleton(self.config, dtype=self.dtype, attn_implementation=IMPLEMENTATION)

    def _hidden(self) -> torch.Tensor:
        """Random hidden states [1, tokens, hidden size], always the same."""
        tokens, width = self.inputs["input_ids"].shape[1], self.config.get_text_config().hidden_size
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(1, tokens, width, generator=generator, device=self.device, dtype=self.dtype)

    def _arguments(self, stage: PipelineStage, layer: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model gives a layer."""
        taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def take(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.append((args, kwargs))
            raise _ArgumentsTaken  # of the last layer, the head would follow

        handle = layer.register_forward_pre_hook(take, with_kwargs=True)
        stage.model.eval()
        try:
            with torch.no_grad():
                stage.run(lambda given: stage.model(**given), self.inputs, None if stage.is_first else self._hidden())
        except _ArgumentsTaken:
            return taken[0]
        finally:
            handle.remove()
            stage.model.train()
        raise ValueError(
            f"{type(stage.model).__name__} does not call its layer {stage.layers.start} in a forward pass, so it "
            "cannot be measured. Say how many layers every stage has: pp_stage_layers."
        )


def _look(layer: torch.nn.Module, kind: str | None) -> tuple[Any, ...]:
    """What decides how long a layer takes: its modules, their settings and shapes; not which layer it is."""
    looks: list[Any] = [kind]
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, str | int | float | None) and key != "layer_idx"
        }
        tensors = ((key, tensor.shape, tensor.dtype) for key, tensor in module.named_parameters(recurse=False))
        looks.append((name, type(module), tuple(sorted(settings.items())), tuple(tensors)))
    return tuple(looks)
