"""Weights that are given to parameters which are split over ranks already, on the meta device."""

from pathlib import Path
from typing import Any

import torch

from hf_wlb.parallel import ParallelMesh, ParallelSizes, ParameterLayout, shard_parameters, split_model
from hf_wlb.parallel.pipeline import cut_stage, find_parts
from hf_wlb.parallel.pipeline.materialise import materialise
from hf_wlb.parallel.pipeline.skeleton import skeleton
from tests.support.checkpoints import local, model_of
from tests.support.oracle import relative_error
from tests.support.spawn import run_distributed
from tests.support.tolerances import TENSOR_PARALLEL

SIZES = {"tp2": ParallelSizes(tp=2), "fsdp2": ParallelSizes(dp_shard=2)}
STAGES = (range(0, 2), range(0, 1), range(1, 2))  # of two layers: all of them, and each alone
TOKENS = torch.tensor([[3, 1, 2, 5, 2]])


def whole(folder: Path, source: Path | None, seed: int = 0) -> Any:
    model = skeleton(folder, attn_implementation="eager", experts_implementation="eager")
    materialise(model, ParameterLayout(ParallelMesh()), source, seed=seed)
    return model


def split_stage(folder: Path, source: Path | None, layers: range, sizes: ParallelSizes) -> tuple[Any, ParameterLayout]:
    model = skeleton(folder, attn_implementation="eager", experts_implementation="eager")
    parts, mesh = find_parts(model), ParallelMesh.of(sizes, "cpu")
    shards = split_model(model, mesh)
    stage = cut_stage(model, parts, layers)
    shards |= {name: shards[owner] for name, owner in stage.copies.items() if owner in shards}
    if mesh.shard_group is not None:
        shard_parameters(model, mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    layout = ParameterLayout(mesh, {n: shards[n] for n, _ in model.named_parameters() if n in shards}, stage.copies)
    materialise(model, layout, source)
    return model, layout


def other_parts(model: Any, layout: ParameterLayout, values: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters that, put together, are not the whole model's; all ranks call it together."""
    found = []
    for name, parameter in model.named_parameters():
        expected = values[layout.whole_name(name)]
        if not torch.equal(layout.whole(name, parameter.detach()), expected):
            found.append(name)
    return found


def differences(rank: int, world_size: int, folders: dict[str, Path]) -> list[str]:
    """What is not as in the whole model, and controls that found nothing."""
    found = []
    for kind, folder in folders.items():
        others = dict(whole(folder, None, seed=1).named_parameters())
        for source in (folder, None):
            expected = whole(folder, source)
            values, logits = dict(expected.named_parameters()), expected(TOKENS).logits
            for split, sizes in SIZES.items():
                for layers in STAGES:
                    case = f"{kind}, {'files' if source else 'random'}, {split}, {layers}"
                    model, layout = split_stage(folder, source, layers, sizes)
                    found += [f"{case}: {name}" for name in other_parts(model, layout, values)]
                    if not other_parts(model, layout, others):
                        found.append(f"{case}: another seed makes no difference")
                    whole_size = sum(values[layout.whole_name(name)].numel() for name, _ in model.named_parameters())
                    if sum(local(of).numel() for of in model.parameters()) > 0.6 * whole_size:
                        found.append(f"{case}: not split")
                    if layers == STAGES[0] and relative_error(model(TOKENS).logits, logits) > TENSOR_PARALLEL:
                        found.append(f"{case}: other logits")
    return found


def test_slices_and_shards_are_of_the_whole_model(tmp_path: Path) -> None:
    folders = {kind: tmp_path / kind for kind in ("tied", "untied", "qwen3_moe")}
    for kind, folder in folders.items():
        model = model_of(kind, 0)
        model.config.pad_token_id = model.config.vocab_size - 1  # the row of zeros is the second rank's
        model.save_pretrained(folder, max_shard_size="30KB")
    assert run_distributed(differences, 2, folders) == [[], []]
