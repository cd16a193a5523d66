"""`run.show()` in a browser, as a notebook puts it below a cell."""

from __future__ import annotations

import pytest

pytest.importorskip("plotly", reason="figures need the view extra: pip install 'sonde[view]'")

from tests.views.report.hostile_run import write_hostile_run

from sonde.store import open_run


def test_the_frame_draws_its_figures_and_cannot_reach_the_notebook(offline, tmp_path):
    write_hostile_run(tmp_path / "run", steps=6)
    cell = f"<!doctype html><body data-secret='token'>{open_run(tmp_path / 'run').show()._repr_html_()}</body>"
    (tmp_path / "notebook.html").write_text(cell, encoding="utf-8")
    page = offline.open(tmp_path / "notebook.html")
    frame = page.query_selector("iframe").content_frame()
    frame.wait_for_selector("html[data-ready]")
    assert frame.locator("[data-figure] svg.main-svg").count() >= 8
    reached = "() => { try { return parent.document.body.dataset.secret; } catch { return null; } }"
    assert frame.evaluate(reached) is None
    assert page.locator("body > :not(p, iframe)").count() == 0
    assert offline.errors == []
    assert offline.requests == []
