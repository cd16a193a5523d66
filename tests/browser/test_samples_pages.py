"""The pages about samples in a real browser, on digits that were really trained and captured."""

from __future__ import annotations

import json
from collections import Counter
from urllib.parse import quote

import pytest

pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("uvicorn", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("torch", reason="the runs are trained here")

from tests.browser.clicks import promised
from tests.browser.questions import ask_about_samples
from tests.browser.sampled_runs import ATTACK, train_digits, write_batched, write_odd
from tests.browser.serving import go as follow
from tests.browser.serving import serving

from sonde.analysis.samples import pick
from sonde.analysis.scores import find_evaluation, read_notes, read_scores


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    for seed in range(2):
        train_digits(folder / f"digits_run_{seed}", seed)
    write_odd(folder / "odd")
    write_batched(folder / "batched")
    return folder


@pytest.fixture(scope="module")
def viewer(runs):
    with serving(runs) as running:
        yield running


@pytest.fixture(scope="module")
def page(browser, viewer):
    context = browser.new_context(viewport={"width": 1366, "height": 768})
    page = context.new_page()
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", lambda told: page.troubles.append(told.text) if told.type == "error" else None)
    page.on("dialog", lambda dialog: (page.troubles.append(f"a script ran: {dialog.message}"), dialog.dismiss()))
    page.goto(viewer.url)
    page.wait_for_selector("main[data-ready]")
    yield page
    context.close()


@pytest.fixture(autouse=True)
def _no_trouble(page):
    page.troubles.clear()
    yield
    assert page.troubles == []


RUN = "#/run/0-digits_run_0"


def go(page, link):
    """Open a page anew, also if it is the one that is shown."""
    if page.evaluate("location.hash") == link:
        follow(page, "#/runs")
    follow(page, link)


def wait_for_link(page, text):
    page.wait_for_function("text => location.hash.includes(text)", arg=text)


def worst(runs, run="digits_run_0"):
    table = read_scores(find_evaluation(runs / run))
    return [table.ids[row] for row in table.worst_first("loss")]


def first_ids(page, count):
    page.wait_for_selector("table[aria-label='Samples, worst first'] tbody tr[data-key]")
    return page.eval_on_selector_all(
        "table[aria-label='Samples, worst first'] tbody tr[data-key]",
        f"rows => rows.slice(0, {count}).map(row => row.dataset.key)",
    )


def test_the_worst_samples_come_first_and_the_map_has_a_cell_for_each(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    assert first_ids(page, 5) == [str(each) for each in worst(runs)[:5]]
    assert page.get_attribute(".mapbox", "data-cells") == "60"
    assert page.locator(".figure").count() == 1


def test_the_overview_of_a_run_without_steps_leads_to_its_samples(page):
    go(page, "#/run/0-digits_run_0/overview")
    assert page.inner_text(".verdict") == "No step was recorded."
    assert not page.locator(".story-tools").is_visible()
    page.click("section[aria-label='Where to look'] a, section:has(h2:text-is('Where to look')) a")
    page.wait_for_selector("main[data-page=samples][data-ready]")


def test_samples_are_pictures_worst_first_with_an_overlay_that_the_link_keeps(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    page.wait_for_selector(".sampletile canvas")
    shown = page.eval_on_selector_all(".sampletile", "all => all.map(each => each.dataset.idx)")
    assert shown == [str(each) for each in worst(runs)[:48]]
    notes = read_notes(find_evaluation(runs / "digits_run_0"))
    wrong = [each for each in worst(runs)[:48] if notes.labels[each] != notes.predictions[each]]
    assert page.locator(".sampletile.wrong").count() == len(wrong) > 0
    plain = page.eval_on_selector(".sampletile canvas", "each => each.toDataURL()")
    page.select_option("label:has-text('Overlay') select", "where_it_looks/gradcam")
    page.wait_for_function("plain => document.querySelector('.sampletile canvas')?.toDataURL() !== plain", arg=plain)
    wait_for_link(page, "overlay=where_it_looks%2Fgradcam")
    page.hover(".sampletile >> nth=0")
    page.get_by_role("button", name=f"Select sample {shown[0]}").click()
    page.get_by_role("button", name="Only these 1").click()
    page.wait_for_selector("text=1 of 60 samples")


def test_the_confusion_matrix_and_the_histogram_count_all_samples_and_filter(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    page.wait_for_selector("table.confusion")
    notes = read_notes(find_evaluation(runs / "digits_run_0"))
    assert len(notes.labels) == 60  # of every sample, not of those that were kept only
    pairs = Counter((notes.labels[each], notes.predictions[each]) for each in notes.labels)
    (label, prediction), number = max(pairs.items(), key=lambda each: (each[0][0] != each[0][1], each[1]))
    cell = page.get_by_role("button", name=f"label {label} predicted as {prediction}: ")
    assert cell.inner_text() == str(number)
    bars = page.eval_on_selector_all(".histbar", "all => all.map(each => each.ariaLabel)")
    assert sum(int(each.rpartition(": ")[2].split()[0]) for each in bars) == 60
    cell.click()
    page.wait_for_selector(f"text={number} of 60 samples")
    wait_for_link(page, f"where=label+%3D%3D+{label}+and+prediction+%3D%3D+{prediction}")


def test_a_lasso_on_the_map_of_samples_becomes_a_filter(page):
    go(page, f"{RUN}/samples?metric=loss&of=features%2Ffeature_map")
    canvas = page.locator("canvas.embedding")
    canvas.wait_for()
    page.wait_for_selector("text=60 captured samples")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    corners = [(0.02, 0.02), (0.5, 0.02), (0.5, 0.5), (0.5, 0.95), (0.25, 0.95), (0.02, 0.95)]
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point)
    page.mouse.up()
    page.wait_for_selector(".chip:has-text('idx in (')")
    chosen = page.locator(".chip:has-text('idx in (')").inner_text().count(",") + 1
    assert 0 < chosen < 60
    assert f"{chosen} of 60 samples" in page.inner_text("main")


def test_two_runs_list_the_predictions_that_changed(page, runs):
    go(page, f"{RUN}/samples?metric=loss&with=0-digits_run_1")
    table = page.locator("table[aria-label='Changed predictions']")
    table.wait_for()
    mine, theirs = (read_notes(find_evaluation(runs / f"digits_run_{seed}")).predictions for seed in range(2))
    changed = {str(each) for each in mine if mine[each] != theirs[each]}
    assert f"{len(changed)} prediction" in page.locator("section[aria-label='Against digits_run_1']").inner_text()
    listed = table.locator("tbody tr").evaluate_all("all => all.map(each => each.dataset.key)")
    assert set(listed[: len(changed)]) == changed


def test_pointing_at_a_cell_tells_its_value_and_a_click_opens_it(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    table = read_scores(find_evaluation(runs / "digits_run_0"))
    page.hover(".scoremap", position={"x": 3, "y": 3})
    told = page.inner_text(".mapbox .note")
    assert told.startswith(f"sample {table.ids[0]}: loss ")
    assert float(told.rpartition(" ")[2]) == pytest.approx(table.columns["loss"][0], rel=1e-3)
    page.click(".scoremap", position={"x": 3, "y": 3})
    page.wait_for_selector(f"h1:has-text('Sample {table.ids[0]}')")


def test_filters_stack_are_in_the_link_and_agree_with_sonde_query(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    for text in ("label in (3, 5, 8, 9)", "loss > 0.5"):
        page.fill("[data-search]", text)
        page.keyboard.press("Enter")
        page.wait_for_selector(f".chip:has-text('{text}')")
    expected = [str(each.idx) for each in pick(runs / "digits_run_0", "(label in (3, 5, 8, 9)) and (loss > 0.5)")]
    assert first_ids(page, 99) == expected
    command = page.get_attribute(".chips[data-command]", "data-command")
    assert command == 'sonde query digits_run_0 "(label in (3, 5, 8, 9)) and (loss > 0.5)"'
    link = page.url
    go(page, f"{RUN}/overview")
    go(page, link[link.index("#") :])
    assert first_ids(page, 99) == expected


def test_a_filter_that_cannot_be_read_says_why_and_is_not_kept(page):
    go(page, f"{RUN}/samples")
    page.fill("[data-search]", "los > 1")
    with page.expect_console_message(lambda told: "400" in told.text):  # the browser itself logs the answer
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]:has-text('nearest: loss')")
    assert "los" not in page.url.partition("?")[2]
    page.troubles.clear()


def test_the_epoch_slider_changes_map_and_table(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    page.keyboard.press("[")
    page.wait_for_selector("output:has-text('epoch 0')")
    table = read_scores(find_evaluation(runs / "digits_run_0", "0"))
    expected = [str(table.ids[row]) for row in table.worst_first("loss")[:3]]
    page.wait_for_function(
        "idx => document.querySelector('table[aria-label^=Samples] tr[data-key]').dataset.key === idx", arg=expected[0]
    )
    assert first_ids(page, 3) == expected
    wait_for_link(page, "evaluation=0")


def test_repeats_are_averaged_and_common_failures_follow_the_percentile(page, runs):
    go(page, f"{RUN}/samples?metric=loss")
    page.click("button:has-text('Average 2 repeats')")
    page.wait_for_selector("section[aria-label='Mean of 2 runs']")
    widths = page.eval_on_selector_all(".stack > .panel .scoremap", "all => all.map(each => each.clientWidth)")
    assert len(widths) == 4  # the mean, both runs, and their difference
    assert len(set(widths)) == 1
    page.hover("section[aria-label='Mean of 2 runs'] .scoremap", position={"x": 3, "y": 3})
    assert " ± " in page.inner_text("section[aria-label='Mean of 2 runs'] .mapbox .note")
    page.hover("section[aria-label='digits_run_0 less digits_run_1'] .scoremap", position={"x": 3, "y": 3})
    mine, theirs = (read_scores(find_evaluation(runs / f"digits_run_{seed}")).columns["loss"][0] for seed in range(2))
    told = page.inner_text("section[aria-label='digits_run_0 less digits_run_1'] .mapbox .note")
    assert float(told.rpartition(" is ")[2]) == pytest.approx(mine - theirs, rel=1e-2, abs=1e-6)
    common = page.locator("section[aria-label='Common failures']")
    few = common.locator("p.note").first.inner_text()
    common.locator("input[type=range]").fill("60")
    page.wait_for_function(
        "few => document.querySelector(\"[aria-label='Common failures'] p.note\")?.innerText !== few", arg=few
    )
    assert int(common.locator("p.note").first.inner_text().split()[0]) > int(few.split()[0])
    wait_for_link(page, "percentile=60")


def test_a_sample_shows_input_label_output_and_debug_outputs(page, runs):
    idx = worst(runs)[0]
    go(page, f"{RUN}/sample/1/{idx}?metric=loss")
    assert page.eval_on_selector_all(".thirds > section", "all => all.map(each => each.ariaLabel)") == [
        "Inputs", "Labels", "Outputs",
    ]  # fmt: skip
    page.wait_for_selector("section[aria-label='features'] .tilebutton")
    page.wait_for_selector("section[aria-label='where_it_looks'] canvas")
    names = page.eval_on_selector_all(".debugger", "all => all.map(each => each.ariaLabel)")
    assert set(names) == {"features", "statistics", "where_it_looks"}
    assert names[-1] == "statistics"
    assert page.locator("section[aria-label='statistics'] table").count() >= 1
    assert page.locator("section[aria-label='where_it_looks'] input[aria-label='Over the image']").input_value() == "60"


def test_keys_lead_to_the_next_failure_and_back(page, runs):
    order = worst(runs)
    go(page, f"{RUN}/sample/1/{order[0]}?metric=loss")
    page.keyboard.press("n")
    page.wait_for_selector(f"h1:has-text('Sample {order[1]}')")
    page.keyboard.press("n")
    page.wait_for_selector(f"h1:has-text('Sample {order[2]}')")
    page.keyboard.press("p")
    page.wait_for_selector(f"h1:has-text('Sample {order[1]}')")


def test_a_channel_is_picked_and_a_link_shows_the_same_one(page, runs):
    go(page, f"{RUN}/sample/1/{worst(runs)[0]}?metric=loss")
    page.click("section[aria-label='features'] .tilebutton:nth-child(3)")
    page.wait_for_selector("section[aria-label='features'] .tilebutton:nth-child(3)[aria-pressed=true]")
    caption = page.inner_text("section[aria-label='features'] figcaption")
    link = page.url
    go(page, f"{RUN}/overview")
    go(page, link[link.index("#") :])
    page.wait_for_selector("section[aria-label='features'] figcaption")
    assert page.inner_text("section[aria-label='features'] figcaption") == caption


def test_the_value_under_the_pointer_is_the_captured_one(page, runs):
    idx = worst(runs)[0]
    go(page, f"{RUN}/sample/1/{idx}?metric=loss")
    page.wait_for_selector("section[aria-label='features'] .large canvas")
    page.hover("section[aria-label='features'] .large canvas", position={"x": 30, "y": 100})
    told = page.inner_text("section[aria-label='features'] .tensorbody > [role=status]")
    place, _, value = told.partition(" = ")
    stored = find_evaluation(runs / "digits_run_0").outputs("debugger")[idx]["features"]["feature_map"]
    assert float(value) == pytest.approx(float(stored[tuple(json.loads(place))]), rel=1e-4, abs=1e-6)


def test_one_sample_goes_through_the_epochs_with_a_key(page, runs):
    go(page, f"{RUN}/sample/1/{worst(runs)[0]}?metric=loss")
    page.keyboard.press("[")
    page.wait_for_selector("output:has-text('epoch 0')")
    wait_for_link(page, "/sample/0/")


def test_two_runs_side_by_side_as_a_difference_and_wiped(page, runs):
    go(page, f"{RUN}/sample/1/{worst(runs)[0]}?metric=loss&with=0-digits_run_1")
    features = page.locator("section[aria-label='features']")
    features.locator(".large canvas").nth(1).wait_for()
    modes = features.locator("select").last
    modes.select_option("difference")
    features.locator("figcaption:has-text('less digits_run_1')").wait_for()
    modes.select_option("wipe")
    features.locator("input[aria-label='Wipe']").wait_for()
    assert features.locator(".large canvas").count() == 1


def test_good_against_failed_names_statistics_and_shows_examples(page, runs):
    go(page, f"{RUN}/contrast?metric=loss&percentile=20")
    page.wait_for_selector("table[aria-label='What separates failed from good samples'] tbody tr[data-key]")
    assert "12 failed against 48 good samples" in page.inner_text("main [role=status]")
    page.wait_for_selector(".strips circle.failed")
    assert page.locator(".example.failed").first.inner_text().strip() == str(worst(runs)[0])
    page.click("table[aria-label='What separates failed from good samples'] tbody tr:nth-child(2) button")
    wait_for_link(page, "at=1")


def test_odd_samples_are_shown_and_hostile_texts_stay_texts(page):
    go(page, "#/run/0-odd/samples?metric=" + quote("my/score", safe=""))
    assert first_ids(page, 4) == ["plain", ATTACK, "7", '"7"']
    go(page, f"#/run/0-odd/sample/0/{quote(ATTACK, safe='')}")
    page.wait_for_selector("h1:has-text('onerror')")
    page.wait_for_selector(".bad:has-text('1 NaN (pink), 1 infinite (cyan)')")
    page.wait_for_selector("section[aria-label='broken'] .tilebutton[aria-pressed=true]")
    assert page.inner_text("section[aria-label='broken'] figcaption") == "channel 3"  # what is not finite comes first
    pixel = page.eval_on_selector(
        "section[aria-label='broken'] .large canvas",
        "c => [...c.getContext('2d').getImageData(1.5 * c.width / 6, 2.5 * c.height / 6, 1, 1).data]",
    )
    assert pixel == [255, 0, 200, 255]
    assert page.locator("main img").count() == 0


def test_attention_is_read_by_head_and_token(page):
    go(page, "#/run/0-odd/sample/0/plain")
    attention = page.locator("section[aria-label='attention']").first
    attention.scroll_into_view_if_needed()
    attention.locator(".large canvas").wait_for()
    attention.locator(".large canvas").click(position={"x": 20, "y": 60})
    attention.locator("p:has-text('Where token 1 (cat) looks')").wait_for()
    assert attention.locator(".token").count() == 4
    vision = page.locator("section[aria-label='vision']").first  # one class token and 4 by 4 patches
    vision.locator(".large canvas").click(position={"x": 5, "y": 5})
    vision.locator(".focus canvas[aria-label^='attention of token 0 over 4']").wait_for()


def test_a_plane_is_read_and_picked_with_the_keyboard(page):
    go(page, "#/run/0-odd/sample/0/plain")
    attention = page.locator("section[aria-label='attention']").first
    attention.scroll_into_view_if_needed()
    canvas = attention.locator(".large canvas")
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    told = attention.locator(".tensorbody > [role=status]").inner_text()
    assert told.startswith("[0, ")
    assert ", 1, 1] = " in told
    page.keyboard.press("Enter")
    attention.locator("p:has-text('Where token 1 (cat) looks')").wait_for()


def test_tensors_of_five_dimensions_and_large_ones_can_be_turned(page):
    go(page, "#/run/0-odd/sample/0/plain")
    deep = page.locator("section[aria-label='deep']").first
    deep.scroll_into_view_if_needed()
    deep.locator(".tilebutton").first.wait_for()
    assert deep.locator("input[aria-label='Dimension 0']").count() == 1
    deep.locator("summary").click()
    deep.locator("label:has-text('Rows') select").select_option("1")
    deep.locator("label:has-text('Rows') select").wait_for()
    large = page.locator("section[aria-label='large']").first
    large.scroll_into_view_if_needed()
    large.locator("input[aria-label='Channel']").fill("2")
    large.locator("figcaption:has-text('channel 2')").wait_for()
    large.locator(".large canvas").hover(position={"x": 40, "y": 90})
    place, _, value = large.locator(".tensorbody > [role=status]").inner_text().partition(" = ")
    channel, row, column = json.loads(place)
    assert channel == 2
    assert row > column > 0
    assert float(value) == pytest.approx(channel * 490_000 + row * 700 + column, rel=1e-5)


def test_a_link_with_a_senseless_view_shows_the_usual_one(page, runs):
    senseless = {"y": 99, "x": -1, "c": "a", "zoom": 1e9, "map": "x", "index": {"1": 9999}}
    nonsense = {"debugger/features/feature_map": senseless}
    view = quote(json.dumps(nonsense | {"x": 3}), safe="")
    go(page, f"{RUN}/sample/1/{worst(runs)[0]}?metric=loss&view={view}")
    page.wait_for_selector("section[aria-label='features'] .tilebutton[aria-pressed=true]")
    assert page.locator("section[aria-label='features'] .problem").count() == 0


def test_a_value_of_a_whole_batch_is_not_shown_as_the_sample_s(page):
    go(page, "#/run/0-batched/sample/0/1")
    shown = page.locator("section[aria-label='mine']")
    shown.wait_for()
    row = shown.locator("tr", has_text="mean")
    assert row.inner_text().split("\t")[1] == "0.5 of the whole batch of 2 samples, not of this one"
    assert shown.locator(".ofbatch > .note").inner_text() == "of the whole batch of 2 samples, not of this one"


def test_what_is_missing_from_captures_and_how_to_read_pickles_is_said(page):
    go(page, "#/run/0-batched/sample/0/3")
    page.wait_for_selector(".problem:has-text('The capture of this sample is missing')")
    go(page, "#/run/0-batched/samples?evaluation=0")
    page.wait_for_selector(".problem:has-text('2 samples lack theirs')")
    go(page, "#/run/0-batched/samples?evaluation=1")
    page.wait_for_selector(".problem:has-text('sonde import-pages')")


def test_five_questions_about_samples_take_as_many_clicks_as_the_docs_say(page):
    """Questions 6 to 10 of docs/ten-questions.md, each from the page that `sonde view` opens."""
    needed = {number: clicks for number, (clicks, _) in ask_about_samples(page).items()}
    assert needed == {number: clicks for number, clicks in promised().items() if number > 5}
