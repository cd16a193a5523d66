"""The viewer and what may go wrong: damage, nothing, deletion, hostile names, strangers, and no network."""

from __future__ import annotations

import http.client
import json
import shutil
from urllib.parse import urlsplit

import pytest

pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import Recipe, write_run
from tests.browser.serving import go, serving, settle, walk
from tests.views.report.hostile_run import ATTACKS, write_hostile_run

from sonde.records import RunHeader
from sonde.store import RunWriter

SMALL = Recipe(steps=20, layers=2, dies_at=10, nan_at=None)
NAME = "<img src=x onerror=alert('folder')> \"'&%3Cscript%3E #?~"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "good", SMALL)
    write_run(folder / "doomed", SMALL)
    write_run(folder / "broken header", SMALL)
    (folder / "broken header" / "run.json").write_text('{"schema_version": 1, "created"')
    write_run(folder / "bad segment", SMALL)
    (segment,) = (folder / "bad segment" / "telemetry" / "r00000").glob("seg-*")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    segment.write_bytes(content)
    (folder / "bad segment" / "events.jsonl").write_text('{"event_type": 3\n[]\nnonsense\n')
    header = RunHeader(schema_version=1, created=1.0, sonde_version="0", model={})
    RunWriter(folder / "empty", header).close()
    write_hostile_run(folder / NAME, steps=12)
    return folder


@pytest.fixture(scope="module")
def viewer(runs):
    with serving(runs) as running:
        yield running


class Seen:
    """A page of the viewer with all but loopback cut off, and what went wrong in it."""

    def __init__(self, context):
        self.page = context.new_page()
        self.errors, self.left, self.failed = [], [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("dialog", self._dialog)
        context.route("**/*", self._pass)

    def _hear(self, told):
        # An answer that says what is wrong is shown by the page; the browser tells of it too.
        if told.type in ("error", "warning") and "Failed to load resource" not in told.text:
            self.errors.append(told.text)

    def _dialog(self, dialog):
        self.errors.append(f"a script opened a dialog: {dialog.message}")
        dialog.dismiss()

    def _pass(self, route):
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            self.left.append(route.request.url)
            route.abort()


@pytest.fixture(scope="module")
def window(browser, viewer):
    """One window for all tests: loading the viewer and Plotly anew takes a second each time."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    looking = Seen(context)
    looking.page.goto(viewer.url)
    looking.page.wait_for_selector("main[data-ready]")
    yield looking
    context.close()


@pytest.fixture
def seen(window):
    window.errors.clear()
    go(window.page, "#/runs")
    window.page.wait_for_selector("tr[data-key]")
    yield window
    assert window.left == [], "a request left the machine"


def run_id(page, name):
    """Return the id of the run whose row shows a name."""
    keys = page.evaluate(
        "name => [...document.querySelectorAll('tr[data-key]')].filter(row => row.children[1].textContent === name)"
        ".map(row => row.dataset.key)",
        name,
    )
    assert len(keys) == 1, (name, keys)
    return keys[0]


def ask(viewer, path, *, host=None, token=True, method="GET", **headers):
    """Ask the server as a program would, path and headers exactly as given."""
    place = urlsplit(viewer.base)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or place.netloc)
    if token:
        connection.putheader("Authorization", f"Bearer {viewer.token if token is True else token}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body.decode("utf-8", "replace")


def test_a_good_run_shows_on_every_page_with_the_network_cut_off(seen):
    go(seen.page, f"#/run/{run_id(seen.page, 'good')}/overview")
    for hash_ in walk(seen.page):
        assert seen.page.locator("#main .page > .problem").count() == 0, hash_
    assert seen.errors == []


def test_a_run_whose_header_is_broken_is_listed_with_what_is_wrong_and_can_be_opened_to_read_it(seen):
    key = run_id(seen.page, "broken header")
    assert "run.json" in seen.page.locator(f"tr[data-key='{key}']").inner_text()
    go(seen.page, f"#/run/{key}/overview")
    assert "run.json" in seen.page.locator("[role=alert]").inner_text()
    assert seen.errors == []


def test_a_damaged_segment_leaves_the_rest_of_the_run_readable_and_is_named(seen):
    go(seen.page, f"#/run/{run_id(seen.page, 'bad segment')}/overview")
    named = " ".join(seen.page.locator(".problem").all_inner_texts())
    assert "seg-" in named
    assert "events.jsonl" in named
    list(walk(seen.page))
    assert seen.errors == []


def test_an_empty_run_says_that_nothing_is_there(seen):
    go(seen.page, f"#/run/{run_id(seen.page, 'empty')}/overview")
    assert seen.page.locator(".tile b").first.inner_text() == "0"
    list(walk(seen.page))
    assert seen.errors == []


def test_a_folder_without_runs_says_how_to_make_one(browser, tmp_path):
    with serving(tmp_path) as viewer:
        context = browser.new_context()
        page = context.new_page()
        page.goto(viewer.url)
        page.wait_for_selector("text=No runs yet")
        assert "sonde.watch(" in page.inner_text("main")
        context.close()


def test_a_run_that_is_deleted_while_it_is_shown_keeps_the_page_alive(seen, runs):
    key = run_id(seen.page, "doomed")
    go(seen.page, f"#/run/{key}/overview")
    settle(seen.page)
    shutil.rmtree(runs / "doomed")
    list(walk(seen.page))
    go(seen.page, "#/runs")
    seen.page.wait_for_selector(f"tr[data-key='{key}']", state="detached")
    go(seen.page, f"#/run/{run_id(seen.page, 'good')}/overview")
    seen.page.wait_for_selector(".tile b")
    assert seen.errors == []


def test_no_name_of_a_stranger_becomes_markup_or_script(seen):
    key = run_id(seen.page, NAME)
    go(seen.page, f"#/run/{key}/overview")
    assert seen.page.locator("h1").inner_text() == NAME
    for hash_ in walk(seen.page):
        # Hovering makes Plotly write labels with the names of the run.
        for plot in seen.page.locator(".figure:visible .plot").all()[:4]:
            plot.hover(position={"x": 200, "y": 120}, force=True)
        bad = "document.querySelectorAll('img:not([src^=\"assets/\"]), iframe, [href^=javascript], svg a').length"
        assert seen.page.evaluate(bad) == 0, hash_
    go(seen.page, f"#/run/{key}/overview")
    shown = seen.page.inner_text("main")
    assert all(" ".join(attack.split()[:1]) in shown for attack in ATTACKS[:4])
    assert seen.errors == []


def test_texts_of_findings_and_settings_are_shown_letter_by_letter(seen):
    key = run_id(seen.page, NAME)
    go(seen.page, f"#/run/{key}/overview")
    seen.page.evaluate("document.querySelectorAll('main details').forEach(each => { each.open = true; })")
    cards = seen.page.locator(".finding").evaluate_all("all => all.map(each => each.textContent)")
    for attack in ATTACKS:  # cause, fix, refute and the name of the evidence
        assert any(card.count(attack) >= 4 for card in cards), attack
    config, environment = seen.page.locator("main pre").all_text_contents()
    assert json.loads(config) == {"nested": {attack: [attack] for attack in ATTACKS}}
    assert json.loads(environment) == {attack: attack for attack in ATTACKS}
    go(seen.page, f"#/compare?run={key}&run={run_id_of(seen.page, 'good')}")
    seen.page.wait_for_selector("[aria-label='Settings that differ'] tbody tr")
    rows = seen.page.locator("[aria-label='Settings that differ'] tbody tr").all_text_contents()
    assert any(f"environment.{ATTACKS[0]}" in row for row in rows)
    assert seen.page.locator("main img, main iframe, main script").count() == 0
    assert seen.errors == []


def run_id_of(page, name):
    """Return the id of a run from wherever a page is."""
    return page.evaluate(
        "name => fetch('api/runs').then(each => each.json()).then(told => told.runs.find(run => run.name === name).id)",
        name,
    )


def test_an_address_that_leads_nowhere_says_so(seen):
    nowhere = {
        "#/nowhere": "There is no such page",
        "#/run/0-nobody/overview": "There is no run",
        "#/run/..%2F..%2Fetc/overview": "There is nothing at /api/run/../../etc",
        "#/run/%E0%A4%A/overview": "There is no run",
    }
    for hash_, words in nowhere.items():
        go(seen.page, hash_)
        assert words in seen.page.locator("[role=alert]").inner_text()
    assert seen.errors == []


def test_a_wrong_token_opens_nothing(browser, viewer):
    context = browser.new_context()
    page = context.new_page()
    for address in (viewer.base, f"{viewer.base}?token=wrong-wrong-wrong-wrong"):
        answer = page.goto(address)
        assert answer.status == 401
        assert "answers only to its token" in page.inner_text("body")
    context.close()
    for token in (False, "wrong", viewer.token[:-1], viewer.token + "x"):
        answer, body = ask(viewer, "/api/runs", token=token)
        assert answer.status == 401
        assert "good" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example"]
)
def test_a_name_that_is_not_ours_is_refused_with_the_right_token_too(viewer, host):
    answer, body = ask(viewer, "/api/runs", host=host)
    assert answer.status == 421
    assert "good" not in body


def test_a_page_of_a_stranger_may_not_ask(viewer):
    answer, _ = ask(viewer, "/api/runs", Origin="https://evil.example")
    assert answer.status == 403
    answer, _ = ask(viewer, "/api/runs", method="POST")
    assert answer.status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/nothing",
        "/api/run/0-good/nothing",
        "/api/run/0-good/figure/nothing",
        "/api/run/..%2f..%2f/events",
        "/api/run/0-..~2F..~2Fetc",
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/guard.py",
        "//etc/passwd",
        "/api/run/0-good/trace/..%2f..%2frun.json",
    ],
)
def test_a_path_that_leads_nowhere_is_not_found_and_shows_no_file(viewer, path):
    answer, body = ask(viewer, path)
    assert answer.status == 404
    assert "error" in json.loads(body)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "script-src 'self';" in answer.headers["Content-Security-Policy"]
