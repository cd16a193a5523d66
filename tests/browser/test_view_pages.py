"""The viewer's pages as a person uses them: links, keys, themes, comparisons, and a training that goes on meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("playwright.sync_api", reason="browser tests need the dev extra: pip install 'sonde[dev]'")
pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from playwright.sync_api import TimeoutError
from tests.analysis.made_run import DYING, Recipe, write_run
from tests.browser.live_training import live_training
from tests.browser.serving import Window, go, serving, settle

from sonde.records import Evidence, Finding
from sonde.store import open_run

FINDING = Finding(
    kind="vanishing_gradient",
    severity="critical",
    confidence=0.9,
    step=30,
    last_step=60,
    sites=(DYING,),
    evidence=(
        Evidence(name="rms of its gradient", value=1e-9, threshold=1e-7, relation="<",
                 series=f"{DYING}.weight:gradient rms"),
    ),
    cause="The gradient of a layer fades away.",
    fix="Look at what its input became.",
    refute="Its gradient grows again.",
    explains=("not_learning",),
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    writer = write_run(folder / "ill", Recipe(layers=4), close=False)
    writer.take_finding(FINDING)
    writer.take_finding(replace(FINDING, kind="dead_relu", severity="warning", cause="Its units are dead."))
    writer.close()
    (folder / "ill" / "traces").mkdir()
    for name in ("first.json", "second.json"):
        events = [{"name": f"aten::{name[:-5]}", "cat": "cpu_op", "ph": "X", "ts": 0, "dur": 2000, "pid": 1, "tid": 1}]
        (folder / "ill" / "traces" / name).write_text(json.dumps({"traceEvents": events}))
    write_run(folder / "well", Recipe(layers=4, dies_at=None, nan_at=None, seed=1))
    return folder


@pytest.fixture(scope="module")
def viewer(runs):
    with serving(runs) as running:
        yield running


@pytest.fixture(scope="module")
def window(browser, viewer):
    made = Window(browser, viewer)
    yield made
    made.context.close()


@pytest.fixture
def page(window):
    window.errors.clear()
    yield window.page
    assert window.errors == []


def query_of(page):
    return parse_qs(urlsplit(urlsplit(page.url).fragment).query)


def test_the_list_of_runs_filters_sorts_and_remembers_both_in_its_link(page):
    go(page, "#/runs")
    page.wait_for_selector("tr[data-key='0-ill'] >> text=vanishing gradient")
    page.wait_for_selector("tr[data-key='0-ill'] .spark path")
    page.wait_for_selector("tr[data-key='0-well'] .spark path")
    assert (
        page.locator("tr[data-key='0-ill'] a.severity")
        .evaluate("each => each.hash")
        .endswith("?open=vanishing_gradient")
    )
    page.get_by_role("button", name="Run", exact=True).click()
    assert page.locator("tbody tr").first.get_attribute("data-key") == "0-ill"
    page.get_by_role("button", name="Run").click()
    assert page.locator("tbody tr").first.get_attribute("data-key") == "0-well"
    page.keyboard.press("/")
    page.keyboard.type("vanish")
    page.wait_for_selector("text=1 of 2 runs")
    assert query_of(page) == {"sort": ["-name"], "filter": ["vanish"]}
    page.reload()
    page.wait_for_selector("text=1 of 2 runs")
    assert page.locator("tbody tr").count() == 1


def test_keys_go_through_the_list_and_open_a_run(page):
    go(page, "#/runs?sort=name")
    page.wait_for_selector("tr[data-key='0-well']")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator("tr.current").get_attribute("data-key") == "0-well"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=overview][data-ready]")
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.wait_for_selector("main[data-page=layers][data-ready]")
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_selector("main[data-page=runs][data-ready]")
    page.keyboard.press("?")
    assert "Layers" in page.locator("dialog table[aria-label='Go to']").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_a_finding_comes_first_and_leads_to_its_evidence(page):
    go(page, "#/run/0-ill/overview")
    card = page.locator(".finding").first
    told = card.inner_text()
    for words in (FINDING.cause, FINDING.fix, FINDING.refute, "Not learning", "rms of its gradient"):
        assert words in told
    tops = page.evaluate(
        "() => ['.finding', '.figure'].map(each => document.querySelector(each).getBoundingClientRect().top)"
    )
    assert tops[0] < tops[1]
    card.get_by_role("link", name="curve").click()
    page.wait_for_selector("main[data-page=layers][data-ready]")
    page.wait_for_selector(f"h2.mono >> text={DYING}.weight:gradient")
    assert query_of(page)["site"] == [f"{DYING}.weight:gradient"]


def test_the_layers_page_shows_what_its_link_says(page, runs):
    site = "head.weight:gradient"
    go(page, f"#/run/0-ill/layers?pattern=*.weight:gradient&stat=norm&site={site}&step=20")
    page.wait_for_selector(f"[data-site='{site}'][aria-selected=true]")
    settle(page)
    last = open_run(runs / "ill").series(site, "norm").values[-1]
    shown = float(page.locator(".tile:has(span:text-is('norm')) b").inner_text())
    assert shown == pytest.approx(last, rel=1e-3)
    page.get_by_label("Step", exact=True).scroll_into_view_if_needed()
    page.wait_for_selector("text=step 20")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("p.note >> text=step 21")
    assert query_of(page)["step"] == ["21"]


def test_a_click_on_the_picture_of_all_layers_jumps_to_the_site(page):
    go(page, "#/run/0-ill/layers?pattern=blocks.1.*:gradient")
    settle(page)
    page.wait_for_selector(".heat canvas[data-drawn]")
    page.locator(".heat canvas").click(position={"x": 400, "y": 5})
    page.wait_for_selector("[data-site='blocks.1.attn.weight:gradient'][aria-selected=true]")
    page.keyboard.press("j")
    page.wait_for_selector("[data-site='blocks.1.mlp.weight:gradient'][aria-selected=true]")
    page.go_back()
    page.wait_for_selector("[data-site='blocks.1.attn.weight:gradient'][aria-selected=true]")


def test_two_sites_and_two_runs_are_overlaid(page):
    go(page, "#/run/0-ill/layers?site=head.weight:gradient&site=embed.weight:gradient")
    settle(page)
    page.wait_for_selector("text=head.weight:gradient and 1 more")
    page.wait_for_selector(".chart .legend >> text=embed")
    page.get_by_label("Overlay the run").select_option("0-well")
    page.wait_for_selector(".legendtext >> text=well")
    assert query_of(page)["other"] == ["0-well"]


def test_the_timeline_lists_events_and_findings(page):
    go(page, "#/run/0-ill/timeline?type=nonfinite")
    settle(page)
    assert page.locator("tbody tr").count() == 1
    assert "are NaN" in page.locator("tbody tr").inner_text()
    assert page.locator(".finding").count() == 2


def click_point(page, trace, which, shows):
    """Click a point of a plot until that shows something: a plot that is laid out meanwhile does not hear a click."""
    for _ in range(20):
        box = page.locator(".figure .scatterlayer .trace").nth(trace).locator(".point").nth(which).bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        try:
            page.wait_for_selector(shows, timeout=4000)
            return
        except TimeoutError:
            page.mouse.move(0, 0)
    pytest.fail(f"clicks on the plot do not show {shows}")


def test_a_click_on_the_timeline_leads_to_the_words(page):
    go(page, "#/run/0-ill/timeline")
    settle(page)
    click_point(page, 0, -1, ".finding[open][data-kind=vanishing_gradient] summary:focus")
    assert query_of(page)["open"] == ["vanishing_gradient"]
    go(page, "#/run/0-ill/timeline")  # anew: two clicks on one plot may count as a double one
    settle(page)
    click_point(page, -1, 0, "text=1 of 2 events")
    assert query_of(page)["type"] == ["nonfinite"]
    assert page.locator("tr.current").count() == 1


def test_the_profile_page_says_that_nothing_was_traced(page):
    go(page, "#/run/0-well/profile")
    settle(page)
    page.wait_for_selector("text=The run has no trace")


def test_two_runs_chosen_in_the_list_are_compared(page):
    go(page, "#/runs?sort=name")
    for name in ("ill", "well"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare 2").click()
    page.wait_for_selector("main[data-page=compare][data-ready]")
    page.wait_for_selector("[data-parting]")
    assert page.locator("[data-parting]").inner_text().startswith("Step 1, ")
    page.wait_for_selector("table[aria-label='Layers that differ'] tbody tr")
    settle(page)
    assert query_of(page)["run"] == ["0-ill", "0-well"]


# What a link says, and what shows that the page has understood it.
LINKS = {
    "#/runs?sort=-name&run=0-ill&run=0-well": "a.button:text-is('Compare 2')",
    "#/runs?status=live": "text=0 of 2 runs",
    "#/run/0-ill/overview?open=dead_relu": ".finding[open][data-kind=dead_relu]",
    "#/run/0-ill/overview?open=-": "#main .findings:not(:has(.finding[open]))",
    "#/run/0-ill/timeline?open=vanishing_gradient": ".finding[open][data-kind=vanishing_gradient]",
    "#/run/0-ill/timeline?filter=epoch": "text=1 of 2 events",
    "#/run/0-ill/timeline?sort=step": "th[aria-sort=ascending]:has-text('Step')",
    "#/run/0-ill/layers?colour=findings": "text=modules are named by findings",
    "#/run/0-ill/layers?stat=abs_max&pattern=head": "[data-site='head.weight:gradient']",
    "#/run/0-ill/layers?site=head.weight:gradient&log=1": ".chart .scale[aria-pressed=true]",
    "#/run/0-ill/profile?trace=second.json": "td:has-text('aten::second')",
    "#/compare?run=0-ill&run=0-well&metric=optimizer.group0.lr:scalar": "h2:text-is('optimizer.group0.lr')",
}


@pytest.mark.parametrize("link", LINKS)
def test_a_link_shows_what_its_sender_saw_and_goes_on_saying_it(page, viewer, link):
    page.goto("about:blank")
    page.goto(f"{viewer.base}{link}")
    page.wait_for_selector(LINKS[link])
    settle(page)
    assert parse_qs(urlsplit(link[1:]).query) == query_of(page)


def test_what_is_opened_or_closed_is_in_the_link(page):
    go(page, "#/run/0-ill/overview")
    page.click(".finding[data-kind=dead_relu] summary")
    page.wait_for_function("() => location.hash.endsWith('open=vanishing_gradient%2Cdead_relu')")
    page.reload()
    page.wait_for_selector(".finding[open][data-kind=dead_relu]")
    assert page.locator(".finding[open]").count() == 2


def test_the_back_button_leads_through_pages_and_choices_to_where_one_was(page):
    go(page, "#/runs?sort=name")
    page.click("text=ill")
    page.wait_for_selector("main[data-page=overview][data-ready]")
    settle(page)
    page.evaluate("scrollTo(0, 300)")
    page.wait_for_function("() => history.state?.top === 300")
    page.click("#bar >> text=Timeline")
    page.wait_for_selector("main[data-page=timeline][data-ready]")
    page.go_back()
    page.wait_for_selector("main[data-page=overview][data-ready]")
    page.wait_for_function("() => scrollY === 300")
    page.go_back()
    page.wait_for_selector("main[data-page=runs][data-ready]")
    assert query_of(page) == {"sort": ["name"]}
    page.go_forward()
    page.wait_for_selector("main[data-page=overview][data-ready]")


def test_the_back_button_finds_the_place_on_a_page_whose_figures_come_late(page):
    """A page is short until its figures have come."""
    go(page, "#/run/0-ill/overview")
    settle(page)
    page.evaluate("scrollTo(0, 300)")
    page.wait_for_function("() => history.state?.top === 300")
    go(page, "#/run/0-ill/timeline")
    page.add_style_tag(content="main.late { height: 200px; overflow: hidden }")
    page.evaluate("document.getElementById('main').classList.add('late')")
    page.go_back()
    page.wait_for_selector("main[data-page=overview][data-ready]")
    assert page.evaluate("scrollY") == 0
    page.evaluate("document.getElementById('main').classList.remove('late')")
    page.wait_for_function("() => scrollY === 300")
    assert page.evaluate("history.state.top") == 300


def test_the_keys_are_listed_by_where_they_work(page):
    go(page, "#/run/0-ill/layers")
    page.keyboard.press("?")
    page.keyboard.press("?")  # one is enough
    dialog = page.locator("dialog")
    assert dialog.count() == 1
    groups = dialog.locator("table").evaluate_all("all => all.map(each => each.ariaLabel)")
    assert groups == ["On this page", "Everywhere", "Go to"]
    assert "a step later" in dialog.locator("table").nth(0).inner_text()
    assert dialog.bounding_box()["width"] < 800
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.get_by_role("button", name="Keys").click()
    page.wait_for_selector("dialog[open]")
    page.get_by_role("button", name="Close").click()
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("?")
    go(page, "#/runs")  # as by a click on a link in another window
    assert page.locator("dialog").count() == 0


FOCUSABLE = (
    "() => [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')].filter(each =>"
    " each.tabIndex >= 0 && !each.disabled && !each.closest('.plot')"
    " && each.checkVisibility({visibilityProperty: true}))"
)


@pytest.mark.parametrize(
    "hash_", ["#/runs", "#/run/0-ill/overview", "#/run/0-ill/layers", "#/run/0-ill/timeline", "#/compare?run=0-ill"]
)
def test_everything_that_can_be_used_is_reached_by_tab_and_seen_to_have_the_focus(page, hash_):
    go(page, hash_)
    settle(page)
    if hash_ == "#/runs":
        for name in ("ill", "well"):  # what comes later draws the table anew
            page.wait_for_selector(f"tr[data-key='0-{name}'] .spark path")
    if hash_.startswith("#/run/"):  # what is known of the run's pages draws the bar anew
        page.wait_for_function("() => document.getElementById('bar').dataset.knownOf === '0-ill'")
    if hash_.endswith("overview"):  # what is read of all layers comes after the first figure
        page.wait_for_selector(".chart[data-role=update]")
        settle(page)
    count = page.evaluate(f"() => ({FOCUSABLE})().length")
    page.evaluate("() => { document.activeElement?.blur(); getSelection().collapse(document.body, 0); }")
    left, unseen = count, []
    for _ in range(3 * count + 40):  # plots have a few stops of their own, and what is drawn anew is gone to again
        page.keyboard.press("Tab")
        left, at, seen = page.evaluate(
            f"() => {{ const held = document.activeElement, style = getComputedStyle(held), all = ({FOCUSABLE})();"
            f" held.setAttribute('data-reached', '');"
            f" const seen = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;"
            f" return [all.filter(each => !each.hasAttribute('data-reached')).length, all.indexOf(held), seen]; }}"
        )
        if at >= 0 and not seen:
            unseen.append(at)
        if not left:
            break
    missed = f"() => ({FOCUSABLE})().filter(each => !each.hasAttribute('data-reached')).map(each => each.outerHTML)"
    assert page.evaluate(missed) == []
    assert unseen == []


def test_a_list_of_sites_is_one_stop_and_is_gone_through_with_arrows(page):
    go(page, "#/run/0-ill/layers?pattern=blocks.1.*:gradient")
    page.focus(".sitelist")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("[data-site='blocks.1.attn.weight:gradient'][aria-selected=true]")
    page.keyboard.press("End")
    page.wait_for_selector("[data-site='blocks.1.mlp.weight:gradient'][aria-selected=true]")
    marked = page.locator(".sitelist").get_attribute("aria-activedescendant")
    assert page.locator(f"#{marked}").get_attribute("data-site") == "blocks.1.mlp.weight:gradient"


def test_whoever_goes_by_the_keyboard_stays_in_the_bar(page):
    go(page, "#/run/0-ill/overview")
    page.wait_for_selector("#bar nav .menu")  # pages without anything are folded away
    page.focus("#bar >> text=Timeline")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=timeline][data-ready]")
    assert page.evaluate("document.activeElement.textContent") == "Timeline"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.textContent") == "Layers"


def test_a_trace_is_handed_to_perfetto_only_when_asked_for(browser, viewer, runs):
    window = Window(browser, viewer)
    stub = """<script>onmessage = event => {
      if (event.data === "PING") event.source.postMessage("PONG", event.origin);
      else document.title = event.data.perfetto.fileName + " " + new TextDecoder().decode(event.data.perfetto.buffer);
    };</script>"""
    asked = []
    window.context.route(
        "https://ui.perfetto.dev/**",
        lambda route: (asked.append(route.request.url), route.fulfill(body=stub, content_type="text/html")),
    )
    go(window.page, "#/run/0-ill/profile")
    window.page.wait_for_selector("td:has-text('aten::first')")
    assert asked == []
    with window.context.expect_page() as opened:
        window.page.get_by_role("button", name="Open in Perfetto").click()
    window.page.wait_for_selector("text=Open in another window")
    opened.value.wait_for_function("() => document.title.startsWith('first.json')")
    assert opened.value.title() == "first.json " + (runs / "ill" / "traces" / "first.json").read_text()
    window.context.close()


def test_light_and_dark_change_page_and_figures(page):
    go(page, "#/run/0-ill/timeline")
    settle(page)
    paper = "() => getComputedStyle(document.documentElement).backgroundColor"
    ink = "() => getComputedStyle(document.querySelector('.xtick text')).fill"
    page.wait_for_selector(".xtick text", state="attached")
    before = page.evaluate(paper), page.evaluate(ink)
    page.keyboard.press("d")
    page.wait_for_function("was => getComputedStyle(document.querySelector('.xtick text')).fill !== was", arg=before[1])
    assert page.evaluate(paper) != before[0]
    page.keyboard.press("d")


def test_the_theme_of_the_system_is_followed(browser, viewer):
    window = Window(browser, viewer, color_scheme="dark")
    assert window.page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    assert window.errors == []
    window.context.close()


def test_every_control_has_a_name_and_every_plot_a_label(page):
    for hash_ in ("#/runs", "#/run/0-ill/overview", "#/run/0-ill/layers", "#/compare?run=0-ill&run=0-well"):
        go(page, hash_)
        settle(page)
        nameless = page.evaluate(
            "() => [...document.querySelectorAll('button, a[href], input, select')]"
            ".filter(each => !each.closest('.plot') && !each.getAttribute('aria-label')"
            " && !each.textContent.trim() && !each.closest('label')?.textContent.trim()).map(each => each.outerHTML)"
        )
        assert nameless == [], hash_
        bare = page.locator(".figure[aria-busy=false]:not([hidden]):not([aria-label])").count()
        assert bare == 0, hash_


@pytest.mark.parametrize("width", [1440, 390])
def test_no_page_is_wider_than_the_window_and_the_bar_shows_where_one_is(page, width):
    usual = page.viewport_size
    page.set_viewport_size({"width": width, "height": 844})
    try:
        for name in ("overview", "layers", "samples", "timeline", "tape", "profile"):
            go(page, f"#/run/0-ill/{name}")
            settle(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            folded = page.locator("#bar .fold")
            where = folded if folded.is_visible() else page.locator("#bar nav a[aria-current]")
            shown = where.bounding_box()
            assert 0 <= shown["x"] <= shown["x"] + shown["width"] <= width, name
            assert name in where.inner_text().lower()
        page.click("#bar .fold") if folded.is_visible() else None
        assert page.locator("#bar nav a", has_text="Overview").is_visible()
    finally:
        page.set_viewport_size(usual)


def test_windows_follow_a_training_that_goes_on_by_stream_or_by_asking(browser, tmp_path):
    with live_training(tmp_path / "run") as training, serving(tmp_path) as viewer:
        training.train(20)
        windows = {how: Window(browser, viewer) for how in ("stream", "asking")}
        windows["asking"].page.goto(f"{viewer.base}?poll=1")
        for window in windows.values():
            go(window.page, "#/run/0-run/overview")
            window.page.wait_for_selector("#pulse[data-step='20'][data-status=live]")
            assert window.page.locator(".tile b").first.inner_text() == "20"
        training.train(15)
        for how, window in windows.items():
            window.page.wait_for_selector("#pulse[data-step='35']")
            window.page.wait_for_selector(".tile b:text-is('35')")
            assert window.page.locator("#pulse").get_attribute("data-how") == how
        training.finish()
        for window in windows.values():
            window.page.wait_for_selector("#pulse[data-status=finished]")
            assert window.errors == []
            window.context.close()
