"""What figures show, read from the figure itself: the numbers drawn are the numbers recorded."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.made_run import BROKEN, DYING

import sonde
from sonde.analysis import column_edges, phase_shares
from sonde.core import schema, signals
from sonde.errors import MissingExtra, OptionError
from sonde.records import Block, Event, Finding, RunHeader, Site
from sonde.store import RunWriter, open_run
from sonde.store.timeline import encode_finding
from sonde.views import figures
from sonde.views.figures.curves import Line, extremes

HOSTILE = "<img src=x onerror=alert(1)>"


def title(figure):
    return figure.layout.title.text


def says(figure):
    return " ".join(each.text for each in figure.layout.annotations)


def test_values_are_counted_in_bins_and_what_is_not_finite_is_reported():
    values = np.random.default_rng(0).normal(3, 2, 10_000)
    figure = figures.tensor_distribution([*values, np.nan, np.inf], bins=30, name="weights")
    counts, edges = np.histogram(values, bins=30)
    assert np.array_equal(figure.data[0].y, counts)
    assert np.allclose(figure.data[0].x, (edges[1:] + edges[:-1]) / 2)
    assert "2 NaN or infinite left out" in title(figure)
    assert f"mean {values.mean():.4g}" in title(figure)


def test_a_distribution_of_a_run_shows_the_stored_bins_between_powers_of_two(run):
    figure = figures.tensor_distribution(run, "embed.weight:gradient", step=20)
    reading = next(reading for reading in run.readings("embed.weight:gradient") if reading.step == 20)
    bar = figure.data[0]
    index = (np.asarray(bar.x) - 0.5).astype(int) - schema.FIRST_EXPONENT
    assert np.allclose(bar.y, reading.bins[index] / reading.count)
    assert reading.bins.sum() - reading.bins[index].sum() <= 1e-3 * reading.bins.sum()
    assert bar.text[0].startswith("2⁻")
    assert "step 20" in title(figure)


def test_every_step_of_a_histogram_over_time_adds_up_to_one(run):
    figure = figures.histogram_over_time(run, "embed.weight:gradient")
    heat = figure.data[0]
    assert np.allclose(np.nansum(heat.z, axis=0), 1, atol=1e-3)
    steps, bins = run.histogram("embed.weight:gradient")
    assert np.array_equal(heat.x, steps)
    largest = int(bins[0].argmax()) + schema.FIRST_EXPONENT + 0.5
    assert heat.y[np.nanargmax(heat.z[:, 0])] == largest


def test_neighbouring_histograms_are_added_up_in_a_long_run():
    bins = np.zeros((5000, schema.NUM_BINS))
    bins[:, 40], bins[3333, 50] = 10, 10_000
    figure = figures.histogram_over_time((np.arange(5000), bins))
    heat = figure.data[0]
    assert heat.z.shape[1] <= 300
    assert np.nanmax(heat.z[np.asarray(heat.y) == 50 + schema.FIRST_EXPONENT + 0.5]) > 0.9


def test_ridges_are_taken_from_the_whole_run(run):
    figure = figures.histogram_over_time(run, "embed.weight:gradient", kind="ridge")
    ticks = figure.layout.yaxis.ticktext
    assert ticks[0] == str(run.steps[0] or 1)
    assert ticks[-1] == str(run.steps[-1])
    with pytest.raises(OptionError, match="'heat', 'ridge', 'signed' or 'values'"):
        figures.histogram_over_time(run, "embed.weight:gradient", kind="pie")


def test_values_over_time_keep_their_signs(run):
    figure = figures.histogram_over_time([[-3.0, 1.0, 2.0], [0.0, 0.0], [4.0, np.nan]], kind="signed")
    high, low, _, _, mean = (np.asarray(trace.y, float) for trace in figure.data)
    assert (low.tolist(), high.tolist(), mean.tolist()) == ([-3.0, 0.0, 4.0], [2.0, 0.0, 4.0], [0.0, 0.0, 4.0])
    assert np.asarray(figure.data[-1].customdata)[:, 3].tolist() == [0.5, 0.0, 0.0]
    drawn = figures.histogram_over_time(run, "embed.weight:gradient", kind="signed").data
    stored = {stat: run.series("embed.weight:gradient", stat).values for stat in ("min", "max", "mean")}
    assert [np.asarray(drawn[at].y, float).tolist() for at in (1, 0, 4)] == [each.tolist() for each in stored.values()]


def test_values_of_taped_steps_are_counted_with_their_signs(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    figure = figures.histogram_over_time(run, "weight:parameter", kind="values")
    assert [trace.name for trace in figure.data] == [f"step {step}" for step in run.tapes()]
    first = run.tape(run.tapes()[0])
    [kept] = [first.tensor(each.id) for each in first.given("parameter") if each.name == "weight"]
    assert kept.shape == before.shape
    x, shares = np.asarray(figure.data[0].x, float), np.asarray(figure.data[0].y, float)
    bins = (x[::2] + x[1::2]) / 2
    assert shares[::2][bins < 0].sum() == pytest.approx((kept < 0).mean(), abs=1 / kept.size)
    nothing = figures.histogram_over_time(run, "weight:gradient", kind="values")
    assert not nothing.data


def test_gradient_flow_is_in_model_order_and_marks_what_is_not_finite(run):
    figure = figures.gradient_flow(run)
    line, *marks = figure.data
    assert line.text[0] == "embed"
    assert line.text[-1] == "head"
    by_name = {trace.name: list(trace.text) for trace in marks}
    assert by_name == {"NaN or infinite": [BROKEN]}
    assert line.text[int(np.argmin(line.y))] == DYING
    expected = [np.median(run.series(f"{name}.weight:gradient", "rms").values[-20:]) for name in line.text]
    assert np.allclose(line.y, expected)


def test_gradient_flow_at_one_step_is_that_step(run):
    figure = figures.gradient_flow(run, step=10, stat="norm")
    series = run.series("head.weight:gradient", "norm")
    assert figure.data[0].y[-1] == series.values[series.steps == 10][0]


def test_gradient_flow_of_plain_values_needs_no_run():
    figure = figures.gradient_flow({"a": [0.1, 0.2, 0.3], "b": 0.01, "c": [np.nan], "d": 0.0})
    assert list(figure.data[0].y) == [0.2, 0.01]
    assert {trace.name: list(trace.text) for trace in figure.data[1:]} == {
        "exactly zero": ["d"],
        "NaN or infinite": ["c"],
    }


def test_gradients_over_time_keep_a_spike_of_one_step():
    values = np.full(50_000, 1e-3)
    values[31_234] = 7.0
    figure = figures.gradient_flow_over_time({"layer": values})
    assert len(figure.data[0].x) <= 1000
    assert figure.data[0].y[list(figure.data[0].x).index(31_234)] == 7.0


def test_a_heat_map_shows_every_layer_and_crosses_where_it_is_not_finite(run):
    figure = figures.layer_heatmap(run, "*:gradient")
    heat, crosses = figure.data
    assert len(heat.y) == len(run.find("*:gradient"))
    assert set(crosses.y) == {f"{BROKEN}.weight"}
    row = list(heat.y).index("embed.weight")
    series = run.series("embed.weight:gradient", "rms")
    assert np.allclose(heat.customdata[row], series.values, rtol=1e-6)
    assert np.allclose(heat.z[row], np.log10(series.values), rtol=1e-5)


def test_a_heat_map_of_many_steps_keeps_the_extremes():
    values = np.full((2, 20_000), 1e-2)
    values[0, 11_111], values[1, 3] = 5.0, 1e-9
    figure = figures.layer_heatmap(dict(zip(("up", "down"), values, strict=True)))
    heat = figure.data[0]
    assert heat.z.shape[1] <= 400
    assert np.isclose(heat.customdata[0].max(), 5.0)
    assert np.isclose(heat.customdata[1].min(), 1e-9)
    assert "most unusual" in title(figure)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 20), st.booleans())
def test_a_column_shows_the_value_farthest_from_the_median(values, columns, log):
    given_values = np.abs(values) if log else np.array(values)
    edges = column_edges(0, len(values) - 1, columns)
    found = extremes(Line.of("x", np.arange(len(values)), given_values), edges, log=log)

    def scaled(value):
        return value if not log else (np.log10(value) if value > 0 else -400.0)

    middle = scaled(np.median(given_values))
    for shown, low, high in zip(found, edges, edges[1:], strict=False):
        inside = [value for step, value in enumerate(given_values) if low <= step < high]
        assert shown in inside
        assert abs(scaled(shown) - middle) == max(abs(scaled(value) - middle) for value in inside)


def test_a_heat_map_of_a_very_deep_model_shows_rows_over_all_of_its_depth(run, monkeypatch):
    monkeypatch.setattr("sonde.views.figures.heatmaps._MOST_ROWS", 5)
    figure = figures.layer_heatmap(run, "*:gradient")
    assert len(figure.data[0].y) == 5
    assert (figure.data[0].y[0], figure.data[0].y[-1]) == ("embed.weight", "head.weight")
    assert "5 of 14 sites" in title(figure)


def test_a_matrix_has_names_and_steps_or_is_refused():
    figure = figures.layer_heatmap([[1.0, -2.0], [3.0, 4.0]], names=["a", "a"], steps=[10, 20])
    assert list(figure.data[0].y) == ["a", "a (2)"]
    assert list(figure.data[0].x) == [10, 20]
    assert figure.data[0].z[0][1] == -2  # not a magnitude, so not a logarithm
    with pytest.raises(OptionError, match="3 names"):
        figures.layer_heatmap([[1.0]], names=["a", "b", "c"])
    with pytest.raises(OptionError, match="matrix"):
        figures.layer_heatmap([1.0])


def test_metrics_share_a_panel_by_kind():
    figure = figures.training_metrics(
        {"loss": np.linspace(2, 1, 100), "val_loss": ([50, 99], [2.0, 1.5]), "accuracy": [0.1, 0.9], "lr": [1.0, 0.5]}
    )
    titles = [figure.layout[axis].title.text for axis in ("yaxis", "yaxis2", "yaxis3")]
    assert titles == ["loss", "accuracy", "learning rate"]
    names = [trace.name for trace in figure.data if trace.yaxis in (None, "y") and trace.showlegend is not False]
    assert names == ["loss", "loss, smoothed", "val_loss"]


def test_metrics_of_a_run_are_what_was_logged(run):
    figure = figures.training_metrics(run, smoothing=False)
    assert np.array_equal(figure.data[0].y, run.series("loss:scalar", "value").values, equal_nan=True)
    assert list(figure.data[1].x) == [45]  # the cross where the loss was NaN


def test_update_ratios_are_those_of_the_run(run):
    figure = figures.update_ratio(run)
    drawn = {trace.name: trace for trace in figure.data}
    series = run.series("head.weight:update", "ratio")
    assert np.allclose(drawn["head.weight"].y, series.values)
    assert figure.layout.yaxis.type == "log"


def test_activations_of_a_run_have_zeros_beside_their_size(run):
    size, zeros = figures.activation_patterns(run).data
    assert list(size.y) == list(zeros.y)
    assert (zeros.zmin, zeros.zmax) == (0, 1)
    row = list(size.y).index("head")
    assert np.allclose(size.customdata[row], run.series("head:output", "rms").values, rtol=1e-6)


def test_activations_count_units_that_never_fire():
    values = np.random.default_rng(0).random((30, 700)) + 0.1
    values[:, 5], values[7, 650] = 0, 9.0
    figure = figures.activation_patterns(values.tolist(), name="relu")
    assert "1 units never active" in title(figure)
    assert figure.data[0].z.shape == (30, 400)
    assert figure.data[0].z.max() == 9.0


def test_attention_has_a_panel_for_each_head_on_one_scale():
    weights = np.random.default_rng(0).dirichlet(np.ones(5), size=(3, 5))
    figure = figures.attention(weights, tokens=["a", "b", "<c>", "d", "e"])
    assert len(figure.data) == 3
    assert np.allclose(figure.data[2].z, weights[2], atol=1e-7)
    assert figure.layout.yaxis.ticktext[2] == "&lt;c&gt;"
    assert figure.layout.coloraxis.cmax == pytest.approx(weights.max())
    with pytest.raises(OptionError, match="4 tokens were given for 5"):
        figures.attention(weights, tokens=list("abcd"))
    with pytest.raises(OptionError, match="heads 0 to 2"):
        figures.attention(weights, heads=[3])
    with pytest.raises(OptionError, match="Pick one sample"):
        figures.attention(np.zeros((2, 3, 4, 4)))


def test_memory_is_in_a_unit_that_suits_its_peak():
    figure = figures.memory_timeline({"allocated": [1e9, 2.5e9], "reserved": [3e9, 3e9]})
    assert "peak 3 GB" in title(figure)
    assert list(figure.data[0].y) == [1.0, 2.5]


def run_with_phases(path, *, slow=0):
    """Write a run whose steps wait 10 ms for data, go forward 20 ms, backward 30 ms; the first few 100 times that."""
    seconds = {signals.DATA_WAIT: 0.01, signals.time_of("forward"): 0.02, signals.time_of("backward"): 0.03}
    seconds |= {signals.STEP_TIME: 0.06} if slow else {}
    sites = [
        Site(id=i, name=signals.LOOP, quantity="vital", part=signals.part_of(name)) for i, name in enumerate(seconds)
    ]
    header = RunHeader(schema_version=schema.SCHEMA_VERSION, created=0.0, sonde_version="0")
    writer = RunWriter(path, header)
    writer.take_sites(sites)
    for step in range(1, 1001):
        rows = schema.rows_of_values(np.array(list(seconds.values())) * (1 + step % 2) * (100 if step <= slow else 1))
        count = len(seconds)
        block = {"sites": np.arange(count, dtype=np.uint32), "rows": rows, "bins": np.zeros((count, 64), np.uint64)}
        writer.take_block(Block(step=step, time=float(step), binned=np.zeros(count, np.bool_), **block))
    writer.close()
    return open_run(path)


def test_the_mean_step_of_the_figure_is_that_of_the_overview(tmp_path):
    run = run_with_phases(tmp_path / "run", slow=3)
    known = phase_shares(run)
    assert known is not None
    assert known.mean_s < 0.1, "its first steps are left out"
    assert f"mean {known.mean_s * 1e3:.3g} ms" in title(figures.step_phases(run))


def test_the_phases_of_a_step_add_up_to_their_means(tmp_path):
    figure = figures.step_phases(run_with_phases(tmp_path / "run"))
    assert [trace.name for trace in figure.data] == ["data wait 17%", "forward 33%", "backward 50%"]
    assert np.isclose(np.mean(figure.data[2].y), 45, rtol=0.01)
    assert len(figure.data[0].x) <= 400


def test_a_phase_that_occurs_now_and_then_counts_as_nothing_elsewhere():
    steps = np.arange(1, 101)
    phases = {"forward": (steps, np.full(100, 0.01)), "evaluation": (steps[9::10], np.full(10, 0.1))}
    figure = figures.step_phases(phases)
    assert "mean 20 ms" in title(figure)
    assert [trace.name for trace in figure.data] == ["forward 50%", "evaluation 50%"]
    assert np.isclose(np.nanmean(figure.data[1].y), 10)


def test_steps_that_were_not_recorded_are_not_drawn_at_zero():
    steps = np.array([1, 2, 3, 20, 21, 90])
    figure = figures.step_phases({"forward": (steps, np.full(6, 0.01)), "backward": (steps, np.full(6, 0.02))})
    assert list(figure.data[0].x) == list(steps)
    assert np.allclose(figure.data[1].y, 20)


def test_one_very_slow_step_does_not_flatten_the_others():
    seconds = np.full(200, 0.01)
    seconds[0] = 5.0
    figure = figures.step_phases({"forward": seconds})
    assert figure.layout.yaxis.range[1] < 20
    assert "cut off: up to 5,000 ms" in title(figure)


def test_events_and_findings_lie_along_the_steps():
    events = [Event(event_type="epoch", message=HOSTILE, step=4, timestamp=0.0)]
    found = Finding(kind="dead_relu", severity="critical", confidence=1.0, step=3, last_step=9, sites=("fc",))
    figure = figures.event_timeline(events, findings=[found])
    assert list(figure.data[0].x) == [3, 9]
    assert figure.data[0].y[0] == "dead relu"
    assert list(figure.data[1].x) == [4]
    assert figure.data[1].text[0].startswith("&lt;img")


def test_the_model_tree_adds_parameters_up_and_colours_by_numbers(run):
    tree = figures.model_tree(run).data[0]
    sizes = dict(zip(tree.ids, tree.values, strict=True))
    parents = dict(zip(tree.ids, tree.parents, strict=True))
    assert sizes["(model)"] == run.header.model["num_parameters"]
    assert sizes["blocks.3"] == 2 * 65_536
    assert parents["blocks.3.mlp"] == "blocks.3"
    by_numbers = figures.model_tree(run, colour={"head": 1.0, "embed": 100.0}).data[0]
    # Those two, what is not measured, and the model itself, which holds both.
    assert len(set(by_numbers.marker.colors)) == 4
    words = dict(zip(by_numbers.ids, (each[2] for each in by_numbers.customdata), strict=True))
    assert words["(model)"] == f"value: {np.sqrt((1.0 + 100.0**2) / 2):.3g}"


def test_the_model_tree_shows_the_worst_finding_that_names_a_module(run_path, tmp_path):
    path = shutil.copytree(run_path, tmp_path / "run")
    told = {"confidence": 1.0, "step": 1, "last_step": 2}
    findings = [
        Finding(kind="slow", severity="info", sites=("head.weight",), **told),
        Finding(kind="dead", severity="critical", sites=("head",), **told),
        Finding(kind="odd", severity="warning", sites=("blocks.1.mlp", "optimizer"), **told),
    ]
    (path / "findings.jsonl").write_bytes(b"".join(map(encode_finding, findings)))
    tree = figures.model_tree(open_run(path), colour="findings").data[0]
    words = {name: told[2] for name, told in zip(tree.ids, tree.customdata, strict=True)}
    assert (words["head"], words["blocks.1.mlp"], words["embed"]) == ("dead", "odd", "no finding names it")
    colours = dict(zip(tree.ids, tree.marker.colors, strict=True))
    assert len({colours["head"], colours["blocks.1.mlp"], colours["embed"]}) == 3


def test_a_distribution_at_a_step_that_was_not_read_says_so(run):
    assert "no histogram of this site at step 10000" in says(
        figures.tensor_distribution(run, "head.weight:gradient", step=10_000)
    )


def test_runs_are_compared_by_curve_and_the_one_without_it_is_named(run, empty_run):
    figure = figures.compare_runs([run, empty_run])
    assert [trace.name for trace in figure.data] == ["first", "NaN or infinite"]
    assert "not in: nothing" in title(figure)
    series = run.series("loss:scalar", "value")
    figure = figures.compare_runs({"one": run, "two": (series.steps, series.values)}, "loss:scalar")
    assert np.array_equal(figure.data[0].y, figure.data[1].y, equal_nan=True)
    assert figure.data[0].line.dash != figure.data[1].line.dash


@pytest.mark.parametrize(
    "draw",
    [
        lambda run: figures.gradient_flow(run),
        lambda run: figures.gradient_flow_over_time(run),
        lambda run: figures.layer_heatmap(run),
        lambda run: figures.training_metrics(run),
        lambda run: figures.activation_patterns(run),
        lambda run: figures.update_ratio(run),
        lambda run: figures.memory_timeline(run),
        lambda run: figures.step_phases(run),
        lambda run: figures.event_timeline([]),
        lambda run: figures.compare_runs([run]),
        lambda run: figures.tensor_distribution(run, "head.weight:gradient"),
        lambda run: figures.histogram_over_time(run, "head.weight:gradient"),
        lambda run: figures.tensor_distribution([]),
        lambda run: figures.histogram_over_time([[0.0]]),
        lambda run: figures.activation_patterns([np.nan]),
        lambda run: figures.attention(np.full((2, 2), np.nan)),
    ],
)
def test_a_figure_without_data_says_what_is_missing(draw, empty_run):
    figure = draw(empty_run)
    assert not figure.data
    assert len(says(figure)) > 15


def test_names_are_shown_and_never_taken_for_markup():
    drawn = [
        figures.tensor_distribution([1.0, 2.0], name=HOSTILE),
        figures.gradient_flow({HOSTILE: 1.0}),
        figures.layer_heatmap({HOSTILE: [1.0, 2.0]}),
        figures.training_metrics({HOSTILE: [1.0, 2.0]}),
        figures.compare_runs({HOSTILE: [1.0, 2.0]}),
        figures.memory_timeline({HOSTILE: [1.0, 2.0]}),
        figures.step_phases({HOSTILE: [1.0, 2.0]}),
    ]
    for figure in drawn:
        assert "<img" not in figure.to_json().replace("\\u003c", "<")
        assert "&lt;img" in figure.to_json().replace("\\u003c", "<").replace("\\u0026", "&")


def test_figures_are_strict_json_that_plotly_reads_again(run, strict_json, numbers):
    import plotly.io

    figure = figures.layer_heatmap(run)
    plain = strict_json(figure)
    assert np.array_equal(numbers(plain["data"][0]["x"]), figure.data[0].x)
    again = plotly.io.from_json(figures.to_json(figure))
    assert again.layout.title.text == title(figure)


def test_themes_differ_and_an_unknown_one_is_refused(run):
    light, dark = (figures.gradient_flow(run, theme=theme) for theme in figures.THEMES)
    assert light.layout.template.layout.paper_bgcolor != dark.layout.template.layout.paper_bgcolor
    assert figures.apply_theme(light, "dark").layout.template == dark.layout.template
    with pytest.raises(OptionError, match="light, dark"):
        figures.gradient_flow(run, theme="sepia")


def test_a_file_is_written_as_its_ending_says(run, tmp_path, monkeypatch):
    figure = figures.gradient_flow(run)
    assert figures.write(figure, tmp_path / "flow.html").read_text().startswith("<!doctype html>")
    assert '"data"' in figures.write(figure, tmp_path / "flow.json").read_text()
    with pytest.raises(OptionError, match="html, json, png"):
        figures.write(figure, tmp_path / "flow.gif")
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(MissingExtra, match="pip install kaleido"):
        figures.write(figure, tmp_path / "flow.png")


def test_without_plotly_reading_works_and_drawing_names_the_cure():
    code = (
        "import sys; sys.modules['plotly'] = None\n"
        "import sonde.views.figures as figures, sonde.errors\n"
        "try:\n    figures.gradient_flow({'a': 1.0})\n"
        "except sonde.errors.MissingExtra as error:\n    assert \"pip install 'sonde[view]'\" in str(error), error\n"
        "else:\n    raise SystemExit('drawn')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_tensors_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    figure = figures.tensor_distribution(torch.ones(10, dtype=torch.bfloat16, requires_grad=True))
    assert "10 elements, mean 1" in title(figure)


def test_attention_is_drawn_from_what_a_debugger_captured():
    weights = np.full((1, 2, 3, 3), 1 / 3)
    figure = figures.attention({"attention_map": weights, "layer_name": "encoder.attention"})
    assert len(figure.data) == 2
    assert "encoder.attention" in figure.layout.title.text
    with pytest.raises(OptionError, match="no attention_map, only gradcam"):
        figures.attention({"gradcam": weights})


def test_a_tree_of_plain_sizes_adds_up():
    figure = figures.model_tree({"encoder.0": 30, "encoder.1": 10, "head": 2}, colour={"head": 0.5})
    sizes = dict(zip(figure.data[0].ids, figure.data[0]["values"], strict=True))
    assert sizes == {"(model)": 42, "encoder": 40, "encoder.0": 30, "encoder.1": 10, "head": 2}
    with pytest.raises(OptionError, match="size of 'head'"):
        figures.model_tree({"head": -1})


@pytest.mark.parametrize("draw", [figures.training_metrics, figures.gradient_flow, figures.step_phases])
def test_a_path_is_not_drawn_letter_by_letter(draw):
    with pytest.raises(OptionError, match="open the run first"):
        draw("runs/first")


def test_a_model_of_very_many_modules_shows_its_largest_and_says_how_many_there_are():
    sizes = {f"blocks.{at}.{part}": 1000 - at for at in range(700) for part in ("attention", "mlp")}
    figure = figures.model_tree(sizes)
    (trace,) = figure.data
    assert len(trace.ids) == 500
    assert set(trace.parents) <= {"", *trace.ids}
    assert "blocks.0" in trace.ids
    assert "blocks.699" not in trace.ids
    assert "the 500 largest of 2,102 modules" in figure.layout.title.text


def test_the_axis_of_a_constant_says_which_number_it_is():
    figure = figures.training_metrics({"loss": [2.0, 1.5, 1.0], "lr": [1e-3] * 3})
    low, high = figure.layout.yaxis2.range
    assert (low, high) == pytest.approx((0.5e-3, 1.5e-3))
    assert figure.layout.yaxis.range is None


@pytest.mark.parametrize("draw", [figures.layer_heatmap, figures.model_tree, figures.event_timeline])
def test_a_path_or_nothing_is_answered_with_what_to_hand_in(draw):
    with pytest.raises(OptionError, match=r"'runs/first' is a name; open the run first: sonde\.open_run"):
        draw("runs/first")
    with pytest.raises(OptionError, match=r"Figures are drawn from .*; got None"):
        draw(None)


def test_a_container_of_modules_too_small_to_be_drawn_is_coloured_by_them():
    leaves = {f"blocks.{block}.{leaf}": 10.0 - leaf for block in range(300) for leaf in range(3)}
    figure = figures.model_tree(leaves, colour={name: 1.0 + size for name, size in leaves.items()})
    assert len(figure.data[0].ids) < len(leaves)
    assert "#9aa0a6" not in figure.data[0].marker.colors, "grey: not measured"


def test_many_runs_each_have_a_colour_and_dash_of_their_own():
    figure = figures.compare_runs({f"run {number}": [1.0, 2.0, number] for number in range(12)})
    looks = {(trace.line.color, trace.line.dash) for trace in figure.data}
    assert len(looks) == 12
