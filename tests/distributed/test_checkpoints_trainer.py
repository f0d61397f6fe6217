"""WLBTrainer's checkpoints: one split goes on where another stopped, and Trainer's options keep working."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.spawn import run_distributed
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import TRAINER_AFTER_STEPS
from tests.support.training import rows_of, trainer_of

STEPS, SAVED = 4, 2
SPLITS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "fsdp2": {"dp_shard_size": 2},
    "tp2": {"tp_size": 2},
    "fsdp over cp2": {"cp_size": 2, "fsdp": True},
    "fsdp2, lora": {"dp_shard_size": 2},
}


def model_of(split: str) -> Any:
    if "lora" not in split:
        return tiny_llama()
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(tiny_llama(), config)


def run(
    folder: Path, split: str, world_size: int, resume: Path | None = None, **options: Any
) -> tuple[Any, list[float]]:
    """Four steps, a checkpoint after each second one; evaluation finds the first of them better."""
    dp_size = world_size // (options.get("cp_size", 1) * options.get("tp_size", 1))
    settings: dict[str, Any] = {
        "packer": "next-fit",
        "max_steps": STEPS,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 4 // dp_size,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "eval_strategy": "steps",
        "eval_steps": SAVED,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "save_total_limit": 1,
        "eval_dataset": rows_of((5, 7, 9, 3), seed=1),
    }
    trainer, recorder = trainer_of(folder, model=model_of(split), **{**settings, **options})
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "final"))
    return trainer, recorder.losses


def alone(split: str) -> str:
    return "one, lora" if "lora" in split else "one"


def splits(rank: int, world_size: int, root: Path) -> dict[str, list[list[float]]]:
    found = {}
    for split, options in SPLITS.items():
        whole = run(root / split, split, world_size, **options)[1]
        rest = run(root / f"{split}, on", split, world_size, root / alone(split) / f"checkpoint-{SAVED}", **options)[1]
        found[split] = [whole, rest]
    found["refused"] = refused(root)
    return found


def refused(root: Path) -> Any:
    """What every rank says of checkpoints that a split run cannot go on from."""
    return {what: _resumed(root / what, root) for what in ("no optimizer", "cut", "of Trainer")}


def _resumed(checkpoint: Path, root: Path) -> str:
    try:
        run(root / "refused", "fsdp2", 2, checkpoint, dp_shard_size=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: Any) -> tuple[Path, dict[str, list[float]]]:
    """Runs of one process and their losses, and damaged copies of their checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    losses = {split: run(folder / split, split, 1, save_total_limit=None)[1] for split in ("one", "one, lora")}
    for what in ("no optimizer", "cut", "of Trainer"):
        shutil.copytree(folder / "one" / f"checkpoint-{SAVED}", folder / what)
    (folder / "cut" / "trainer_state.json").unlink()
    for what in ("no optimizer", "of Trainer"):
        for path in (folder / what).glob("optimizer*"):
            path.unlink()
    torch.save({}, folder / "of Trainer" / "optimizer.pt")
    return folder, losses


@pytest.fixture(scope="module")
def root(one_process: Any) -> Path:
    return one_process[0]


@pytest.fixture(scope="module")
def expected(one_process: Any) -> dict[str, list[float]]:
    return one_process[1]


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_distributed(splits, 2, root, timeout_s=400)


def assert_losses(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=TRAINER_AFTER_STEPS)


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_goes_on_where_one_process_stopped(split: str, ranks: Any, expected: Any) -> None:
    curve = expected[alone(split)]
    assert len(set(curve)) == STEPS
    for found in ranks:
        whole, rest = found[split]
        assert_losses(whole, curve)
        assert_losses(rest, curve[SAVED:])


@pytest.mark.parametrize("split", SPLITS)
def test_one_process_goes_on_where_a_split_stopped(
    split: str, ranks: Any, expected: Any, root: Path, tmp_path: Path
) -> None:
    checkpoint = root / split / f"checkpoint-{SAVED}"
    _, rest = run(tmp_path, split, 1, checkpoint)
    assert_losses(rest, expected[alone(split)][SAVED:])
    # The negative control: with other moments, Adam's steps come out otherwise.
    shutil.copytree(checkpoint, tmp_path / "control")
    path = next((tmp_path / "control").glob("optimizer-*"))
    state = load_file(path)
    save_file({name: of if name.endswith("step") else of * 0.5 for name, of in state.items()}, path)
    _, wrong = run(tmp_path, split, 1, tmp_path / "control")
    assert wrong[0] == rest[0] and abs(wrong[1] / rest[1] - 1) > 3 * TRAINER_AFTER_STEPS


@pytest.mark.parametrize("split", SPLITS)
def test_options_of_trainer_keep_working(split: str, ranks: Any, root: Path) -> None:
    """The best checkpoint (the first here) is kept and loaded at the end, and written whole by save_model."""
    folder = root / split
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{SAVED}"]  # save_total_limit
    name = "adapter_model.safetensors" if "lora" in split else "model.safetensors"
    best = load_file(folder / f"checkpoint-{SAVED}" / name)
    last = load_file(root / alone(split) / f"checkpoint-{STEPS}" / name)
    final = load_file(folder / "final" / name)
    assert all(torch.equal(final[key], best[key]) for key in best) and final.keys() == best.keys()
    assert not any(torch.allclose(final[key], last[key], rtol=1e-3) for key in last)
    extra = set(os.listdir(folder / "final")) ^ set(os.listdir(root / alone(split) / "final"))
    assert extra == set()
    if "lora" not in split:
        model = AutoModelForCausalLM.from_pretrained(folder / "final")
        assert all(torch.equal(model.state_dict()[key], best[key]) for key in best)


def test_what_cannot_be_resumed_is_named_on_every_rank(ranks: Any) -> None:
    for found in ranks:
        said = found["refused"]
        assert "holds no state of the optimizer and the scheduler (save_only_model?)" in said["no optimizer"]
        assert "or its writing was cut. Resume from an earlier one." in said["cut"]
        assert "holds optimizer.pt, which a run whose parameters are split cannot read" in said["of Trainer"]
