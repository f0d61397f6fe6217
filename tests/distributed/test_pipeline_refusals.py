"""What a pipeline does not do is refused at construction, on every rank, in words; and nothing else needs DeepSpeed."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_wlb import WLBTrainer
from tests.numerics.test_pipeline_families import UnusedWeights, fake
from tests.support.documents import WORKLOAD
from tests.support.source_tree import REPOSITORY
from tests.support.spawn import run_distributed
from tests.support.tiny_llama import tiny_llama
from tests.support.training import arguments, rows_of

EXPECTED = {
    "none": "no error",
    "layers given": "no error",
    "without deepspeed": 'ValueError: pp_size=2 needs DeepSpeed, for its pipeline schedule: pip install "hf_wlb[pip',
    "adapters": "ValueError: pp_size=2 cannot train adapters of PEFT. Set pp_size=1, or merge them first",
    "optimizer": "ValueError: optimizers=... holds the parameters of the whole model, but this run splits them",
    "too few layers": "ValueError: pp_size=2 is more than the model's 1 layer; every stage needs one layer at least",
    "other layers": "ValueError: pp_stage_layers=[2, 1] adds up to 3 layers, but the model has 2; spread all of them",
    "layers differ": "RuntimeError: The ranks do not agree on pp_stage_layers (rank",
    "weights that nobody uses": "ValueError: UnusedWeights cannot be split into pipeline stages: it has model.pooler",
}


def lora_model() -> Any:
    import peft

    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    model = tiny_llama()
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    cases: dict[str, dict[str, Any]] = {
        "none": {},
        "layers given": {"pp_stage_layers": [1, 1]},
        "adapters": {"model": lora_model()},
        "optimizer": {"model": model, "optimizers": optimizers},
        "too few layers": {"model": one_layer()},
        "other layers": {"pp_stage_layers": [2, 1]},
        "layers differ": {"pp_stage_layers": [1 + rank, 2 - rank]},
        "weights that nobody uses": {"model": fake(UnusedWeights)},
    }
    said = {name: outcome(folder, options) for name, options in cases.items()}
    with mock.patch.dict(sys.modules, {"deepspeed": None}):
        said["without deepspeed"] = outcome(folder, {})
    return said


def one_layer() -> Any:
    model = tiny_llama()
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    return model


def outcome(folder: str, options: dict[str, Any]) -> str:
    own = {"model": tiny_llama(), "train_dataset": rows_of(), "workload": WORKLOAD}
    own |= {name: options.pop(name) for name in ("model", "optimizers") if name in options}
    try:
        WLBTrainer(args=arguments(folder, pp_size=2, **options), **own)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_distributed(refusals, 2, str(tmp_path_factory.mktemp("refusals")))


@pytest.mark.parametrize("case", EXPECTED)
def test_what_is_refused_is_refused_on_every_rank(case: str, said: list[dict[str, str]]) -> None:
    for rank in said:
        assert rank.keys() == EXPECTED.keys()
        assert rank[case].startswith(EXPECTED[case]), rank[case]


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None
from hf_wlb import WLBTrainer, WLBTrainingArguments
import hf_wlb.parallel.pipeline
from tests.support.training import train
trainer, _ = train(sys.argv[1], max_steps=1)
print(trainer.state.global_step)
"""


def test_one_stage_needs_no_deepspeed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "1"
