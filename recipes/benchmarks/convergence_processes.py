"""The processes of the convergence benchmark: one a run, so many at once, and none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from convergence_cases import Job, Run

RUN = Path(__file__).resolve().parent / "convergence_run.py"
POLL_S = 0.2
SHOWN_OF_LOG = 3_000  # characters, where a run fails
PATIENCE_S = 10.0  # for a run that is told to end; then it is killed


class Terminated(KeyboardInterrupt):
    """SIGTERM, as ``timeout`` sends it: ends this process as Ctrl-C does, with those that it started."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises ``Terminated`` in this process; those that it forks end as always."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() == process:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Started:
    """A run that is going on: its process, its log, its place and since when."""

    run: Run
    process: subprocess.Popen[bytes]
    log: TextIO
    gpu: int
    since: float


def start(job: Job, gpu: int) -> Started:
    """Starts a run on a GPU.

    Raises:
        ValueError: If there is no such GPU among those of ``CUDA_VISIBLE_DEVICES``.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = devices.split(",") if devices else [str(number) for number in range(gpu + 1)]
    if gpu >= len(names):
        raise ValueError(f"GPU {gpu} was asked for, but CUDA_VISIBLE_DEVICES={devices} names {len(names)}.")
    log = (Path(job.folder) / f"{job.run.file_name}.log").open("a" if job.checkpoints else "w", encoding="utf-8")
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "" if job.use_cpu else names[gpu],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1" if job.use_cpu else "4"),
    }
    command = [sys.executable, str(RUN), str(job.save())]
    process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
    return Started(job.run, process, log, gpu, time.perf_counter())


def end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process that was told to end; kills it if it does not."""
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_all(jobs: Sequence[Job], places: Sequence[int], finished: Callable[[Job], str]) -> list[str]:
    """Runs all jobs, one at a place at once.

    Args:
        jobs: In the order in which they are started.
        places: The GPU of every place.
        finished: Called after each that succeeds; returns what shall be said of it.

    Returns:
        The names of the runs that failed.
    """
    waiting, free, running, failed = list(jobs), list(places), list[Started](), list[str]()
    by_name = {job.run.name: job for job in jobs}
    try:
        while waiting or running:
            while waiting and free:
                running.append(start(waiting.pop(0), free.pop(0)))
            time.sleep(POLL_S)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.gpu)
                one.log.close()
                seconds = time.perf_counter() - one.since
                if one.process.returncode == 0:
                    print(
                        f"{one.run.name}: finished after {seconds:.0f} s{finished(by_name[one.run.name])}", flush=True
                    )
                else:
                    failed.append(one.run.name)
                    log = Path(one.log.name).read_text(encoding="utf-8", errors="replace")
                    print(f"{one.run.name} failed after {seconds:.0f} s:\n{log[-SHOWN_OF_LOG:]}", file=sys.stderr)
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            end(one.process)
            one.log.close()
    return failed
