"""The built-in conversations: questions and answers about the Python standard library on this machine."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from hf_wlb.data.stdlib_documents import Definition, standard_library_definitions

_SYSTEM = "You answer questions about the Python standard library."
_FIRST = ("What does {name} do?", "Explain {name}.", "I found {name} in the standard library. What is it for?")
_CODE = ("Show me the code.", "How is {name} written?", "And its source?")
_MEMBER = ("What about its method {member}?", "And {name}.{member}?", "What is {member} good for?")
_MOST_MEMBERS = 8


def standard_library_chats() -> list[list[dict[str, str]]]:
    """Return conversations made up from the docstrings and the source of this machine's Python standard library.

    One about every top-level function or class with a docstring: what it does, often what its methods do, sometimes
    its source; every other one after a system message. Python 3.11 has about 2,900, with 2 to 21 messages and a long
    tail of lengths.

    Returns:
        Lists of messages with ``role`` and ``content``; the same each time on the same Python.

    Raises:
        RuntimeError: If this Python comes without the source files of its standard library.
    """
    chats = []
    for number, (definition, source) in enumerate(standard_library_definitions()):
        turns = list(_turns(definition, source, random.Random(number)))
        if turns:
            system = [{"role": "system", "content": _SYSTEM}] if number % 2 else []
            said = [{"role": role, "content": text} for turn in turns for role, text in turn]
            chats.append(system + said)
    return chats


def _turns(definition: Definition, source: str, choose: random.Random) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield questions with their answers; none without a docstring."""
    answer = ast.get_docstring(definition)
    if not answer:
        return
    name = definition.name
    yield ("user", choose.choice(_FIRST).format(name=name)), ("assistant", answer)
    members = [
        (member.name, text)
        for member in definition.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(member))
    ]
    for member, text in members[: choose.randint(0, _MOST_MEMBERS)]:
        yield ("user", choose.choice(_MEMBER).format(name=name, member=member)), ("assistant", text)
    if choose.random() < 0.4:
        yield ("user", choose.choice(_CODE).format(name=name)), ("assistant", source)
