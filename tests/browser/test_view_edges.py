"""The viewer at the edges: odd runs, many runs, one that is deleted or whose writer is killed; what is not there."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.browser.live_training import live_training
from tests.browser.odd_runs import write_all, write_values
from tests.browser.serving import Window, go, serving, settle, walk

from sonde.core import schema
from sonde.records import Block

MANY = 205


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_all(folder)
    write_values(folder / "doomed", {"loss": [2.0, 1.0]}).close()
    return folder


@pytest.fixture(scope="module")
def window(browser, runs):
    with serving(runs) as viewer:
        made = Window(browser, viewer)
        made.viewer = viewer
        yield made
        made.context.close()


@pytest.fixture
def page(window):
    window.errors.clear()
    go(window.page, "#/runs")
    yield window.page
    assert window.errors == []


def run_id(page, start):
    """Return the id of the run whose name begins so, from the page of runs."""
    page.wait_for_selector("tr[data-key]")
    rows = {
        row.locator(".name").inner_text(): row.get_attribute("data-key") for row in page.locator("tr[data-key]").all()
    }
    (found,) = (key for name, key in rows.items() if name.startswith(start))
    return found


@pytest.mark.parametrize(
    "name", ["one step", "all nan", "some nan", "no loss", "long", "zero steps", "ended interrupted"]
)
def test_every_page_of_an_odd_run_stands_and_stays_inside_the_window(page, name):
    go(page, f"#/run/{run_id(page, name)}/overview")
    for hash_ in walk(page):
        assert page.locator("main .problem").count() == 0, hash_
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) <= 0, hash_


def test_what_cannot_be_told_is_said_in_words_and_not_drawn_as_nothing(page):
    assert page.locator("tr", has_text="all nan").locator(".bad").inner_text() == "NaN"
    key = run_id(page, "one step")
    go(page, f"#/run/{key}/profile")
    settle(page)
    empty = page.locator(".figure[data-empty=true]")
    assert empty.count() == 2
    assert empty.locator("svg").count() == 0
    assert all(box["height"] < 120 for box in (each.bounding_box() for each in empty.all()))
    go(page, f"#/run/{key}/samples")
    assert "sonde train" in page.inner_text("main")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("interrupted", "Step 2: The training was interrupted."),
        ("failed", "Failed at step 2: The training raised RuntimeError: <b>shapes</b>"),
    ],
)
def test_a_run_that_did_not_finish_says_how_it_ended(page, status, words):
    row = page.locator("tr[data-key]", has_text=f"ended {status}")
    assert row.locator(".status").inner_text() == status
    go(page, f"#/run/{run_id(page, f'ended {status}')}/overview")
    assert words in page.inner_text("main")
    assert page.locator("h1 + .status").inner_text() == status


def test_the_end_of_a_long_name_can_be_read_in_the_list_of_sites(page):
    go(page, f"#/run/{run_id(page, 'long')}/layers")
    page.wait_for_selector(".sitelist .tail")
    ends = page.locator(".sitelist .tail").evaluate_all(
        "all => all.map(each => [each.textContent, each.scrollWidth <= each.clientWidth])"
    )
    assert ends == [[".projection", True], [".projection_2", True]]


def test_a_run_that_is_deleted_says_so_and_goes_on_being_shown(page, runs):
    go(page, f"#/run/{run_id(page, 'doomed')}/overview")
    page.wait_for_selector("#pulse[data-status=finished]")
    shutil.rmtree(runs / "doomed")
    page.wait_for_selector("#pulse[data-status=deleted]")
    page.wait_for_selector("h1 + .status.deleted")
    assert page.locator(".tile b").first.inner_text() == "2"
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_selector("main[data-page=runs][data-ready] tr[data-key]")
    assert "doomed" not in page.inner_text("tbody")


def test_an_address_outside_the_viewer_gets_a_page_that_leads_back(page, window):
    other = window.context.new_page()
    answer = other.goto(f"{window.viewer.base}some/where<b>")
    assert answer.status == 404
    assert "There is nothing here" in other.inner_text("h1")
    assert "<b>" in other.inner_text("code") or "%3Cb%3E" in other.inner_text("code")
    other.click("text=All runs")
    other.wait_for_selector("tr[data-key]")
    other.close()


def test_a_page_that_cannot_be_shown_offers_the_way_back(page, window):
    go(page, "#/run/0-nobody/overview")
    assert "There is no such run" in page.locator("[role=alert] h1").inner_text()
    page.wait_for_selector("#pulse[data-how=gone]", state="attached")
    page.get_by_role("button", name="Back").click()
    page.wait_for_selector("tr[data-key]")
    window.errors.clear()  # the browser itself logs that the answers were 404


def test_two_hundred_runs_are_listed_filtered_and_get_their_curves(browser, tmp_path):
    write_values(tmp_path / "runs" / "run_000", {"loss": [3.0, 2.0, 1.0]}).close()
    for number in range(1, MANY):
        shutil.copytree(tmp_path / "runs" / "run_000", tmp_path / "runs" / f"run_{number:03}")
    with serving(tmp_path / "runs") as viewer:
        window = Window(browser, viewer)
        page = window.page
        page.wait_for_selector("tr[data-key]")
        assert page.locator("tbody tr").count() == 200
        page.get_by_role("button", name=f"Show more of {MANY} rows").click()
        assert page.locator("tbody tr").count() == MANY
        page.wait_for_function(
            f"() => document.querySelectorAll('tbody .spark path').length === {MANY}", timeout=90_000
        )
        page.keyboard.press("/")
        page.keyboard.type("run_20")
        page.wait_for_selector(f"text=5 of {MANY} runs")
        assert page.locator("tbody tr").count() == 5
        assert window.errors == []
        window.context.close()


def test_a_viewer_that_was_stopped_is_said_not_to_answer_and_what_was_drawn_stays(browser, runs):
    with serving(runs) as viewer:
        window = Window(browser, viewer)
        go(window.page, f"#/run/{run_id(window.page, 'some nan')}/overview")
        settle(window.page)
        window.page.wait_for_selector("#pulse[data-how=stream]")
    window.page.wait_for_selector("#pulse[data-how=lost]")
    assert window.page.locator(".figure .main-svg, .figure canvas[data-drawn]").count() >= 1
    window.page.keyboard.press("g")
    window.page.keyboard.press("t")
    window.page.wait_for_selector("[role=alert]:has-text('Is `sonde view` still running?')")
    window.context.close()


def test_compare_and_the_slider_follow_a_training_and_a_killed_writer_has_crashed(browser, tmp_path):
    write_values(tmp_path / "other", {"loss": [2.0] * 5}).close()
    with live_training(tmp_path / "run") as training, serving(tmp_path) as viewer:
        training.train(12)
        compared, layers = Window(browser, viewer), Window(browser, viewer)
        go(compared.page, "#/compare?run=0-run&run=0-other")
        steps = compared.page.locator("tr[data-key='0-run'] td[data-title=Steps]")
        assert steps.inner_text() == "12"
        go(layers.page, "#/run/0-run/layers?step=5")
        slider = layers.page.get_by_label("Step", exact=True)
        assert slider.get_attribute("max") == "13"  # step 0 is the state before the first
        compared.page.wait_for_selector("[data-parting]")  # from then on it follows
        training.train(8)
        compared.page.wait_for_function(
            "() => document.querySelector('[aria-label=Runs] tbody').innerText.includes('20')"
        )
        layers.page.wait_for_selector("input[aria-label=Step][max='21']")
        assert layers.page.locator("label:has(input[aria-label=Step]) output").inner_text() == "5"
        training.kill()
        layers.page.wait_for_selector("#pulse[data-status=crashed]")
        compared.page.wait_for_selector("[aria-label=Runs] .status.crashed")
        for window in (compared, layers):
            assert window.errors == []
            window.context.close()


def test_on_a_phone_a_site_of_a_run_beside_long_names_fits_the_screen(page):
    other = run_id(page, "one step")
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        go(page, f"#/run/{other}/layers?site=first.weight%3Agradient")
        settle(page)
        page.wait_for_selector("label:has-text('Overlay the run') select")
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    finally:
        page.set_viewport_size({"width": 1366, "height": 768})


def test_a_layer_whose_gradient_is_zero_is_grey_and_the_legend_says_so(page, runs):
    writer = write_values(runs / "dead layer", {"loss": [2.0, 1.9, 1.8]}, names=("alive", "dead"))
    rows = schema.rows_of_values(np.array([1.7, 0.1, 0.0]))
    for step in (4, 5):
        block = Block(
            step=step, time=1_700_000_000.0 + step, sites=np.arange(3, dtype=np.uint32), rows=rows,
            bins=np.zeros((3, schema.NUM_BINS), np.uint64), binned=np.zeros(3, bool),
        )  # fmt: skip
        writer.take_block(block)
    writer.close()
    page.wait_for_selector("tr:has-text('dead layer')")
    go(page, f"#/run/{run_id(page, 'dead layer')}/layers")
    page.wait_for_selector(".heat canvas[data-drawn]")
    assert "grey: zero" in page.inner_text(".heat .legend")
    grey = page.evaluate(
        """() => {
            const canvas = document.querySelector(".heat canvas"), scale = devicePixelRatio;
            const pen = canvas.getContext("2d"), at = [canvas.width - 20 * scale, (canvas.height - 18 * scale) * 0.75];
            return [...pen.getImageData(...at, 1, 1).data].slice(0, 3);
        }"""
    )
    assert max(grey) - min(grey) < 16, grey
