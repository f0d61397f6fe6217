"""The built-in documents: the functions and classes of the Python standard library on this machine, or whole files."""

import ast
import hashlib
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_SKIPPED_FOLDERS = {
    *(
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "site-packages",
        "dist-packages",
        "lib-dynload",
        "__pycache__",
    ),
}


def standard_library_documents() -> list[str]:
    """Return the top-level functions and classes of this machine's Python standard library.

    One document each, whole source lines with decorators, in the order of file names and then of lines.
    Test folders, IDLE and installed packages are left out, and so are files that do not parse. Python 3.11
    has about 5,600, 8 million characters, with the long tail of real data: half of the documents have
    fewer than 400 characters, the longest has 118,000.

    Returns:
        The documents; the same list each time on the same Python, a similar one on another.

    Raises:
        RuntimeError: If this Python comes without the source files of its standard library.
    """
    return [text for _, text in standard_library_definitions()]


def standard_library_definitions() -> list[tuple[Definition, str]]:
    """Return the same functions and classes, parsed, each with its text.

    Raises:
        RuntimeError: If this Python comes without the source files of its standard library.
    """
    root = sysconfig.get_path("stdlib")
    found = [definition for file in _source_files(root) for definition in _top_level_definitions(file)]
    if not found:
        raise RuntimeError(
            f"This Python has no standard library source files under {root!r}, so the built-in documents are "
            "not available. Give a dataset, a file or a folder instead."
        )
    return found


def _source_files(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith("config-"))
        yield from (os.path.join(folder, file) for file in sorted(files) if file.endswith(".py"))


def _top_level_definitions(file: str) -> Iterator[tuple[Definition, str]]:
    try:
        with tokenize.open(file) as stream:
            source = stream.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in somebody else's source
            module = ast.parse(source)
    except (SyntaxError, ValueError):  # the library keeps a few broken files on purpose
        return
    lines = source.split("\n")  # as the parser counts them: str.splitlines would also split at form feeds
    for node in module.body:
        if isinstance(node, Definition):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node, "\n".join(lines[first - 1 : node.end_lineno])


def source_file_documents(
    folders: Iterable[str | os.PathLike[str]],
    *,
    suffixes: tuple[str, ...] = (".py", ".pyi", ".md", ".rst"),
    most_bytes: int = 2_000_000,
) -> list[str]:
    """Return the source files and documentation under some folders, one document a file.

    There is much more of it than :func:`standard_library_documents` gives: a Python with torch, Transformers and SciPy
    has some 12,000 different files, 200 million characters. Lengths of files have a long tail by nature: half of them
    have fewer than 8,000 characters, one in a hundred has more than 160,000.

    Args:
        folders: To look through, with all folders in them; packages installed below a standard library are left out
            unless their own folder is given as well.
        suffixes: Of the files taken.
        most_bytes: Longer files (tables, mostly) are left out.

    Returns:
        The documents in the order of their content's hash, which is as good as random and the same wherever the same
        files are installed, in whatever folders. Files of the same content are one document; empty ones, and those
        that are not UTF-8, are left out.

    Raises:
        FileNotFoundError: If one of the folders is not there.
    """
    files: list[Path] = []
    for folder in folders:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"There is no folder {os.fspath(folder)!r} to take documents from.")
        for place, below, names in os.walk(folder):
            below[:] = [name for name in below if name not in ("site-packages", "dist-packages", "__pycache__")]
            files += (Path(place, name) for name in names if name.endswith(suffixes))
    with ThreadPoolExecutor(16) as readers:
        found = readers.map(lambda file: _different_text(file, most_bytes), dict.fromkeys(files))
        documents = dict(filter(None, found))
    return [documents[key] for key in sorted(documents)]


def _different_text(file: Path, most_bytes: int) -> tuple[bytes, str] | None:
    """A file's text by its hash; None for one that is to be left out."""
    if not file.is_file() or file.stat().st_size > most_bytes:
        return None
    content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return (hashlib.sha256(content).digest(), text) if text.strip() else None
