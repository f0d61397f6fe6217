"""The API reference as Markdown: a page for every package and every module beside them, made from the source alone.

Nothing is listed by hand and no module is imported: what is public follows from the files that exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "hf_wlb"
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> ")
_CODE = re.compile(r"(``.*?``|`.*?`)")


@dataclass(frozen=True)
class Module:
    """A public module: its dotted name, the first line of its docstring, what it defines and what it passes on.

    Attributes:
        name: ``hf_wlb.packing.types``.
        summary: First line of the docstring.
        is_package: Whether it is a folder's ``__init__.py``; such a one is public without names, too.
        defined: Public names that it defines.
        exported: Public names that it passes on from other modules, with the dotted name that each has there.
    """

    name: str
    summary: str
    is_package: bool
    defined: tuple[str, ...]
    exported: dict[str, str]


def public_modules(root: Path) -> list[Module]:
    """The packages under ``root``/hf_wlb and their modules that define public names, in the order of their names.

    A name is public if it does not begin with an underscore; so is a module if no part of its own name does.
    """
    modules = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        if any(part.startswith("_") for part in parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        summary = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        defined, exported = tuple(_defined(tree)), _exported(tree)
        if defined or is_package:
            modules.append(Module(".".join(parts), summary, is_package, defined, exported))
    return sorted(modules, key=lambda module: module.name)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Public names that a module's top level defines, each once."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    yield from dict.fromkeys(name for name in names if not name.startswith("_"))


def _exported(tree: ast.Module) -> dict[str, str]:
    """What ``__all__``, or ``_EXPORTS``, a table of names that are looked up late, takes from other modules."""
    taken: dict[str, str] = {}
    passed_on: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            taken |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if target == "__all__":
                passed_on |= set(ast.literal_eval(node.value))
            elif target == "_EXPORTS":
                late = {name: f"{module}.{name}" for name, module in ast.literal_eval(node.value).items()}
                taken, passed_on = taken | late, passed_on | set(late)
    return {name: where for name, where in taken.items() if name in passed_on}


def api_pages(root: Path) -> dict[str, str]:
    """The API's pages as Markdown, by file name: the overview, then one for every package and every lone module."""
    modules = public_modules(root)
    packages = {module.name for module in modules if module.is_package} | {PACKAGE}
    pages: dict[str, list[Module]] = {}
    for module in modules:
        above = module.name.rpartition(".")[0]
        alone = module.name in packages or above == PACKAGE or above not in packages
        pages.setdefault(module.name if alone else above, []).append(module)
    overview = pages.pop(PACKAGE, [])
    texts = {"index.md": _overview(overview, pages)}
    return texts | {f"{name}.md": _page(name, found) for name, found in pages.items()}


def _overview(own: list[Module], pages: dict[str, list[Module]]) -> str:
    """The main names, and what every page is about."""
    lines = ["# API reference", "", f"Every public module of `{PACKAGE}`, from its docstrings.", ""]
    for module in own:
        lines += [f"::: {module.name}", "    options:", "      members: false", "", *_passed_on(module)]
    lines += ["## Parts", "", "| part | what it is |", "|---|---|"]
    lines += [f"| [{name}]({name}.md) | {found[0].summary} |" for name, found in pages.items()]
    return "\n".join([*lines, ""])


def _page(name: str, modules: list[Module]) -> str:
    """One package with its modules, or one module."""
    lines = [f"# {name}", ""]
    for module in modules:
        lines += [f"::: {module.name}"]
        if module.name == name:  # the page has its name as the title
            lines += ["    options:", "      show_root_heading: false", "      show_root_toc_entry: false"]
            lines += [] if module.defined else ["      members: false"]
        lines += ["", *_passed_on(module)]
    return "\n".join(lines)


def _passed_on(module: Module) -> list[str]:
    """A line of links to what a package passes on from its modules."""
    if not module.exported:
        return []
    links = ", ".join(f"[`{name}`][{where}]" for name, where in sorted(module.exported.items()))
    return [f"Can be imported from `{module.name}`: {links}.", ""]


def as_markdown(docstring: str) -> str:
    """A docstring in which examples (``>>>``, up to the next empty line) are code, and ``a[i][j]`` in prose no link."""
    lines: list[str] = []
    indent: str | None = None  # of the example that goes on
    for line in docstring.splitlines():
        begins = _EXAMPLE.match(line)
        if indent is None and begins:
            indent = begins["indent"]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line if indent is not None else _no_links(line))
    return "\n".join([*lines, *([] if indent is None else [f"{indent}```"])])


def _no_links(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(part if part.startswith("`") else part.replace("][", "]\\[") for part in parts)


def comment_on(lines: list[str], number: int) -> str:
    """What the source says about the constant that begins in line ``number`` (from 1): ``#:`` above, or ``#`` behind.

    >>> comment_on(["#: In tokens.", "ROOM = 512  # a power of two"], 2)
    'In tokens.'
    >>> comment_on(["ROOM = 512  # a power of two"], 1)
    'a power of two'
    """
    above: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.startswith("#:"):
            break
        above.insert(0, line.removeprefix("#:").strip())
    behind = lines[number - 1].partition("  # ")[2]
    return " ".join(above) or re.sub(r"^(type|noqa|pragma|mypy)\b.*", "", behind)
