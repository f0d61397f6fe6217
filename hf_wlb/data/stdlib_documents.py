"""The built-in documents: the functions and classes of the Python standard library on this machine."""

import ast
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator

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
