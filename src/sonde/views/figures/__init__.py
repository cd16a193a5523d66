"""Figures of a run, or of plain values, as Plotly figures: for notebooks, reports and the viewer.

Each function takes a run or plain numbers and returns a `plotly.graph_objects.Figure`. Where there is nothing to draw,
the figure says what is missing. Plotly is loaded when the first figure is made.

    import sonde
    from sonde.views import figures

    figures.gradient_flow(sonde.open_run("runs/first")).show()
"""

from sonde.views.figures.activations import activation_patterns, input_output
from sonde.views.figures.attention_maps import attention
from sonde.views.figures.compare import compare_groups, compare_runs
from sonde.views.figures.export import to_html, to_json, write
from sonde.views.figures.flow import gradient_flow, gradient_flow_over_time, update_ratio
from sonde.views.figures.heatmaps import layer_heatmap
from sonde.views.figures.histograms import histogram_over_time, tensor_distribution
from sonde.views.figures.loop import event_timeline, memory_timeline, step_phases
from sonde.views.figures.metrics import training_metrics
from sonde.views.figures.module_tree import model_tree
from sonde.views.figures.ranks import rank_heatmap, rank_phases, rank_spread
from sonde.views.figures.theme import THEMES, Theme, apply_theme, template

__all__ = [
    "THEMES",
    "Theme",
    "activation_patterns",
    "apply_theme",
    "attention",
    "compare_groups",
    "compare_runs",
    "event_timeline",
    "gradient_flow",
    "gradient_flow_over_time",
    "histogram_over_time",
    "input_output",
    "layer_heatmap",
    "memory_timeline",
    "model_tree",
    "rank_heatmap",
    "rank_phases",
    "rank_spread",
    "step_phases",
    "template",
    "tensor_distribution",
    "to_html",
    "to_json",
    "training_metrics",
    "update_ratio",
    "write",
]
