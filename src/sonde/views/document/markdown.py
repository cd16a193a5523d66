"""Documents as Markdown: for pull requests, issues and notes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from sonde.records import Finding, words_of
from sonde.views.document.finding_text import rows_of, when
from sonde.views.document.model import Block, Code, Curves, Document, Findings, Folded, Table, Text, Tiles, Values
from sonde.views.terminal.style import printable, short

_TICKS: Final = re.compile("`+")
_MARKUP: Final = re.compile(r"([\\`*_\[\]|~])")


def text(value: object) -> str:
    r"""Return a text that Markdown shows as it is, on one line.

    >>> print(text("a|b <i>"))
    a\|b &lt;i&gt;
    """
    line = " ".join(printable(value).split())
    return _MARKUP.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_markdown(document: Document) -> str:
    """Write a document."""
    lines = [f"# {text(document.title)}", "", *_blocks(document.lead)]
    for section in document.shown:
        body = list(_blocks(section.blocks))
        if body:
            lines += [f"## {text(section.title)}", "", *body] if section.title else body
    return "\n".join(lines).rstrip() + "\n"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Folded):
        yield from _blocks(block.blocks)
    elif isinstance(block, Findings):
        for finding in block.findings:
            yield from _finding(finding)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Curves):
        rows = [[name, short(values[0]), short(values[-1])] for name, values in block.curves.items() if len(values)]
        yield from _table(Table(["curve", "first", "last"], rows))
    elif isinstance(block, Code | Values):
        yield from _code(block.text if isinstance(block, Code) else block.as_json(ascii_only=True))
    elif isinstance(block, Text | Tiles):
        yield from (_line(block), "")


def _line(block: Text | Tiles) -> str:
    if isinstance(block, Text):
        return text(block.text)
    return ", ".join(f"{text(name)}: {text(value)}" for name, value in block.pairs)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {text(words_of(finding.kind))} ({finding.severity})"
    yield ""
    yield f"Observed {when(finding)}."
    yield ""
    for label, found in rows_of(finding):
        yield from (f"- **{label}:** {text(line)}" for line in found)
    yield ""


def _code(lines: str) -> Iterator[str]:
    # The fence is longer than any in the text. Without one, what comes after a list would be a part of it, not code.
    fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(lines)), default=0))
    yield from (fence, *lines.splitlines(), fence, "")


def _table(table: Table) -> Iterator[str]:
    rows = table.cells[: table.most]
    if not rows:
        return
    headings = table.columns or [""] * len(rows[0])
    yield "| " + " | ".join(map(text, headings)) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield "| " + " | ".join(text(cell.text) for cell in row) + " |"
    yield ""
    if len(rows) < len(table.rows):
        yield from (f"and {len(table.rows) - len(rows):,} more", "")
