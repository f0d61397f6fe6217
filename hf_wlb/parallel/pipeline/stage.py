"""A pipeline stage is the unmodified model, in which the other stages' modules are stand-ins.

Each stage runs the model's own forward. The layer in front of a stage's first one is an ``Entry``, which hands on what
the stage before sent, whatever the model made of its arguments; the layer behind its last one is an ``Exit``, which
remembers what must be sent on, whatever the model does afterwards. Models that scale embeddings or logits are so right
without anybody knowing of it, parameters keep their names, and masks and rotary angles are made on every stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_wlb.parallel.pipeline.parts import ModelParts

#: Arguments of a model's forward that are for the loss only.
_FOR_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")


class StandIn(torch.nn.Module):
    """In the place of a module of another stage: hands its first argument on, and knows what the module knew of itself.

    Args:
        module: The one whose place it takes; only its plain attributes are kept, such as ``attention_type``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int | float | None)}
        self.__dict__.update({name: value for name, value in plain.items() if not name.startswith("_")})

    def forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        """What was given."""
        return given


class EmbeddingStandIn(StandIn):
    """In the place of an embedding: something that depends on tokens. For models looked at a stage at a time.

    Args:
        module: The embedding.
    """

    def __init__(self, module: torch.nn.Embedding) -> None:
        super().__init__(module)
        self._width, self._dtype = module.embedding_dim, module.weight.dtype

    def forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        """[..., width] for integers [...]."""
        waves = torch.arange(1, self._width + 1, device=given.device, dtype=torch.float32)
        return torch.sin(given[..., None] * waves + waves).to(self._dtype)


class Entry(StandIn):
    """In the place of the layer in front of a stage's own: hands on what was received, instead of what it is given."""

    received: torch.Tensor | None = None
    guarded = False

    def forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        """What was received; outside of a pipeline, what was given, unless it is guarded."""
        if self.received is None and self.guarded:
            raise RuntimeError(_ALONE)
        return given if self.received is None else self.received


class Exit(StandIn):
    """In the place of the layer behind a stage's own: remembers what it is given."""

    taken: torch.Tensor | None = None
    running = False
    guarded = False

    def forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        """What was given."""
        if self.guarded and not self.running:
            raise RuntimeError(_ALONE)
        self.taken = given
        return given


_ALONE = (
    "a stage of a pipeline was called by itself, and it has some of the model's layers only. Use the trainer's "
    "evaluate() and predict(), or save the model and load it whole with from_pretrained."
)


@dataclass(frozen=True)
class PipelineStage:
    """This process's layers of a model.

    Attributes:
        model: The whole model's object; other stages' modules are stand-ins.
        layers: Which of the model's layers it has.
        entry: Where hidden states come in; None on the first stage.
        exit: Where they go out; None on the last stage.
        copies: Parameters that are another stage's too (tied), by their names here; values are their names there.
    """

    model: PreTrainedModel
    layers: range
    entry: Entry | None
    exit: Exit | None
    copies: Mapping[str, str]

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.entry is None

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.exit is None

    def guard(self) -> None:
        """From now on an error when the model is called otherwise than by ``run``."""
        for end in (self.entry, self.exit):
            if end is not None:
                end.guarded = True

    def run(
        self, forward: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any], received: torch.Tensor | None
    ) -> Any:
        """One forward pass of this stage.

        Args:
            forward: Calls the model with the arguments it is given, and computes the loss on the last stage.
            inputs: Of the whole model: ``input_ids``, ``position_ids``, labels and the plan.
            received: Hidden states [1, tokens, hidden size] of the stage before; None on the first.

        Returns:
            Hidden states [1, tokens, hidden size] for the next stage; on the last, what ``forward`` returned.
        """
        given = dict(inputs)
        if self.exit is not None:
            given = {name: value for name, value in given.items() if name not in _FOR_THE_LOSS}
        if self.entry is not None:
            given.pop("input_ids", None)
            given["inputs_embeds"] = received
            self.entry.received = received
        if self.exit is not None:
            self.exit.running = True
        try:
            output = forward(given)
            if self.exit is None:
                return output
            taken = self.exit.taken
        finally:
            if self.entry is not None:
                self.entry.received = None
            if self.exit is not None:
                self.exit.taken, self.exit.running = None, False
        if not isinstance(taken, torch.Tensor):
            raise RuntimeError(
                f"{type(self.model).__name__} did not call its layer {self.layers.stop} in a forward pass, so the "
                f"stage of layers {self.layers.start} to {self.layers.stop - 1} has nothing to send on."
            )
        return taken


def cut_stage(model: PreTrainedModel, parts: ModelParts, layers: range) -> PipelineStage:
    """Leaves a model one stage's modules, in place; the others' parameters are let go of.

    The model's ``generate`` then raises, and so does its ``save_pretrained`` without a state to save.

    Args:
        model: Whole, on any device, "meta" included.
        parts: See ``find_parts``.
        layers: The stage's own, one after the other.
    """
    stage, _ = _cut(model, parts, layers)
    model.__dict__["generate"] = _no_generation
    model.__dict__["save_pretrained"] = partial(_save_configuration, model)
    return stage


def _no_generation(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "generate is not supported with pp_size above 1: this process has some of the model's layers only. Save the "
        "model, and load it whole with from_pretrained."
    )


def _save_configuration(model: PreTrainedModel, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    if state_dict is None:
        raise RuntimeError(
            "save_pretrained would write some of the model's layers only: with pp_size above 1 this process has no "
            "more. Call the trainer's save_model() on all processes."
        )
    write: Any = type(model).save_pretrained
    return write(model, *args, state_dict=state_dict, **kwargs)


@contextlib.contextmanager
def as_stage(model: PreTrainedModel, parts: ModelParts, layers: range) -> Iterator[PipelineStage]:
    """A whole model as one stage of it, inside the block."""
    stage, replaced = _cut(model, parts, layers)
    try:
        yield stage
    finally:
        for name, module in replaced.items():
            _replace(model, name, module)


def _cut(model: PreTrainedModel, parts: ModelParts, layers: range) -> tuple[PipelineStage, dict[str, torch.nn.Module]]:
    first, last = layers.start == 0, layers.stop == parts.count
    tied = dict(parts.tied) if last and not first else {}
    names = [f"{parts.layers}.{place}" for place in range(parts.count) if place not in layers]
    names += [name for name in parts.before if not first] + [name for name in parts.after if not last]
    entry_name, exit_name = f"{parts.layers}.{layers.start - 1}", f"{parts.layers}.{layers.stop}"
    entry: Entry | None = None
    exit_: Exit | None = None
    replaced: dict[str, torch.nn.Module] = {}
    for name in names:
        if any(name.startswith(f"{other}.") for other in names):
            continue  # goes with the module that it is in
        module = replaced[name] = model.get_submodule(name)
        stand_in = EmbeddingStandIn(module) if isinstance(module, torch.nn.Embedding) else StandIn(module)
        if name == entry_name:
            stand_in = entry = Entry(module)
        elif name == exit_name:
            stand_in = exit_ = Exit(module)
        _replace(model, name, stand_in)
    return PipelineStage(model, layers, entry, exit_, tied), replaced


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
