"""A run exported as a site: opened from disk and from a file server, without Sonde and without a network."""

from __future__ import annotations

import http.server
import threading
from functools import partial

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("starlette", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import Recipe, write_run
from tests.browser.conftest import Watched
from tests.browser.sampled_runs import write_odd, write_scored
from tests.browser.serving import go, settle, walk
from tests.views.report.hostile_run import write_hostile_run

from sonde.store import PageWriter
from sonde.views.site import Limits, write_site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    write_run(folder / "first", Recipe(steps=30, layers=2, dies_at=15, nan_at=None))
    write_site(folder / "first", folder / "copy", limits=Limits(sites=8, steps=4))
    return folder / "copy"


@pytest.fixture(scope="module")
def opened(browser, site):
    """The copy, opened once from disk without a network."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    watched = Watched(context.new_page())
    watched.open(site / "index.html").wait_for_selector("main[data-ready]")
    yield watched
    context.close()


@pytest.fixture
def copy(opened):
    go(opened.page, "#/runs")
    opened.page.evaluate("sondeCopy.refused.splice(0)")
    yield opened
    assert opened.errors == []
    assert opened.requests == []


def missing(page, run):
    """Open every page; return what each asked that the copy does not hold."""
    page.wait_for_selector("main[data-ready]")
    go(page, f"#/run/{run}/overview")
    found = {}
    for hash_ in walk(page):
        refused = page.evaluate("sondeCopy.refused.splice(0)")
        if refused:
            found[hash_] = refused
    return found


def test_a_copy_opens_from_disk_and_answers_what_its_pages_ask(copy):
    page = copy.page
    page.wait_for_selector("tr[data-key='0-first'] a")
    assert "first" in page.locator("#copy summary").inner_text()
    assert missing(page, "0-first") == {}
    go(page, "#/run/0-first/overview")
    page.wait_for_selector(".chart canvas[data-drawn]")
    assert page.locator(".tile b").first.inner_text() == "30"


def test_a_copy_holds_samples_with_what_was_captured_of_them_whatever_they_are_called(offline, tmp_path):
    write_odd(tmp_path / "odd")
    write_site(tmp_path / "odd", tmp_path / "copy")
    page = offline.open(tmp_path / "copy" / "index.html")
    page.wait_for_selector("main[data-ready]")
    assert missing(page, "0-odd") == {}
    go(page, "#/run/0-odd/samples")
    page.wait_for_selector(".mapbox[data-cells='4']")
    page.click("text=Worst 20")
    page.wait_for_selector(".chip.mono")
    for hash_ in page.evaluate("[...document.querySelectorAll('td a[href*=\"/sample/\"]')].map(each => each.hash)"):
        go(page, hash_)
        page.wait_for_selector("main canvas")
    refused = page.evaluate("sondeCopy.refused")
    assert [question for question in refused if '["debugger","large"]' not in question] == []
    assert "more than 1,048,576 elements are left out" in page.locator("#copy").text_content()
    assert offline.errors == []
    assert offline.requests == []


def test_every_sample_that_a_copy_lists_can_be_opened_and_what_it_cannot_do_is_not_offered(offline, tmp_path):
    folder = tmp_path / "run"
    write_scored(folder, [[each / 10 for each in range(40)], [each / 20 for each in range(40)]])
    for epoch in (0, 1):
        with PageWriter(folder / f"epoch_{epoch}" / "debugger", page_bytes=64 << 20) as pages:
            for name in range(40):
                large = np.ones((200, 200), np.float32)
                pages.add(name, {"maps": {"small": np.eye(8, dtype=np.float32), "large": large}})
    write_site(folder, tmp_path / "copy")
    page = offline.open(tmp_path / "copy" / "index.html")
    assert missing(page, "0-run") == {}
    for epoch in (1, 0):
        go(page, f"#/run/0-run/samples?evaluation={epoch}")
        page.wait_for_selector("td a[href*='/sample/']")
        assert page.locator(".chips input, .samplegrid .select, td button.plain").count() == 0
        listed = page.evaluate("[...document.querySelectorAll('td a[href*=\"/sample/\"]')].map(each => each.hash)")
        assert len(listed) == 40
        for hash_ in listed[26:28]:  # neither the worst nor examples of good ones
            go(page, hash_)
            page.wait_for_selector("text=/large: 200 . 200, not in this copy/")
            small = "main canvas" if epoch else "text=/small: 8 . 8, not in this copy/"
            page.wait_for_selector(small)  # small captures are those of the last evaluation
    go(page, "#/run/0-run/contrast")
    page.wait_for_selector("text=worst 10%")
    assert page.locator("main input").count() == 0
    assert page.evaluate("sondeCopy.refused") == []
    assert offline.errors == []


def test_what_a_copy_does_not_hold_is_said(copy):
    page = copy.page
    go(page, "#/run/0-second/overview")
    assert page.locator(".problem h1").inner_text() == "Not in this copy"
    assert "sonde view first" in page.locator(".problem").inner_text()
    go(page, "#/run/0-first/layers?pattern=*head*")
    page.wait_for_selector(".beside .map .problem")
    assert "This copy does not hold it" in page.locator(".beside .map .problem").inner_text()
    assert "This copy does not hold it" in page.locator("section[aria-label=Sites] .note").inner_text()


def test_the_step_slider_of_a_copy_moves_what_stands_beside_it(copy):
    page = copy.page
    go(page, "#/run/0-first/layers")
    settle(page)
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => location.hash.includes('step=')")
    settle(page)
    page.wait_for_selector("text=/^step [0-9]+/")
    assert page.evaluate("sondeCopy.refused") == []


def test_a_copy_works_from_a_file_server_below_a_prefix(browser, site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site.parent)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    context = browser.new_context()
    try:
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/copy/#/run/0-first/overview")
        page.wait_for_selector(".figure .main-svg, .figure canvas[data-drawn]")
        assert errors == []
    finally:
        context.close()
        server.shutdown()
        server.server_close()
        thread.join()


def test_no_script_of_a_stranger_runs_in_a_copy(offline, tmp_path):
    write_hostile_run(tmp_path / "run", steps=4)
    write_site(tmp_path / "run", tmp_path / "copy", limits=Limits(sites=3, steps=2))
    page = offline.open(tmp_path / "copy" / "index.html")
    assert missing(page, "0-run") == {}
    assert page.evaluate("document.querySelectorAll('img:not([src^=assets]), iframe, a[href^=javascript]').length") == 0
    assert offline.errors == []
    assert offline.requests == []
