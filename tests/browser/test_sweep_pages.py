"""Runs and comparisons of a sweep in a real browser."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="browser tests need the dev extra: pip install 'sonde[dev]'")
pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.analysis.swept_runs import write_sweep
from tests.browser.clicks import promised
from tests.browser.questions import ask_about_a_sweep
from tests.browser.serving import Window, go, serving, settle

from sonde.store.header import Labels, write_labels


@pytest.fixture(scope="module")
def window(browser, tmp_path_factory):
    folder = write_sweep(tmp_path_factory.mktemp("sweep"))
    write_labels(folder / "nan", Labels(("broken",), "look at the last step"))
    with serving(folder) as viewer:
        made = Window(browser, viewer)
        yield made
        made.context.close()


@pytest.fixture
def page(window):
    window.errors.clear()
    window.page.set_viewport_size({"width": 1366, "height": 768})
    yield window.page
    assert window.errors == []


def row(page, run, title):
    """Return the text of a cell by the title of its column."""
    return page.locator(f"tr[data-key='{run}'] td[data-title='{title}']").inner_text()


def test_rows_show_settings_that_differ_metrics_and_what_is_wrong(page):
    go(page, "#/runs")
    page.wait_for_selector("td[data-title='lr']")
    assert row(page, "0-lr0.01-seed1", "lr") == "0.01"
    assert row(page, "0-lr0.01-seed1", "val_acc, best") == "0.92"
    assert row(page, "0-failed", "Findings") == "ValueError"
    assert row(page, "0-nan", "Findings") == "Loss not finite"
    assert row(page, "0-nan", "Loss") == "NaN"
    assert "2 with a critical finding or a bad end" in page.inner_text("main")
    assert "look at the last step" in row(page, "0-nan", "Run")


@pytest.mark.parametrize(
    ("words", "shown"),
    [("lr=0.01", 2), ("val_acc>0.8", 2), ("tag:broken", 1), ("valueerror", 1), ("lr<0.1 seed=0", 2)],
)
def test_a_filter_selects_by_setting_metric_tag_and_finding(page, words, shown):
    go(page, f"#/runs?filter={words.replace('=', '%3D').replace('>', '%3E').replace(' ', '+')}")
    page.wait_for_selector(f"text={shown} of 8 runs")
    assert page.locator("table[aria-label=Runs] tbody tr").count() == shown


def test_groups_show_mean_and_deviation_and_open(page):
    go(page, "#/runs?filter=seed<2&group=usual&sort=-best+val_acc")
    group = "tr[data-key='group lr=0.01']"
    page.wait_for_selector(group)
    assert page.locator("tr[data-group]").first.get_attribute("data-key") == "group lr=0.01"
    assert page.locator(f"{group} td[data-title='val_acc, best']").inner_text() == "0.91 ± 0.01414"
    page.click(f"{group} button.plain")
    page.wait_for_selector("tr[data-key='0-lr0.01-seed0']")
    page.reload()
    page.wait_for_selector("tr[data-key='0-lr0.01-seed0']")  # what is open is in the link


def test_parallel_coordinates_have_a_line_for_each_run_that_tells_it_and_opens_it(page):
    go(page, "#/runs?metric=val_acc&x=lr")
    page.wait_for_selector(".sweepline")
    assert page.locator(".sweepline").count() == 8
    line = page.locator(".sweepline[data-run='0-lr0.01-seed1']")
    assert line.get_attribute("aria-label") == "lr0.01-seed1: lr 0.01, seed 1, val_acc (best) 0.92"
    assert page.locator("svg[aria-label='val_acc (best) against lr'] .sweepdot").count() == 8
    line.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=overview][data-ready]")


def test_all_runs_are_compared_by_group_with_bands_and_layers(page):
    go(page, "#/runs?filter=seed<2&group=usual")
    page.wait_for_selector("tr[data-group]")
    page.get_by_role("link", name="Compare all 6").click()
    page.wait_for_selector("main[data-page=compare][data-ready]")
    settle(page)
    page.wait_for_selector("table[aria-label='Layers that differ'] tbody tr >> nth=3")
    assert page.locator("table[aria-label='Runs compared'] tbody tr").count() == 6
    first = page.locator("table[aria-label='Layers that differ'] tbody tr").first
    assert first.get_attribute("data-key") == "head:output"
    assert "lr=0.01 (2 runs)" in page.locator(".figure").first.inner_text()
    page.wait_for_selector("table[aria-label='Where they diverge'] tr")
    assert page.locator("table[aria-label='Where they diverge'] tr").count() == 5


def test_on_a_phone_rows_are_cards_and_nothing_is_wider_than_the_screen(page):
    page.set_viewport_size({"width": 390, "height": 844})
    for hash_ in ("#/runs", "#/compare?run=0-nan&run=0-failed"):
        go(page, hash_)
        page.wait_for_selector("tr[data-key='0-nan'] td[data-title='Status']")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        row_of_nan = page.locator("tr[data-key='0-nan']").first
        row_of_nan.wait_for()
        assert row_of_nan.evaluate("each => each.getBoundingClientRect().width") <= 390
    assert not page.locator("table.cards thead").first.is_visible()


def test_five_questions_about_a_sweep_take_as_many_clicks_as_the_docs_say(page):
    """Questions 1 to 5 of docs/ten-questions.md, each from the page that `sonde view` opens."""
    needed = {number: clicks for number, (clicks, _) in ask_about_a_sweep(page).items()}
    assert needed == {number: clicks for number, clicks in promised().items() if number <= 5}
