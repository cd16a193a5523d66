"""Write docs/statistics.md from the table of statistics; run this after adding one: python docs/make_statistics.py"""

from __future__ import annotations

from pathlib import Path

from sonde.core.statistics import STATISTICS, USUAL, Statistic

PAGE = Path(__file__).parent / "statistics.md"
HEAD = """# Statistics

What `run.series(site, name)`, `sonde show --stat NAME`, `sonde export --stat NAME`, the figures and the viewer know, by
name. All are computed from the twelve columns and the histogram that a run stores for each tensor and step; statistics
of magnitudes are over the finite elements. What cannot be known is NaN, such as the standard deviation of one element.

| name | meaning | of |
|---|---|---|
"""
TAIL = """
By default each quantity is shown by the statistic that says most about it: {usual}.

This page is written from `sonde.core.statistics`; a row added to that table appears here and everywhere else.
"""


def page() -> str:
    """Return the page."""
    rows = "".join(f"| `{row.name}` | {_cell(row.title)} | {_owner(row)} |\n" for row in STATISTICS.values())
    usual = ", ".join(f"{quantity.replace('_', ' ')} by `{name}`" for quantity, name in USUAL.items())
    return HEAD + rows + TAIL.format(usual=usual)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _owner(row: Statistic) -> str:
    return "every tensor" if row.quantity is None else f"each {row.quantity}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
