"""What the viewer says of planted runs is true: recorded values, causal smoothing, NaN as NaN, the user's own line."""

from __future__ import annotations

import inspect
import re

import pytest

pytest.importorskip("playwright.sync_api", reason="browser tests need the dev extra: pip install 'sonde[dev]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.browser import planted_runs
from tests.browser.serving import Window, go, serving, settle

from sonde.analysis import verdict_on
from sonde.store import open_run


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
