"""A page as Markdown, or as one HTML file that needs nothing beside it."""

from __future__ import annotations

import math
from html import escape
from typing import Final

from sonde.pytorch_debugging.report_pages import Page, Section

_STYLE: Final = """
:root { --ink: #1d2330; --soft: #667085; --line: #e4e7ec; --back: #fbfbfa; --card: #ffffff; --accent: #2f6f9f;
  --well: #2e7d5b; --trouble: #b3402e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #98a2b3; --line: #2c333d; --back: #14171c;
  --card: #1b1f26; --accent: #7db4dc; --well: #6fc29b; --trouble: #ee8f7f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 68rem; background: var(--back); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 0.4rem; }
.made, .note { color: var(--soft); margin: 0.2rem 0 0.7rem; font-size: 0.9rem; }
.verdict { margin: 1.2rem 0; padding: 0.9rem 1.1rem; border-left: 4px solid; border-radius: 6px;
  background: var(--card); overflow-wrap: anywhere; }
.well { border-color: var(--well); } .trouble { border-color: var(--trouble); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 0.38rem 0.8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: break-word; }
td:first-child { white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 0.8rem; margin: 0.8rem 0; }
figure { margin: 0; padding: 0.7rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figcaption { color: var(--soft); font-size: 0.82rem; }
svg { display: block; width: 100%; height: 3.6rem; }
polyline { fill: none; stroke: var(--accent); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
"""
_WIDTH: Final = 300
_HEIGHT: Final = 60


def to_markdown(page: Page) -> str:
    """Write a page as Markdown."""
    parts = [f"# {page.title}", f"*{page.made}*", f"**{_md(page.verdict)}**"]
    for section in page.sections:
        parts.append(f"## {section.title}")
        if section.note:
            parts.append(_md(section.note))
        if section.rows:
            parts.append(_md_table(section))
    return "\n\n".join(parts) + "\n"


def to_html(page: Page) -> str:
    """Write a page as HTML; every text in it is escaped and nothing is loaded from elsewhere."""
    body = "\n".join(_html_section(section) for section in page.sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(page.title)}</h1>\n<p class="made">{escape(page.made)}</p>\n'
        f'<p class="verdict {page.mood}">{escape(page.verdict)}</p>\n{body}\n</body>\n</html>\n'
    )


def _html_section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.note:
        parts.append(f'<p class="note">{escape(section.note)}</p>')
    if section.curves:
        drawn = "".join(_curve(name, values) for name, values in section.curves.items())
        parts.append(f'<div class="curves">{drawn}</div>')
    if section.rows:
        head = "".join(f"<th>{escape(name)}</th>" for name in section.columns)
        rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in section.rows)
        parts.append(
            f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
        )
    return "\n".join(parts)


def _curve(name: str, values: list[float]) -> str:
    """Draw a curve; where values are not finite it is broken."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    span, steps = (high - low) or 1.0, max(len(values) - 1, 1)
    pieces: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if math.isfinite(value):
            x, y = index / steps * _WIDTH, _HEIGHT - (value - low) / span * (_HEIGHT - 4) - 2
            pieces[-1].append(f"{x:.1f},{y:.1f}")
        elif pieces[-1]:
            pieces.append([])
    lines = "".join(f'<polyline points="{" ".join(points)}"/>' for points in pieces if points)
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(name)}"'
    return f"<figure><figcaption>{escape(name)}: {low:.4g} to {high:.4g}</figcaption><svg {box}>{lines}</svg></figure>"


def _md_table(section: Section) -> str:
    lines = [section.columns, tuple("---" for _ in section.columns), *section.rows]
    return "\n".join("| " + " | ".join(_md(cell) for cell in row) + " |" for row in lines)


def _md(text: str) -> str:
    """Keep a text from being taken for Markdown or HTML, on one line."""
    for mark in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return " ".join(text.split())
