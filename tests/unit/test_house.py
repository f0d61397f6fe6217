"""House rules that a machine can hold: sizes, no stubs, one version, one line length.

Each check returns the offences it finds, and each is shown to find one in a made-up tree.
"""

import ast
import configparser
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.source_tree import REPOSITORY, place, python_files, write_tree

MOST_LINES_PER_FILE = 449
MOST_LINES_PER_FUNCTION = 69
STUB_WORDS = re.compile(r"\b(TODO|FIXME|NotImplementedError)\b")
FOLDERS = ("hf_wlb", "tests", "recipes", "docs", "notebooks")


def long_files(root: Path) -> list[str]:
    """Name the files that are too long to read at one go."""
    offences = []
    for path in python_files(*(root / folder for folder in FOLDERS)):
        count = len(path.read_text().splitlines())
        if count > MOST_LINES_PER_FILE:
            offences.append(f"{path.relative_to(root)} has {count} lines, more than {MOST_LINES_PER_FILE}")
    return offences


def long_functions(root: Path) -> list[str]:
    """Name the functions that are too long, their docstrings and decorators counted."""
    offences = []
    for path in python_files(*(root / folder for folder in FOLDERS)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                count = (node.end_lineno or node.lineno) - first + 1
                if count > MOST_LINES_PER_FUNCTION:
                    offences.append(
                        f"{place(path, node, root)}: {node.name} has {count} lines, more than {MOST_LINES_PER_FUNCTION}"
                    )
    return offences


def stubs(root: Path) -> list[str]:
    """Name the lines of hf_wlb that leave something for later."""
    return [
        f"{path.relative_to(root)}:{number}: {found.group()}"
        for path in python_files(root / "hf_wlb")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (found := STUB_WORDS.search(line))
    ]


def version_conflicts(root: Path) -> list[str]:
    """Say where the version is written besides hf_wlb/__init__.py, and where a copy of it disagrees."""
    offences = []
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    if "version" in pyproject["project"] or "version" not in pyproject["project"].get("dynamic", []):
        offences.append("pyproject.toml states a version of its own")
    source = pyproject["tool"]["setuptools"]["dynamic"]["version"]
    if source != {"attr": "hf_wlb.__version__"}:
        offences.append(f"pyproject.toml reads the version from {source}")
    found = re.search(r'^__version__ = "(.+)"$', (root / "hf_wlb" / "__init__.py").read_text(), re.MULTILINE)
    version = found.group(1) if found else None
    cited = yaml.safe_load((root / "CITATION.cff").read_text())["version"]
    if cited != version:
        offences.append(f"CITATION.cff says {cited}, hf_wlb/__init__.py says {version}")
    return offences


def line_length_conflicts(root: Path) -> list[str]:
    """Compare the one setting that setup.cfg has to repeat."""
    ruff = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    pycodestyle = setup.getint("pycodestyle", "max-line-length")
    return [] if ruff == pycodestyle else [f"ruff allows {ruff} columns, pycodestyle {pycodestyle}"]


@pytest.mark.parametrize("check", [long_files, long_functions, stubs, version_conflicts, line_length_conflicts])
def test_the_repository_keeps_the_rule(check) -> None:
    assert check(REPOSITORY) == []


# ---- negative controls: each check finds what it is there to find ----


def test_control_a_long_file_is_found(tmp_path: Path) -> None:
    write_tree(tmp_path, {"hf_wlb/fits.py": "x = 1\n" * 449, "recipes/long.py": "x = 1\n" * 450})
    assert long_files(tmp_path) == ["recipes/long.py has 450 lines, more than 449"]


def test_control_a_long_function_is_found(tmp_path: Path) -> None:
    fits = "def fits():\n" + "    x = 1\n" * 68
    nested = "class A:\n    @property\n    def long(self):\n" + "        x = 1\n" * 68
    write_tree(tmp_path, {"hf_wlb/a.py": fits + nested})
    assert long_functions(tmp_path) == ["hf_wlb/a.py:72: long has 70 lines, more than 69"]


@pytest.mark.parametrize("line", ["raise NotImplementedError", "x = 1  # TODO: later", "# FIXME"])
def test_control_a_stub_is_found(tmp_path: Path, line: str) -> None:
    write_tree(tmp_path, {"hf_wlb/a.py": f"x = 1\n{line}\n", "tests/b.py": line})
    assert len(stubs(tmp_path)) == 1 and stubs(tmp_path)[0].startswith("hf_wlb/a.py:2: ")


def _version_tree(pyproject: str, cited: str) -> dict[str, str]:
    dynamic = '[tool.setuptools.dynamic]\nversion = { attr = "hf_wlb.__version__" }\n'
    return {
        "pyproject.toml": f"[project]\n{pyproject}\n{dynamic}",
        "hf_wlb/__init__.py": '__version__ = "1.2.3"\n',
        "CITATION.cff": f"version: {cited}\n",
    }


def test_control_a_second_version_is_found(tmp_path: Path) -> None:
    dynamic = 'dynamic = ["version"]'
    assert version_conflicts(write_tree(tmp_path, _version_tree(dynamic, "1.2.3"))) == []
    write_tree(tmp_path, _version_tree('version = "1.2.3"', "1.2.4"))
    assert version_conflicts(tmp_path) == [
        "pyproject.toml states a version of its own",
        "CITATION.cff says 1.2.4, hf_wlb/__init__.py says 1.2.3",
    ]


def test_control_another_line_length_is_found(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": "[tool.ruff]\nline-length = 110\n",
        "setup.cfg": "[pycodestyle]\nmax-line-length = 100\n",
    }
    assert line_length_conflicts(write_tree(tmp_path, files)) == ["ruff allows 110 columns, pycodestyle 100"]
