"""The dashboard in a real browser, from disk, with the network cut off."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("plotly", reason="dashboards need the view extra: pip install 'sonde[view]'")

from sonde.debug import DebugVisualizer, VisualizationConfig

HOSTILE = "</script><script>alert('name')</script><img src=x onerror=alert(1)>"


def test_a_dashboard_opens_without_a_network_and_draws_all_plots(offline, tmp_path):
    visualizer = DebugVisualizer(VisualizationConfig(output_directory=tmp_path))
    values = np.random.default_rng(0).normal(size=(20, 30))
    for name in ("weights", HOSTILE):
        visualizer.plot_tensor_distribution(name, values)
        visualizer.plot_gradient_flow(name, range(20), np.abs(values[:, 0]))
        visualizer.plot_heatmap(name, np.abs(values))
        visualizer.plot_activation_patterns(name, values)
    visualizer.plot_training_metrics(range(20), np.linspace(2, 1, 20), np.linspace(0, 1, 20))
    page = offline.open(visualizer.create_dashboard(visualizer.get_plot_names()))
    page.wait_for_selector("html[data-ready]")
    places = page.locator("[data-figure]")
    assert places.count() == 9
    assert places.evaluate_all("all => all.every(each => each.querySelector('svg.main-svg') && each.data.length)")
    assert page.locator("text=alert('name')").count() > 0  # shown as text
    assert offline.errors == []
    assert offline.requests == []
