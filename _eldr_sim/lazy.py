"""Modules that take long to import, imported where they are first used."""

from importlib import import_module
from typing import Any


class Lazy:
    """Stands for a module, such as pyarrow, which some of the functions beside it need."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return an attribute of the module, imported."""
        return getattr(import_module(self._name), attribute)
