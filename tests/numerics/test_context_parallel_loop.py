"""The recipe of a loop of one's own: two processes, started as the guide says, have the losses of one."""

import re
import subprocess
import sys

import pytest

from tests.support.scripts import quiet_environment, run_script
from tests.support.source_tree import REPOSITORY

RECIPE = "recipes/context_parallel_loop.py"
SMALL = ("--max_steps", "3", "--context_length", "1024")


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=200, check=False
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[tuple[float, int]]:
    """Loss and targets of every step."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step \d+ loss (\S+) of (\d+) targets$", done.stdout, re.MULTILINE)
    return [(float(loss), int(targets)) for loss, targets in found]


def test_two_processes_have_the_losses_of_one() -> None:
    alone = losses(run_script(RECIPE, *SMALL))
    shared = losses(torchrun(RECIPE, *SMALL, "--cp_size", "2"))
    assert len(alone) == 3 and alone[2][0] < alone[0][0]
    assert [targets for _, targets in shared] == [targets for _, targets in alone]
    assert [loss for loss, _ in shared] == pytest.approx([loss for loss, _ in alone], abs=3e-5)


def test_the_guide_names_it() -> None:
    text = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert f"torchrun --nproc_per_node 2 {RECIPE} --cp_size 2" in text
    assert (REPOSITORY / RECIPE).is_file()
