"""Debug sessions, inspectors, hooks and visualizers, by the names their users know."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Loaded at first use, so that drawing never imports torch, and recording never imports what only drawing needs.
_HOMES: dict[str, str] = {}

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sonde.debug' has no attribute {name!r}")
    value = getattr(import_module(f"sonde.debug.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
