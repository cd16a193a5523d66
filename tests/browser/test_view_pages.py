"""The viewer's pages as a person uses them: links, keys, themes, comparisons, and a training that goes on meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))

from made_run import DYING, Recipe, write_run
from serving import Window, go, serving, settle

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
    writer.close()
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
    assert "go to Layers" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_a_finding_comes_first_and_leads_to_its_evidence(page):
    go(page, "#/run/0-ill/overview")
    card = page.locator(".finding").first
    told = card.inner_text()
    for words in (FINDING.cause, FINDING.fix, FINDING.refute, "not learning", "rms of its gradient"):
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
    page.wait_for_selector(".figure .plot .nsewdrag")
    page.locator(".figure .plot .nsewdrag").first.click(position={"x": 60, "y": 5})
    page.wait_for_selector("[data-site='blocks.1.attn.weight:gradient'][aria-selected=true]")
    page.keyboard.press("j")
    page.wait_for_selector("[data-site='blocks.1.mlp.weight:gradient'][aria-selected=true]")
    page.go_back()
    page.wait_for_selector("[data-site='blocks.1.attn.weight:gradient'][aria-selected=true]")


def test_two_sites_and_two_runs_are_overlaid(page):
    go(page, "#/run/0-ill/layers?site=head.weight:gradient&site=embed.weight:gradient")
    settle(page)
    page.wait_for_selector("text=head.weight:gradient and 1 more")
    page.wait_for_selector(".legendtext >> text=embed.weight:gradient")
    page.get_by_label("Overlay the run").select_option("0-well")
    page.wait_for_selector(".legendtext >> text=well")
    assert query_of(page)["other"] == ["0-well"]


def test_the_timeline_lists_events_and_findings(page):
    go(page, "#/run/0-ill/timeline?type=nonfinite")
    settle(page)
    assert page.locator("tbody tr").count() == 1
    assert "are NaN" in page.locator("tbody tr").inner_text()
    assert page.locator(".finding").count() == 1


def test_the_profile_page_says_that_nothing_was_traced(page):
    go(page, "#/run/0-ill/profile")
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


def test_light_and_dark_change_page_and_figures(page):
    go(page, "#/run/0-well/overview")
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


def test_windows_follow_a_training_that_goes_on_by_stream_or_by_asking(browser, tmp_path):
    script = Path(__file__).with_name("trained_live.py")
    training = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        train(training, 20)
        with serving(tmp_path) as viewer:
            windows = {how: Window(browser, viewer) for how in ("stream", "asking")}
            windows["asking"].page.goto(f"{viewer.base}?poll=1")
            for window in windows.values():
                go(window.page, "#/run/0-run/overview")
                window.page.wait_for_selector("#pulse[data-step='20'][data-status=live]")
                assert window.page.locator(".tile b").first.inner_text() == "20"
            train(training, 15)
            for how, window in windows.items():
                window.page.wait_for_selector("#pulse[data-step='35']")
                window.page.wait_for_selector(".tile b:text-is('35')")
                assert window.page.locator("#pulse").get_attribute("data-how") == how
            training.stdin.close()
            assert training.wait(120) == 0
            for window in windows.values():
                window.page.wait_for_selector("#pulse[data-status=finished]")
                assert window.errors == []
                window.context.close()
    finally:
        training.kill()
        training.wait()
        training.stdout.close()


def train(training, steps):
    """Let a training go on for some steps, and wait until they are written."""
    training.stdin.write(f"{steps}\n")
    training.stdin.flush()
    assert training.stdout.readline() == f"at {steps}\n"
