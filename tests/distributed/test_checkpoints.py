"""Checkpoints of every split: the same files whoever wrote them, and the same state whoever reads them."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_wlb.parallel import ParallelMesh, ParallelSizes, failing_together
from hf_wlb.parallel.checkpoint import (
    gather_adapters,
    has_optimizer,
    has_weights,
    load_adapters,
    load_optimizer,
    load_weights,
    save_optimizer,
    save_weights,
)
from hf_wlb.parallel.parameter_layout import ParameterLayout
from tests.support.checkpoints import (
    MOST_BYTES,
    contents,
    differing,
    model_of,
    optimizer_of,
    same,
    save,
    some_steps,
    split,
)
from tests.support.spawn import run_distributed

KINDS = ("untied", "tied", "qwen3_moe")
#: By number of processes: sizes, and the models to try.
SPLITS: dict[int, dict[str, tuple[ParallelSizes, tuple[str, ...]]]] = {
    2: {
        "dp2": (ParallelSizes(dp_replicate=2), ("tied",)),
        "fsdp2": (ParallelSizes(dp_shard=2), ("tied", "qwen3_moe")),
        "tp2": (ParallelSizes(tp=2), KINDS),
    },
    4: {
        "fsdp2 x tp2": (ParallelSizes(dp_shard=2, tp=2), ("qwen3_moe",)),
        "dp2 x fsdp2": (ParallelSizes(dp_replicate=2, dp_shard=2), ("tied",)),
        "tp4": (ParallelSizes(tp=4), ("untied",)),  # KV heads are held twice
    },
}


def trained(kind: str, sizes: ParallelSizes) -> tuple[Any, Any, ParameterLayout]:
    model = model_of(kind, seed=0)
    layout = split(model, sizes)
    optimizer = optimizer_of(model)
    some_steps(model, optimizer)
    return model, optimizer, layout


def untrained(kind: str, sizes: ParallelSizes) -> tuple[Any, Any, ParameterLayout]:
    model = model_of(kind, seed=1)
    layout = split(model, sizes)
    return model, optimizer_of(model), layout


def load(model: Any, optimizer: Any, layout: ParameterLayout, folder: Path) -> None:
    load_weights(model, layout, str(folder))
    load_optimizer(optimizer, model, layout, str(folder))


def swapped(layout: ParameterLayout) -> ParameterLayout:
    """Every rank takes the slice of another one: what a wrong order of slices does."""
    shards = layout.tensor_shards.items()
    wrong = {name: dataclasses.replace(shard, index=shard.count - 1 - shard.index) for name, shard in shards}
    return ParameterLayout(layout.mesh, wrong)


def save_and_load(rank: int, world_size: int, root: Path) -> dict[str, list[str]]:
    """What differs from what is expected, by case; saves every split's checkpoint besides."""
    found: dict[str, list[str]] = {}
    for split_name, (sizes, kinds) in SPLITS[world_size].items():
        for kind in kinds:
            expected = trained(kind, sizes)
            with torch.no_grad():  # after an evaluation FSDP2 has not put its shards back yet
                expected[0](input_ids=torch.arange(3, 12)[None], use_cache=False)
            save(*expected, root / split_name / kind, rank)
            case = f"{split_name}, {kind}"
            start = untrained(kind, sizes)
            found[f"{case}, before"] = differing(start[:2], expected[:2])
            load(*start, root / "one" / kind)
            found[f"{case}, loaded"] = differing(start[:2], expected[:2])
            if sizes.tp == 2:
                wrong = untrained(kind, sizes)
                load(wrong[0], wrong[1], swapped(wrong[2]), root / "one" / kind)
                found[f"{case}, swapped"] = differing(wrong[:2], expected[:2])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    """The checkpoints of one process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        save(*trained(kind, ParallelSizes()), folder / "one" / kind)
    return folder


@pytest.fixture(scope="module")
def two_ranks(root: Path, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """All that two ranks can show, from one start of them."""
    folder = tmp_path_factory.mktemp("two_ranks")
    adapters(0, 1, folder)
    return run_distributed(of_two_ranks, 2, root, folder)


def of_two_ranks(rank: int, world_size: int, root: Path, folder: Path) -> dict[str, Any]:
    return {
        "splits": save_and_load(rank, world_size, root),
        "lora": adapters(rank, world_size, folder),
        "optimizers": other_optimizers(rank, folder),
        "damaged": damaged(rank, folder, root / "one" / "untied"),
        "failing": failing_to_write(rank, folder, root / "one" / "untied"),
    }


def test_two_ranks_write_and_read_the_same(two_ranks: list[dict[str, Any]], root: Path) -> None:
    assert_splits([found["splits"] for found in two_ranks], root)


def test_four_ranks_write_and_read_the_same(root: Path) -> None:
    assert_splits(run_distributed(save_and_load, 4, root), root)


def assert_splits(ranks: list[dict[str, list[str]]], root: Path) -> None:
    for found in ranks:
        for case, names in found.items():
            if case.endswith("loaded"):
                assert names == [], case
            else:  # the control: what was not loaded, or loaded from other slices, is found to differ
                assert len(names) > 20, case
    for split_name, (_, kinds) in SPLITS[len(ranks)].items():
        for kind in kinds:
            assert_same_checkpoint(root / split_name / kind, root / "one" / kind)


def assert_same_checkpoint(folder: Path, reference: Path) -> None:
    found, expected = contents(folder), contents(reference)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same(found[name], expected[name])] == [], folder
    for name in os.listdir(folder):
        assert name in os.listdir(reference) and not name.endswith(".partial"), name
        if name.endswith(".safetensors"):
            assert sum(of.nbytes for of in load_file(folder / name).values()) <= MOST_BYTES
        elif name.endswith(".json"):
            assert json.loads((folder / name).read_text()) == json.loads((reference / name).read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_reads_what_one_process_wrote(kind: str, root: Path) -> None:
    expected, start = trained(kind, ParallelSizes()), untrained(kind, ParallelSizes())
    assert len(differing(start[:2], expected[:2])) > 20
    load(*start, root / "one" / kind)
    assert differing(start[:2], expected[:2]) == []
    assert (start[0].lm_head.weight is start[0].model.embed_tokens.weight) == (kind == "tied")
    files = list((root / "one" / kind).glob("model-*.safetensors"))
    assert len(files) > 2 and len(list((root / "one" / kind).glob("optimizer-*.safetensors"))) > 4
    model = AutoModelForCausalLM.from_pretrained(root / "one" / kind)
    for name, value in expected[0].state_dict().items():
        assert same(model.state_dict()[name], value), name


def test_control_a_swapped_slice_makes_another_checkpoint(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(root / "one" / "untied", tmp_path / "copy"))
    assert_same_checkpoint(folder, root / "one" / "untied")
    model, optimizer, layout = trained("untied", ParallelSizes())
    with torch.no_grad():
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.copy_(torch.cat(weight.chunk(2, 1)[::-1], 1))
    save(model, optimizer, layout, folder)
    with pytest.raises(AssertionError, match=r"down_proj"):
        assert_same_checkpoint(folder, root / "one" / "untied")


# ---- what else is trained ----


def adapters(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    sizes = ParallelSizes(dp_shard=2)

    def adapted(seed: int) -> tuple[Any, Any, ParameterLayout]:
        torch.manual_seed(seed)
        model: Any = get_peft_model(model_of("untied", seed=0), config)
        layout = split(model, sizes) if world_size > 1 else ParameterLayout(ParallelMesh())
        return model, optimizer_of(model), layout

    model, optimizer, layout = adapted(3)
    some_steps(model, optimizer)
    folder = root / f"lora {world_size}"
    state = gather_adapters(model, layout)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    save_optimizer(optimizer, model, layout, str(folder), leads=rank == 0)
    start = adapted(4)
    before = differing(start[:2], (model, optimizer))
    load_adapters(start[0], start[2], str(root / "lora 1" if world_size > 1 else folder))
    load_optimizer(start[1], start[0], start[2], str(root / "lora 1" if world_size > 1 else folder))
    return {
        "before": before,
        "loaded": differing(start[:2], (model, optimizer)),
        "file": {} if rank else load_file(folder / "adapter_model.safetensors"),
    }


def other_optimizers(rank: int, folder: Path) -> dict[str, list[str]]:
    found = {}
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.AdamW, {"amsgrad": True, "betas": (0.8, 0.95)}),
    ):
        pair = []
        for seed in (0, 1):
            model = model_of("untied", seed)
            layout = split(model, ParallelSizes(dp_shard=2))
            optimizer = optimizer_of(model, kind, **options)
            pair.append((model, optimizer, layout))
        some_steps(*pair[0][:2])
        place = folder / f"{kind.__name__}{len(found)}"
        save_optimizer(pair[0][1], pair[0][0], pair[0][2], str(place), leads=rank == 0)
        load_optimizer(pair[1][1], pair[1][0], pair[1][2], str(place))
        names = [name for name, _ in pair[0][0].named_parameters()]
        found[place.name] = [name for name in differing(pair[1][:2], pair[0][:2]) if name not in names]
    return found


# ---- damage, and ranks that cannot write ----


def damage(folder: Path, what: str) -> None:
    if what == "a missing file":
        next(folder.glob("model-00002*")).unlink()
    elif what == "a cut file":
        path = next(folder.glob("optimizer-00002*"))
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "a cut index":
        path = folder / "model.safetensors.index.json"
        path.write_text(path.read_text()[:200])
    elif what == "a mixture":
        shutil.copy(next(folder.glob("model-00001*")), next(folder.glob("model-00002*")))
    else:
        (folder / "optimizer.safetensors.index.json").unlink()


DAMAGES = {
    "a missing file": "model-00002-of-.* is missing: the checkpoint is damaged",
    "a cut file": "optimizer-00002-of-.* cannot be read .*: the checkpoint is damaged",
    "a cut index": "model.safetensors.index.json cannot be read .*: the checkpoint is damaged",
    "a mixture": "do not agree on .*: they are of different checkpoints",
    "no index": "holds no optimizer.safetensors.index.json",
}


def said_by(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def damaged(rank: int, folder: Path, reference: Path) -> dict[str, str]:
    start = untrained("untied", ParallelSizes(tp=2))

    def read(where: Path) -> None:
        with failing_together():
            load(*start, where)

    for what in DAMAGES if rank == 0 else ():
        damage(Path(shutil.copytree(reference, folder / what)), what)
    dist.barrier()
    found = {what: said_by(lambda where=folder / what: read(where)) for what in DAMAGES}
    found["one rank"] = said_by(lambda: read(reference if rank == 0 else folder / "elsewhere"))
    return found


def failing_to_write(rank: int, folder: Path, reference: Path) -> dict[str, Any]:
    """Rank 1 has no room left; then, the rank that finishes is ended while it does."""
    model, optimizer, layout = trained("untied", ParallelSizes(dp_shard=2))
    name = "hf_wlb.parallel.checkpoint.files.save_file"
    whole = folder / "whole"
    if rank == 0:
        shutil.copytree(reference, whole)
    dist.barrier()

    def write(where: Path) -> None:
        save(model, optimizer, layout, where, rank)

    def no_room(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with mock.patch(name, no_room) if rank == 1 else mock.patch.dict({}):
        found = {"no room": said_by(lambda: write(whole)), "no room, new": said_by(lambda: write(folder / "new"))}
    dist.barrier()
    found["new"] = has_weights(str(folder / "new")) or has_optimizer(str(folder / "new"))
    start = untrained("untied", ParallelSizes(dp_shard=2))
    load(*start, whole)  # what was there before is still there, and whole
    found["old"] = differing(start[:2], (model, optimizer))

    calls: list[str] = []

    def killed(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) > 1:
            raise OSError("killed")
        os.rename(source, target)

    with mock.patch("hf_wlb.parallel.checkpoint.files.os.replace", killed):
        found["killed"] = said_by(lambda: write(whole))
    found["after"] = has_weights(str(whole))
    write(whole)
    found["again"] = sorted(os.listdir(whole)) == sorted(os.listdir(reference))
    return found


def test_adapters_of_a_sharded_model(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = adapters(0, 1, tmp_path)
    for of in (alone, *(found["lora"] for found in two_ranks)):
        assert of["loaded"] == [] and len(of["before"]) > 10
    whole = two_ranks[0]["lora"]["file"]
    assert whole.keys() == alone["file"].keys() and all(same(whole[name], alone["file"][name]) for name in whole)


def test_state_of_every_shape_comes_back(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["optimizers"] == {"SGD0": [], "SGD1": [], "Adagrad2": [], "AdamW3": []}


def test_damage_is_named_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        for what, sentence in DAMAGES.items():
            text = found["damaged"][what]
            assert text.startswith("ValueError: ") and re.search(sentence, text), text
    assert two_ranks[1]["damaged"]["one rank"].startswith("ValueError: ")
    assert "others failed: rank 1 with ValueError" in two_ranks[0]["damaged"]["one rank"]


def test_a_rank_that_cannot_write_ends_all_and_leaves_nothing_that_looks_complete(
    two_ranks: list[dict[str, Any]],
) -> None:
    others = "RuntimeError: This rank stops because others failed: rank "
    for rank, found in enumerate(two_ranks):
        failing = found["failing"]
        assert failing["no room"].startswith("OSError: No space left" if rank == 1 else f"{others}1 with OSError")
        assert failing["no room, new"] == failing["no room"]
        assert not failing["new"] and failing["old"] == []
        assert failing["killed"].startswith("OSError: killed" if rank == 0 else f"{others}0 with OSError")
        assert not failing["after"] and failing["again"]


# ---- what is refused ----


def test_another_model_or_optimizer_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    folder, layout = root / "one" / "untied", ParameterLayout(ParallelMesh())
    tied = str(root / "one" / "tied")
    with pytest.raises(ValueError, match=r"of another model than LlamaForCausalLM .*: it lacks lm_head.weight"):
        load_weights(model_of("untied", 1), layout, tied)
    with pytest.raises(ValueError, match=r"lm_head.weight of its own, but the model ties it to model.embed_tokens"):
        load_weights(model_of("tied", 1), layout, str(folder))
    with pytest.raises(ValueError, match=r"layers.1.* which the model has not"):
        load_weights(tiny(num_hidden_layers=1), layout, str(folder))
    with pytest.raises(ValueError, match=r"q_proj.weight is \[32, 32\] in .*, but \[64, 32\] in the model"):
        load_weights(tiny(head_dim=16), layout, str(folder))
    with pytest.raises(ValueError, match=r"is float32 in .*, but bfloat16 in the model. Load the model with dtype="):
        load_weights(model_of("untied", 1).bfloat16(), layout, str(folder))
    model = model_of("untied", 1)
    with pytest.raises(ValueError, match=r"written by the optimizer AdamW, and this run's is SGD"):
        load_optimizer(optimizer_of(model, torch.optim.SGD), model, layout, str(folder))
    frozen = model_of("untied", 1)
    frozen.lm_head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"they differ in lm_head.weight"):
        load_optimizer(optimizer_of(frozen), frozen, layout, str(folder))
    with pytest.raises(ValueError, match=r"had different hyper-parameters when they were saved"):
        load_optimizer(torch.optim.AdamW(model.parameters()), model, layout, str(folder))
    with pytest.raises(ValueError, match=r"the optimizer updates parameters that are not the model's"):
        save_optimizer(optimizer_of(model_of("untied", 1)), model, layout, str(tmp_path), leads=True)


def tiny(**settings: Any) -> Any:
    from transformers import LlamaForCausalLM

    config = model_of("untied", 0).config
    for name, value in settings.items():
        setattr(config, name, value)
    return LlamaForCausalLM(config)


def test_a_single_file_goes_without_an_index(root: Path, tmp_path: Path) -> None:
    model, _, layout = trained("untied", ParallelSizes())
    shutil.copytree(root / "one" / "untied", tmp_path, dirs_exist_ok=True)
    save_weights(model, layout, str(tmp_path), leads=True)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    start = untrained("untied", ParallelSizes())
    load_weights(start[0], layout, str(tmp_path))
    assert differing((start[0], optimizer_of(start[0])), (model, optimizer_of(model))) == []
