"""Where a model can be cut: its layers, and what it does before and after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

_PROBE = [1, 2, 1, 2, 1]
#: What final norms are called where a model has no pipeline plan and cannot be run (on the meta device).
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


@dataclass(frozen=True)
class ModelParts:
    """What a causal language model consists of; names as in ``model.get_submodule``.

    Attributes:
        layers: The ``ModuleList`` of decoder layers.
        count: How many they are.
        before: Modules with parameters that work on tokens before the layers do: embeddings.
        after: Those that come after: the final norm, the head.
        tied: Parameters that one of ``after`` shares with one of ``before``: their names there, and here.
    """

    layers: str
    count: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]


def find_parts(model: PreTrainedModel) -> ModelParts:
    """Finds out where a model can be cut, by running it over a few tokens; on the meta device, by its plan and names.

    Args:
        model: Whole.

    Raises:
        ValueError: If layers get or give anything that depends on parameters besides the hidden states, or parameters
            belong nowhere; names the model class and what it is.
    """
    layers = _layers_of(model)
    count = len(model.get_submodule(layers)._modules)
    owners = _owners_outside(model, layers)
    if any(parameter.is_meta for parameter in model.parameters()):
        before, after = _by_name(model, layers, owners)
    else:
        before, after = _by_running(model, layers, owners)
    return ModelParts(layers, count, tuple(before), tuple(after), tuple(_tied(model, before, after)))


def check_layers(model: PreTrainedModel, layers: str, own: range) -> None:
    """Refuses layers that exchange more than hidden states, by running the model over a few tokens.

    Args:
        model: Whole, or one stage of it.
        layers: Name of the ``ModuleList``.
        own: The layers that are there.

    Raises:
        ValueError: Names the model class and the layer.
    """
    _run(model, layers, own, {})


def _layers_of(model: PreTrainedModel) -> str:
    count = int(model.config.get_text_config().num_hidden_layers)
    base = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is base)
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and name.startswith(prefix)
    ]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outermost) != 1:
        what = f"{len(outermost)} lists of" if outermost else "no list of"
        raise ValueError(_refusal(model, f"it has {what} {count} layers ({', '.join(outermost) or 'none'})"))
    return str(outermost[0])


def _owners_outside(model: PreTrainedModel, layers: str) -> dict[str, torch.nn.Module]:
    """Modules outside of the layers that have parameters or persistent buffers of their own."""
    persistent = set(model.state_dict(keep_vars=True))
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = [*module._parameters, *module._buffers]
        inside = name == layers or name.startswith(f"{layers}.")
        if not inside and any((f"{name}.{key}" if name else key) in persistent for key in own):
            found[name] = module
    return found


def _by_name(model: PreTrainedModel, layers: str, owners: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    parent = layers.rpartition(".")[0]
    plan = list(getattr(model.config.get_text_config(), "base_model_pp_plan", None) or ())
    later = plan[plan.index("layers") + 1 :] if "layers" in plan else _FINAL_NORMS
    ends = {id(model.get_input_embeddings()): 0, id(model.get_output_embeddings()): 1}
    ends |= {id(module): 1 for name in later if (module := _child(model, parent, name)) is not None}
    unknown = [name for name, module in owners.items() if id(module) not in ends]
    if unknown:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into pipeline stages by names alone: {', '.join(unknown)} have "
            "weights, and it is not known whether they are used before or after the layers. Give the model itself, "
            "loaded with from_pretrained, or set pp_size=1."
        )
    before = [name for name, module in owners.items() if ends[id(module)] == 0]
    return before, [name for name, module in owners.items() if ends[id(module)] == 1]


def _child(model: PreTrainedModel, parent: str, name: str) -> torch.nn.Module | None:
    return model.get_submodule(parent)._modules.get(name)


def _by_running(model: PreTrainedModel, layers: str, owners: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    count = len(model.get_submodule(layers)._modules)
    seen = _run(model, layers, range(count), owners)
    unused = [name for name in owners if not seen[name]]
    inside = [name for name, places in seen.items() if places & {1}]
    both = [name for name, places in seen.items() if places == {0, 2}]
    if unused or inside:
        what = f"{', '.join(unused or inside)} with weights outside of its layers"
        raise ValueError(
            _refusal(model, f"it has {what}, {'used between them' if inside else 'which it does not use'}")
        )
    if both:
        raise ValueError(_refusal(model, f"it uses {', '.join(both)} both before and after its layers"))
    before = [name for name, places in seen.items() if places == {0}]
    return before, [name for name, places in seen.items() if places == {2}]


class _Listener:
    """Follows hidden states from layer to layer in a forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._given: list[Any] = []
        self.place = 0  # 0 before the layers, 1 between them, 2 after
        self.handed_on: Any = None

    def enter(self, layer: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if self.handed_on is not None and hidden is not self.handed_on:
                raise ValueError(
                    _refusal(self._model, f"layer {layer} does not get the very hidden states that the one before gave")
                )
            others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(leaf is not hidden and leaf.requires_grad for leaf in others):
                raise ValueError(
                    _refusal(self._model, f"layer {layer} gets more than hidden states: others that have a gradient")
                )
            self.place = 1

        return hook

    def leave(self, layer: int, last: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                raise ValueError(_refusal(self._model, f"layer {layer} gives a {type(output).__name__}"))
            self.handed_on = output
            if last:
                self.place = 2

        return hook


def _run(model: PreTrainedModel, layers: str, own: range, owners: dict[str, torch.nn.Module]) -> dict[str, set[int]]:
    """When each of the owners is used in a forward pass; checks the layers on the way."""
    listener = _Listener(model)
    seen: dict[str, set[int]] = {name: set() for name in owners}
    handles = []
    for layer in own:
        module = model.get_submodule(f"{layers}.{layer}")
        handles.append(module.register_forward_pre_hook(listener.enter(layer), with_kwargs=True))
        handles.append(module.register_forward_hook(listener.leave(layer, last=layer == own[-1])))
    for name, owner in owners.items():
        handles.append(owner.register_forward_hook(lambda *_, name=name: seen[name].add(listener.place)))
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            tokens = torch.tensor([_PROBE], device=model.device)
            positions = torch.arange(len(_PROBE), device=model.device)[None]
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return seen


def _tied(model: PreTrainedModel, before: Iterable[str], after: Iterable[str]) -> list[tuple[str, str]]:
    def parameters(names: Iterable[str]) -> dict[int, str]:
        return {
            id(parameter): f"{name}.{own}"
            for name in names
            for own, parameter in model.get_submodule(name)._parameters.items()
            if parameter is not None
        }

    earlier = parameters(before)
    return [(name, earlier[key]) for key, name in parameters(after).items() if key in earlier]


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return f"{type(model).__name__} cannot be split into pipeline stages: {reason}. Set pp_size=1 for this model."
