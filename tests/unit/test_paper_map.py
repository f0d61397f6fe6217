"""The map from the paper to the code leads to things that exist: modules, objects in them, test files, recipes."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.pages import read_page
from tests.support.source_tree import REPOSITORY, write_tree

PAGE = "docs/paper_to_code.md"
#: What the page must have a row for.
ELEMENTS = (
    *(
        "W_a",
        "Imbalance degree",
        "Outlier queue",
        "Algorithm 1",
        "Greedy packing of variable length",
        "Solver baseline",
    ),
    *("Per-document sharding", "Without padding", "All-gather of keys and values", "Adaptive choice", "4D mesh"),
    *("Plain-4D and Fixed-4D", "Thresholds tuned", "Table 2", "Figure 15"),
)


def missing(text: str, root: Path) -> list[str]:
    """Name the modules, objects and files that a page has in backticks and that do not exist under ``root``."""
    names = re.findall(r"`(hf_wlb(?:\.\w+)+)(?:\(\w*\))?`", text)
    files = re.findall(r"`((?:tests|recipes|docs)/[\w./]+)`", text)
    return [name for name in names if not defined(name, root)] + [file for file in files if not (root / file).is_file()]


def defined(name: str, root: Path) -> bool:
    """Whether a dotted name is a module, something that it defines or passes on, or a member of what it defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = root.joinpath(*parts[:count])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return _holds(ast.parse(path.read_text(encoding="utf-8")).body, parts[count:])
    return False


def _holds(body: list[ast.stmt], names: list[str]) -> bool:
    if not names:
        return True
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == names[0]:
            return _holds(node.body, names[1:])
        if isinstance(node, ast.If) and _holds(node.body, names):
            return True  # names for type checkers, which are looked up late
        if isinstance(node, ast.ImportFrom) and names in [[alias.asname or alias.name] for alias in node.names]:
            return True
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if len(names) == 1 and any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return True
    return False


def rows(text: str) -> list[list[str]]:
    """The cells of a page's tables of three columns, without their heads."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [cells for cells in found if len(cells) == 3 and cells[0] != "in the paper" and set(cells[0]) != {"-"}]


@pytest.mark.parametrize("page", [PAGE, "README.md", "docs/using.md", "docs/parallelism.md", "docs/model_families.md"])
def test_what_a_page_names_exists(page: str) -> None:
    assert missing(read_page(page), REPOSITORY) == []


def test_every_row_has_code_and_a_test() -> None:
    found = rows(read_page(PAGE))
    assert len(found) > 30
    for element, code, test in found:
        assert re.search(r"`(hf_wlb\.|recipes/)", code), element
        assert re.fullmatch(r"`tests/[\w/]+/test_\w+\.py`(, `tests/[\w/]+/test_\w+\.py`)*", test), element


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_papers_elements_have_a_row(element: str) -> None:
    assert any(element in cells[0] for cells in rows(read_page(PAGE)))


def test_control_what_does_not_exist_is_found(tmp_path: Path) -> None:
    source = "LEVELS: int = 1\nclass Queue:\n    size = 1\n    def pop(self): ...\n"
    root = write_tree(
        tmp_path, {"hf_wlb/a/__init__.py": "x = 1\n", "hf_wlb/a/b.py": source, "tests/unit/test_a.py": ""}
    )
    write_tree(root, {"hf_wlb/c.py": "if CHECKING:\n    from hf_wlb.a.b import Queue as Queue\n"})
    good = "`hf_wlb.a` `hf_wlb.a.x` `hf_wlb.a.b.LEVELS` `hf_wlb.a.b.Queue.pop` `hf_wlb.a.b.Queue.size` `hf_wlb.c.Queue`"
    assert missing(f"{good} `tests/unit/test_a.py`", root) == []
    bad = [
        "hf_wlb.a.d",
        "hf_wlb.a.b.Queues",
        "hf_wlb.a.b.Queue.push",
        "hf_wlb.a.b.pop",
        "hf_wlb.c.Queues",
        "tests/unit/test_b.py",
    ]
    assert missing(" ".join(f"`{name}`" for name in bad), root) == bad
