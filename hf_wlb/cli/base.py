"""What the commands share: the application, options, errors, progress, files."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_wlb import __version__

app = typer.Typer(
    help="Workload-balanced packing and sharding for long-context training: what they bring for your data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Model = Annotated[str | None, typer.Option(help="Preset (550M, 1B, 7B, 30B, 70B) or folder of a Transformers config.")]
Crossover = Annotated[float | None, typer.Option(help="Tokens at which attention equals linear work.")]
ProfileFile = Annotated[str | None, typer.Option(help="Measured profile (JSON).")]
Hardware = Annotated[str, typer.Option(help="With --model: h100, h100-flash-attn-4 or cpu.")]
Checkpointing = Annotated[bool, typer.Option("--gradient-checkpointing", help="With --model: recompute layers.")]

errors = Console(stderr=True)
_SECONDS_BETWEEN_LINES = 10.0


def user_errors(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turns what the user can mend into one sentence and exit code 2."""

    @functools.wraps(command)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError) as error:
            errors.print(f"Error: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return guarded


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-wlb {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Workload-balanced packing and sharding for long-context training."""


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; the function it gives says what is done next.

    Where that is no terminal but a file, as of a batch job, a line every ten seconds says so instead.
    """
    if not errors.is_terminal:
        yield _lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def show(what: str) -> None:
            bar.update(task, description=what)

        yield show


def _lines() -> Callable[[str], None]:
    begun = last = time.monotonic()

    def show(what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            errors.print(f"{now - begun:.0f} s: {what}", markup=False, soft_wrap=True)

    return show


def check_folders(*files: Path | None) -> None:
    """Before anything is computed: can the results be written?

    Raises:
        FileNotFoundError: A file's folder is not there.
        IsADirectoryError: A file is a folder.
    """
    for file in files:
        if file is not None and file.is_dir():
            raise IsADirectoryError(f"{file} cannot be written: it is a folder; name a file in it")
        if file is not None and not file.parent.is_dir():
            raise FileNotFoundError(f"{file} cannot be written: there is no folder {file.parent}; make it first")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object, its keys sorted."""
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def measuring_device(device: str | None, dtype: str) -> tuple[str, Any]:
    """Where to measure, "cuda" or "cpu", and torch's type of that name.

    Raises:
        ValueError: There is no such type, or no such device.
    """
    import torch

    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in known:
        raise ValueError(f"--dtype must be one of {', '.join(known)}, got {dtype!r}.")
    there = torch.cuda.is_available()
    if device is None:
        device = "cuda" if there else "cpu"
    if device not in (("cuda", "cpu") if there else ("cpu",)):
        raise ValueError(f"--device must be cpu or, where there is a GPU, cuda; got {device!r}.")
    return device, known[dtype]
