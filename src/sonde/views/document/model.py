"""What a document is made of. All texts are plain: each format escapes them itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import StringIO
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from sonde.core import files
from sonde.records import Finding

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.views.figures.theme import Figure

Tone = Literal["plain", "quiet", "good", "odd", "bad"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table that is more than its text."""

    text: str
    tone: Tone = "plain"
    hint: str = ""
    """Shown when the mouse rests on it; HTML only."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    kind: ClassVar = "text"
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Tiles:
    """A few numbers that matter most, each with its name."""

    kind: ClassVar = "tiles"
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells."""

    kind: ClassVar = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: Sequence[int] = ()
    """The columns to align right."""
    most: int | None = None
    """How many rows Markdown and the terminal show; HTML shows all."""

    @property
    def cells(self) -> list[list[Cell]]:
        """All cells, as cells."""
        return [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings in full, in the order given."""

    kind: ClassVar = "findings"
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Figures:
    """Plotly figures, drawn only where they can be shown: in HTML. A figure without data becomes its sentence."""

    kind: ClassVar = "figures"
    draw: Callable[[], Sequence[Figure]]
    columns: int = 1


@dataclass(frozen=True, slots=True)
class Curves:
    """Small curves by name. They need no Plotly; values that are not finite interrupt the line."""

    kind: ClassVar = "curves"
    curves: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Code:
    """Text that keeps its lines, such as a traceback."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True, slots=True)
class Values:
    """Settings by name: a table in HTML, JSON elsewhere."""

    kind: ClassVar = "values"
    values: Mapping[str, Any]

    def as_json(self, *, ascii_only: bool = False) -> str:
        """Return them as indented JSON."""
        return json.dumps(files.plain(self.values, nonfinite="null"), indent=1, ensure_ascii=ascii_only)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each name with its value on one line."""
        return [(str(name), _one_line(value)) for name, value in self.values.items()]


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks that HTML shows when the reader asks for them."""

    kind: ClassVar = "folded"
    summary: str
    blocks: Sequence[Block]
    is_open: bool = False


Block: TypeAlias = Text | Tiles | Table | Findings | Figures | Curves | Code | Values | Folded


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the blocks below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Document:
    """A title, what leads in, and sections; those without blocks are left out."""

    title: str
    sections: Sequence[Section]
    lead: Sequence[Block] = ()
    data: Mapping[str, Any] | None = field(default=None, repr=False)
    """The values behind the document, which JSON writes; None writes the sections themselves."""

    @property
    def shown(self) -> list[Section]:
        """The sections that have something to show."""
        return [section for section in self.sections if section.blocks]

    def to_html(self) -> str:
        """Return one HTML file that opens from disk and asks the network for nothing.

        Raises:
            MissingExtra: jinja2 is not installed, or the document has figures and plotly is not.

        """
        from sonde.views.document.html import to_html

        return to_html(self)

    def to_markdown(self) -> str:
        """Return the document as Markdown, without figures."""
        from sonde.views.document.markdown import to_markdown

        return to_markdown(self)

    def to_json(self) -> str:
        """Return strict JSON; what is not known is null."""
        values = self.data if self.data is not None else {"title": self.title, "sections": _described(self.shown)}
        return files.text(values, indent=1) + "\n"

    def to_text(self, width: int = 100) -> str:
        """Return the document as plain text, as a terminal without colours would show it."""
        from sonde.views.terminal.style import make_console

        out = StringIO()
        self.print(make_console(file=out, width=width))
        return out.getvalue()

    def print(self, console: Console | None = None) -> None:
        """Print the document on a terminal, without figures."""
        from sonde.views.document.terminal import print_document

        print_document(self, console)


def figure_page(title: str, figures: Sequence[Figure], *, columns: int = 1) -> str:
    """Return a page of figures, as HTML."""
    block = Figures(lambda: figures, columns) if figures else Text("No plot was made yet.", "quiet")
    return Document(title, [Section("", [block])]).to_html()


def _described(sections: Sequence[Section]) -> list[dict[str, Any]]:
    return [{"title": each.title, "blocks": [_describe(block) for block in each.blocks]} for each in sections]


def _describe(block: Block) -> dict[str, Any]:
    if isinstance(block, Folded):
        return {"kind": block.kind, "summary": block.summary, "blocks": [_describe(each) for each in block.blocks]}
    if isinstance(block, Findings):
        return {"kind": block.kind, "findings": [finding.to_json() for finding in block.findings]}
    if isinstance(block, Table):
        rows = [[cell.text for cell in row] for row in block.cells]
        return {"kind": block.kind, "columns": block.columns, "rows": rows}
    if isinstance(block, Figures):
        return {"kind": block.kind, "figures": [json.loads(figure.to_json()) for figure in block.draw()]}
    return {"kind": block.kind} | {each.name: getattr(block, each.name) for each in fields(block)}


def _one_line(value: Any) -> str:
    return value if isinstance(value, str) else files.text(value)
