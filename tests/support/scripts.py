"""Run a script in processes of its own, as `python script.py` or a launcher would, without waiting for its imports.

    done = run_script("recipes/llama_long_context.py", "--max_steps", "3", processes=2)
    assert done.returncode == 0, done.stderr

Importing torch and Transformers takes each process of a tiny training longer than the training does. So these processes
are forked from the one that `run_distributed` forks its ranks from, which has imported both. They are a launcher's
processes in what a script can ask for: arguments, environment, folder, output, exit code, and that a failing one ends
the others. But what libraries read as they are imported (HF_HOME, HF_HUB_OFFLINE, ...) is that of the first one. What
the start itself does (a launch file, torchrun's own agent, an import that is missing) they cannot show; tests of that
start real ones.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support.source_tree import REPOSITORY
from tests.support.spawn import fork, free_port

_QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_SECONDS_TO_FOLLOW = 20.0  # for the other processes to end by themselves, once one has failed


class Script:
    """A script that runs: in one process, or in those of a launcher."""

    def __init__(
        self,
        script: str | Path,
        *words: Any,
        processes: int | None = None,
        environment: dict[str, str] | None = None,
        folder: Path = REPOSITORY,
    ) -> None:
        """Start `script`, a path from `folder`, there and with `words` as its arguments.

        Without `processes` it is one process that no launcher has started; else each gets its RANK, WORLD_SIZE, ...
        """
        self.words = [str(script), *map(str, words)]
        self._outputs = tempfile.TemporaryDirectory(prefix="hf_wlb_script_")
        job = {} if processes is None else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        inherited = {name: value for name, value in quiet_environment().items() if name not in _OF_LAUNCHERS}
        self._processes: list[ForkServerProcess] = []
        try:
            for rank in range(processes or 1):
                self._start(rank, processes, {**inherited, **job, **(environment or {})}, folder)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, processes: int | None, variables: dict[str, str], folder: Path) -> None:
        if processes is not None:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            variables |= {name: str(value) for name, value in ranks.items()}
        outputs = [self._output(stream, rank) for stream in ("stdout", "stderr")]
        for output in outputs:
            output.touch()  # it may be killed before it has done anything
        self._processes.append(fork(_run, (self.words, variables, folder, outputs), f"{self.words[0]} {rank}"))

    def _output(self, stream: str, rank: int) -> Path:
        return Path(self._outputs.name) / f"{stream}_{rank}"

    def runs(self) -> bool:
        """Whether none of its processes has ended."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """End all processes, and those that they started, without a word to them."""
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # its group is not made yet, or all gone
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()

    def wait(self, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Wait for the end; the exit code is the first failing process's, the output that of all in their order.

        Raises:
            subprocess.TimeoutExpired: it had not ended after `timeout_s` seconds; all its processes were ended.
        """
        try:
            code, late = self._exit_code(time.monotonic() + timeout_s)
        finally:  # also if the test itself is ended
            self.kill()
            for process in self._processes:
                process.join()
                process.close()
        stdout, stderr = (
            "".join(self._output(stream, rank).read_text(errors="replace") for rank in range(len(self._processes)))
            for stream in ("stdout", "stderr")
        )
        self._outputs.cleanup()
        if late and not code:
            raise subprocess.TimeoutExpired(self.words, timeout_s, stdout, stderr)
        return subprocess.CompletedProcess(self.words, code, stdout, stderr)

    def _exit_code(self, deadline: float) -> tuple[int, bool]:
        """The first failing process's, or 0; and whether some had not ended in time."""
        left, code = {process.sentinel: process for process in self._processes}, 0
        while left:
            ended = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ended:
                return code, True
            for sentinel in ended:
                process = left.pop(int(str(sentinel)))
                process.join()
                if process.exitcode and not code:
                    code, deadline = process.exitcode, min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        return code, False


_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(
    script: str | Path,
    *words: Any,
    processes: int | None = None,
    environment: dict[str, str] | None = None,
    folder: Path = REPOSITORY,
    timeout_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end: see `Script`, and `Script.wait` for what comes back."""
    return Script(script, *words, processes=processes, environment=environment, folder=folder).wait(timeout_s)


def quiet_environment() -> dict[str, str]:
    """What these processes and real ones beside them are given: one thread each, no network, no warnings of forks."""
    return {**os.environ, **_QUIET}


def _run(words: list[str], variables: dict[str, str], folder: Path, outputs: list[Path]) -> None:
    os.setsid()  # a group of its own: it can be ended with what it started
    for number, file in enumerate(outputs, start=1):
        descriptor = os.open(file, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = words
    sys.path.insert(0, str((folder / words[0]).parent))
    gc.freeze()  # as in run_distributed
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which a forked process would leave out
