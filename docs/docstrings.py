"""How docstrings are read for the API reference: examples as code, comments on constants as their docstrings."""

from __future__ import annotations

from typing import Any

# MkDocs has loaded docs/hooks.py, and this with it, before docstrings are read.
from api_reference import as_markdown, comment_on
from griffe import Attribute, Docstring, Extension, Object


class DocstringsAsMarkdown(Extension):
    """The extension of mkdocstrings' reader that mkdocs.yml names."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Examples are marked as code."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """A module's constant is shown with its comment, or by its value alone."""
        if attr.docstring is None and attr.parent is not None and attr.parent.is_module and attr.lineno is not None:
            source = attr.parent.filepath.read_text(encoding="utf-8").splitlines()
            attr.docstring = Docstring(comment_on(source, attr.lineno), parent=attr)
