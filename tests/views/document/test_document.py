"""One document: the same sections as HTML, Markdown, JSON and on a terminal."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("jinja2", reason="HTML needs the view extra: pip install 'sonde[view]'")

from tests.views.html_tags import Tags

from sonde.records import Evidence, Finding
from sonde.views.document import (
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
    Values,
    figure_page,
)

FINDING = Finding(
    kind="dead_relu",
    severity="warning",
    confidence=0.6,
    step=3,
    last_step=9,
    sites=("net.1",),
    evidence=(Evidence(name="dead share", value=0.95, threshold=0.9, relation=">="),),
    cause="The units never fire.",
    fix="Lower the learning rate.",
)
DOCUMENT = Document(
    "A <b>report</b>",
    [
        Section("Findings", [Findings([FINDING])]),
        Section("Numbers", [Table(["layer", "norm"], [["net|1", Cell("1e9", "bad")], ["net.2", "2"]], (1,), 1)]),
        Section("Curves", [Curves({"loss": [3.0, float("nan"), 2.0, 1.0]})]),
        Section("Details", [Folded("more", [Code("line one\n  line two"), Values({"seed": 1})])]),
        Section("Nothing", []),
    ],
    [Text("It went wrong.", "bad"), Tiles([("steps", "12")])],
)


SAID_EVERYWHERE = (
    "It went wrong.", "The units never fire.", "Lower the learning rate.", "dead share", "1e9", "seed", "line two",
)  # fmt: skip


@pytest.mark.parametrize("write", [Document.to_html, Document.to_markdown, Document.to_text])
def test_every_format_says_the_same(write):
    text = write(DOCUMENT)
    assert [words for words in SAID_EVERYWHERE if words not in text] == []
    assert "Nothing" not in text, "a section without content is left out"


def test_html_escapes_all_text_and_needs_no_plotly_without_figures():
    html = Document.to_html(DOCUMENT)
    page = Tags(html)
    assert "A <b>report</b>" in page.text
    assert sum(tag == "script" for tag, _ in page.tags) == 2, "the data and our own script"
    assert len(html) < 20_000


def test_a_curve_is_interrupted_where_it_is_not_finite():
    page = Tags(DOCUMENT.to_html())
    pieces = [attrs["points"] for tag, attrs in page.tags if tag == "polyline"]
    assert [len(points.split()) for points in pieces] == [1, 2]


def test_html_shows_all_rows_and_markdown_the_first_ones():
    assert "net.2" in DOCUMENT.to_html()
    markdown = DOCUMENT.to_markdown()
    assert "net.2" not in markdown
    assert "| net\\|1 | 1e9 |" in markdown
    assert "and 1 more" in markdown


def test_json_writes_the_data_behind_a_document_or_else_its_sections():
    sections = json.loads(DOCUMENT.to_json())["sections"]
    assert [section["title"] for section in sections] == ["Findings", "Numbers", "Curves", "Details"]
    assert sections[0]["blocks"][0]["findings"][0]["kind"] == "dead_relu"
    assert sections[2]["blocks"][0]["curves"]["loss"] == [3.0, None, 2.0, 1.0]
    assert json.loads(Document("t", [], data={"loss": float("inf")}).to_json()) == {"loss": None}


def test_figures_are_drawn_for_html_only():
    def refuse():
        raise AssertionError("nobody can see it")

    document = Document("t", [Section("Figures", [Figures(refuse)])])
    assert "Figures" not in document.to_markdown()
    assert "Figures" not in Document.to_text(document)
    with pytest.raises(AssertionError, match="nobody can see it"):
        document.to_html()


def test_a_figure_with_nothing_to_draw_becomes_its_sentence():
    pytest.importorskip("plotly")
    from sonde.views.figures.theme import empty

    html = figure_page("t", [empty("Loss", "No loss was <logged>.")])
    assert "No loss was &lt;logged&gt;." in html
    assert "data-figure=" not in html
