"""Run one function as several gloo processes on this machine and bring back what each rank returned.

    def sum_of_ranks(rank: int, world_size: int, factor: int) -> float:
        total = torch.tensor(float(rank * factor))
        dist.all_reduce(total)
        return total.item()

    assert run_distributed(sum_of_ranks, 2, 10) == [10.0, 10.0]

The function lives at the top level of an importable module. Ranks are forked from one fresh Python that has imported
torch and what most of them need, once for all calls: to import it takes each of them longer than most runs.
Nothing that a rank does can hang or outlive the call: one rank's failure or the time limit ends all of
them, with the processes that they started (DataLoader workers too).
"""

import faulthandler
import gc
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

_SECONDS_TO_START = 240.0  # for all ranks to import torch and the function, and to meet; a busy machine is slow
_PRELOADED = ["torch", "transformers.trainer", "accelerate", "datasets", "hf_wlb.trainer", "hf_wlb.parallel.checkpoint"]
_OF_ALL_RANKS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
_SECONDS_TO_LEAVE = 10.0  # for a rank to end once its value is here; after that it is killed
_SECONDS_TO_DUMP = 1.0  # for a hanging rank to write where it stands
_SECONDS_TO_DIE = 1.0  # for a dead rank's pipe to end, once another has failed: perhaps for its death


class RankError(RuntimeError):
    """A rank raised, or died without a word; `rank` says which, the message holds its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` gloo processes; return their values in rank order.

    Every rank has one torch thread, the default process group (gloo over the loopback interface) and the
    environment of a launcher (RANK, LOCAL_RANK, WORLD_SIZE, ..., ACCELERATE_USE_CPU), so that
    `Accelerator()`, `PartialState(cpu=True)` and TrainingArguments see a CPU run of `world_size` processes.
    Arguments and values travel by pickle, tensors as copies.

    Raises:
        RankError: a rank raised or died; of several, one that died without a word, else the first.
        TimeoutError: not all ranks had returned `timeout_s` seconds after the last of them had started; says
            which and where each stood. Also if they had not all started after four minutes.
        ValueError: `world_size` below 1, or `fn` or `args` cannot be pickled.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; run_distributed needs at least one rank.")
    try:
        job = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{fn!r} or its arguments cannot be sent to other processes ({error}); "
            "pass a function from the top level of a module, and plain data."
        ) from error
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="hf_wlb_spawn_") as folder:
        port = free_port()
        try:
            for rank in range(world_size):
                ranks.append(_start(rank, world_size, job, Path(folder), port, timeout_s))
            values = _collect(ranks, timeout_s)
            _dismiss(ranks)
            return values
        finally:
            _kill(ranks)


@dataclass(frozen=True)
class _Rank:
    """One started process, the parent's end of its pipe, and the file a hanging rank writes its stack to."""

    rank: int
    process: ForkServerProcess
    pipe: Connection
    stack_file: Path


_STARTED = "started"  # what a rank sends first; its _Report follows


@dataclass(frozen=True)
class _Report:
    """What a rank sends back, once: its pickled value or its traceback, and when (all share a clock)."""

    at_s: float
    value: bytes | None
    error: str | None
    died: bool = False  # it sent nothing: this is what the parent says in its place


@dataclass(frozen=True, order=True)
class _Failure:
    """One rank's failure; the least of several is the cause, the others are mostly its victims.

    A rank that died says so only by the end of its pipe, often after those that talked to it have complained.
    """

    spoke: bool
    at_s: float
    rank: int
    error: str


def free_port() -> int:
    """A port of the loopback interface that nothing listens at."""
    # Our own group meets in a file, so a port taken in between hurts only a test that opens another store.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def _preloaded() -> list[str]:
    """Nothing where there are GPUs: some imports initialise CUDA, and a forked process cannot do so again."""
    import torch

    return [] if torch.cuda.device_count() else _PRELOADED


def fork(target: Callable[..., None], args: tuple[Any, ...], name: str) -> ForkServerProcess:
    """Start a process that has torch and the trainer's imports already, to run `target(*args)`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    # Not a daemon: daemons may start no processes, and this one may have DataLoader workers.
    process = context.Process(target=target, args=args, name=name, daemon=False)
    with patch.dict(os.environ, _OF_ALL_RANKS):  # the first one starts the server, whose imports read some of these
        process.start()
    return process


def _start(rank: int, world_size: int, job: bytes, folder: Path, port: int, timeout_s: float) -> _Rank:
    ours, theirs = get_context("forkserver").Pipe()
    environment = {
        **_OF_ALL_RANKS,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    stack_file = folder / f"stack_{rank}"
    arguments = (theirs, job, environment, str(folder / "rendezvous"), str(stack_file), timeout_s)
    process = fork(_rank_main, arguments, f"rank {rank}")
    theirs.close()  # so that a rank's death shows as the end of its pipe
    return _Rank(rank, process, ours, stack_file)


def _rank_main(
    pipe: Connection, job: bytes, environment: dict[str, str], meeting: str, stack_path: str, timeout_s: float
) -> None:
    os.setsid()  # a group of its own: the parent can end this rank's own children with it
    os.environ.update(environment)  # before this rank's own imports; the server's knew what is of all ranks
    with open(stack_path, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            fn, args = _get_ready(job, rank, world_size, meeting, timeout_s)
            pipe.send(_STARTED)
            value = fn(rank, world_size, *args)
            report = _Report(time.monotonic(), pickle.dumps(value), None)
        except BaseException:  # SystemExit too: the parent decides what it means
            report = _Report(time.monotonic(), None, traceback.format_exc())
        with suppress(OSError, EOFError):  # the parent may have ended everything meanwhile
            pipe.send(report)
            pipe.recv()  # no rank leaves while another may still talk to it


def _get_ready(job: bytes, rank: int, world_size: int, meeting: str, timeout_s: float) -> Any:
    """Import what the job needs, join the other ranks, and return the job's function and arguments."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # Trainer collects garbage after every training: half a second if it looks through all that is imported
    torch.set_num_threads(1)
    job_parts = pickle.loads(job)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(timeout_s, _SECONDS_TO_START)),  # our own limit shall strike first
    )
    return job_parts


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    """Wait for every rank's report; raise when one fails, or when the time is up."""
    waiting = {rank.pipe: rank for rank in ranks}
    starting = {rank.rank for rank in ranks}
    values: dict[int, Any] = {}
    failures: list[_Failure] = []
    limit_s = _SECONDS_TO_START
    deadline = time.monotonic() + limit_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if failures:
                break
            late = [rank for rank in waiting.values() if not starting or rank.rank in starting]
            raise TimeoutError(_hanging(late, len(ranks), "started" if starting else "returned", limit_s))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            report = _receive(rank)
            if isinstance(report, str):
                starting.remove(rank.rank)
                if not starting and not failures:  # now the function's own time begins
                    limit_s, deadline = timeout_s, time.monotonic() + timeout_s
                continue
            del waiting[pipe]
            if report.error is not None:
                if not failures:
                    deadline = time.monotonic() + _SECONDS_TO_DIE
                failures.append(_Failure(not report.died, report.at_s, rank.rank, report.error))
            elif report.value is not None:
                values[rank.rank] = pickle.loads(report.value)
    if failures:
        cause = min(failures)
        raise RankError(cause.rank, f"Rank {cause.rank} of {len(ranks)} failed:\n{cause.error}")
    return [values[rank.rank] for rank in ranks]


def _receive(rank: _Rank) -> _Report | str:
    try:
        report = rank.pipe.recv()
    except (EOFError, OSError):
        rank.process.join(_SECONDS_TO_LEAVE)
        error = f"it ended with exit code {rank.process.exitcode} before it returned a value or raised.\n"
        return _Report(time.monotonic(), None, error, died=True)
    assert isinstance(report, _Report | str)
    return report


def _hanging(late: list[_Rank], world_size: int, what: str, limit_s: float) -> str:
    """Say which ranks had not `started` or `returned`, and where each stands if it can still tell."""
    for rank in late:
        if rank.stack_file.exists():  # else it has no handler for the signal yet, which would end it
            with suppress(ProcessLookupError):
                os.kill(_pid(rank), signal.SIGUSR1)
    time.sleep(_SECONDS_TO_DUMP)
    numbers = [rank.rank for rank in late]
    which = f"Rank {numbers[0]}" if len(numbers) == 1 else "Ranks " + ", ".join(map(str, numbers))
    lines = [f"{which} of {world_size} had not {what} after {limit_s:g} s; all ranks were ended."]
    for rank in late:
        stack = rank.stack_file.read_text() if rank.stack_file.exists() else ""
        lines.append(f"Rank {rank.rank} stood at:\n{stack or 'an unknown place, early in its start.'}")
    return "\n".join(lines)


def _dismiss(ranks: list[_Rank]) -> None:
    """Tell every rank that all have returned, and give them a while to leave by themselves."""
    for rank in ranks:
        with suppress(OSError):  # it may have been killed since
            rank.pipe.send(None)
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    for rank in ranks:
        wait([rank.process.sentinel], timeout=max(0.0, deadline - time.monotonic()))


def _kill(ranks: list[_Rank]) -> None:
    """End every rank that still runs, and whatever the ranks started."""
    for rank in ranks:
        with suppress(ProcessLookupError):  # its group is not made yet, or all gone
            os.killpg(_pid(rank), signal.SIGKILL)
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.pipe.close()


def _pid(rank: _Rank) -> int:
    pid = rank.process.pid
    assert pid is not None, "a rank is only listed once it is started"
    return pid
