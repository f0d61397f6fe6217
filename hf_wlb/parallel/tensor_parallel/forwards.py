"""What a module does once its parameters are slices: the styles of Transformers' tensor-parallel plans.

Each takes the place of ``module.forward`` and calls what was there before, so that subclasses (scaled embeddings) and
patched forwards (Liger's norms) stay what they are. Parameters are looked up when it runs: FSDP2 exchanges them.

``torch.compile`` compares functions by identity and other objects by what they hold: these are functions of a module
with state beside them, not closures, so that one compiled layer serves all layers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_wlb.parallel.tensor_parallel.communication import (
    TensorRanks,
    enter,
    gather_features,
    leave,
    own_features,
    sum_over_copies,
)

Style = Callable[..., torch.Tensor]
_STATE, _INPUT = "_tensor_parallel", "_tensor_parallel_input"


@dataclass
class SharedInput:
    """The tensor that modules of one block read last: it enters once for all of them, so that backward sums once.

    Attributes:
        original: The block's own forward, as a function of the block.
    """

    original: Callable[..., Any]
    given: torch.Tensor | None = field(default=None, repr=False)
    entered: torch.Tensor | None = field(default=None, repr=False)

    def enter(self, whole: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        """``communication.enter``, or what it gave for this same tensor."""
        if self.entered is None or self.given is not whole:
            self.given, self.entered = whole, enter(whole, ranks)
        return self.entered


def share_input(block: torch.nn.Module) -> SharedInput:
    """Of the modules of one block; nothing of it outlives the block's forward."""
    shared: SharedInput | None = block.__dict__.get(_INPUT)
    if shared is None:
        shared = SharedInput(_forward_of(block))
        setattr(block, _INPUT, shared)
        block.forward = types.MethodType(_forgetful, block)
    return shared


def _forgetful(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Not a hook: torch.compile would tell layers apart by their hooks' numbers.
    shared: SharedInput = block.__dict__[_INPUT]
    try:
        return shared.original(block, *args, **kwargs)
    finally:
        shared.given = shared.entered = None


@dataclass(frozen=True)
class SplitState:
    """What a module that works on slices knows.

    Attributes:
        ranks: That share them.
        shared: What it and its neighbours read; None to enter alone.
        copies: Own parameters of which several ranks hold the same slice (KV heads): name, slice and slices.
        rows: Of the whole vocabulary, the first that is here and the one behind the last.
        rope_features: Last output features that go to every head directly (``mla_kv_a_proj``).
        original: The forward that it had, as a function of the module.
    """

    ranks: TensorRanks
    shared: SharedInput | None = None
    copies: tuple[tuple[str, int, int], ...] = ()
    rows: tuple[int, int] = (0, 0)
    rope_features: int = 0
    original: Callable[..., Any] = torch.nn.Module.forward


def install(module: torch.nn.Module, style: Style, state: SplitState) -> None:
    """From now on the module's forward is the style's."""
    setattr(module, _STATE, replace(state, original=_forward_of(module)))
    module.forward = types.MethodType(style, module)


def _forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    """As a function of the module."""
    patched = module.__dict__.get("forward")
    if patched is None:
        return type(module).forward
    if isinstance(patched, types.MethodType) and patched.__self__ is module:
        return patched.__func__
    return _Unbound(patched)


@dataclass(frozen=True)
class _Unbound:
    """A patched forward that does not ask for the module."""

    forward: Callable[..., Any]

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def _state(module: torch.nn.Module) -> SplitState:
    state: SplitState = module.__dict__[_STATE]
    return state


def _call(module: torch.nn.Module, replaced: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The original forward with other tensors in place of some own parameters."""
    original = _state(module).original
    if not replaced:
        return original(module, *args, **kwargs)
    parameters: dict[str, Any] = module._parameters
    kept = {name: parameters[name] for name in replaced}
    parameters.update(replaced)
    try:
        return original(module, *args, **kwargs)
    finally:
        parameters.update(kept)


def column(module: torch.nn.Module, whole: torch.Tensor) -> torch.Tensor:
    """Own output features of a whole input."""
    state = _state(module)
    summed = {
        name: sum_over_copies(module._parameters[name], state.ranks, index, count)  # type: ignore[arg-type]
        for name, index, count in state.copies
    }
    entered = enter(whole, state.ranks) if state.shared is None else state.shared.enter(whole, state.ranks)
    output: torch.Tensor = _call(module, summed, entered)
    return output


def gathered_column(module: torch.nn.Module, whole: torch.Tensor) -> torch.Tensor:
    """All output features."""
    return gather_features(column(module, whole), _state(module).ranks)


def row(module: torch.nn.Module, own: torch.Tensor) -> torch.Tensor:
    """The whole output of own input features; the bias, whole on every rank, is added once."""
    bias = module._parameters.get("bias")
    output = leave(_call(module, {} if bias is None else {"bias": None}, own), _state(module).ranks)
    return output if bias is None else output + bias.to(output.dtype)


def cut_row(module: torch.nn.Module, whole: torch.Tensor) -> torch.Tensor:
    """The whole output of a whole input, of which each rank reads its part."""
    return row(module, own_features(whole, _state(module).ranks))


def embedding(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Each rank looks up the ids in its part of the vocabulary, the others add nothing."""
    first, last = _state(module).rows
    foreign = (ids < first) | (ids >= last)
    found = _call(module, {}, torch.where(foreign, 0, ids - first))
    return leave(found.masked_fill(foreign[..., None], 0), _state(module).ranks)


def summed_gradient(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Whole parameters that every rank applies to its own heads: their gradients are terms of a sum."""
    ranks = _state(module).ranks
    own = {name: enter(p, ranks) for name, p in module._parameters.items() if p is not None}
    return _call(module, own, *args, **kwargs)


def experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Every rank runs its part of each expert, on whole hidden states and weights of the router."""
    ranks = _state(module).ranks
    entered = [_enter_floating(value, ranks) for value in args]
    named = {name: _enter_floating(value, ranks) for name, value in kwargs.items()}
    return leave(_call(module, {}, *entered, **named), ranks)


def _enter_floating(value: Any, ranks: TensorRanks) -> Any:
    return enter(value, ranks) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def compressed_key(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Multi-head latent attention: the rotary part of the key goes to own heads, the rest through a column."""
    state, output = _state(module), _call(module, {}, hidden)
    latent, rotary = output.split([output.shape[-1] - state.rope_features, state.rope_features], -1)
    return torch.cat([latent, enter(rotary, state.ranks)], -1)


def summed_output(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What its modules make are terms of a sum."""
    return leave(_call(module, {}, *args, **kwargs), _state(module).ranks)
