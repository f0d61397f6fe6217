"""Models with optimizer state, split in any way, for checkpoints: what every rank then holds is known without them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_wlb.parallel import ParallelMesh, ParallelSizes
from hf_wlb.parallel.checkpoint import save_optimizer, save_weights
from hf_wlb.parallel.data_parallel import shard_parameters
from hf_wlb.parallel.parameter_layout import ParameterLayout
from hf_wlb.parallel.tensor_parallel import split_model
from tests.numerics.test_families import ACCEPTED, build
from tests.support.tiny_llama import tiny_llama

MOST_BYTES = 30_000  # of tensors in a file


def model_of(kind: str, seed: int) -> Any:
    """Float32 Llama with grouped heads, untied or tied; or a mixture of experts, which files hold one by one."""
    if kind in ("untied", "tied"):
        return tiny_llama(seed, tie_word_embeddings=kind == "tied")
    torch.manual_seed(seed)
    model = build(ACCEPTED[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model.float()


def split(model: Any, sizes: ParallelSizes) -> ParameterLayout:
    """As WLBTrainer does it."""
    mesh = ParallelMesh.of(sizes, "cpu")
    shards = split_model(model, mesh) if sizes.tp > 1 else {}
    if sizes.dp_shard > 1:
        shard_parameters(model, mesh)
    return ParameterLayout(mesh, shards)


def optimizer_of(model: Any, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """With two groups, of different hyper-parameters, as Trainer makes them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim == 1]
    return kind(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, **options
    )


def some_steps(model: Any, optimizer: Any) -> None:
    """Gradients are made of the parameters element by element: every split computes the same, with no collective."""
    for step in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() * 0.5 + step
        optimizer.step()
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (number + 3)


def local_tensors(model: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and optimizer state as this process holds them."""
    for name, parameter in model.named_parameters():
        yield name, local(parameter.detach())
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{name}.{key}", local(torch.as_tensor(value))


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def differing(found: tuple[Any, Any], expected: tuple[Any, Any]) -> list[str]:
    """Names of what two models with their optimizers do not have alike, to the last bit."""
    one, other = dict(local_tensors(*found)), dict(local_tensors(*expected))
    names = [name for name in one.keys() & other.keys() if not same(one[name], other[name])]
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in of[1].param_groups] for of in (found, expected)]
    return sorted([*names, *(one.keys() ^ other.keys()), *(["groups"] if groups[0] != groups[1] else [])])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def save(model: Any, optimizer: Any, layout: ParameterLayout, folder: Path, rank: int = 0) -> None:
    """A checkpoint as of a trainer, in several files."""

    def beside() -> None:
        model.save_pretrained(folder, state_dict={})

    leads = rank == 0
    save_weights(model, layout, str(folder), leads=leads, beside=beside, most_bytes=MOST_BYTES)
    save_optimizer(optimizer, model, layout, str(folder), leads=leads, most_bytes=MOST_BYTES)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, through its indices; optimizer state under a name of its own."""
    found: dict[str, torch.Tensor] = {}
    for stem in ("model", "optimizer"):
        index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
        for file in set(index["weight_map"].values()):
            tensors = load_file(folder / file)
            assert {name for name, of in index["weight_map"].items() if of == file} == tensors.keys()
            found |= {f"{stem}: {name}": tensor for name, tensor in tensors.items()}
    return found
