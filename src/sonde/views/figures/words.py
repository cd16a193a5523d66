"""Names and numbers inside figures. Names come from runs that strangers may have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sonde import schema
from sonde.core import statistics
from sonde.views.terminal.numbers import printable

_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_CHARACTERS: Final = 2000


def safe(text: object) -> str:
    """Return a text that Plotly shows as it is: no tags, no entities, no control characters.

    >>> safe("<b>layer</b>")
    '&lt;b&gt;layer&lt;/b&gt;'
    """
    shown = printable(str(text)[:_MAX_CHARACTERS])
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut(name: str, most: int = 28) -> str:
    """Cut a dotted name from the left, because its end says more than its beginning.

    >>> cut("transformer.blocks.11.attention.projection", 20)
    '…ttention.projection'
    """
    return name if len(name) <= most else "…" + name[len(name) - most + 1 :]


def labels(names: Sequence[str], most: int = 34) -> list[str]:
    """Return short, safe names for the ticks of an axis."""
    return [safe(cut(name or "(model)", most)) for name in names]


def power(base: int, exponent: int) -> str:
    """Write a power.

    >>> power(2, -12)
    '2⁻¹²'
    """
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"


def bin_label(index: int) -> str:
    """Return which magnitudes a histogram bin holds; the two at the ends are open.

    >>> bin_label(47), bin_label(63)
    ('2⁰ ≤ |x| < 2¹', '|x| ≥ 2¹⁶')
    """
    exponent = index + schema.FIRST_EXPONENT
    if index == 0:
        return f"0 < |x| < {power(2, exponent + 1)}"
    if index == schema.NUM_BINS - 1:
        return f"|x| ≥ {power(2, exponent)}"
    return f"{power(2, exponent)} ≤ |x| < {power(2, exponent + 1)}"


def stat_title(stat: str, quantity: str = "") -> str:
    """Return the name of a statistic on an axis, with the quantity it is of."""
    row = statistics.find(stat)
    return row.title + (f" of the {quantity.replace('_', ' ')}" if quantity and row.quantity is None else "")


def as_title(text: str) -> str:
    """Return words as a title begins.

    >>> as_title("share of zeros")
    'Share of zeros'
    """
    return f"{text[:1].upper()}{text[1:]}"
