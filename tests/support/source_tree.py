"""Reading a package's source without importing it: its modules, and what each of them imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One imported module or name, with its full dotted path, as `where` (file:line) spells it."""

    target: str
    where: str


def python_files(*folders: Path) -> Iterator[Path]:
    """Yield the Python files under `folders`, in a fixed order."""
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def place(path: Path, node: ast.AST, root: Path) -> str:
    """Spell a node's place as file:line, seen from `root`."""
    return f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}"


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Yield every import in a file, those inside functions too; `from a import b` gives `a.b`."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, place(path, node, root))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", place(path, node, root))


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write a made-up tree, for showing that a check fails on it; returns `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
