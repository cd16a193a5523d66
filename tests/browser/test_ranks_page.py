"""The page *Ranks*: which rank is slow or stuck, their times over the steps, and how far they lie apart."""

from __future__ import annotations

import pytest

pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("starlette", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.browser.conftest import Watched
from tests.browser.serving import go, serving, settle
from tests.parallel.made_ranks import write_hang, write_ranks

from sonde.views.site import Limits, write_site


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_ranks(folder / "run")
    write_hang(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def window(browser, run):
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    with serving(run.parent) as viewer:
        watched = Watched(context.new_page())
        watched.page.goto(viewer.url)
        watched.page.wait_for_selector("main[data-ready]")
        yield watched
        context.close()


def test_the_page_names_the_stuck_and_the_slow_rank_and_shows_its_stack(window):
    page = window.page
    go(page, "#/run/0-run/ranks")
    settle(page)
    words = page.locator(".findings").inner_text()
    assert "Rank 2 never came: it has been in data_wait at train.py:12 in load" in words
    assert "Rank 1 makes the other ranks wait in almost every step" in words
    rows = page.locator("table[aria-label=Ranks] tbody tr")
    assert [row.split()[:2] for row in rows.all_inner_texts()] == [["2", "stuck"], ["1", "waiting"], ["0", "waiting"]]
    page.get_by_role("button", name="Stacks").click()
    page.wait_for_selector("pre:has-text('Thread 1: in load')")
    assert window.errors == []


def test_the_pictures_follow_what_is_chosen(window):
    page = window.page
    go(page, "#/run/0-run/ranks")
    settle(page)
    page.get_by_label("Show").select_option("waiting")
    page.wait_for_selector("h2:text-is('Waiting for others by rank and step')")
    page.get_by_label("Site").select_option("parted:scalar")
    page.wait_for_selector("text=from step 21 on rank 2 leaves the others")
    assert window.errors == []


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_fits_into_the_window(window, width):
    page = window.page
    page.set_viewport_size({"width": width, "height": 844})
    go(page, "#/run/0-run/ranks")
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_copy_of_the_viewer_holds_the_page(browser, run, tmp_path):
    write_site(run, tmp_path / "copy", limits=Limits(sites=4, steps=4))
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    watched = Watched(context.new_page())
    watched.open(tmp_path / "copy" / "index.html").wait_for_selector("main[data-ready]")
    go(watched.page, "#/run/0-run/ranks")
    settle(watched.page)
    assert "Rank 2 never came" in watched.page.locator(".findings").inner_text()
    assert watched.page.evaluate("sondeCopy.refused") == []
    assert watched.errors == []
    context.close()
