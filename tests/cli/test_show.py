import math

import pytest
from tests.analysis.made_run import BROKEN, DYING

import sonde as library


def test_the_page_is_shown(sonde, first):
    result = sonde("show", first)
    assert result.exit_code == 0
    assert result.stdout.startswith("first · finished · 60 steps")
    assert result.stderr == ""


def test_the_width_is_taken(sonde, first):
    narrow, wide = sonde("show", first, "--width", 60).stdout, sonde("show", first, "--width", 140).stdout
    assert "gradients over time" in wide
    assert "gradients over time" not in narrow


def test_the_page_as_json(sonde, first, strict):
    answer = strict(sonde("show", first, "--json").stdout)
    assert answer["run"]["num_steps"] == 60
    worst = answer["layers"][0]
    assert (worst["layer"], worst["level"], worst["since_step"]) == (BROKEN, "bad", 45)
    assert worst["reason"] == "non-finite at step 45"
    assert worst["update_ratio"] > 0
    assert answer["gradient_flow"][0]["name"] == "embed"
    assert answer["loss"]["trend"]["direction"] == "falling"
    assert answer["events"][-1]["event_type"] == "nonfinite"


def test_sites_are_listed_worst_first(sonde, first):
    lines = sonde("show", first, "--site", "*:gradient").stdout.splitlines()
    assert lines[1].startswith(f"●  {BROKEN}.weight:gradient")
    assert lines[2].strip() == "non-finite at step 45"
    assert lines[3].startswith(f"●  {DYING}.weight:gradient")
    assert lines[5].startswith("·  embed.weight:gradient")


def test_few_rows_when_asked(sonde, first):
    text = sonde("show", first, "--site", "*:gradient", "--rows", 3).stdout
    assert "and 11 more sites; --rows 0 shows all" in text
    assert "more sites" not in sonde("show", first, "--site", "*:gradient", "--rows", 0).stdout


def test_one_site_comes_with_its_histogram_and_is_judged_by_its_peers(sonde, first):
    text = sonde("show", first, "--site", f"{DYING}.weight:gradient").stdout
    assert "magnitudes at step 60" in text
    assert "faded" in text


def test_a_statistic_is_picked(sonde, first, strict):
    answer = strict(sonde("show", first, "--site", "embed.weight:gradient", "--stat", "norm", "--json").stdout)
    [site] = answer["sites"]
    assert (site["stat"], len(site["values"]), site["steps"][0]) == ("norm", 60, 1)
    assert site["last"] == site["values"][-1]
    ratios = strict(sonde("show", first, "--stat", "ratio", "--json", "--last", 5).stdout)["sites"]
    assert {each["quantity"] for each in ratios} == {"update"}
    assert {len(each["steps"]) for each in ratios} == {5}


def test_a_number_that_is_not_finite_is_null(sonde, first, strict):
    [site] = strict(sonde("show", first, "--site", "loss:scalar", "--json").stdout)["sites"]
    assert site["values"][44] is None


def test_one_step_is_shown_with_what_is_not_finite_first(sonde, first, strict):
    lines = sonde("show", first, "--step", 45).stdout.splitlines()
    assert lines[0] == "first at step 45"
    assert lines[2].startswith(f"{BROKEN}.weight:gradient")
    assert lines[2].split()[-1] == "12"
    answer = strict(sonde("show", first, "--step", 45, "--site", "head*", "--json").stdout)
    assert {each["site"] for each in answer["readings"]} == {
        "head:output",
        "head.weight:parameter",
        "head.weight:gradient",
        "head.weight:update",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--site", "blokcs.2*"], "nearest: blocks.2"),
        (["--site", "re:("], "re:("),
        (["--site", ""], "'*' means all"),
        (["--stat", "rsm"], "There is no statistic 'rsm' (nearest: rms)"),
        (["--stat", "ratio", "--site", "embed.weight:gradient"], "'ratio' is a statistic of update sites"),
        (["--step", "900"], "the run has steps 1 to 60. Nearest: --step 60"),
    ],
)
def test_what_is_not_there_is_named_with_what_is_near(sonde, first, options, message):
    result = sonde("show", first, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize("options", [[], ["--site", "*"], ["--step", "45"], ["--site", "head.weight:gradient"]])
def test_output_that_is_not_a_terminal_has_no_escapes(sonde, first, options):
    assert "\x1b" not in sonde("show", first, *options).stdout


def test_a_loss_that_was_never_finite_is_not_called_missing(sonde, tmp_path):
    with library.open_session(run=tmp_path / "nan") as session:
        for _ in range(4):
            session.log(loss=float("nan"))
            session.record("fc.weight", [float("nan")] * 3, quantity="gradient")
            session.step()
    shown = sonde("show", tmp_path / "nan").stdout
    assert "NaN in all of its 4 readings" in shown
    assert "No loss was logged" not in shown
    assert "bars from" not in shown, "there is nothing to draw"


def test_settings_are_not_offered_for_a_closer_look(sonde, tmp_path):
    with library.open_session(run=tmp_path / "plain") as session:
        for _ in range(4):
            session.log(loss=1.0, weight_decay=0.0)
            session.record("fc.weight", [0.1, 0.2], quantity="gradient")
            session.step()
    shown = sonde("show", tmp_path / "plain").stdout
    assert "look closer" not in shown
    assert "sonde view " in shown


def test_long_names_stay_on_one_line_and_keep_their_end(sonde, tmp_path):
    layers = [f"encoder.layers.{number}.self_attention.output_projection" for number in range(3)]
    with library.open_session(run=tmp_path / "deep") as session:
        for _ in range(4):
            session.log(generator_loss=1.0)
            for layer in layers:
                session.record(f"{layer}.weight", [[0.1, 0.2]], quantity="gradient")
            session.step()
    for width in (60, 80):
        shown = sonde("show", tmp_path / "deep", "--width", width).stdout
        assert "loss: generator_loss" in shown
        assert shown.count("output_projection") == 6, "each once in either table"
        assert "stands out" not in shown, "a column of nothing"


@pytest.mark.parametrize(
    "values",
    [[1e308, -1e308, 1e308, 5e-324], [5e-324, 1.7e308, 3.0, 1e-300] * 3, [float("nan"), float("-inf")], [1.7e308]],
    ids=["both ends", "all magnitudes", "nothing finite", "one value"],
)
def test_a_run_whose_numbers_are_at_the_ends_of_what_floats_hold_is_shown(sonde, tmp_path, values):
    with library.open_session(run=tmp_path / "run") as session:
        for value in values:
            session.log(loss=value, other=-value)
            session.step()
    for verb in (["show"], ["show", "--site", "loss"], ["show", "--site", "*"], ["tail", "--once"],
                 ["show", "--step", "1"], ["diagnose"], ["report", "--format", "md", "--out", "-"],
                 ["report", "--format", "html", "--out", tmp_path / "report.html"]):  # fmt: skip
        result = sonde(verb[0], tmp_path / "run", *verb[1:])
        # A loss that is not finite is a critical finding, which `diagnose` exits with.
        allowed = (2,) if verb == ["diagnose"] and not math.isfinite(values[-1]) else (0, 1)
        assert result.exit_code in allowed, (verb, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), verb
