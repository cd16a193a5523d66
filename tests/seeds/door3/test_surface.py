"""Every name, default, threshold and field that users of the documented debug session rely on."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from sonde.debug import (
    DebugConfig,
    DebugSession,
    DebugVisualizer,
    GradientDebugger,
    HookAction,
    HookBuilder,
    HookCondition,
    HookManager,
    HookTrigger,
    ModelDiagnostics,
    Profiler,
    TensorInspector,
    TerminalVisualizer,
    VisualizationConfig,
    debug_session,
)
from sonde.debug.gradient_layer import SEED

MEMBERS = {
    DebugSession: "tensor_inspector gradient_debugger model_diagnostics start stop export snapshot generate_snapshot "
    "debug_tensor debug_gradients",
    TensorInspector: "inspect_tensor inspect_gradients compare_tensors get_tensor_info get_all_tensors "
    "get_tensors_by_layer get_alerts enable_monitoring track_dependency record_lifecycle_event update_time_series "
    "perform_advanced_analysis detect_advanced_anomalies clear generate_report",
    GradientDebugger: "record_gradient_flow next_step get_status generate_comprehensive_report quick_analysis "
    "analyze_gradient_flow analyze_gradient_conflicts generate_gradient_flow_visualization "
    "generate_enhanced_layer_analysis get_performance_insights get_layer_history get_layer_alerts "
    "generate_recommendations reset",
    ModelDiagnostics: "record_performance record_architecture record_layer_stats record_training_dynamics "
    "analyze_training_dynamics increment_step generate_report",
    HookManager: "register_hook register_callback remove_hook set_hook_enabled set_enabled set_step execute_hooks",
    HookBuilder: "trigger action layer_patterns max_executions enabled build",
    HookTrigger: "EveryForward EveryBackward EveryNSteps Conditional Once LayerSpecific",
    HookCondition: "LossThreshold GradientNormThreshold MemoryThreshold StepRange Custom",
    HookAction: "InspectTensor TrackGradients RecordActivations SaveSnapshot Alert CustomCallback PauseTraining",
    Profiler: "start_timer end_timer record_layer_execution record_tensor_operation record_model_inference "
    "analyze_performance get_statistics get_layer_profiles generate_report",
    DebugVisualizer: "plot_tensor_distribution plot_gradient_flow plot_training_metrics plot_heatmap "
    "plot_activation_patterns get_plot_names create_dashboard export_plot_data",
    TerminalVisualizer: "ascii_histogram ascii_line_plot display_statistics",
}


@pytest.mark.parametrize("owner", MEMBERS, ids=lambda owner: owner.__name__)
def test_every_documented_member_is_there(owner):
    assert [name for name in MEMBERS[owner].split() if not hasattr(owner, name)] == []


def test_defaults_are_the_documented_ones():
    config = DebugConfig()
    on = (config.enable_tensor_inspection, config.enable_gradient_debugging, config.enable_model_diagnostics)
    assert (on, config.enable_visualization) == ((True, True, True), False)
    assert (config.max_tracked_tensors, config.max_gradient_history) == (1000, 100)
    assert (config.output_dir, config.sampling_rate) == (None, 1.0)
    pictures = VisualizationConfig()
    assert (str(pictures.output_directory), pictures.width, pictures.height) == ("./debug_plots", 800, 600)
    assert (SEED.vanishing, SEED.exploding) == (1e-7, 10.0)


def test_arguments_come_in_the_documented_order():
    wanted = {
        TensorInspector.inspect_tensor: ["tensor", "name", "layer", "operation"],
        HookManager.execute_hooks: ["layer", "data", "shape", "is_forward", "metadata"],
        DebugVisualizer.plot_tensor_distribution: ["name", "values", "bins"],
        DebugVisualizer.plot_gradient_flow: ["layer", "steps", "gradients"],
        TerminalVisualizer.ascii_histogram: ["values", "bins"],
        TerminalVisualizer.ascii_line_plot: ["x", "y", "title"],
    }
    for function, names in wanted.items():
        assert list(inspect.signature(function).parameters)[1 : len(names) + 1] == names
    layer = list(inspect.signature(Profiler.record_layer_execution).parameters)[1:]
    assert layer == ["name", "layer_type", "forward_time", "backward_time", "memory_usage", "parameter_count"]


def test_a_tensor_is_described_by_every_documented_number():
    session = debug_session()
    values = np.concatenate([np.random.default_rng(0).standard_normal(998), [0.0, 40.0]])
    info = session.tensor_inspector.get_tensor_info(session.debug_tensor(values, "w", "fc", "parameter"))
    stats = info.stats
    assert (stats.shape, stats.dtype, stats.total_elements, stats.memory_usage_bytes) == (
        (1000,),
        "float64",
        1000,
        8000,
    )
    assert (stats.nan_count, stats.inf_count, stats.zero_count, stats.sparsity) == (0, 0, 1, 0.001)
    for name, expected in {
        "mean": values.mean(),
        "std": values.std(ddof=1),
        "min": values.min(),
        "max": 40.0,
        "median": np.median(values),
        "l1_norm": np.abs(values).sum(),
        "l2_norm": np.sqrt((values**2).sum()),
        "infinity_norm": 40.0,
    }.items():
        assert getattr(stats, name) == pytest.approx(expected), name
    spread = info.distribution
    assert (len(spread.counts), sum(spread.counts)) == (50, 1000)
    assert spread.percentiles == pytest.approx({f"p{q}": np.percentile(values, q) for q in (5, 25, 50, 75, 95, 99)})
    assert spread.outliers[0].value == 40.0
    centred = (values - values.mean()) / values.std()
    assert (spread.skewness, spread.kurtosis) == pytest.approx(((centred**3).mean(), (centred**4).mean() - 3))


@pytest.mark.parametrize(
    ("values", "kind", "severity"),
    [
        ([1.0, float("nan")], "nan", "critical"),
        ([1.0, float("inf")], "inf", "critical"),
        ([1.0, 2e10], "extreme_value", "warning"),
    ],
)
def test_alerts_have_the_documented_severities(values, kind, severity):
    inspector = TensorInspector()
    inspector.inspect_tensor(values, "x")
    assert [(alert.kind, alert.severity) for alert in inspector.get_alerts()] == [(kind, severity)]


def test_the_summary_of_a_report_has_the_documented_fields():
    session = debug_session().start()
    session.debug_tensor([float("nan")], "x")
    summary = session.stop().summary()
    assert (summary.session_id, summary.total_issues, summary.critical_issues) == (session.id, 1, 1)
    assert (len(summary.issues), summary.recommendations) == (1, ())
