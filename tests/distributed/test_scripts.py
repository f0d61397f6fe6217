"""Scripts in forked processes: they are told what a launcher tells, and nothing of them outlives the call."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.scripts import Script, quiet_environment, run_script
from tests.support.source_tree import REPOSITORY

SAYS = """
import atexit, json, os, pathlib, sys
import neighbour
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "OWN")
print(json.dumps([sys.argv[1:], os.getcwd(), neighbour.NAME, __name__, {n: os.environ.get(n) for n in names}]))
print("aside", file=sys.stderr)
os.system("echo from a child")
if len(sys.argv) > 2:
    atexit.register(pathlib.Path(sys.argv[2]).touch)
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("NAME = 'beside it'\n")
    (tmp_path / "says.py").write_text(SAYS)
    return tmp_path / "says.py"


def test_one_process_is_what_python_starts(script: Path) -> None:
    done = run_script(script, "a", environment={"OWN": "given"})
    real = subprocess.run(
        [sys.executable, str(script), "a"], cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1", "OWN": "given"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(real.stdout.splitlines())
    assert done.stderr.splitlines()[-1] == real.stderr.splitlines()[-1] == "aside"


def test_another_folder_is_where_it_starts(script: Path) -> None:
    done = run_script(script.name, folder=script.parent)
    real = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, env=quiet_environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(real.stdout.splitlines())
    said = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert said[1:3] == [str(script.parent), "beside it"]


def test_a_launcher_s_processes_know_their_ranks(script: Path) -> None:
    done = run_script(script, processes=2)
    said = [json.loads(line)[-1] for line in done.stdout.splitlines() if line.startswith("[")]
    assert [(of["RANK"], of["LOCAL_RANK"], of["WORLD_SIZE"]) for of in said] == [("0", "0", "2"), ("1", "1", "2")]


def test_the_exit_code_and_what_was_registered_for_the_end(script: Path, tmp_path: Path) -> None:
    assert run_script(script, 3, tmp_path / "left").returncode == 3
    assert (tmp_path / "left").exists()


def test_an_error_is_a_traceback_and_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.scripts._SECONDS_TO_FOLLOW", 1.0)
    (tmp_path / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise KeyError('no such document: 17')\ntime.sleep(600)\n"
    )
    begin = time.monotonic()
    done = run_script(tmp_path / "fails.py", processes=2)
    assert done.returncode == 1 and "KeyError: 'no such document: 17'" in done.stderr
    assert time.monotonic() - begin < 120


def test_a_late_script_is_ended_with_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import pathlib, subprocess, sys, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\ntime.sleep(600)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(tmp_path / "late.py", tmp_path / "pid", timeout_s=3)
    status = Path("/proc") / (tmp_path / "pid").read_text() / "status"
    assert not status.exists() or "State:\tZ" in status.read_text()  # gone, or gone and not reaped yet


def test_killed_it_has_a_signal_s_exit_code(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
    script = Script(tmp_path / "waits.py")
    assert script.runs()
    script.kill()
    assert script.wait().returncode == -9
