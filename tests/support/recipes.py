"""The recipes as modules, imported the way their own scripts import each other."""

import importlib
import sys
from types import ModuleType

from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes"


def load_recipe(name: str) -> ModuleType:
    """Import a recipe by the name of its file."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
