"""Executes the notebooks, each in a fresh kernel, and compares what comes out with what is stored in them.

    python notebooks/run.py                        # all of them; fails where a cell fails or a stored result differs
    python notebooks/run.py --write                # stores the results, without anything that changes from run to run
    python notebooks/run.py notebooks/03_sharding.ipynb

Text is compared, pictures are not: their bytes depend on Matplotlib's version. Needs the extra ``notebooks``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CELL_SECONDS = 120
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_KEPT = {
    "stream": ("output_type", "name", "text"),
    "execute_result": ("output_type", "execution_count", "data", "metadata"),
    "display_data": ("output_type", "data", "metadata"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the notebooks named on the command line, or all of them; the exit code."""
    parser = argparse.ArgumentParser(
        description="Execute the notebooks and compare their results with the stored ones."
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="which ones (all of this folder without)")
    parser.add_argument("--write", action="store_true", help="store the results instead of comparing them")
    given = parser.parse_args(arguments)
    failed, start = [], time.perf_counter()
    paths = given.notebooks or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        begin = time.perf_counter()
        problem = run(path, given.write)
        print(f"{path.name}: {time.perf_counter() - begin:.0f} s{', FAILED' if problem else ''}", flush=True)
        if problem:
            failed.append(path.name)
            print(problem, file=sys.stderr, flush=True)
    print(f"{len(paths) - len(failed)} of {len(paths)} notebooks are well, {time.perf_counter() - start:.0f} s in all")
    return 1 if failed else 0


def run(path: Path, write: bool) -> str:
    """Execute one notebook; what is wrong, or nothing."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    try:
        fresh = cleaned(executed(path))
    except RuntimeError as error:  # nbclient's, with the cell and its traceback
        return str(error)
    if not write:
        return differences(stored, fresh)
    loud = complaints(fresh)
    if not loud:
        path.write_text(serialised(fresh), encoding="utf-8")
    return loud


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the results of a fresh kernel, which runs in the notebook's own folder.

    Raises:
        RuntimeError: If a cell fails or takes more than two minutes; with the cell and its traceback.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.resolve().parent)}},
            # Sockets in a folder of our own: no port that others on this machine could talk to.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),
        )
        # No settings or start-up files of whoever runs this.
        environment = {**os.environ, "IPYTHONDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            client.execute(env=environment)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise RuntimeError(f"{path.name} stopped: {_COLOUR.sub('', str(error))}") from error
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return found


def cleaned(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook without what changes from run to run or from machine to machine: metadata, times, progress."""
    cells = []
    for cell in notebook["cells"]:
        kept = {key: cell[key] for key in ("cell_type", "id", "source")} | {"metadata": {}}
        if cell["cell_type"] == "code":
            outputs = [
                {key: {} if key == "metadata" else output[key] for key in _KEPT[output["output_type"]]}
                for output in cell["outputs"]
            ]
            kept |= {"execution_count": cell["execution_count"], "outputs": outputs}
        cells.append(kept)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def serialised(notebook: dict[str, Any]) -> str:
    """The file's content, always the same for the same notebook."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def texts(cell: dict[str, Any]) -> list[str]:
    """What a code cell wrote, line by line: of a picture only its size, and no warnings."""
    lines = []
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr":
            continue
        written = output.get("text") or output.get("data", {}).get("text/plain", "")
        lines += (written if isinstance(written, str) else "".join(written)).splitlines()
    return lines


def differences(stored: dict[str, Any], fresh: dict[str, Any]) -> str:
    """Where a fresh run writes something else than what is stored, cell by cell; empty if nowhere."""
    found = []
    for before, after in zip(stored["cells"], fresh["cells"], strict=True):
        lines = list(difflib.unified_diff(texts(before), texts(after), "stored", "now", lineterm="", n=0))
        if lines:
            found.append("\n".join([f"The results of cell {after['id']!r} are not those stored:", *lines]))
    if found:
        found.append("Read whether the text around still holds, then store them: python notebooks/run.py --write")
    return "\n".join(found)


def complaints(notebook: dict[str, Any]) -> str:
    """Warnings that cells wrote: nothing to store. Empty if there are none."""
    return "\n".join(
        f"Cell {cell['id']!r} wrote to stderr: {''.join(output['text'])}"
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    )


if __name__ == "__main__":
    sys.exit(main())
