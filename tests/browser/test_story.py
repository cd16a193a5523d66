"""What the viewer says of planted runs is true: recorded values, causal smoothing, NaN as NaN, the user's own line."""

from __future__ import annotations

import csv
import inspect
import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("playwright.sync_api", reason="browser tests need the dev extra: pip install 'sonde[dev]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.browser import planted_runs
from tests.browser.serving import Window, go, serving, settle

from sonde.analysis import verdict_on
from sonde.store import open_run
from sonde.views.document import count_findings
from sonde.views.web.story_api import MOST_POINTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("planted")
    for make in planted_runs.ALL:
        make(made)
    return made


@pytest.fixture(scope="module")
def window(browser, folder):
    with serving(folder) as viewer:
        made = Window(browser, viewer)
        yield made
        made.context.close()


@pytest.fixture
def page(window):
    window.errors.clear()
    yield window.page
    assert window.errors == []


def overview(page, run, query=""):
    go(page, f"#/run/0-{run}/overview{query}")
    page.wait_for_selector(".chart canvas[data-drawn]")
    return page


def words(page, selector):
    return re.sub(r"\s+", " ", page.inner_text(selector))


def test_the_verdict_is_the_first_line_and_names_the_spike_and_its_cause(page, folder):
    overview(page, "language")
    page.wait_for_selector(".chart[data-role=update]")  # what is read of all layers comes after the first figure
    said = words(page, ".verdict")
    assert said == verdict_on(open_run(folder / "language")).text
    assert "spike at step 302" in said
    assert "one step after learning rate \N{MULTIPLICATION SIGN}60" in said
    assert [row for row in page.locator("td.level-bad").all_inner_texts() if row == "spike"] == ["spike"]


def test_the_cursor_tells_recorded_values_everywhere_and_the_address_holds_it(page, folder):
    recorded = open_run(folder / "language").series("loss:scalar", "value")
    value = float(recorded.values[recorded.steps == 302][0])
    overview(page, "language", "?step=302")
    legend = words(page, ".chart[data-role=loss] .legend")
    assert f"{value:.4g} at step 302" in legend
    assert "smoothed" in legend
    page.wait_for_selector("[data-step='302']")
    assert f"loss {value:.4g}" in words(page, "[aria-label='Recorded at this step']").replace("\t", " ")
    page.click("table[aria-label='Losses and metrics'] button.step >> nth=1")
    step = re.search(r"step=(\d+)", page.url)[1]
    assert int(step) == verdict_on(open_run(folder / "language")).metrics[0].best_step
    go(page, "#/run/0-language/layers")
    assert f"step={step}" in page.url


def test_smoothing_is_causal_and_zero_is_raw(page):
    overview(page, "language", "?smooth=0&step=300")
    assert "smoothed" not in words(page, ".chart[data-role=loss] .legend")
    calm = page.evaluate(
        """async () => {
            const { smoothed } = await import("./assets/chart.js"), steps = [...Array(60).keys()];
            const line = (at) => ({ thinned: false, steps, values: steps.map((step) => (step === at ? 9 : 1)) });
            const [flat, spiked] = [smoothed(line(-1), 0.9), smoothed(line(30), 0.9)];
            const same = flat.slice(0, 30).every((value, at) => value === spiked[at]);
            return [same, spiked[30] > 1, smoothed(line(30), 0)];
        }"""
    )
    assert calm == [True, True, None]


def test_one_far_row_does_not_flatten_the_colours_and_names_keep_block_and_role(page):
    overview(page, "language")
    scales, cut = page.evaluate(
        """async () => {
            const { ends } = await import("./assets/heat.js");
            const { fitted, fittedAll } = await import("./assets/timeaxis.js");
            const even = [...Array(90).keys()].map((at) => at / 10), tiny = Array(10).fill(-3000);
            const names = [["37 · qkv.weight", 20], ["37 · attn.c_proj.weight", 15], ["37 · attn.c_proj.weight", 12],
                ["37 · self_attention", 6], ["embed_tokens", 8]];
            return [[even, [...even, ...tiny], [2, 2, 2], [NaN], Array(99).fill(1).concat([5])].map(ends),
                [...names.map(([name, room]) => fitted(name, room)),
                 ...fittedAll(["discriminator.conv_blocks 0", "generator.conv_blocks 0", "generator.l1 0"], 17)]];
        }"""
    )
    halves = ["discri…v_blocks 0", "genera…v_blocks 0", "generator.l1 0"]
    alone, with_tiny, constant, nothing, one_far = scales
    assert alone == [pytest.approx(0.2, abs=0.05), pytest.approx(8.7, abs=0.05)]
    assert with_tiny[0] > -20, "a tenth of the cells, far below all others, must not take most of the colours"
    assert with_tiny[1] == pytest.approx(8.7, abs=0.1)
    assert constant == [1.5, 2.5]
    assert nothing == [0, 1]
    assert one_far[0] < 1 < one_far[1]
    assert cut == ["37 · qkv.weight", "37 · c_proj.w", "37 · at…oj.w", "37", "em…okens", *halves]


def test_nan_is_called_nan_and_marked_and_the_first_bad_line_is_not_the_models(page):
    overview(page, "nan")
    assert "NaN at step 60" in words(page, ".chart[data-role=loss] .legend")
    assert "NaN" in words(page, "[aria-label='Recorded at this step']")
    assert page.get_attribute(".lane-span", "aria-label") == "NaN in loss, steps 41 to 60", "it is NaN to the end"
    card = words(page, ".finding")
    source = inspect.getsourcelines(planted_runs.nan_between_model_and_loss)
    model_line = source[1] + next(at for at, text in enumerate(source[0]) if "its output is finite" in text)
    # The division itself; or, where a graph does not tell that much, what lies behind the model's call.
    named = f"planted_runs.py:{model_line + 1} (`scores = (scores - scores.mean()) /" in card
    assert named or f"made between lines {model_line} and {model_line + 4}" in card
    assert f"NaN appears at planted_runs.py:{model_line}" not in card


def test_a_failed_run_shows_the_users_innermost_line_with_its_source_first(page):
    overview(page, "raises")
    assert words(page, ".verdict").startswith(
        "Failed at step 20: The training raised ValueError: expected an even batch"
    )
    assert "in check_shapes" in words(page, ".culprit")
    assert "raise ValueError(" in words(page, ".culprit pre")
    assert "patches.py" not in words(page, ".culprit")
    assert page.locator(".traceback li.own").count() >= 1


def test_a_healthy_run_has_no_marks_no_events_and_constants_in_a_line(page):
    overview(page, "cnn")
    assert page.locator("td.level-bad, td.level-odd").count() == 0
    assert "Still learning" in words(page, ".verdict")
    assert "lr 0.002" in words(page, ".constants")
    assert page.locator(".chart[data-role=rate]").count() == 0
    assert "val_loss" in words(page, ".metrics")


def test_each_loss_of_a_gan_is_named_and_x_may_be_time(page):
    overview(page, "gan")
    legend = words(page, ".chart[data-role=loss] .legend")
    assert "d_loss" in legend
    assert "g_loss" in legend
    assert "2 losses" in words(page, ".verdict")
    page.select_option(".story-tools select", "time")
    assert "x=time" in page.url
    page.click(".chart[data-role=loss] .scale")
    assert "log-loss=" in page.url


def test_layers_are_named_by_block_and_role_with_the_full_name_on_hover(page):
    go(page, "#/run/0-language/layers")
    page.wait_for_selector(".heat canvas[data-drawn]")
    settle(page)
    button = page.locator(".sitelist [data-site='blocks.1.qkv.weight:gradient']")
    assert button.text_content() == "1 · qkv.weight"
    assert button.get_attribute("title").startswith("blocks.1.qkv.weight:gradient")
    button.click()
    page.wait_for_selector(".chart canvas[data-drawn]")
    assert "1 · qkv.weight" in words(page, ".chart .legend")


def test_words_are_explained_where_the_pointer_rests_on_them(page):
    overview(page, "language")
    page.wait_for_selector(".chart[data-role=gradient] h2.explained")
    assert "before the optimizer uses it" in page.get_attribute(".chart[data-role=gradient] h2", "title")


def test_heat_maps_and_curves_share_the_unit_and_sites_fold_by_block(page):
    go(page, "#/run/0-cnn/layers?x=epoch&step=8")
    page.wait_for_selector(".heat canvas[data-drawn]")
    assert page.input_value("label:has-text('x') >> nth=-1 >> select") == "epoch"
    go(page, "#/run/0-language/layers")
    head = page.locator(".sitelist .blockhead", has_text="blocks.1")
    head.click()
    page.wait_for_selector(".sitelist [data-site='blocks.1.qkv.weight:gradient']", state="detached")
    head.click()
    page.wait_for_selector(".sitelist [data-site='blocks.1.qkv.weight:gradient']")


def ask_cli(*words):
    """Return what a command of `sonde` prints as JSON."""
    done = subprocess.run([sys.executable, "-m", "sonde", *map(str, words)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_curves_that_come_later_do_not_take_a_chart_from_under_its_reader(page):
    def is_full(url):
        return "/story" in url and "quick=1" not in url

    held = []
    page.route(is_full, lambda route: held.append(route))
    with page.expect_request(lambda request: is_full(request.url)):
        overview(page, "language")
    canvas = page.locator(".chart[data-role=loss] canvas").element_handle()
    assert page.query_selector(".chart[data-role=update]") is None
    for each in held:
        each.continue_()
    page.unroute(is_full)
    page.wait_for_selector(".chart[data-role=update]")
    assert canvas.evaluate("each => each.isConnected && each.closest('.chart').dataset.role === 'loss'")


def test_hovering_reads_recorded_values_and_the_slider_at_zero_shows_them_raw(page, folder):
    overview(page, "language")
    recorded = open_run(folder / "language").series("loss:scalar", "value")
    canvas = page.locator(".chart[data-role=loss] canvas").bounding_box()
    for share in (0.3, 0.55, 0.9):
        page.mouse.move(canvas["x"] + share * canvas["width"], canvas["y"] + canvas["height"] / 2)
        step = int(re.search(r"step ([\d,]+)", words(page, ".story-tools .cursor"))[1].replace(",", ""))
        value = float(recorded.values[recorded.steps == step][0])
        assert f"{value:.4g} at step {step}" in words(page, ".chart[data-role=loss] .legend")
    page.mouse.move(0, 0)
    page.fill("input[aria-label=Smoothing]", "0")
    assert "0 (raw)" in words(page, ".story-tools")
    assert "smoothed" not in words(page, ".chart[data-role=loss] .legend")


def test_thinned_points_have_a_band_from_lowest_to_highest_and_smoothing_ends_with_the_data(page, folder):
    losses = open_run(folder / "long").series("loss:scalar", "value")
    assert len(losses.steps) > MOST_POINTS
    bad = float(losses.values[losses.steps == planted_runs.BAD_BATCH][0])
    said = []
    for step in range(planted_runs.BAD_BATCH, planted_runs.BAD_BATCH + 3):
        overview(page, "long", f"?step={step}")
        said.append(words(page, ".chart[data-role=loss] .legend"))
    assert any(f"to {bad:.4g} in steps" in each for each in said), said
    last = page.evaluate(
        """async (values) => {
            const { smoothed } = await import("./assets/chart.js");
            const made = smoothed({ thinned: false, steps: values.map((_, at) => at), values }, 0.9);
            return [made.length, made.at(-1)];
        }""",
        losses.values.tolist(),
    )
    assert last[0] == len(losses.values)
    assert min(losses.values[-30:]) <= last[1] <= max(losses.values[-30:])


def test_infinity_is_called_so_and_neither_it_nor_nan_becomes_a_number(page):
    overview(page, "long", "?step=1")
    assert "∞ at step 1" in words(page, ".chart[data-role=metric] .legend")
    overview(page, "nan")
    for hash_ in (
        "#/run/0-nan/overview",
        "#/run/0-nan/layers?site=0.weight%3Agradient",
        "#/run/0-nan/layers?site=loss%3Ascalar",
    ):
        go(page, hash_)
        settle(page)
        page.wait_for_selector(".chart canvas[data-drawn]")
        shown = words(page, "main")
        assert "NaN" in shown
        for invented in ("1e-12", "1.00e-12", "0 to 0", "not measured"):
            assert invented not in shown.replace("grey: not measured", "")
    page.wait_for_selector(".heat canvas[data-drawn]")
    bad = page.evaluate(
        "fetch('api/run/0-nan/heat?pattern=*:gradient').then(each => each.json()).then(made => made.bad.length)"
    )
    assert bad > 0, "cells of NaN are marked in the heat map"


def test_the_users_line_comes_before_everything_else_on_the_page(page):
    overview(page, "raises")
    places = [page.locator(each).first.bounding_box()["y"] for each in (".verdict", ".culprit", ".tiles", ".chart")]
    assert places == sorted(places)
    page.click(".traceback summary")
    assert "check_shapes" in words(page, ".traceback li.own:last-of-type")


def test_a_healthy_run_marks_no_layer_as_worst_and_its_noise_is_no_event(page, folder):
    overview(page, "cnn")
    assert "None." in words(page, "section:has(h2:text-is('Latest events'))")
    assert page.locator(".lane.critical, .lane.warning").count() == 0
    layers = ask_cli("show", folder / "cnn", "--json")["layers"]
    assert [each["layer"] for each in layers if each["level"] != "fine"] == []


def test_a_finding_that_no_longer_holds_stays_with_its_span(page, folder):
    [closed] = open_run(folder / "mended").closed_findings
    assert closed.kind == "missing_zero_grad"
    assert closed.last_step < 220
    overview(page, "mended")
    lane = page.locator(".lane.closed")
    assert lane.count() == 1, "closed once: it has not flapped"
    label = f"Missing zero grad, steps {closed.step} to {closed.last_step}, closed"
    assert lane.locator(".lane-span").get_attribute("aria-label") == label
    assert "Missing zero grad" not in words(page, ".findings"), "what no longer holds is no finding"
    go(page, "#/run/0-mended/timeline")
    settle(page)
    page.wait_for_function("() => document.querySelector('.figure .plot')?.textContent.includes('missing zero grad')")


@pytest.mark.parametrize("run", ["nan", "raises", "mended", "cnn"])
def test_numbers_and_words_agree_between_pages_commands_report_and_export(page, folder, run):
    path = folder / run
    told = ask_cli("show", path, "--json")
    facts, verdict = told["run"], told["verdict"]["text"]
    report = ask_cli("report", path, "--format", "json", "--out", "-")
    assert {name: report["run"][name] for name in ("num_sites", "num_steps", "nbytes")} == {
        name: facts[name] for name in ("num_sites", "num_steps", "nbytes")
    }
    overview(page, run)
    assert verdict == report["verdict"]
    assert words(page, ".verdict") == re.sub(r"\s+", " ", verdict)
    # Not the visible text: whether that has two lines depends on styles that may come later.
    read = "tiles => tiles.map((tile) => ['span', 'b'].map((part) => tile.querySelector(part).textContent))"
    tiles = dict(page.locator(".tile").evaluate_all(read))
    assert tiles["steps"] == f"{facts['num_steps']:,}"
    assert tiles["sites"] == f"{facts['num_sites']:,}"
    size = page.evaluate("async (size) => (await import('./assets/words.js')).bytes(size)", facts["nbytes"])
    assert tiles["on disk"] == size
    shown = words(page, ".findings h2")
    assert count_findings(open_run(path).findings) in shown or "found nothing" in shown
    [row] = [each for each in ask_cli("runs", folder, "--json")["runs"] if each["path"].endswith(f"/{run}")]
    found = [each["kind"] for each in report["findings"]]
    assert sorted(each["kind"] for each in row["findings"] if each["kind"] in found) == sorted(found)
    assert page.locator(".findings details").count() == len(found)
    done = subprocess.run(
        [sys.executable, "-m", "sonde", "export", str(path), "--to", "csv", "--out", "-"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = list(csv.DictReader(done.stdout.splitlines()))
    exported = {each["site"] for each in rows if each["quantity"] != "vital"}
    assert exported == {site.key for site in open_run(path).sites if site.quantity != "vital" and site.same_as is None}
    assert max(int(each["step"]) for each in rows) == facts["last_step"]
    go(page, "#/runs")
    page.wait_for_selector(f"tr[data-key='0-{run}'] td[data-title=Step]")
    assert page.inner_text(f"tr[data-key='0-{run}'] td[data-title=Step]") == f"{facts['last_step']:,}"


def test_spike_and_jump_are_events_with_step_and_cause_on_the_timeline_too(page):
    go(page, "#/run/0-language/timeline")
    page.wait_for_selector("table[aria-label=Events] tbody tr")
    events = [re.sub(r"\s+", " ", each) for each in page.locator("table[aria-label=Events] tbody tr").all_inner_texts()]
    [spike] = [each for each in events if " spike " in each]
    assert spike.startswith("302 ")
    assert "one step after learning rate \N{MULTIPLICATION SIGN}60" in spike
    jumps = [each for each in events if " jump " in each]
    assert jumps
    assert all(each.startswith(("301 ", "302 ")) for each in jumps), "ordinary noise is no event"


def test_converged_is_earned(page):
    overview(page, "long")
    assert words(page, ".verdict").startswith("Converged")
    for run in ("cnn", "language", "gan", "raises"):
        overview(page, run)
        assert "onverged" not in words(page, ".verdict")
