"""The recipe of a loop of one's own: two processes have the losses of one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.numerics.test_recipe import environment
from tests.support.source_tree import REPOSITORY

SMALL = ["--max_steps", "3", "--context_length", "1024"]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run(*before: str, more: tuple[str, ...] = ()) -> list[tuple[float, int]]:
    """Loss and targets of every step."""
    command = [sys.executable, *before, "recipes/context_parallel_loop.py", *SMALL, *more]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step \d+ loss (\S+) of (\d+) targets$", done.stdout, re.MULTILINE)
    return [(float(loss), int(targets)) for loss, targets in found]


def test_two_processes_have_the_losses_of_one() -> None:
    alone, shared = run(), run(*LAUNCHER, more=("--cp_size", "2"))
    assert len(alone) == 3 and alone[2][0] < alone[0][0]
    assert [targets for _, targets in shared] == [targets for _, targets in alone]
    assert [loss for loss, _ in shared] == pytest.approx([loss for loss, _ in alone], abs=3e-5)


def test_the_guide_names_it() -> None:
    text = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert "torchrun --nproc_per_node 2 recipes/context_parallel_loop.py --cp_size 2" in text
    assert (Path(REPOSITORY) / "recipes" / "context_parallel_loop.py").is_file()
