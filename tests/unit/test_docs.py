"""The site: every public module has its place in the API, and the README what it says and shows."""

import ast
import doctest
import fnmatch
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.pages import blocks, broken_links, load_hook, pages, read_page
from tests.support.source_tree import REPOSITORY, python_files, write_tree

ORDER = (
    "Does it fit my model?",
    "Quick start",
    "Results",
    "Use it in your script",
    "From the paper to the code",
    "Limits and refusals",
    "What is where",
    "Contributing",
    "Citation",
)


# ---- the API ----


def with_public_names(root: Path) -> set[str]:
    """Find the modules that define something public, by another way than the generator's: their statements."""
    found = set()
    for path in python_files(root / "hf_wlb"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [getattr(node, "name", "_")]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [ast.unparse(target) for target in targets]
            if any(not name.startswith("_") for name in names) or path.name == "__init__.py":
                found.add(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
    return found


def in_the_api(root: Path) -> Counter[str]:
    """Count how often each module is rendered on the API's pages."""
    texts = load_hook("api_reference").api_pages(root).values()
    return Counter(name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def test_every_public_module_is_in_the_api_once() -> None:
    rendered = in_the_api(REPOSITORY)
    assert set(rendered) == with_public_names(REPOSITORY)
    assert set(rendered.values()) == {1}
    assert {"hf_wlb", "hf_wlb.packing.wlb", "hf_wlb.presets", "hf_wlb.attention.kernels.base"} <= set(rendered)


def test_a_new_module_is_in_the_api_without_a_word(tmp_path: Path) -> None:
    files = {
        "hf_wlb/__init__.py": '"""All."""\n',
        "hf_wlb/alone.py": '"""Alone."""\nROOM = 1\n',
        "hf_wlb/part/__init__.py": '"""A part."""\n',
        "hf_wlb/part/old.py": '"""Old."""\ndef f(): ...\n',
        "hf_wlb/part/_own.py": "def g(): ...\n",
        "hf_wlb/part/__main__.py": "_run = 1\n",
        "hf_wlb/part/private.py": "def _h(): ...\n",
    }
    known = {"hf_wlb", "hf_wlb.alone", "hf_wlb.part", "hf_wlb.part.old"}
    assert set(in_the_api(write_tree(tmp_path, files))) == known
    new = {"hf_wlb/part/new.py": "class New: ...\n", "hf_wlb/part/deeper/__init__.py": "x = 1\n"}
    write_tree(tmp_path, {**new, "hf_wlb/part/deeper/still.py": "x: int = 1\n"})
    added = {"hf_wlb.part.new", "hf_wlb.part.deeper", "hf_wlb.part.deeper.still"}
    assert set(in_the_api(tmp_path)) == known | added
    assert set(load_hook("api_reference").api_pages(tmp_path)) == {
        *("index.md", "hf_wlb.alone.md", "hf_wlb.part.md", "hf_wlb.part.deeper.md")
    }


def test_packages_say_what_they_pass_on() -> None:
    texts = load_hook("api_reference").api_pages(REPOSITORY)
    assert "[`StepPlanner`][hf_wlb.packing.planner.StepPlanner]" in texts["hf_wlb.packing.md"]  # from __all__
    assert "[`WLBDataLoader`][hf_wlb.data.loader.WLBDataLoader]" in texts["hf_wlb.data.md"]  # looked up late
    assert "[`WLBTrainer`][hf_wlb.trainer.WLBTrainer]" in texts["index.md"]


def test_docstrings_become_markdown() -> None:
    api = load_hook("api_reference")
    assert doctest.testmod(api).failed == 0
    text = "Prose `a[i][j]` and b[i][j].\n\nExample:\n    >>> f[0][1]\n    2\n\nMore.\n\n>>> last\n[[4, 1]]"
    assert api.as_markdown(text) == (
        "Prose `a[i][j]` and b[i]\\[j].\n\nExample:\n    ```pycon\n    >>> f[0][1]\n    2\n    ```\n\nMore.\n\n"
        "```pycon\n>>> last\n[[4, 1]]\n```"
    )
    assert api.comment_on(["x = 1", "#: One,", "#: and two.", "Y = 2  # here"], 4) == "One, and two."
    assert api.comment_on(["Y = 2  # type: ignore"], 1) == ""


def test_the_home_page_is_the_readme_with_links_from_inside_docs() -> None:
    hooks = load_hook("hooks")
    text = "[a](docs/using.md#x) ![b](docs/images/c.png) ![r](recipes/r.png) [d](https://e.org) [f](#g)"
    home = "[a](using.md#x) ![b](images/c.png) ![r](../recipes/r.png) [d](https://e.org) [f](#g)"
    assert hooks.home_page(text) == home
    assert hooks.pictures_of(home, REPOSITORY / "docs") == {"../recipes/r.png": REPOSITORY / "recipes" / "r.png"}
    assert hooks.linked_names("`hf_wlb.a.B` `hf_wlb`\n```py\n`hf_wlb.a.B`\n```\n") == (
        "[`hf_wlb.a.B`][hf_wlb.a.B] `hf_wlb`\n```py\n`hf_wlb.a.B`\n```\n"
    )


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://cdn.org/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.org/css">', True),
        ('<img src="images/a.png"><a href="https://arxiv.org">', False),
    ],
)
def test_a_page_that_needs_a_network_is_noticed(page: str, found: bool) -> None:
    assert bool(load_hook("hooks").ELSEWHERE.search(page)) == found


# ---- README.md and the pages ----


def test_the_readme_has_its_order() -> None:
    text = re.sub(r"^```.*?^```$", "", read_page("README.md"), flags=re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == ORDER
    before, _, after = text.partition("![")
    assert before.count("\n- ") == 3 and "## " not in before and after  # three lines, then a picture


def test_links_lead_to_files() -> None:
    assert [link for page in pages() for link in broken_links(page, read_page(page), REPOSITORY)] == []
    assert broken_links("docs/x.md", "[a](using.md#b) [c](nowhere.md) [d](https://e.org)", REPOSITORY) == [
        "docs/x.md: nowhere.md"
    ]


def tree_entries(text: str) -> set[str]:
    """Read a drawn tree: two blanks for each level, the name, two blanks or more, what it is."""
    above: list[str] = []
    entries = set()
    for line in text.splitlines():
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        above = [*above[:level], name]
        entries.add("".join(above))
    return entries


def real_entries(root: Path) -> set[str]:
    """List the folders of two levels and the modules of hf_wlb; what git ignores, and git itself, aside."""
    ignored = [line.rstrip("/") for line in (root / ".gitignore").read_text().splitlines() if line.endswith("/")]

    def folders(above: Path) -> list[Path]:
        found = [path for path in sorted(above.iterdir()) if path.is_dir() and path.name != ".git"]
        kept = [path for path in found if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)]
        return [path for path in kept if any(child.is_file() for child in path.rglob("*"))]

    entries = {f"{path.name}/" for path in folders(root)}
    entries |= {f"{above.name}/{path.name}/" for above in folders(root) for path in folders(above)}
    return entries | {f"hf_wlb/{path.name}" for path in (root / "hf_wlb").glob("*.py") if path.stem != "__init__"}


def test_the_file_tree_is_the_one_that_exists() -> None:
    (tree,) = blocks(read_page("README.md"), "text")
    assert tree_entries(tree) == real_entries(REPOSITORY)


def test_control_a_folder_without_a_line_is_found(tmp_path: Path) -> None:
    files = {".gitignore": "build/\n*.egg-info/\n", "hf_wlb/__init__.py": "", "hf_wlb/new.py": "", "build/x": ""}
    root = write_tree(tmp_path, {**files, "docs/deep/x": "", "x.egg-info/y": "", ".git/z": ""})
    assert real_entries(root) == {"hf_wlb/", "hf_wlb/new.py", "docs/", "docs/deep/"}
    assert tree_entries("hf_wlb/   a\n  new.py   b\ndocs/   c\n  deep/\n") == real_entries(root)
