"""DebugVisualizer: plots of hand-fed values, kept by name, drawn for real, and written with their data."""

from __future__ import annotations

import csv
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("plotly", reason="plots need the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import write_run

from sonde.debug import DebugVisualizer, VisualizationConfig
from sonde.errors import OptionError, SelectionError
from sonde.store import open_run


@pytest.fixture
def visualizer(tmp_path):
    return DebugVisualizer(VisualizationConfig(output_directory=tmp_path / "plots"))


def test_the_seeds_example_runs_as_it_stands(visualizer):
    values = [1.0, 2.0, 1.5, 3.0, 2.5, 1.8, 2.2]
    visualizer.plot_tensor_distribution("weights", values, 10)
    steps = [0, 1, 2, 3, 4]
    gradients = [0.1, 0.08, 0.06, 0.04, 0.03]
    visualizer.plot_gradient_flow("layer1", steps, gradients)
    plot_names = visualizer.get_plot_names()
    assert plot_names == ["weights_distribution", "layer1_gradient_flow"]
    dashboard = visualizer.create_dashboard(plot_names)
    assert dashboard.name == "dashboard.html"
    assert dashboard.read_text().startswith("<!doctype html>")


def test_plots_are_drawn_from_the_values_and_not_described_in_a_sentence(visualizer):
    gradients = [0.1, 0.08, 0.06]
    figure = visualizer.plot_gradient_flow("layer1", [0, 5, 9], gradients)
    assert list(figure.data[0].x) == [0, 5, 9]
    assert list(figure.data[0].y) == gradients
    counts = visualizer.plot_tensor_distribution("w", np.arange(100), bins=4).data[0].y
    assert list(counts) == [25, 25, 25, 25]


def test_the_dashboard_holds_every_plot_asked_for_and_no_other(visualizer):
    visualizer.plot_training_metrics([1, 2, 3], [3.0, 2.0, 1.0], [0.1, 0.5, 0.9], learning_rate=[1e-3, 1e-3, 1e-4])
    visualizer.plot_heatmap("attention", np.eye(4), row_names=list("abcd"))
    visualizer.plot_activation_patterns("relu", np.maximum(np.random.default_rng(0).normal(size=(8, 16)), 0))
    everything = visualizer.create_dashboard().read_text()
    assert everything.count("data-figure=") == 3
    one = visualizer.create_dashboard(["attention_heatmap"]).read_text()
    data = json.loads(re.search(r'id="figures">(.*?)</script>', one, re.S).group(1))
    assert [figure["data"][0]["type"] for figure in data["figures"]] == ["heatmap"]
    assert visualizer.create_dashboard("attention_heatmap").read_text() == one, "a single name is a list of one"
    with pytest.raises(SelectionError, match="no plot 'atention_heatmap'; 3 were made, such as attention_heatmap"):
        visualizer.create_dashboard(["atention_heatmap"])


def test_names_of_plots_are_those_that_were_made(visualizer):
    assert visualizer.get_plot_names() == []
    visualizer.plot_heatmap("a", [[1.0]])
    visualizer.plot_heatmap("a", [[2.0]])  # the later one takes the place of the earlier
    assert visualizer.get_plot_names() == ["a_heatmap"]
    assert visualizer.get_plot("a_heatmap").data[0].customdata[0][0] == 2.0
    assert "No plot was made yet" in DebugVisualizer(visualizer.config).create_dashboard().read_text()


def test_the_oldest_plot_goes_when_there_are_too_many(tmp_path):
    visualizer = DebugVisualizer(VisualizationConfig(output_directory=tmp_path, max_plots=2))
    for name in "abc":
        visualizer.plot_tensor_distribution(name, [1.0, 2.0])
    assert visualizer.get_plot_names() == ["b_distribution", "c_distribution"]


def test_data_comes_back_from_csv_and_json_as_it_went_in(visualizer, tmp_path):
    losses = [3.0, float("nan"), float("inf")]
    visualizer.plot_training_metrics([1, 2, 3], losses, val_loss=[4.0, 3.5, 3.25])
    rows = list(csv.DictReader(visualizer.export_plot_data("training_metrics").read_text().splitlines()))
    assert [row["loss"] for row in rows] == ["3.0", "nan", "inf"]
    assert [float(row["val_loss"]) for row in rows] == [4.0, 3.5, 3.25]
    file = visualizer.export_plot_data("training_metrics", tmp_path / "data.json")
    plain = json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert plain["loss"] == [3.0, "nan", "inf"]
    with pytest.raises(OptionError, match=r"\.csv or \.json"):
        visualizer.export_plot_data("training_metrics", tmp_path / "data.xml")


def test_heat_map_data_names_rows_and_columns(visualizer):
    visualizer.plot_heatmap("m", [[1.0, 2.0], [3.0, 4.0]], row_names=["x", "y"], steps=[10, 20])
    rows = list(csv.reader(visualizer.export_plot_data("m_heatmap").read_text().splitlines()))
    assert rows == [
        ["row", "column", "value"],
        ["x", "10", "1.0"],
        ["x", "20", "2.0"],
        ["y", "10", "3.0"],
        ["y", "20", "4.0"],
    ]


def test_activations_may_be_inputs_and_outputs(visualizer):
    figure = visualizer.plot_activation_patterns("relu", [-1.0, 2.0], [0.0, 2.0])
    assert list(figure.data[0].y) == [0.0, 2.0]
    with pytest.raises(OptionError, match="3 inputs and 1 outputs"):
        visualizer.plot_activation_patterns("relu", [1, 2, 3], [1])


def test_a_name_cannot_lead_out_of_the_folder(visualizer):
    visualizer.plot_tensor_distribution("../../etc/passwd", [1.0, 2.0])
    file = visualizer.save_plot("../../etc/passwd_distribution")
    assert file.parent == Path(visualizer.config.output_directory)


def test_a_run_becomes_plots_of_what_it_has(visualizer, tmp_path):
    write_run(tmp_path / "first")
    names = visualizer.plot_run(open_run(tmp_path / "first"))
    assert "first_gradient_flow" in names
    assert "first_memory" not in names  # it recorded none
    with pytest.raises(OptionError, match="sonde export"):
        visualizer.export_plot_data("first_gradient_flow")


def test_drawing_needs_no_torch():
    code = (
        "import sys; from sonde.debug import DebugVisualizer, TerminalVisualizer;"
        "DebugVisualizer().plot_gradient_flow('a', [0, 1], [1.0, 2.0]); TerminalVisualizer().sparkline([1, 2]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_plot_says_what_it_is_of(visualizer):
    titles = [
        visualizer.plot_gradient_flow("layer1", [0, 1], [0.2, 0.1]).layout.title.text,
        visualizer.plot_heatmap("confusion", np.eye(3)).layout.title.text,
        visualizer.plot_tensor_distribution("weights", [1.0, 1.0]).layout.title.text,
    ]
    assert titles[0] == "Gradient of layer1 over time"
    assert titles[1] == "confusion", "and a matrix of zeros and ones is not drawn in decades"
    assert "standard deviation 0<" in titles[2], "where nothing is shaded nothing is called so"


def test_few_steps_and_few_elements_are_counted_one_by_one(visualizer):
    assert visualizer.plot_gradient_flow("a", [0, 1, 2], [0.2, 0.1, 0.1]).layout.xaxis.dtick == 1
    assert visualizer.plot_gradient_flow("a", [0, 100], [0.2, 0.1]).layout.xaxis.dtick is None
    assert visualizer.plot_tensor_distribution("a", [1.0, 2.0]).layout.yaxis.dtick == 1
    metrics = visualizer.plot_training_metrics([0, 1, 2], [3.0, 2.0, 1.0], [0.1, 0.2, 0.3])
    assert metrics.layout.xaxis2.dtick == 1


def test_files_go_where_they_were_asked_for_even_if_there_is_no_folder_yet(visualizer, tmp_path):
    visualizer.plot_training_metrics([0, 1], [2.0, 1.0])
    for write, name in (
        (visualizer.save_plot, "a/plot.html"),
        (visualizer.export_plot_data, "b/data.csv"),
    ):
        assert write("training_metrics", tmp_path / name).is_file()
    assert visualizer.create_dashboard(path=tmp_path / "c" / "d" / "page.html").is_file()


@pytest.mark.parametrize(("option", "value"), [("width", 0), ("height", "600"), ("max_plots", True), ("theme", "pink")])
def test_a_senseless_config_is_reported(option, value):
    with pytest.raises(OptionError, match=f"{option} takes .*got {value!r}"):
        VisualizationConfig(**{option: value})


def test_a_picture_is_as_large_as_the_config_says(visualizer, tmp_path):
    pytest.importorskip("kaleido", reason="pictures are made by kaleido: pip install kaleido")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))):
        pytest.skip("kaleido draws with a Chromium, and there is none")
    visualizer.plot_gradient_flow("layer1", [0, 1, 2], [0.3, 0.2, 0.1])
    png = visualizer.save_plot("layer1_gradient_flow", tmp_path / "flow.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (2 * visualizer.config.width, 2 * visualizer.config.height), "two pixels for each one"
    svg = ElementTree.fromstring(visualizer.save_plot("layer1_gradient_flow", tmp_path / "flow.svg").read_text())
    assert "Gradient of layer1 over time" in "".join(svg.itertext())


def test_defaults_are_those_of_the_seed():
    config = DebugVisualizer().config
    assert (str(config.output_directory), config.width, config.height) == ("./debug_plots", 800, 600)
