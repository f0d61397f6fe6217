"""What `make docs` makes while it builds the site: the home page from README.md and a page for every public module.

MkDocs calls the functions named ``on_...`` (see ``hooks`` in mkdocs.yml). Nothing is listed by hand: pages of the API
follow from the modules that exist, pictures from the links to them. No module of the package is imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from api_reference import api_pages

REPOSITORY = Path(__file__).resolve().parent.parent
#: Where pictures from outside of docs/ are on the site.
PICTURES = "pictures"

_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_URL = re.compile(r"\w+:")
_NAME = re.compile(r"(?<!\[)`(hf_wlb(?:\.\w+)+)`")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(https?:)?//[^>]*>")


def home_page(readme: str) -> str:
    """README.md as the site's first page: links start in docs/ and no longer one folder above it."""

    def from_docs(link: re.Match[str]) -> str:
        target = link["target"]
        if not _URL.match(target):
            target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"{link['before']}{target}{link['anchor'] or ''})"

    return _LINK.sub(from_docs, readme)


def pictures_of(markdown: str, folder: Path) -> dict[str, Path]:
    """The files outside of docs/ to which a page links: target -> file.

    Args:
        markdown: The page's text.
        folder: Where the page's links start.
    """
    targets = {link["target"] for link in _LINK.finditer(markdown) if link["target"].startswith("../")}
    return {target: (folder / target).resolve() for target in sorted(targets) if target.endswith(".png")}


def linked_names(markdown: str) -> str:
    """A page in which names such as ``hf_wlb.packing.wlb.WlbPacker`` lead to their place in the API, code aside."""
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _NAME.sub(r"[`\1`][\1]", part) for part in parts)


# ---- what MkDocs calls ----


def on_config(config: Any) -> Any:
    """The API's pages in the navigation."""
    entries = [{name.removesuffix(".md"): f"api/{name}"} for name in api_pages(REPOSITORY) if name != "index.md"]
    config.nav.append({"API": ["api/index.md", *entries]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages that no file in docs/ holds, and the pictures from other folders."""
    from mkdocs.structure.files import File

    made = {"index.md": home_page((REPOSITORY / "README.md").read_text(encoding="utf-8"))}
    made |= {f"api/{name}": text for name, text in api_pages(REPOSITORY).items()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    for file in list(files.documentation_pages()):
        for picture in pictures_of(file.content_string, REPOSITORY / "docs").values():
            place = f"{PICTURES}/{picture.name}"
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to README.md, pictures and names, as they are on the site."""
    for target, picture in pictures_of(markdown, REPOSITORY / "docs").items():
        markdown = markdown.replace(f"]({target})", f"]({PICTURES}/{picture.name})")
    markdown = markdown.replace("](../README.md", "](index.md")
    return markdown if page.file.src_uri.startswith("api/") else linked_names(markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Pages must do without a network.

    Raises:
        PluginError: If one loads something from elsewhere.
    """
    from mkdocs.exceptions import PluginError

    found = ELSEWHERE.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found.group()[:200]}")
    return output
