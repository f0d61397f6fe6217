"""Checkpoints of pipelines: one split goes on where another stopped, and the curve is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.distributed.test_pipeline_trainer import deep
from tests.numerics.test_families import build
from tests.support.equivalence import rows
from tests.support.spawn import run_distributed
from tests.support.tolerances import TRAINER_AFTER_STEPS
from tests.support.training import trainer_of

STEPS, SAVED = 4, 2
WRITER = "pp2 x dp2"
#: By number of processes; what goes on from the writer's checkpoint.
READERS: dict[int, dict[str, dict[str, Any]]] = {
    4: {"pp4": {"pp_size": 4}, "pp2 x tp2": {"pp_size": 2, "tp_size": 2}, "pp2 x fsdp2": {"pp_size": 2, "fsdp": True}},
    2: {"cp2": {"cp_size": 2}, "pp2": {"pp_size": 2}},
}


def run(folder: Path, world_size: int, resume: Path | None = None, **options: Any) -> list[float]:
    """Losses of four steps, or of those that are left; a checkpoint after the second."""
    dp_size = world_size // (options.get("cp_size", 1) * options.get("tp_size", 1) * options.get("pp_size", 1))
    settings: dict[str, Any] = {
        "packer": "next-fit",
        "context_length": 24,
        "max_document_tokens": 24,
        "max_steps": STEPS,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 4 // dp_size,
        "save_strategy": "steps",
        "save_steps": SAVED,
    }
    torch.manual_seed(0)
    trainer, recorder = trainer_of(folder, rows(), build(deep("gemma3")), **{**settings, **options})
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return recorder.losses


def runs(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if world_size == 4:
        found[WRITER] = run(root / WRITER, 4, pp_size=2)
        found["of one process"] = run(root / "on", 4, root / "one" / f"checkpoint-{SAVED}", pp_size=2)
    checkpoint = root / WRITER / f"checkpoint-{SAVED}"
    for reader, options in READERS[world_size].items():
        found[reader] = run(root / reader, world_size, checkpoint, **options)
    if world_size == 2:
        found["damaged"] = {name: resumed(root, damaged) for name, damaged in damages(rank, root, checkpoint).items()}
    return found


def damages(rank: int, root: Path, checkpoint: Path) -> dict[str, Path]:
    """Copies of a checkpoint: a file of the last stage is cut, or misses, or holds an optimizer's state too little."""
    import shutil

    import torch.distributed as dist

    found = {name: root / name for name in ("cut", "missing")}
    if rank == 0:
        for folder in found.values():
            shutil.copytree(checkpoint, folder)
        (file,) = (root / "cut").glob("model-00002-of-*.safetensors")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        (file,) = (root / "missing").glob("optimizer-00002-of-*.safetensors")
        file.unlink()
    dist.barrier()
    return found


def resumed(root: Path, checkpoint: Path) -> str:
    try:
        run(root / "refused", 2, checkpoint, pp_size=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(root: Path) -> list[float]:
    return run(root / "one", 1)


@pytest.fixture(scope="module")
def found(root: Path, whole: list[float]) -> dict[str, Any]:
    four = run_distributed(runs, 4, root, timeout_s=400)
    two = run_distributed(runs, 2, root, timeout_s=400)
    assert all(other[name] == four[0][name] for other in four for name in four[0])  # all ranks log alike
    return {**four[0], **two[0], "damaged, all ranks": [rank["damaged"] for rank in two]}


def test_the_writer_trains_as_one_process(found: dict[str, Any], whole: list[float]) -> None:
    assert len(whole) == STEPS and len(set(whole)) == STEPS
    assert found[WRITER] == pytest.approx(whole, rel=TRAINER_AFTER_STEPS)


@pytest.mark.parametrize("reader", [*READERS[4], *READERS[2], "of one process"])
def test_another_split_goes_on(reader: str, found: dict[str, Any], whole: list[float]) -> None:
    assert found[reader] == pytest.approx(whole[SAVED:], rel=1e-5)


def test_the_checkpoint_is_hugging_faces(found: dict[str, Any], root: Path) -> None:
    models = [
        AutoModelForCausalLM.from_pretrained(root / name / f"checkpoint-{STEPS}") for name in (WRITER, "one", "pp4")
    ]
    states = [model.state_dict() for model in models]
    for name, tensor in states[1].items():
        for other in (states[0], states[2]):
            assert torch.allclose(other[name], tensor, rtol=1e-3, atol=1e-5), name


def test_damage_is_named_on_every_rank(found: dict[str, Any]) -> None:
    for rank in found["damaged, all ranks"]:
        assert "model-00002-of-" in rank["cut"] and "cannot be read" in rank["cut"]
        assert "optimizer-00002-of-" in rank["missing"] and "is missing" in rank["missing"]


def test_control_other_weights_are_noticed(found: dict[str, Any], root: Path, whole: list[float]) -> None:
    """One that goes on from weights that were changed a little does not give this curve."""
    folder = root / WRITER / f"checkpoint-{SAVED}"
    file = sorted(folder.glob("model-*.safetensors"))[0]
    tensors = load_file(file)
    changed = {name: tensor * (1.3 if "layers" in name else 1) for name, tensor in tensors.items()}
    save_file(changed, file, metadata={"format": "pt"})
    losses = run(root / "changed", 1, folder)
    assert losses != pytest.approx(whole[SAVED:], rel=1e-4)
