"""Documents: sections of text, tables, findings and figures, written as HTML, Markdown, JSON or on a terminal.

Every report is one of these. A report decides what to say; how it looks is decided here, once.

    from sonde.views.document import Document, Section, Table, Text

    document = Document("Debug report", [Section("Events", [Table(["step", "event"], [["3", "loss is NaN"]])])])
    document.to_html()
    document.to_markdown()
    document.to_json()
    document.print()
"""

from sonde.views.document.finding_text import count_findings, evidence_line, ranked, when
from sonde.views.document.model import (
    Block,
    Cell,
    Code,
    Curves,
    Document,
    Figures,
    Findings,
    Folded,
    Section,
    Table,
    Text,
    Tiles,
    Tone,
    Values,
    figure_page,
)

__all__ = [
    "Block",
    "Cell",
    "Code",
    "Curves",
    "Document",
    "Figures",
    "Findings",
    "Folded",
    "Section",
    "Table",
    "Text",
    "Tiles",
    "Tone",
    "Values",
    "count_findings",
    "evidence_line",
    "figure_page",
    "ranked",
    "when",
]
