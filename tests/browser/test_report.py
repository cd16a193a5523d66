"""The report in a real browser, from disk, with the network cut off."""

from __future__ import annotations

import pytest

pytest.importorskip("plotly", reason="reports need the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import write_run
from tests.views.report.hostile_run import write_hostile_run

from sonde.store import open_run
from sonde.views.report import render_report


def report(tmp_path, write):
    write(tmp_path / "run")
    file = tmp_path / "report.html"
    file.write_text(render_report(open_run(tmp_path / "run")), encoding="utf-8")
    return file


def drawn(page):
    """Wait for the page to draw, and return how many places for plots it has and how many hold one."""
    page.wait_for_selector("html[data-ready]")
    return page.locator("[data-figure]").count(), page.locator("[data-figure] svg.main-svg:first-of-type").count()


def test_a_report_opens_without_a_network_draws_every_plot_and_switches_its_theme(offline, tmp_path):
    page = offline.open(report(tmp_path, write_run))
    places, plots = drawn(page)
    assert places >= 8
    assert plots >= places
    assert all(box["height"] > 200 for box in page.locator("[data-figure]").evaluate_all(
        "all => all.map(each => ({height: each.getBoundingClientRect().height}))"))  # fmt: skip
    assert page.locator("text=Gradient flow, first layer to last").count() >= 1
    switch_theme(page)
    assert offline.errors == []
    assert offline.requests == []


def switch_theme(page):
    """Press the button and wait until page and plots have changed."""
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.click("#theme")
    page.wait_for_function(f"{paper} !== '{light}'")
    fill = "document.querySelector('[data-figure]').layout.template.layout.paper_bgcolor"
    page.wait_for_function(f"{fill} === '#14171c'")


def test_no_script_of_a_stranger_runs(offline, tmp_path):
    page = offline.open(report(tmp_path, write_hostile_run))
    places, plots = drawn(page)
    assert plots >= places >= 8
    # Hovering makes Plotly write labels with the names of the run.
    for index in range(places):
        box = page.locator(f"[data-figure='{index}']")
        box.scroll_into_view_if_needed()
        box.hover(position={"x": 300, "y": 180})
    assert page.evaluate("document.querySelectorAll('img, iframe, a[href^=javascript]').length") == 0
    assert page.evaluate("document.querySelectorAll('svg a').length") == 0
    assert offline.errors == []  # a dialog would be one, and so would a script that the policy refused
    assert offline.requests == []
