"""Reading document lengths from files, and telling two arrays of lengths apart."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hf_wlb.lengths.arrays import BLOCK_ENTRIES, MOST_TOKENS, IntArray, LengthArray, iter_blocks

_MOST_DIGITS = len(str(MOST_TOKENS))
_WHAT_LENGTHS_ARE = f"document lengths are integers from 0 to {MOST_TOKENS:,}, in tokens"
_FORMATS = (
    'a JSON list such as [812, 95], a JSON object {"lengths": [812, 95]}, a .npy array, a .csv file of one column, or '
    "text with one length a line"
)
#: What errors say where lengths were expected and something else was given.
HOW_TO_MAKE_LENGTHS = (
    "To make a file of a tokenised data set: json.dump(hf_wlb.data.document_lengths(dataset).tolist(), "
    "open('lengths.json', 'w')); see docs/your_data.md"
)
_KEYS = ("lengths", "length")
_LIST_IN_OBJECT = re.compile(r'(?<!\\)"lengths?"\s*:\s*\[\s*[-\d\]]')
_HEAD_BYTES = 4096


def load_lengths(path: str | Path) -> LengthArray:
    """Read document lengths in tokens from a file.

    Understood are

    - ``.npy``: a one-dimensional integer array, memory-mapped read-only and kept in its own integer dtype, so that ten
      million lengths cost no memory;
    - JSON (any file whose first character is ``[`` or ``{``, or whose name ends in ``.json``): a list of integers, or
      an object that has such a list as ``lengths``;
    - ``.csv``: one column of integers, with or without a header;
    - text with one integer a line (blank lines are ignored).

    Tokenised data sets are read by ``hf_wlb.data.document_lengths``, and by ``hf_wlb.analysis.read_lengths`` from files
    and folders.

    Args:
        path: The file.

    Returns:
        Lengths, shape ``(documents,)``. int64 from JSON and text; the file's own integer dtype from ``.npy``.
        May be empty. A length of 0 is allowed here (an empty document); what to do about it is the
        packer's policy.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the content is not a list of integers from 0 to ``MOST_TOKENS``; the message names the
            first bad place, or what is allowed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {str(path)!r} to read document lengths from. Give {_FORMATS}. {HOW_TO_MAKE_LENGTHS}."
        )
    if path.suffix == ".npy":
        return _load_npy(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # without the mark that spreadsheets begin a .csv with
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path.name} is not text, and its name does not end in .npy. Give document lengths as {_FORMATS}. "
            f"{HOW_TO_MAKE_LENGTHS}."
        ) from error
    if path.suffix == ".json" or text.lstrip()[:1] in ("[", "{"):
        return _parse_json(text, path.name)
    if path.suffix.lower() == ".csv":
        return _parse_words(_cells(text, path.name), path.name)
    return _parse_words(enumerate(text.splitlines(), start=1), path.name)


def holds_lengths(path: Path) -> bool:
    """Whether a file looks like one for ``load_lengths``, and not like text or a tokenised data set.

    Returns:
        True for a ``.npy`` array, a ``.csv`` file, JSON that begins with a list of numbers or has one as ``lengths``,
        and a file that begins with a number. False for anything else, and where there is no such file.
    """
    if not path.is_file():
        return False
    if path.suffix.lower() in (".npy", ".csv"):
        return True
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").strip()
    if head.startswith("{"):
        return _LIST_IN_OBJECT.search(head) is not None
    if path.suffix == ".json" and not head.startswith("["):
        return False
    first = head[1:].lstrip()[:1] if head.startswith("[") else (head.split() or [""])[0]
    return first == "]" or first.lstrip("-").isdigit()


def _load_npy(path: Path) -> LengthArray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path.name} is not a readable .npy array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name} holds an archive of arrays; save one array of lengths with np.save.")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{path.name} holds an array of shape {array.shape} and dtype {array.dtype}; document lengths "
            "are a one-dimensional array of integers. Save them with np.save(path, lengths.astype(np.int64))."
        )
    _check_lengths(array, path.name)
    return array


def _parse_json(text: str, name: str) -> IntArray:
    try:
        content = json.loads(text)
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise ValueError(f"{name} is not valid JSON ({error}). Give {_FORMATS}. {HOW_TO_MAKE_LENGTHS}.") from error
    if isinstance(content, dict):
        content = next((content[key] for key in _KEYS if isinstance(content.get(key), list)), content)
    if not isinstance(content, list):
        raise ValueError(
            f"{name} holds a JSON {_json_kind(content)}; document lengths are a list of integers, such as [812, 95], "
            f'or an object {{"lengths": [812, 95]}}. {HOW_TO_MAKE_LENGTHS}.'
        )
    for index, value in enumerate(content):
        if type(value) is not int or not 0 <= value <= MOST_TOKENS:
            raise ValueError(f"Entry {index} of {name} is {_short(value)}; {_WHAT_LENGTHS_ARE}.")
    return np.array(content, dtype=np.int64)


def _cells(text: str, name: str) -> Iterator[tuple[int, str]]:
    """The lines of a file of comma-separated values that has one column, by number, without its header."""
    first = True
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if len(cells) > 1:
            raise ValueError(
                f"Line {number} of {name} has {len(cells)} columns ({_short(line.strip())}); a .csv file of document "
                "lengths has one, such as that of pandas' frame['length'].to_csv(path, index=False). Text and "
                f"tokenised documents are read from .jsonl and .parquet files. {HOW_TO_MAKE_LENGTHS}."
            )
        is_header = first and not re.match(r"[-+.\d]", cells[0])
        if cells[0] and not is_header:
            yield number, cells[0]
        first = first and not cells[0]


def _parse_words(numbered: Iterable[tuple[int, str]], name: str) -> IntArray:
    values: list[int] = []
    for number, line in numbered:
        word = line.strip()
        if not word:
            continue
        length = parse_length(word)
        if length is None:
            raise ValueError(f"Line {number} of {name} is {_short(word)}; {_WHAT_LENGTHS_ARE}, one a line.")
        values.append(length)
    return np.array(values, dtype=np.int64)


def parse_length(word: str) -> int | None:
    """Read the length of a document in tokens, written in decimal digits.

    Returns:
        The length; None for other text, or for more than ``MOST_TOKENS``.

    Example:
        >>> parse_length("0812"), parse_length("-5"), parse_length("9" * 20)
        (812, None, None)
    """
    digits = word.lstrip("0")
    if not (word.isascii() and word.isdigit()) or len(digits) > _MOST_DIGITS:
        return None
    length = int(digits or "0")  # Python refuses thousands of digits, zeros too
    return length if length <= MOST_TOKENS else None


def _json_kind(value: object) -> str:
    if isinstance(value, dict):
        names = ", ".join(map(repr, list(value)[:5])) + (", ..." if len(value) > 5 else "")
        return f"object with the names {names}" if value else "object without names"
    kinds = {str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _check_lengths(lengths: LengthArray, name: str) -> None:
    for start, block in iter_blocks(lengths, BLOCK_ENTRIES):
        bad = np.flatnonzero((block < 0) | (block > MOST_TOKENS))
        if bad.size:
            first = int(bad[0])
            raise ValueError(f"Entry {start + first} of {name} is {block[first]}; {_WHAT_LENGTHS_ARE}.")


def fingerprint_lengths(lengths: LengthArray) -> str:
    """Hash an array of lengths: equal values in equal order give equal text, whatever the integer dtype.

    Args:
        lengths: Lengths in tokens, shape ``(documents,)``, any integer dtype; read in blocks.

    Returns:
        32 hexadecimal digits (BLAKE2b over the lengths as little-endian int64).

    Example:
        >>> fingerprint_lengths(np.array([3, 1], dtype=np.int32)) == fingerprint_lengths(np.array([3, 1]))
        True
        >>> fingerprint_lengths(np.array([1, 3])) == fingerprint_lengths(np.array([3, 1]))
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    for _, block in iter_blocks(lengths, BLOCK_ENTRIES):
        digest.update(np.ascontiguousarray(block, dtype="<i8").tobytes())
    return digest.hexdigest()
