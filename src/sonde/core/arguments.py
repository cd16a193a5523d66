"""Check arguments of public functions, before anything is attached or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sonde.errors import OptionError


def shown(value: Any) -> str:
    """Return the beginning of a value's representation; its class where that cannot be made.

    >>> shown([1, 2])
    '[1, 2]'
    """
    try:
        return repr(value)[:80]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return f"an object of class {type(value).__name__}"


_MOST: Final = 2**53


def whole_number(name: str, value: Any, *, least: int = 1, most: int = _MOST) -> int:
    """Return a whole number; `name` is what the user calls it.

    >>> whole_number("epoch", 3.0, least=0)
    3
    """
    try:
        is_whole = not isinstance(value, bool | str) and int(value) == value
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's, for a complex number
        is_whole = False
    if not is_whole or not least <= value <= most:
        bound = f"of at least {least}" if not is_whole or value < least else f"up to {most}"
        raise OptionError(f"{name} takes a whole number {bound}; got {shown(value)}.")
    return int(value)


def mapping(name: str, value: Any) -> dict[Any, Any]:
    """Return a mapping as a dict, an empty one for None."""
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(f"{name} takes a dict; got {type(value).__name__}: {shown(value)}.")
    return dict(value or {})


def with_methods(name: str, value: Any, what: str, methods: Iterable[str]) -> None:
    """Refuse an object that lacks a method; None is nothing to refuse."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if value is not None and missing:
        raise OptionError(f"{name} takes {what}; {type(value).__name__} has no {missing[0]}().")
