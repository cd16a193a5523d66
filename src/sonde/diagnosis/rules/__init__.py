"""All rules, in one module per theme. Modules and rules are discovered, not listed."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from sonde.diagnosis.rule import Opinion, Rule


def _load() -> tuple[tuple[Rule, ...], tuple[Opinion, ...]]:
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    found = [value for name in names for value in vars(import_module(f"{__name__}.{name}")).values()]
    by_kind = {value.kind: value for value in found if isinstance(value, Rule)}
    opinions = {id(value): value for value in found if isinstance(value, Opinion)}
    return tuple(by_kind[kind] for kind in sorted(by_kind)), tuple(opinions.values())


RULES, OPINIONS = _load()
WANTED: frozenset[str] = frozenset(need for rule in RULES for need in rule.needs)
"""Every signal, quantity and fact that some rule reads. Sensors that produce nothing else wanted are not attached."""
