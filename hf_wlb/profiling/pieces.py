"""A model in pieces: one layer, what comes before the first one, what comes after the last one.

Each is cut out of the model as a stage is and run by the model's own code over one micro-batch, in types as in training
with ``bf16``: half precision is computed in by autocast, and weights, gradients and hidden states are float32. Weights,
hidden states and gradients are random: numbers that are all alike take a GPU less power, hence less time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_wlb.attention import AttentionContext, ShardTensors, register
from hf_wlb.attention.registration import MASKLESS
from hf_wlb.compilation import CompileDefaults, compile_decoder_layers, function_compiler
from hf_wlb.data import WLBDataCollator
from hf_wlb.loss import HeadLoss, choose_fused_loss
from hf_wlb.loss.head import plain_head
from hf_wlb.parallel import ParallelMesh, ParameterLayout, TensorShard, VocabularyGroup, split_model
from hf_wlb.parallel.pipeline import PipelineStage, cut_stage, find_parts, materialise, skeleton
from hf_wlb.workload.base import IntArray


def micro_batch(
    config: PreTrainedConfig, documents: IntArray, device: torch.device, context: AttentionContext
) -> dict[str, Any]:
    """Documents of random tokens, and the plan of their attention, as the trainer gives both to the model.

    Args:
        config: Of the model.
        documents: int64 [documents], tokens of each.
        device: Where tensors will be.
        context: How to attend.

    Raises:
        ValueError: If a document is longer than the model takes.
    """
    text = config.get_text_config()
    tokens = np.random.default_rng(0)
    rows = [{"input_ids": tokens.integers(text.vocab_size, size=size)} for size in documents[documents > 0].tolist()]
    collator = WLBDataCollator(max_position_embeddings=getattr(text, "max_position_embeddings", None))
    inputs = collator(rows)
    shard = ShardTensors.whole(inputs["cu_seq_lens_q"], inputs["max_length_q"], int(documents.sum()))
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return {**moved, "wlb_shard": shard.to(device), "wlb_context": context}


_HALF = (torch.bfloat16, torch.float16)


class _ArgumentsTaken(Exception):  # noqa: N818 # no error: it ends a forward pass whose rest is not needed
    pass


@dataclass(frozen=True)
class Piece:
    """A part of a model, ready to run.

    Attributes:
        forward: Gives hidden states, or the loss.
        gradient: Of the hidden states; None for the loss.
    """

    forward: Callable[[], torch.Tensor]
    gradient: torch.Tensor | None = None

    def backward(self, out: torch.Tensor) -> None:
        """From what ``forward`` gave."""
        out.backward(self.gradient)

    def __call__(self) -> None:
        """Both, one behind the other."""
        self.backward(self.forward())


class _Made(NamedTuple):
    """A stage, the name of the module that holds its layers, and what of each parameter is here."""

    stage: PipelineStage
    layers: str
    shards: dict[str, TensorShard]


@dataclass(frozen=True)
class ModelPieces:
    """Pieces of a model.

    Attributes:
        config: Of the whole model.
        device: Where.
        dtype: To compute in.
        inputs: Of the whole model, see ``micro_batch``.
        mesh: This process's place, for the ranks that share every matrix; they must make and run pieces together.
        compiled: Whether layers are compiled, as with ``torch_compile``.
        kept: Where stages are kept for pieces of other micro-batches, which ``replace`` gives other ``inputs``: to make
            and compile a layer takes longer than to time it. None to make each anew, and have no more than one at a
            time.
    """

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    inputs: dict[str, Any]
    mesh: ParallelMesh = field(default_factory=ParallelMesh)
    compiled: bool = False
    kept: dict[Any, _Made] | None = None

    def kinds(self) -> list[int]:
        """For every layer the first one that is like it."""
        model = self._skeleton()
        layers = [*model.get_submodule(find_parts(model).layers).children()]
        types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
        first: dict[Any, int] = {}
        looks = (_look(layer, kind) for layer, kind in zip(layers, types, strict=True))
        return [first.setdefault(look, place) for place, look in enumerate(looks)]

    def layer(self, place: int, gradient_checkpointing: bool = False) -> Piece:
        """One layer, called with what the model gives it."""

        def make() -> _Made:
            made = self._stage(lambda count: range(place, place + 1))
            if gradient_checkpointing:
                made.stage.model.activation_checkpointing_enable()
            if self.compiled:
                compile_decoder_layers(made.stage.model, CompileDefaults(self.device), layers=1)
            return made

        stage, name, _ = self._once(("layer", place, gradient_checkpointing), make)
        layer = stage.model.get_submodule(f"{name}.{place}")
        args, kwargs = self._arguments(stage, layer)
        hidden = self._hidden()

        def forward() -> torch.Tensor:
            given = hidden.detach().requires_grad_()
            with self._computing():
                out = layer(given, *args[1:], **kwargs) if args else layer(**{**kwargs, "hidden_states": given})
            return torch.as_tensor(out)

        return Piece(forward, self._hidden(seed=1))

    def before(self) -> Piece:
        """What comes before the first layer."""
        stage, _, _ = self._once("before", lambda: self._stage(lambda count: range(0)))

        def forward() -> torch.Tensor:
            with self._computing():
                return torch.as_tensor(stage.run(lambda given: stage.model(**given), self.inputs, None))

        return Piece(forward, self._hidden(seed=1))

    def after(self, fused_loss: str) -> Piece:
        """What comes after the last layer, to the loss."""
        stage, _, shards = self._once("after", lambda: self._stage(lambda count: range(count, count)))
        head_loss = self._head_loss(stage.model, shards, fused_loss)
        hidden = self._hidden()

        def loss(given: dict[str, Any]) -> torch.Tensor:
            if head_loss is None:
                return torch.as_tensor(stage.model(**given).loss)
            with head_loss.enabled():
                return torch.as_tensor(stage.model(**given).loss)

        def forward() -> torch.Tensor:
            with self._computing():
                return torch.as_tensor(stage.run(loss, self.inputs, hidden.detach().requires_grad_()))

        return Piece(forward)

    def _head_loss(self, model: PreTrainedModel, shards: Mapping[str, TensorShard], fused_loss: str) -> HeadLoss | None:
        """As the trainer computes the loss; None for as the model does."""
        head = None if fused_loss == "off" else plain_head(model)
        name = next((name for name, parameter in model.named_parameters() if head and parameter is head.weight), "")
        split = name in shards
        compiler = function_compiler(CompileDefaults(self.device, torch_compile=self.compiled))
        function = choose_fused_loss(
            fused_loss, self.device.type, self.dtype, split_vocabulary=split, compiler=compiler
        )
        if function is None:
            return None
        vocabulary = VocabularyGroup(self.mesh.tp_group, sum(shards[name].blocks)) if split else None
        return HeadLoss(model, function, vocabulary=vocabulary)

    def _once(self, what: Any, make: Callable[[], _Made]) -> _Made:
        """What was kept under that name, or is made and kept."""
        if self.kept is None:
            return make()
        if what not in self.kept:
            self.kept[what] = make()
        return self.kept[what]

    def _stage(self, layers: Callable[[int], range]) -> _Made:
        """Those layers of the model, of a model of so many, on the device and ready to be trained."""
        model = self._skeleton()
        parts = find_parts(model)
        stage = cut_stage(model, parts, layers(parts.count))
        materialise(model, ParameterLayout(ParallelMesh(), copies=stage.copies), device=self.device)
        shards = split_model(model, self.mesh)
        model.train()
        return _Made(stage, parts.layers, shards)

    def _skeleton(self) -> PreTrainedModel:
        register()
        return skeleton(self.config, dtype=self._kept_in, attn_implementation=MASKLESS)

    @property
    def _kept_in(self) -> torch.dtype:
        """The type of weights, gradients and hidden states."""
        return torch.float32 if self.dtype in _HALF else self.dtype

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        """What Accelerate wraps a model's forward in."""
        if self.dtype not in _HALF:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _hidden(self, seed: int = 0) -> torch.Tensor:
        """Random hidden states [1, tokens, hidden size], or gradients of them; the same ones for a seed."""
        tokens, width = self.inputs["input_ids"].shape[1], self.config.get_text_config().hidden_size
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(1, tokens, width, generator=generator, device=self.device, dtype=self._kept_in)

    def _arguments(self, stage: PipelineStage, layer: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model gives a layer."""
        taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def take(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.append((args, kwargs))
            raise _ArgumentsTaken  # of the last layer, the head would follow

        handle = layer.register_forward_pre_hook(take, with_kwargs=True)
        stage.model.eval()
        try:
            with torch.no_grad(), self._computing():
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
