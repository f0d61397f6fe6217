"""The notebooks: well-formed, executed, small, and without anything of the machine that executed them.

`make notebooks` executes them. Each check here returns the offences it finds, and each is shown to find one in a
made-up notebook.
"""

import ast
import base64
import copy
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_tree import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000
MOST_LINES = 22  # of a cell, imports not counted
MOST_COLUMNS = 120
CELL_KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}
OUTPUTS = ("stream", "execute_result", "display_data")
MACHINE = re.compile(r"(?<![\w.])(/(home|root|tmp|work|usr|opt|mnt|var|Users)/|[A-Z]:\\|file://)|0x[0-9a-f]{8,}")

Notebook = dict[str, Any]


def runner() -> Any:
    """Load notebooks/run.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("notebooks_run", REPOSITORY / "notebooks" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def pictures(cell: dict[str, Any]) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in cell["outputs"]]
    return [base64.b64decode(png if isinstance(png, str) else "".join(png)) for png in found if png]


def malformed(notebook: Notebook) -> list[str]:
    """Say what a reader of format 4.5 would trip over."""
    offences = []
    if (notebook.get("nbformat"), notebook.get("nbformat_minor")) != (4, 5):
        offences.append(f"it is of format {notebook.get('nbformat')}.{notebook.get('nbformat_minor')}")
    names = [cell.get("id", "") for cell in notebook["cells"]]
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names):
        offences.append(f"cells need ids of their own, got {names}")
    for name, cell in zip(names, notebook["cells"], strict=True):
        if set(cell) != CELL_KEYS.get(cell["cell_type"]):
            offences.append(f"cell {name} is {cell['cell_type']} with {sorted(cell)}")
        elif not all(isinstance(line, str) for line in cell["source"]):
            offences.append(f"cell {name} has a source that is no text")
    for cell in code_cells(notebook):
        try:
            ast.parse(source(cell))
        except SyntaxError as error:
            offences.append(f"cell {cell['id']} is no Python: {error}")
    return offences


def noisy(notebook: Notebook) -> list[str]:
    """Find what changes from run to run: metadata, times, kernels' names."""
    offences = [] if notebook["metadata"] == runner().METADATA else [f"its metadata are {notebook['metadata']}"]
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        if cell["metadata"] or any(output.get("metadata") for output in outputs):
            offences.append(f"cell {cell['id']} has metadata")
    return offences


def not_executed(notebook: Notebook) -> list[str]:
    """Find cells that failed, warned, were left out or were run out of order, and pictures that are missing."""
    offences = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        if cell["execution_count"] != number:
            offences.append(f"cell {cell['id']} was run as number {cell['execution_count']}, not {number}")
        for output in cell["outputs"]:
            if output["output_type"] not in OUTPUTS or output.get("name") == "stderr":
                offences.append(f"cell {cell['id']} gave {output.get('name', output['output_type'])}")
        draws = any(line.startswith("inline(") for line in source(cell).splitlines())
        if draws != bool(pictures(cell)) or not all(png.startswith(b"\x89PNG") for png in pictures(cell)):
            offences.append(f"cell {cell['id']} has {len(pictures(cell))} pictures")
    if not any(pictures(cell) for cell in code_cells(notebook)):
        offences.append("it has no picture")
    return offences


def of_a_machine(notebook: Notebook) -> list[str]:
    """Find paths and addresses of the machine that executed it."""
    offences = []
    for cell in notebook["cells"]:
        for line in [*source(cell).splitlines(), *runner().texts(cell)]:
            if MACHINE.search(line):
                offences.append(f"cell {cell['id']}: {line.strip()}")
    return offences


def foreign_imports(notebook: Notebook) -> list[str]:
    """Find imports of what neither Python nor the package nor one of its extras brings."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    stated = [
        *project["dependencies"],
        *(name for names in project["optional-dependencies"].values() for name in names),
    ]
    brought = {re.split(r"[^A-Za-z0-9_.-]", name)[0].replace("-", "_").lower() for name in stated}
    known = {*sys.stdlib_module_names, *brought, "hf_wlb"}
    offences = []
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(source(cell))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            offences += [f"cell {cell['id']} imports {n}" for n in names if n.split(".")[0].lower() not in known]
    return offences


def lines_of_code(cell: dict[str, Any]) -> int:
    """Count lines that are neither empty nor part of an import."""
    lines = sum(bool(line.strip()) for line in source(cell).splitlines())
    imports = [n for n in ast.walk(ast.parse(source(cell))) if isinstance(n, ast.Import | ast.ImportFrom)]
    return lines - sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def hard_to_read(notebook: Notebook) -> list[str]:
    """Find long cells, wide lines, and code without prose before it."""
    offences = []
    before = ""
    for cell in notebook["cells"]:
        lines = source(cell).splitlines()
        if cell["cell_type"] == "code" and lines_of_code(cell) > MOST_LINES:
            offences.append(f"cell {cell['id']} has {lines_of_code(cell)} lines, more than {MOST_LINES}")
        offences += [f"cell {cell['id']} has a line of {len(n)} columns" for n in lines if len(n) > MOST_COLUMNS]
        before = before + "c" if cell["cell_type"] == "code" else ""
        if len(before) == 3:
            offences.append(f"cell {cell['id']} is the third of code without a word between them")
    return offences


CHECKS = (malformed, noisy, not_executed, of_a_machine, foreign_imports, hard_to_read)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("check", CHECKS)
def test_notebooks_keep_the_rule(path: Path, check: Any) -> None:
    assert check(json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_written_as_the_runner_writes_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert text == runner().serialised(json.loads(text))


def test_the_readme_names_every_notebook() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 3
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in readme] == []


def test_links_between_notebooks_lead_somewhere() -> None:
    for path in NOTEBOOKS:
        links = re.findall(r"\]\(([^)#]+)\)", "".join(map(source, json.loads(path.read_text())["cells"])))
        assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


# ---- the runner ----


def test_the_runner_strips_what_changes() -> None:
    noisy_cell = {
        "cell_type": "code",
        "id": "a",
        "metadata": {"execution": {"iopub.status.busy": "2026-01-01T00:00:00"}},
        "source": ["print(1)"],
        "execution_count": 1,
        "outputs": [{"output_type": "stream", "name": "stdout", "text": "1\n", "transient": {}}],
    }
    cleaned = runner().cleaned({"cells": [noisy_cell], "metadata": {"language_info": {"version": "3.11.7"}}})
    assert noisy(cleaned) == [] and malformed(cleaned) == []
    assert cleaned["cells"][0]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "1\n"}]


def test_the_runner_finds_results_that_changed() -> None:
    run = runner()
    stored = good()
    assert run.differences(stored, good()) == ""
    fresh = good()
    fresh["cells"][1]["outputs"][0]["text"] = "gain 1.31\n"
    told = run.differences(stored, fresh)
    assert "cell 'gain'" in told and "-gain 1.25" in told and "+gain 1.31" in told and "--write" in told
    other = good()
    other["cells"][1]["outputs"][1]["data"]["image/png"] = png(b"another picture")
    assert run.differences(stored, other) == ""  # a picture's bytes depend on Matplotlib
    other["cells"][1]["outputs"].pop()  # but it must be there
    assert "-Picture" in run.differences(stored, other)


def test_the_runner_stores_no_warnings() -> None:
    loud = good()
    loud["cells"][1]["outputs"].append({"output_type": "stream", "name": "stderr", "text": "deprecated\n"})
    assert runner().complaints(good()) == ""
    assert "Cell 'gain' wrote to stderr: deprecated" in runner().complaints(loud)
    assert runner().differences(good(), loud) == ""  # another library's warning is no other result


# ---- negative controls: each check finds what it is there to find ----


def png(content: bytes = b"") -> str:
    return base64.b64encode(b"\x89PNG" + content).decode()


def good() -> Notebook:
    """A notebook without offence: a word, then a cell that prints and draws."""
    picture = {"image/png": png(), "text/plain": "Picture(width=8, height=8)"}
    code = "import numpy\nfrom hf_wlb.plots import inline\nprint('gain 1.25')\ninline(None, 1)"
    return copy.deepcopy(
        {
            "cells": [
                {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Title\n", "Words."]},
                {
                    "cell_type": "code",
                    "id": "gain",
                    "metadata": {},
                    "source": code.splitlines(keepends=True),
                    "execution_count": 1,
                    "outputs": [
                        {"output_type": "stream", "name": "stdout", "text": "gain 1.25\n"},
                        {"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": picture},
                    ],
                },
            ],
            "metadata": runner().METADATA,
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


def test_a_good_notebook_offends_nobody() -> None:
    assert [check(good()) for check in CHECKS] == [[]] * len(CHECKS)


def spoil(notebook: Notebook, place: tuple[Any, ...], value: Any) -> Notebook:
    target: Any = notebook
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return notebook


@pytest.mark.parametrize(
    ("check", "place", "value"),
    [
        (malformed, ("nbformat_minor",), 4),
        (malformed, ("cells", 1, "id"), "title"),
        (malformed, ("cells", 0, "outputs"), []),
        (malformed, ("cells", 1, "source"), ["def f(:\n"]),
        (noisy, ("metadata",), {"language_info": {"version": "3.11.7"}}),
        (noisy, ("cells", 1, "metadata"), {"collapsed": True}),
        (noisy, ("cells", 1, "outputs", 1, "metadata"), {"needs_background": "light"}),
        (not_executed, ("cells", 1, "execution_count"), None),
        (not_executed, ("cells", 1, "execution_count"), 7),
        (not_executed, ("cells", 1, "outputs", 0, "output_type"), "error"),
        (not_executed, ("cells", 1, "outputs", 0, "name"), "stderr"),
        (not_executed, ("cells", 1, "outputs"), []),
        (not_executed, ("cells", 1, "outputs", 1, "data"), {"image/png": "QUJD"}),
        (of_a_machine, ("cells", 1, "outputs", 0, "text"), "read /home/somebody/lengths.json\n"),
        (of_a_machine, ("cells", 1, "outputs", 0, "text"), "<function f at 0x7f3bd1da9380>\n"),
        (of_a_machine, ("cells", 1, "source"), ["DATA = 'C:\\\\Users\\\\me'"]),
        (foreign_imports, ("cells", 1, "source"), ["import seaborn"]),
        (foreign_imports, ("cells", 1, "source"), ["def f():\n", "    from sklearn.svm import SVC\n"]),
        (hard_to_read, ("cells", 1, "source"), ["x = 1\n"] * (MOST_LINES + 1)),
        (hard_to_read, ("cells", 0, "source"), ["word " * 30]),
        (hard_to_read, ("cells",), [good()["cells"][1]] * 3),
    ],
)
def test_control_offences_are_found(check: Any, place: tuple[Any, ...], value: Any) -> None:
    assert check(spoil(good(), place, value)) != []
