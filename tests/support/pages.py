"""README.md and the pages in docs/, read the way their readers and tests do."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

from tests.support.source_tree import REPOSITORY

DOCS = REPOSITORY / "docs"


def read_page(name: str) -> str:
    """The text of a page, by its path in the repository."""
    return (REPOSITORY / name).read_text(encoding="utf-8")


def pages() -> list[str]:
    """README.md and every page in docs/, as paths in the repository."""
    return ["README.md", *(str(path.relative_to(REPOSITORY)) for path in sorted(DOCS.glob("*.md")))]


def blocks(text: str, language: str) -> list[str]:
    """What stands in a page's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def load_hook(name: str) -> ModuleType:
    """Import a module of the site's generator, which needs no MkDocs until MkDocs calls it."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(name)


def broken_links(page: str, text: str, root: Path) -> list[str]:
    """Name the links of a page that lead to no file of the repository; those to other sites aside."""
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text)
    inside = [target for target in found if not re.match(r"\w+:", target)]
    return [f"{page}: {target}" for target in inside if not (root / page).parent.joinpath(target).exists()]
