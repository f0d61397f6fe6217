"""Random initial weights that do not depend on how a model is split.

Every module draws from a random state of its own, made of the seed and the module's name, what its model class draws
for it (``_init_weights``): on the CPU and whole, whatever part of it a process keeps. So all stages, shards and slices
together are one model, the same for every split and every kind of device.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from hf_wlb.parallel.checkpoint.names import own_tensors, tied_names
from hf_wlb.parallel.checkpoint.reading import listed
from hf_wlb.parallel.checkpoint.regions import held, held_ranges, take, whole_shape
from hf_wlb.parallel.parameter_layout import ParameterLayout
from hf_wlb.parallel.pipeline.stage import StandIn


@dataclass(frozen=True)
class _Place:
    """A module, its name, and the model whose class knows how it begins."""

    name: str
    module: torch.nn.Module
    model: PreTrainedModel

    def tables(self) -> list[dict[str, torch.Tensor | None]]:
        """Its own parameters and buffers, to be read and replaced."""
        return [self.module._parameters, self.module._buffers]  # type: ignore[list-item]

    def full(self, key: str) -> str:
        """The name in the model of one of its tensors."""
        return f"{self.name}.{key}" if self.name else key


def initialise(model: PreTrainedModel, layout: ParameterLayout, names: Collection[str], seed: int) -> None:
    """Gives some tensors their initial values; random states stay as they are. No communication.

    Needs memory on the CPU for one whole decoder layer, or one other module if that is larger.

    Args:
        model: One stage or all of it, split or not, not on the meta device.
        layout: How it is split. A model that is split over tensor-parallel ranks was so before it was cut.
        names: Of parameters and buffers; tied ones by the name of the one that they are tied to, if it is here.
        seed: Any integer.

    Raises:
        ValueError: If the model class does not say how some of them begin, or says it only for the whole model.
    """
    wanted, copies = set(names), _copies(model, layout)
    if not wanted:
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        for name in sorted(wanted & copies.keys()):
            _initialise_copy(model, layout, name, copies[name], seed)
        wanted -= copies.keys()
        for unit in _units(model):
            if len(unit) == 1 and unit[0].module._modules:
                with _nothing_below_changes(unit[0]):
                    _initialise_unit(unit, layout, wanted, seed)
            else:
                _initialise_unit(unit, layout, wanted, seed)


def _copies(model: PreTrainedModel, layout: ParameterLayout) -> dict[str, str]:
    """Parameters that are tied to those of another stage, and their names there."""
    own = own_tensors(model)
    ties = {name: source for name, source in tied_names(model).items() if name in own and source not in own}
    return {**ties, **layout.copies}


def _units(model: PreTrainedModel) -> Iterator[list[_Place]]:
    """Modules in the order in which Transformers initialises them, a decoder layer's together, others alone.

    Some classes initialise parameters of the modules in a module, again and otherwise: projections into the residual
    stream, say.
    """
    layers = set(model._no_split_modules or ())
    seen: set[int] = set()

    def children(place: _Place) -> Iterator[_Place]:
        for key, child in place.module._modules.items():
            if child is not None and id(child) not in seen and not isinstance(child, StandIn):
                seen.add(id(child))
                yield _Place(place.full(key), child, child if isinstance(child, PreTrainedModel) else place.model)

    def inside(place: _Place) -> Iterator[_Place]:
        for child in children(place):
            yield from inside(child)
        yield place

    def visit(place: _Place) -> Iterator[list[_Place]]:
        if any(kind.__name__ in layers for kind in type(place.module).__mro__):  # FSDP2 gives it a class of its own
            yield list(inside(place))
            return
        for child in children(place):
            yield from visit(child)
        yield [place]

    yield from visit(_Place("", model, model))


def _initialise_unit(unit: list[_Place], layout: ParameterLayout, wanted: set[str], seed: int) -> None:
    drawn: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    try:
        for place in unit:
            for table in place.tables():
                for key, tensor in table.items():
                    name = place.full(key)
                    if tensor is None or (name not in wanted and not _is_kept(place, table, key)):
                        continue
                    whole = _poisoned(tensor, whole_shape(layout, name, tensor), "cpu" if name in wanted else "meta")
                    replaced.append((table, key, tensor))
                    table[key] = whole
                    if name in wanted:
                        drawn.append((name, tensor, whole))
        if not drawn and (len(unit) > 1 or not unit[0].module._modules):
            return
        versions = [whole._version for _, _, whole in drawn]
        for place in unit:
            with _whole_padding(place, layout):
                _draw(place, seed)
    finally:
        for table, key, tensor in replaced:
            table[key] = tensor
    for (name, tensor, whole), version in zip(drawn, versions, strict=True):
        _keep(unit[-1].model, layout, name, tensor, whole, version)


def _is_kept(place: _Place, table: dict[str, torch.Tensor | None], key: str) -> bool:
    """Whether a tensor that has its values must not be touched; buffers that are computed are computed again."""
    return table is place.module._parameters or key not in place.module._non_persistent_buffers_set


def _poisoned(tensor: torch.Tensor, shape: torch.Size, device: str) -> torch.Tensor:
    whole = torch.empty(shape, dtype=tensor.dtype, device=device)
    if whole.is_floating_point():
        whole.fill_(torch.nan)
    return torch.nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else whole


def _draw(place: _Place, seed: int) -> None:
    digest = hashlib.blake2b(f"{seed} {place.name}".encode(), digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    place.model._init_weights(place.module)


def _keep(
    model: PreTrainedModel, layout: ParameterLayout, name: str, tensor: torch.Tensor, whole: torch.Tensor, version: int
) -> None:
    untouched = whole.isnan().any() if whole.is_floating_point() else whole._version == version
    if untouched:
        raise ValueError(
            f"{type(model).__name__} does not say how {name} begins: its _init_weights leaves it out. Load weights "
            "from a folder, or teach the model class."
        )
    part = take(whole.detach(), held_ranges(layout, name, tensor))
    if part is not None:
        held(tensor).copy_(part)


def _initialise_copy(model: PreTrainedModel, layout: ParameterLayout, name: str, owner: str, seed: int) -> None:
    """A head that is tied to another stage's embeddings begins as they do."""
    tensor = model.get_parameter(name)
    module, _, key = owner.rpartition(".")
    there = dict(model.named_modules()).get(module)
    if key != "weight" or not isinstance(there, StandIn) or not hasattr(there, "num_embeddings"):
        raise ValueError(
            f"{type(model).__name__} ties {name} to {owner}, which is no embedding of another stage: how it begins is "
            "not known here. Load weights from a folder, or make the whole model with from_config."
        )
    shape, shard = whole_shape(layout, name, tensor), layout.tensor_shards.get(name)
    row = getattr(there, "padding_idx", None)
    if row is not None and shard is not None:
        row += shard.ranges()[0][0]  # split over tensor-parallel ranks, it counts this rank's own
    rows, columns = shape
    embedding = torch.nn.Embedding(rows, columns, padding_idx=row, device="meta", dtype=tensor.dtype)
    embedding.weight = torch.nn.Parameter(_poisoned(tensor, shape, "cpu"), tensor.requires_grad)
    parts = module.split(".")
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    nearest = [parent for parent in above if isinstance(parent, PreTrainedModel)][-1]
    _draw(_Place(module, embedding, nearest), seed)
    _keep(model, layout, name, tensor, embedding.weight, 0)


@contextlib.contextmanager
def _whole_padding(place: _Place, layout: ParameterLayout) -> Iterator[None]:
    """An embedding that tensor-parallel ranks share knows its padding row by this rank's count."""
    shard, module = layout.tensor_shards.get(place.full("weight")), place.module
    if shard is None or not isinstance(module, torch.nn.Embedding) or module.padding_idx is None:
        yield
        return
    own = module.padding_idx
    module.padding_idx = own + shard.ranges()[0][0]
    try:
        yield
    finally:
        module.padding_idx = own


@contextlib.contextmanager
def _nothing_below_changes(place: _Place) -> Iterator[None]:
    """Refuses what would only be right for a whole model: its class has no way to say it for a part."""
    tensors = (*place.module.named_parameters(), *place.module.named_buffers())
    below = [(place.full(name), tensor) for name, tensor in tensors if "." in name]
    versions = [tensor._version for _, tensor in below]
    kind = f"{type(place.model).__name__} initialises {place.name or 'itself'} as a whole"
    advice = "which cannot be done in parts. Load weights from a folder, or make the whole model with from_config."
    try:
        yield
    except AttributeError as error:  # of a stand-in
        raise ValueError(f"{kind} ({error}), {advice}") from error
    changed = [name for (name, tensor), before in zip(below, versions, strict=True) if tensor._version != before]
    if changed:
        raise ValueError(f"{kind}, {listed(changed)} of its parts too, {advice}")
