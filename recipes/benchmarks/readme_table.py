"""The generated tables in README.md and docs/results.md."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
README, RESULTS_PAGE = REPOSITORY / "README.md", REPOSITORY / "docs" / "results.md"


def marks(name: str) -> tuple[str, str]:
    """The two lines between which a generated table stands.

    >>> marks("packing-table")
    ('<!-- packing-table:begin -->', '<!-- packing-table:end -->')
    """
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def between_marks(text: str, table: str, begin: str, end: str, file: str = "docs/results.md") -> str:
    """The text of a file with what stands between two marks replaced.

    Raises:
        ValueError: The marks are missing.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{file} has no place for the table: put the lines {begin} and {end} where it should go")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"
