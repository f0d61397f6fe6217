"""Ranks that fail in mid-training: all of them learn which one, in which step and why, and none waits for ever.

A rank that raises writes so into the process group's store before it leaves. Collectives of the others then break
(gloo), or never end (NCCL): whoever comes back from one with an error looks into the store for its cause, and for whom
it does not come back, a thread looks and ends the process. A rank that was killed writes nothing; the ranks of its
machine see that its process is gone.

Under ``torchrun`` or ``accelerate launch`` the agent ends all ranks (SIGTERM) as soon as one has ended. The thread then
says why before the process ends; otherwise the log would hold an exit code and no step. A rank that failed itself may
be told to end before Python has shown its error, where another one left sooner: it then shows it first.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_wlb.parallel.agreement import name_ranks
from hf_wlb.parallel.collectives import gather_objects, process_count

_PATIENCE_S = 5.0  # for the cause of a broken collective to show
_PATIENCE_TOLD_S = 1.0  # the same for a process that was told to end
_STORE_S = 10.0  # for the store to answer
_LEAVE_S = 30  # for a failed process to end, exit handlers included
_LONGEST_TEXT = 2000  # characters of an error
# Errors of torch about other processes, where they have no class of their own.
_TALK = re.compile(r"gloo|NCCL|ProcessGroup|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)

Process = tuple[str, int, int]
"""Machine, process id and when it started, so that a process id used again is not taken for it."""


@contextlib.contextmanager
def reporting_failures(
    step: Callable[[], int], *, place: str = "", poll_s: float = 2.0, grace_s: float = 10.0
) -> Iterator[None]:
    """Ends on all ranks when one fails in the block, with an error that names the rank, the step and the cause.

    All ranks must enter and leave it together; it waits for the last one on both sides. A single process gets a note
    with the step on its error.

    Args:
        step: The step that is being trained, from 1; also called from another thread.
        place: What this rank is besides its number, which messages say too: ``ParallelMesh.place``.
        poll_s: Seconds between two looks for failures.
        grace_s: Seconds that a rank has to come back from a collective after another one failed. Then its process ends
            with exit code 1, from the middle of whatever it does.

    Raises:
        BaseException: On a rank whose block raised, that, with a note.
        RuntimeError: On a rank whose collective broke, about the rank that failed first.

    >>> with reporting_failures(lambda: 3):
    ...     int("x")
    Traceback (most recent call last):
    ValueError: invalid literal for int() with base 10: 'x'
    This is rank 0 in step 3.
    """
    if process_count() == 1:
        try:
            yield
        except BaseException as error:
            error.add_note(f"This is rank 0 in step {step()}.")
            raise
        return
    watch = _Watch(step, place, poll_s, grace_s)
    try:
        yield
        gather_objects(None)  # none leaves, and ends its process, while another one still trains
    except BaseException as error:
        cause = watch.failed(error)
        if cause is None:
            raise
        raise RuntimeError(cause) from error
    finally:
        watch.close()


class _Board:
    """What ranks tell each other besides collectives; a store that does not answer is taken for empty."""

    def __init__(self, store: Any, block: int, rank: int) -> None:
        # Two threads use it, and torch the original.
        self._store = dist.PrefixStore(f"hf_wlb_failures_{block}", store.clone())  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._rank = rank
        self._first: str | None = None  # kept: the store may be gone soon

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        if not self._lock.acquire(timeout=_STORE_S):
            return otherwise
        try:
            return question()
        except RuntimeError:  # with rank 0, where no agent hosts it
            return otherwise
        finally:
            self._lock.release()

    def claim(self, sentence: str) -> str:
        """Reports a failure; returns what was reported first."""
        found: bytes = self._ask(lambda: self._store.compare_set("first", "", sentence), sentence.encode())
        return self._keep(found.decode())

    def first(self) -> str | None:
        """The first failure that was reported."""
        if self._first is not None:
            return self._first
        found: bytes | None = self._ask(
            lambda: self._store.get("first") if self._store.check(["first"]) else None, None
        )
        return None if found is None else self._keep(found.decode())

    def _keep(self, first: str) -> str:
        self._first = first
        self._ask(lambda: self._store.set(f"read_{self._rank}", "1"), None)
        return first

    def wait_for_readers(self, ranks: int, patience_s: float) -> None:
        """Waits until all ranks know the first failure."""
        readers, until = [f"read_{rank}" for rank in range(ranks)], time.monotonic() + patience_s
        while not self._ask(lambda: self._store.check(readers), True) and time.monotonic() < until:
            time.sleep(0.1)

    def mark(self) -> None:
        """Shows that this rank is alive, after something broke."""
        self._ask(lambda: self._store.set(f"alive_{self._rank}", "1"), None)

    def unmarked(self, ranks: int) -> list[int]:
        """Ranks that did not."""
        return [rank for rank in range(ranks) if not self._is_marked(rank)]

    def _is_marked(self, rank: int) -> bool:
        return bool(self._ask(lambda: self._store.check([f"alive_{rank}"]), True))


class _Watch:
    """The failures of one block, seen from one rank; its thread acts where the main thread does not come back."""

    def __init__(self, step: Callable[[], int], place: str, poll_s: float, grace_s: float) -> None:
        global _blocks, _present
        self._rank, self._step, self._poll_s, self._grace_s = dist.get_rank(), step, poll_s, grace_s
        # Which ranks share this one's machine, and how many blocks there were: the store still holds theirs.
        told: list[tuple[int, Process, str]] = gather_objects((_blocks, own := own_process(), place))
        _blocks = max(block for block, _, _ in told) + 1
        self._places = [found for _, _, found in told]
        neighbours = {rank: process for rank, (_, process, _) in enumerate(told) if process[0] == own[0]}
        self._neighbours = {rank: process for rank, process in neighbours.items() if rank != self._rank}
        self._board = _Board(_get_default_store(), _blocks, self._rank)
        self._telling = threading.Lock()  # held by the one thread that says how this process ends
        self._returned = threading.Event()
        self._terminated = False
        self._traceback: str | None = None  # of a failure of this rank's own
        self._ears, self._bell = socket.socketpair()
        self._ears.setblocking(False)
        self._bell.setblocking(False)
        self._hears_signals = self._listen()
        _present = self
        atexit.unregister(_leave_soon)
        self._thread = threading.Thread(target=self._run, name="hf_wlb failures", daemon=True)
        self._thread.start()

    # ---- the main thread ----

    def failed(self, error: BaseException) -> str | None:
        """Tells the others, or finds out what they failed with.

        Returns:
            The cause, where ``error`` is a consequence of another rank's failure.
        """
        self._telling.acquire()  # for ever, if the thread is ending this process already
        self._returned.set()
        atexit.register(_leave_soon)
        own = f"{self._name([self._rank])} failed in step {self._step()}: {_text_of(error)}"
        cause = self._explain(_PATIENCE_S) if _is_talk(error) else None
        if cause is not None:
            cause = f"{cause} (This is {self._own_name} in step {self._step()}, which stops for that reason.)"
            _say(cause)  # the traceback may come too late: the agent ends this process soon
            return cause
        self._board.claim(own)
        if self._rank == 0:  # without an agent it hosts the store, and takes it along
            self._board.wait_for_readers(len(self._places), min(self._poll_s + 1, _PATIENCE_S))
        error.add_note(f"This is {self._own_name} in step {self._step()}; the other ranks are told and stop.")
        self._traceback = "".join(traceback.format_exception(error))  # the text: frames would keep tensors alive
        return None

    def close(self) -> None:
        """Ends the thread, and gives a signal that came meanwhile to whom it was meant for."""
        global _present
        self._returned.set()
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        self._thread.join(self._poll_s + 1)
        if self._hears_signals:
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._traceback is None else self._show_and_end)
        _present = None
        self._ears.close()
        self._bell.close()
        if self._terminated:
            signal.raise_signal(signal.SIGTERM)

    def _listen(self) -> bool:
        """Takes SIGTERM over, unless somebody has use for it; a thread cannot, but can hear the bell."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or not (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL or _shows_an_error()):
            return False
        others = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            return False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        return True

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _show_and_end(self, number: int, frame: FrameType | None) -> None:
        _write(self._traceback or "")
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def forget_signals(self) -> None:
        """In a process forked off this one: its signals are not this one's."""
        if self._hears_signals:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # ---- the thread ----

    def _run(self) -> None:
        cause: str | None = None
        patient_until = 0.0
        while not self._returned.is_set():
            if self._told_to_end():
                self._end(cause or self._explain(_PATIENCE_TOLD_S), 128 + signal.SIGTERM)
            elif cause is None:
                cause = self._look()
                patient_until = time.monotonic() + self._grace_s
            elif time.monotonic() >= patient_until:
                self._end(cause, 1)

    def _told_to_end(self) -> bool:
        """Waits until the next look is due; whether SIGTERM came, and nobody else answers to it."""
        ready, _, _ = select.select([self._ears], [], [], self._poll_s)
        if not ready:
            return False
        return signal.SIGTERM in self._ears.recv(4096) and signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _look(self) -> str | None:
        """A failure that somebody reported, or that can be seen from here."""
        first = self._board.first()
        if first is not None:
            return first
        gone = [rank for rank, process in self._neighbours.items() if is_gone(process)]
        if not gone:
            return None
        first = self._board.first()  # it may have reported before it went
        verb = "was killed or ended" if len(gone) == 1 else "were killed or ended"
        return first or self._board.claim(f"{self._name(gone)} {verb} without a word in step {self._step()}.")

    def _explain(self, patience_s: float) -> str | None:
        self._board.mark()
        until = time.monotonic() + patience_s
        while (found := self._look()) is None:
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        if found is not None or patience_s < _PATIENCE_S:
            return found
        silent = self._board.unmarked(len(self._places))
        if not silent:
            return None
        return f"{self._name(silent)} cannot be reached in step {self._step()}: killed, cut off, or still waiting."

    @property
    def _own_name(self) -> str:
        return name_ranks([self._rank], self._places)

    def _name(self, ranks: list[int]) -> str:
        """At the beginning of a sentence."""
        return f"R{name_ranks(ranks, self._places)[1:]}"

    def _end(self, cause: str | None, code: int) -> None:
        if not self._telling.acquire(blocking=False):
            return  # the main thread came back
        if cause is not None:
            _say(f"{cause} (This is {self._own_name} in step {self._step()}, which was waiting and is ended.)")
        for child in multiprocessing.active_children():  # data loader workers, which nobody else would end
            child.kill()
        os._exit(code)


_blocks = 0  # entered so far; part of the store's keys
_present: _Watch | None = None


def _in_child() -> None:
    global _present
    if _present is not None:
        _present.forget_signals()
        _present = None


os.register_at_fork(after_in_child=_in_child)


def own_process() -> Process:
    """This process, as ``is_gone`` knows it on the same machine."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine} {os.readlink('/proc/self/ns/pid')}", os.getpid(), _state_of(os.getpid())[1]


def is_gone(process: Process) -> bool:
    """Whether a process of this machine has ended.

    >>> is_gone(own_process())
    False
    """
    _, pid, started = process
    try:
        state, found = _state_of(pid)
    except OSError:
        return True
    return state in "ZX" or found != started


def _state_of(pid: int) -> tuple[str, int]:
    """State and start of a process, fields 3 and 22 of its stat; the second is a name in brackets, of any text."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _is_talk(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _TALK.search(str(error)) is not None


def _text_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _say(sentence: str) -> None:
    _write(f"hf_wlb: {sentence}\n")


def _write(text: str) -> None:
    """In one write, so that ranks do not mix their lines."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _shows_an_error() -> bool:
    """Whether SIGTERM would show the error with which an earlier block ended."""
    return getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is _Watch._show_and_end


def _leave_soon() -> None:
    """At the exit of a failed process: whatever waits for other ranks there is ended by the system."""
    if threading.current_thread() is threading.main_thread():
        if _shows_an_error():  # Python has shown it by now
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LEAVE_S)
