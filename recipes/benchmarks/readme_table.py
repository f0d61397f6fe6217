"""The generated tables in README.md."""

from __future__ import annotations


def between_marks(readme: str, table: str, begin: str, end: str) -> str:
    """README's text with what stands between two marks replaced.

    Raises:
        ValueError: The marks are missing.
    """
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise ValueError(f"README.md has no place for the table: put the lines {begin} and {end} where it should go")
    head, rest = readme.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"
