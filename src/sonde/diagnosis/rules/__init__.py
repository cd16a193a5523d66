"""All rules, one disease a file. Each file names its rule `RULE`; which files there are is found, not listed."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from sonde.diagnosis.rule import Rule


def _load() -> tuple[Rule, ...]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    rules = (getattr(import_module(f"{__name__}.{name}"), "RULE", None) for name in names)
    return tuple(rule for rule in rules if isinstance(rule, Rule))


RULES: tuple[Rule, ...] = _load()
