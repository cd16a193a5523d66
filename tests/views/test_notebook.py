"""`run.show()`: a run below the cell of a notebook."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

import pytest
from tests.analysis.made_run import write_run
from tests.views.report.hostile_run import ATTACKS, write_hostile_run

from sonde.errors import MissingExtra
from sonde.store import open_run
from sonde.views import notebook


class Elements(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def frame(html):
    (attrs,) = [attrs for tag, attrs in Elements(html).found if tag == "iframe"]
    return attrs


def test_a_notebook_gets_the_report_in_a_frame_that_cannot_reach_it_and_the_command_for_more(tmp_path):
    pytest.importorskip("plotly")
    write_run(tmp_path / "a run")
    shown = open_run(tmp_path / "a run").show(height=400)
    bundle = shown._repr_mimebundle_()
    attrs = frame(bundle["text/html"])
    assert attrs["sandbox"] == "allow-scripts"
    assert attrs["height"] == "400"
    assert "Gradient flow, first layer to last" in attrs["srcdoc"]
    assert "Content-Security-Policy" in attrs["srcdoc"]
    assert f"sonde view &#x27;{tmp_path / 'a run'}&#x27;" in bundle["text/html"]
    assert "60 steps" in bundle["text/plain"]


def test_only_what_a_front_end_wants_is_made(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    shown = open_run(tmp_path / "run").show()
    monkeypatch.setattr(notebook, "render_report", lambda *_: pytest.fail("nobody asked for the report"))
    assert list(shown._repr_mimebundle_(include={"text/plain"})) == ["text/plain"]
    assert list(shown._repr_mimebundle_(exclude={"text/html"})) == ["text/plain"]


def test_a_live_run_is_shown_as_it_is_when_it_is_displayed(tmp_path):
    pytest.importorskip("plotly")
    writer = write_run(tmp_path / "run", close=False)
    shown = open_run(tmp_path / "run").show()
    writer.final_state = "finished"
    writer.close()
    assert "<b>finished</b>" in frame(shown._repr_html_())["srcdoc"]


def test_without_plotly_the_words_remain_and_nothing_in_them_is_markup(tmp_path, monkeypatch):
    write_hostile_run(tmp_path / "run")
    real = notebook.render_report

    def words_only(run, form):
        if form == "html":
            raise MissingExtra("plotly", "view", "Drawing figures")
        return real(run, form)

    monkeypatch.setattr(notebook, "render_report", words_only)
    html = open_run(tmp_path / "run").show()._repr_html_()
    assert "pip install &#x27;sonde[view]&#x27;" in html
    assert {tag for tag, _ in Elements(html).found} <= {"p", "code", "pre"}
    assert ATTACKS[0] not in html


def test_opening_a_run_imports_no_view(tmp_path):
    write_run(tmp_path / "run")
    code = (
        "import sys, sonde; sonde.open_run(sys.argv[1]).show();"
        "print([n for n in sys.modules if n.split('.')[0] in ('plotly', 'torch', 'starlette')])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_outside_a_notebook_a_live_view_names_the_command_instead(tmp_path, caplog):
    write_run(tmp_path / "run")
    assert open_run(tmp_path / "run").show(live=True) is None
    assert f"there is no notebook to show the run in. Run: sonde top {tmp_path / 'run'}" in caplog.text


def test_a_run_as_the_value_of_a_cell_is_small_and_nothing_in_it_is_markup(tmp_path):
    write_hostile_run(tmp_path / "run")
    html = open_run(tmp_path / "run")._repr_html_()
    assert len(html) < 1_000_000
    assert {tag for tag, _ in Elements(html).found} == {"iframe"}
    assert {tag for tag, _ in Elements(frame(html)["srcdoc"]).found}.isdisjoint({"img", "object", "embed", "base"})
