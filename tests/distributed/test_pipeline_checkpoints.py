"""Checkpoints of pipeline stages: files as of the whole model, which stages of any other split read."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_wlb.parallel import ParallelMesh, ParallelSizes, failing_together
from hf_wlb.parallel.checkpoint import (
    all_names,
    check_folder,
    has_optimizer,
    has_weights,
    load_weights,
    save_optimizer,
    save_weights,
)
from hf_wlb.parallel.checkpoint.names import file_tensors
from hf_wlb.parallel.parameter_layout import ParameterLayout
from hf_wlb.parallel.pipeline import cut_stage, find_parts
from tests.numerics.test_families import build
from tests.support.checkpoints import MOST_BYTES, contents, differing, optimizer_of, same, save, some_steps
from tests.support.pipeline_checkpoints import load, model_of, split, trained, untrained
from tests.support.spawn import run_distributed
from tests.support.tensor_parallel import FAMILIES
from tests.support.tolerances import LOSS_FLOAT32

KINDS = ("untied", "tied", "qwen3_moe")
#: By number of processes: sizes, and the models to try. Each reads what the one before it wrote.
SPLITS: dict[int, dict[str, tuple[ParallelSizes, tuple[str, ...]]]] = {
    2: {"pp2": (ParallelSizes(pp=2), KINDS)},
    4: {
        "pp4": (ParallelSizes(pp=4), ("tied", "qwen3_moe")),
        "pp2 x tp2": (ParallelSizes(pp=2, tp=2), ("tied", "qwen3_moe")),
        "dp2 x pp2": (ParallelSizes(dp_replicate=2, pp=2), ("tied",)),
        "pp2 x fsdp2": (ParallelSizes(pp=2, dp_shard=2), ("tied", "qwen3_moe")),
        "cp2 x tp2": (ParallelSizes(cp=2, tp=2), ("tied", "qwen3_moe")),
        "pp2 x cp2": (ParallelSizes(pp=2, cp=2), ("tied",)),
    },
}


def save_and_load(rank: int, world_size: int, root: Path) -> dict[str, list[str]]:
    """What differs from what is expected, by case; saves every split's checkpoint besides."""
    found: dict[str, list[str]] = {}
    last = dict.fromkeys(KINDS, "pp2" if world_size == 4 else "one")
    for name, (sizes, kinds) in SPLITS[world_size].items():
        for kind in kinds:
            expected, start = trained(kind, sizes), untrained(kind, sizes)
            found[f"{name}, {kind}, before"] = differing(start[:2], expected[:2])
            load(*start, root / last[kind] / kind)
            found[f"{name}, {kind}, loaded"] = differing(start[:2], expected[:2])
            save(*start, root / name / kind, rank)
            last[kind] = name
            if name == "dp2 x pp2":  # two machines, each with a replica and a disk of its own
                mesh = start[2].mesh
                save(*start, root / f"{name}, disk {mesh.dp_rank}" / kind, mesh.pp_rank)
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
    """All that two stages can show, from one start of them."""
    return run_distributed(of_two_ranks, 2, root, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def four_ranks(two_ranks: list[dict[str, Any]], root: Path) -> list[dict[str, list[str]]]:
    return run_distributed(save_and_load, 4, root)


def of_two_ranks(rank: int, world_size: int, root: Path, folder: Path) -> dict[str, Any]:
    reference = root / "one" / "untied"
    return {
        "splits": save_and_load(rank, world_size, root),
        "damaged": damaged(rank, folder, reference),
        "refused": refused(rank, folder, reference),
        "failing": failing_to_write(rank, folder, reference),
        "norms": norms(rank),
        "frozen": frozen(rank, folder),
    }


def test_stages_write_and_read_what_one_process_does(two_ranks: list[dict[str, Any]], root: Path) -> None:
    assert_splits([found["splits"] for found in two_ranks], root)


def test_stages_in_other_splits_write_and_read_the_same(four_ranks: list[dict[str, list[str]]], root: Path) -> None:
    assert_splits(four_ranks, root)


def assert_splits(ranks: list[dict[str, list[str]]], root: Path) -> None:
    for found in ranks:
        for case, names in found.items():
            if case.endswith("loaded"):
                assert names == [], case
            else:  # the control: what was not loaded is found to differ
                assert len(names) > 20, case
    for name, (_, kinds) in SPLITS[len(ranks)].items():
        for kind in kinds:
            assert_same_checkpoint(root / name / kind, root / "one" / kind)
            for file in ("config.json", "generation_config.json"):
                assert (root / name / kind / file).read_text() == (root / "one" / kind / file).read_text()
            start = untrained(kind, ParallelSizes())
            load(*start, root / name / kind)
            assert differing(start[:2], trained(kind, ParallelSizes())[:2]) == []
            model = AutoModelForCausalLM.from_pretrained(root / name / kind)
            assert differing((model, optimizer_of(model)), (start[0], optimizer_of(start[0]))) == [], (name, kind)


def assert_same_checkpoint(folder: Path, reference: Path) -> None:
    """The same tensors and descriptions; which tensors share a file is a split's own business."""
    found, expected = contents(folder), contents(reference)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same(found[name], expected[name])] == [], folder
    for stem in ("model", "optimizer"):
        index, other = (json.loads((of / f"{stem}.safetensors.index.json").read_text()) for of in (folder, reference))
        files = sorted(set(index.pop("weight_map").values()))
        del other["weight_map"]
        assert index == other
        assert files == [f"{stem}-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        assert files == sorted(path.name for path in folder.glob(f"{stem}*.safetensors"))
        for file in files:
            assert sum(of.nbytes for of in load_file(folder / file).values()) <= MOST_BYTES
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("disk", (0, 1))
def test_every_disk_gets_a_whole_checkpoint(disk: int, four_ranks: list[dict[str, list[str]]], root: Path) -> None:
    assert_same_checkpoint(root / f"dp2 x pp2, disk {disk}" / "tied", root / "one" / "tied")


def test_control_another_stages_tensor_makes_another_checkpoint(root: Path, tmp_path: Path) -> None:
    model, optimizer, layout = trained("untied", ParallelSizes())
    save(model, optimizer, layout, tmp_path)
    assert_same_checkpoint(tmp_path, root / "one" / "untied")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.copy_(model.model.layers[2].mlp.up_proj.weight)
    save(model, optimizer, layout, tmp_path)
    with pytest.raises(AssertionError, match=r"layers.3.mlp.up_proj"):
        assert_same_checkpoint(tmp_path, root / "one" / "untied")


# ---- families whose files hold other tensors than their models ----


FILES_OF = (
    "llama, attention bias",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss, sinks",
    "deepseek_v2, latent of own heads",
)


@pytest.mark.parametrize("kind", FILES_OF)
def test_every_stage_reads_a_checkpoint_of_transformers(kind: str, tmp_path: Path) -> None:
    build(FAMILIES[kind]).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    units = file_tensors(whole, ParameterLayout(ParallelMesh()))
    files = {key: of.shape for unit in units for key, of in unit.tensors.items()}
    names, parts = all_names(whole), find_parts(whole)
    with torch.device("meta"):
        assert all_names(AutoModelForCausalLM.from_config(whole.config)) == names
    expected, seen = whole.state_dict(), set[str]()
    as_held = tmp_path / "as held"  # a checkpoint under the names that tensors have in memory
    as_held.mkdir()
    save_file({name: of.clone() for name, of in expected.items()}, as_held / "model.safetensors")
    of_stages: list[dict[str, torch.Size]] = []
    for layers in (range(1), range(1, 2)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        stage = cut_stage(model, parts, layers)
        layout = ParameterLayout(ParallelMesh(), copies=stage.copies, elsewhere=names)
        own = dict(model.named_parameters())
        assert own.keys() < expected.keys()
        with pytest.raises(ValueError, match="which the model has not"):
            load_weights(model, dataclasses.replace(layout, elsewhere=frozenset()), str(tmp_path))
        for folder in (tmp_path, as_held):
            for parameter in own.values():
                parameter.data.fill_(torch.nan)
            load_weights(model, layout, str(folder))
            assert [name for name in own if not same(own[name].detach(), expected[name])] == []
        seen |= own.keys()
        written = [unit for unit in file_tensors(model, layout) if unit.name not in stage.copies]
        of_stages.append({key: of.shape for unit in written for key, of in unit.tensors.items()})
        assert len(stage.copies) == (layers.start > 0 and whole.config.tie_word_embeddings)
    assert seen == expected.keys()
    assert of_stages[0] | of_stages[1] == files and not of_stages[0].keys() & of_stages[1].keys()


# ---- what is wrong, and said so on every rank ----


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def read(start: tuple[Any, Any, ParameterLayout], folder: Path) -> str:
    def together() -> None:
        with failing_together(place=start[2].mesh.place):
            load(*start, folder)

    return said_by(together)


def damage(folder: Path, what: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if what == "a missing file":
        (folder / index["weight_map"]["model.layers.0.mlp.up_proj.weight"]).unlink()
        return
    if what == "a cut file":
        file = folder / index["weight_map"]["model.layers.3.mlp.up_proj.weight"]
        file.write_bytes(file.read_bytes()[:-100])
        return
    if what == "a missing tensor":
        file = index["weight_map"].pop("model.norm.weight")
        save_file(
            {key: of for key, of in load_file(folder / file).items() if key != "model.norm.weight"}, folder / file
        )
    else:
        index["weight_map"]["model.layers.4.mlp.up_proj.weight"] = "more.safetensors"
        save_file({"model.layers.4.mlp.up_proj.weight": torch.zeros(1)}, folder / "more.safetensors")
    path.write_text(json.dumps(index))


#: What is said, and whether only by the stage that it concerns, the last one.
DAMAGES = {
    "a missing file": ("is missing: the checkpoint is damaged", False),
    "a cut file": ("cannot be read .*: the checkpoint is damaged", False),
    "a missing tensor": ("it lacks model.norm.weight", True),
    "one tensor more": ("it has model.layers.4.mlp.up_proj.weight, which the model has not", False),
}


def damaged(rank: int, folder: Path, reference: Path) -> dict[str, str]:
    start = untrained("untied", ParallelSizes(pp=2))
    for what in DAMAGES if rank == 0 else ():
        damage(Path(shutil.copytree(reference, folder / what)), what)
    dist.barrier()
    found = {what: read(start, folder / what) for what in DAMAGES}
    found["nothing"] = read(start, reference)
    found["another model"] = read(untrained("untied", ParallelSizes(pp=2), intermediate_size=40), reference)
    if rank == 1:
        start[0].lm_head.weight.requires_grad_(False)
    found["other parameters"] = read((start[0], optimizer_of(start[0]), start[2]), reference)
    return found


def test_damage_is_named_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two_ranks):
        for what, (sentence, one_stage) in DAMAGES.items():
            text = found["damaged"][what]
            begin = (
                "RuntimeError: This rank stops because others failed: rank 1 (stage 1) with "
                if one_stage and not rank
                else ""
            )
            assert re.match(f"{re.escape(begin)}ValueError: .*{sentence}", text), text
        assert found["damaged"]["nothing"] == "nothing"
        assert "in the model. Take the checkpoint of a model of the same" in found["damaged"]["another model"]
        assert "they differ in lm_head.weight" in found["damaged"]["other parameters"]


def refused(rank: int, folder: Path, reference: Path) -> dict[str, Any]:
    model, optimizer, layout = trained("untied", ParallelSizes(pp=2))
    own = folder / f"of rank {rank}"
    found: dict[str, Any] = {
        "folders": said_by(lambda: save(model, optimizer, layout, own, rank)),
        "folder": said_by(lambda: check_folder(str(own), layout.mesh, leads=rank == 0)),
        "shared": said_by(lambda: check_folder(str(folder), layout.mesh, leads=rank == 0)),
        "left": sorted(os.listdir(own)) if rank == 0 else [],
    }
    for what, groups in {
        "number": [{"params": list(model.parameters())}, {"params": []}][: rank + 1],
        "options": [{"params": list(model.parameters()), "weight_decay": 0.1 * (rank + 1)}],
        "empty": [{"params": list(model.parameters())[:0] if rank else list(model.parameters())}],
    }.items():
        other = torch.optim.AdamW(groups, lr=0.1)
        found[what] = said_by(
            lambda of=other: save_optimizer(of, model, layout, str(folder / "groups"), leads=not rank)
        )
    twice = model_of("untied", 0)
    cut_stage(twice, find_parts(twice), range(1, 4) if rank else range(2))
    found["twice"] = said_by(lambda: save_weights(twice, layout, str(folder / "twice"), leads=rank == 0))
    return found


def test_what_makes_no_checkpoint_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in (of["refused"] for of in two_ranks):
        for what in ("folders", "folder"):
            assert re.match(
                "ValueError: .* of rank 0 is not seen by any process of pipeline stage 1, .* needs a folder that all",
                found[what],
            ), found[what]
        assert found["shared"] == "nothing" and found["left"] == []
        assert "there are 1, 2 of them on the stages. Make the same groups" in found["number"]
        assert "weight_decay of group 0 is 0.1 on stage 0 and 0.2 on stage 1. Make" in found["options"]
        assert found["empty"] == "nothing"
        assert found["twice"].startswith("ValueError: two pipeline stages have a model.layers.1.")


def failing_to_write(rank: int, folder: Path, reference: Path) -> dict[str, Any]:
    """The disk is full while the second stage writes."""
    model, optimizer, layout = trained("untied", ParallelSizes(pp=2))
    whole = folder / "whole"
    if rank == 0:
        shutil.copytree(reference, whole)
    dist.barrier()

    def no_room(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    patched = mock.patch("hf_wlb.parallel.checkpoint.files.save_file", no_room) if rank == 1 else nullcontext()
    with torch.no_grad():
        for parameter in model.parameters():  # what must not come into the checkpoint that is there
            parameter.mul_(2)
    found: dict[str, Any] = {}
    with patched:
        for where in (whole, folder / "new"):
            found[where.name] = [
                said_by(lambda of=where: save_weights(model, layout, str(of), leads=rank == 0, most_bytes=MOST_BYTES)),
                said_by(lambda of=where: save_optimizer(optimizer, model, layout, str(of), leads=rank == 0)),
            ]
    dist.barrier()
    found["complete"] = has_weights(str(folder / "new")) or has_optimizer(str(folder / "new"))
    start = untrained("untied", ParallelSizes(pp=2))
    found["read"] = read(start, whole)
    found["old"] = differing(start[:2], trained("untied", ParallelSizes(pp=2))[:2])
    found["again"] = said_by(lambda: save(model, optimizer, layout, whole, rank))
    load(*start, whole)
    found["now"] = differing(start[:2], (model, optimizer))
    found["partial"] = [path.name for path in whole.glob("*.partial")]
    return found


def test_a_full_disk_ends_all_and_leaves_the_checkpoint_before(two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(of["failing"] for of in two_ranks):
        others = "" if rank == 1 else "RuntimeError: This rank stops because others failed: rank 1 (stage 1) with "
        assert found["whole"] == found["new"] == [f"{others}OSError: No space left on device"] * 2
        assert not found["complete"] and found["read"] == "nothing" and found["old"] == []
        assert found["again"] == "nothing" and found["now"] == [] and found["partial"] == []


# ---- norms, and stages that are not trained ----


def norms(rank: int) -> dict[str, tuple[float, str]]:
    """Of gradients; of the copy counted, too; of one stage that is in float64, the other without any; of no stage."""
    model, _, layout = trained("tied", ParallelSizes(pp=2))
    named = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    cases = {
        "all": layout.total_norm(named),
        "copy": dataclasses.replace(layout, copies={}).total_norm(named),
        "double": layout.total_norm([(name, of.double()) for name, of in named] if rank == 1 else []),
        "bfloat16": layout.total_norm([(name, of.bfloat16()) for name, of in named] if rank == 0 else []),
        "none": layout.total_norm([]),
    }
    return {case: (float(norm), str(norm.dtype)) for case, norm in cases.items()}


def test_norms_count_every_element_once(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["norms"] == two_ranks[1]["norms"]
    found = two_ranks[0]["norms"]
    model, _, _ = trained("tied", ParallelSizes())
    gradients = {name: of.grad.double() for name, of in model.named_parameters()}

    def norm(*last: bool) -> float:
        """Of those that are on the last stage, or not."""
        own = (name.startswith(("model.layers.3", "model.norm")) for name in gradients)
        chosen = [of.square().sum() for is_last, of in zip(own, gradients.values(), strict=True) if is_last in last]
        return float(torch.stack(chosen).sum().sqrt())

    assert found["all"] == (pytest.approx(norm(True, False), rel=LOSS_FLOAT32), "torch.float32")
    assert found["double"] == (pytest.approx(norm(True), rel=1e-12), "torch.float64")
    assert found["bfloat16"] == (pytest.approx(norm(False), rel=1e-2), "torch.float32")
    assert found["none"] == (0.0, "torch.float32")
    assert found["copy"][0] > 1.01 * found["all"][0]  # the control


def frozen(rank: int, folder: Path) -> dict[str, Any]:
    """Only the last stage's layer is trained: the other stage has an optimizer of empty groups."""
    found: dict[str, Any] = {}

    def start(seed: int) -> tuple[Any, Any, ParameterLayout]:
        model = model_of("untied", seed)
        layout = split(model, ParallelSizes(pp=2))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.3" in name)
        return model, optimizer_of(model), layout

    expected, other = start(0), start(1)
    some_steps(*expected[:2])
    save(*expected, folder / "frozen", rank)
    found["before"] = len(differing(other[:2], expected[:2]))
    load(*other, folder / "frozen")
    found["loaded"] = differing(other[:2], expected[:2])
    found["groups"] = json.loads((folder / "frozen" / "optimizer.safetensors.index.json").read_text())["param_groups"]
    found["trained"] = list(contents(folder / "frozen"))
    return found


def test_a_stage_that_is_not_trained_keeps_its_place(two_ranks: list[dict[str, Any]]) -> None:
    for found in (of["frozen"] for of in two_ranks):
        assert found["before"] > 10 and found["loaded"] == []
        assert [len(group["params"]) for group in found["groups"]] == [7, 2]
        assert [group["weight_decay"] for group in found["groups"]] == [0.1, 0.0]
        assert all("layers.3." in name for name in found["trained"] if name.startswith("optimizer: "))
