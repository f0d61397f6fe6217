"""WLBTrainer under every split on two GPUs over NCCL: the losses of one GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.source_tree import REPOSITORY
from tests.support.split_training import SPLITS
from tests.support.tolerances import GPU_BF16, GPU_TRAINER

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("splits")
    found: dict[str, Any] = {}
    for processes in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        done = subprocess.run(
            [*launcher, "-m", "tests.support.split_training", str(folder)],
            cwd=REPOSITORY,
            env={**os.environ, "NVIDIA_TF32_OVERRIDE": "0"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found |= json.loads((folder / f"losses_{processes}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("split", SPLITS[2])
def test_a_split_has_the_losses_of_one_gpu(split: str, runs: dict[str, Any]) -> None:
    half = "bf16" in split
    expected, tolerance = runs["one, bf16" if half else "one"], GPU_BF16 if half else 5 * GPU_TRAINER
    for name in ("loss", "grad_norm", "eval_loss"):
        allowed = tolerance * (5 if half and name == "grad_norm" else 1)
        assert runs[split][name] == pytest.approx(expected[name], rel=allowed), name
