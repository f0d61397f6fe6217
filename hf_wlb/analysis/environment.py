"""What is needed to judge and to repeat a run; nothing that names the machine, a folder or a person."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_wlb import __version__

_PACKAGE = Path(__file__).resolve().parents[1]


def environment(command: str, seed: int) -> dict[str, Any]:
    """Date, commit and versions.

    Args:
        command: What was typed, see ``shown_command``.
        seed: Of the run.

    Returns:
        ``date``, ``commit``, ``command``, ``seed``, ``cpu`` and versions, in plain JSON types.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": command,
        "seed": seed,
        "cpu": processor(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "hf_wlb": __version__,
    }


def shown_command(program: str, words: Sequence[str]) -> str:
    """A command line without folders of this machine: of a path only the last part stays.

    Args:
        program: How the program is started.
        words: Its arguments.

    >>> shown_command("hf-wlb", ["simulate", "--data", "/home/me/lengths.json", "--steps", "5"])
    'hf-wlb simulate --data lengths.json --steps 5'
    """
    return shlex.join([*program.split(), *(word.rstrip("/").rsplit("/", 1)[-1] for word in words)])


def commit() -> str:
    """The commit that the package is at, "unknown" where it is not in a checkout of its own; says if it was changed."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else it lies in somebody else's repository
        found = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", ".", "../recipes/benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found}, with changes" if changed else found


def processor() -> str:
    """What the processor is called."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
