"""Numbers as people read them: short, and the same width for the same thing."""

from __future__ import annotations

import math

ABSENT = "-"


def printable(text: object) -> str:
    """Return a text with a space in place of each character that cannot be printed, such as control characters."""
    return "".join(each if each.isprintable() else " " for each in str(text))


def short(value: float | None) -> str:
    """Write a number in three digits. None, which was not measured, is a dash; NaN was measured and is NaN.

    >>> [short(v) for v in (0.0, 0.5, 12.345, 1234.0, 0.000123, -2.5e8, float("nan"), None)]
    ['0', '0.500', '12.3', '1234', '1.23e-4', '-2.50e8', 'NaN', '-']
    """
    if value is None:
        return ABSENT
    if math.isnan(value):
        return "NaN"
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else f"{value:+.0f}".replace("+", "")
    size = abs(value)
    if 1e-2 <= size < 1e4:
        # Rounding may carry into the next decade; `.2e` knows the exponent after rounding.
        digits = max(0, 2 - int(f"{size:.2e}".partition("e")[2]))
        return f"{value:.{digits}f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: int) -> str:
    """Write a count: exactly up to 99,999, then in thousands, millions and billions.

    >>> count(812), count(121_482), count(7_000_000_000)
    ('812', '121 k', '7.0 G')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor and value >= 100_000:
            scaled = value / factor
            return f"{scaled:.0f} {unit}" if scaled >= 10 else f"{scaled:.1f} {unit}"
    return f"{value:,}"


def size(nbytes: int) -> str:
    """Write a number of bytes.

    >>> size(512), size(4_200_000)
    ('512 B', '4.2 MB')
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Write a length of time.

    >>> duration(4.21), duration(75), duration(7300), duration(200_000)
    ('4.2 s', '1 min 15 s', '2 h 01 min', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02d} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes:02d} min"


def plural(number: int, word: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "step"), plural(500, "step")
    ('1 step', '500 steps')
    """
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
