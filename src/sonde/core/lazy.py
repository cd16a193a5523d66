"""Public names of a package, listed once and imported at first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from sonde.errors import MissingExtra


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are listed under `if TYPE_CHECKING`.

    The list serves type checkers, and this function reads the same lines, so each name is written once. A name is
    imported when it is first used: reading a run never imports torch, and recording never imports what only readers
    need.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`.

    """
    homes = _listed(Path(file).read_text(encoding="utf-8"))
    names = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        try:
            value = getattr(import_module(module), original)
        except ModuleNotFoundError as error:
            if error.name == "torch":
                raise MissingExtra("torch", "torch", f"{package}.{name}") from error
            raise
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: list(names), names


def _listed(source: str) -> dict[str, tuple[str, str]]:
    """Return each name that is imported under `if TYPE_CHECKING`, with its module and its name there."""
    blocks = [
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for block in blocks
        for node in block
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
