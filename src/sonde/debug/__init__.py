"""Debug sessions, inspectors, hooks and visualizers, by the names their users know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonde.lazy import loader

if TYPE_CHECKING:
    from sonde.debug.architecture import (
        AttentionAnalysis,
        WeightAnalysis,
        analyze_attention,
        analyze_weights,
        count_flops,
        describe_architecture,
        loss_gradients,
        receptive_field,
    )
    from sonde.debug.config import DebugConfig
    from sonde.debug.gradient_debugger import (
        GradientAlert,
        GradientConflict,
        GradientDebugger,
        GradientFlowAnalysis,
        LayerHealth,
    )
    from sonde.debug.gradient_layer import GradientPoint, GradientThresholds, UnitActivity
    from sonde.debug.hook_types import AlertSeverity, HookAction, HookCondition, HookTrigger, Occasion
    from sonde.debug.hooks import Hook, HookBuilder, HookManager, HookResult, HookStatistics, TrainingStopped
    from sonde.debug.model_diagnostics import (
        DiagnosticAlert,
        LayerActivationStats,
        ModelArchitectureInfo,
        ModelDiagnostics,
        ModelHealth,
        ModelPerformanceMetrics,
        TrainingDynamics,
    )
    from sonde.debug.pause import resume_run
    from sonde.debug.profiler import Bottleneck, Profiler
    from sonde.debug.report import DebugReport, DebugSummary, Issue
    from sonde.debug.session import DebugSession, debug_session, debug_session_with_config
    from sonde.debug.tensor_inspector import TensorAlert, TensorInfo, TensorInspector
    from sonde.debug.tensor_stats import Drift, TensorComparison, TensorDistribution, TensorStats
    from sonde.debug.terminal_visualizer import TerminalVisualizer
    from sonde.debug.visualizer import DebugVisualizer, VisualizationConfig

# Loaded at first use, so that drawing never imports torch, and recording never imports what only drawing needs.
_HOMES: dict[str, str] = {
    "AlertSeverity": "hook_types",
    "AttentionAnalysis": "architecture",
    "Bottleneck": "profiler",
    "DebugConfig": "config",
    "DebugReport": "report",
    "DebugSession": "session",
    "DebugSummary": "report",
    "DebugVisualizer": "visualizer",
    "DiagnosticAlert": "model_diagnostics",
    "Drift": "tensor_stats",
    "GradientAlert": "gradient_debugger",
    "GradientConflict": "gradient_debugger",
    "GradientDebugger": "gradient_debugger",
    "GradientFlowAnalysis": "gradient_debugger",
    "GradientPoint": "gradient_layer",
    "GradientThresholds": "gradient_layer",
    "Hook": "hooks",
    "HookAction": "hook_types",
    "HookBuilder": "hooks",
    "HookCondition": "hook_types",
    "HookManager": "hooks",
    "HookResult": "hooks",
    "HookStatistics": "hooks",
    "HookTrigger": "hook_types",
    "Issue": "report",
    "LayerActivationStats": "model_diagnostics",
    "LayerHealth": "gradient_debugger",
    "ModelArchitectureInfo": "model_diagnostics",
    "ModelDiagnostics": "model_diagnostics",
    "ModelHealth": "model_diagnostics",
    "ModelPerformanceMetrics": "model_diagnostics",
    "Occasion": "hook_types",
    "Profiler": "profiler",
    "TensorAlert": "tensor_inspector",
    "TensorComparison": "tensor_stats",
    "TensorDistribution": "tensor_stats",
    "TensorInfo": "tensor_inspector",
    "TensorInspector": "tensor_inspector",
    "TensorStats": "tensor_stats",
    "TerminalVisualizer": "terminal_visualizer",
    "TrainingDynamics": "model_diagnostics",
    "TrainingStopped": "hooks",
    "UnitActivity": "gradient_layer",
    "VisualizationConfig": "visualizer",
    "WeightAnalysis": "architecture",
    "analyze_attention": "architecture",
    "analyze_weights": "architecture",
    "count_flops": "architecture",
    "debug_session": "session",
    "debug_session_with_config": "session",
    "describe_architecture": "architecture",
    "loss_gradients": "architecture",
    "receptive_field": "architecture",
    "resume_run": "pause",
}

__all__ = [
    "AlertSeverity",
    "AttentionAnalysis",
    "Bottleneck",
    "DebugConfig",
    "DebugReport",
    "DebugSession",
    "DebugSummary",
    "DebugVisualizer",
    "DiagnosticAlert",
    "Drift",
    "GradientAlert",
    "GradientConflict",
    "GradientDebugger",
    "GradientFlowAnalysis",
    "GradientPoint",
    "GradientThresholds",
    "Hook",
    "HookAction",
    "HookBuilder",
    "HookCondition",
    "HookManager",
    "HookResult",
    "HookStatistics",
    "HookTrigger",
    "Issue",
    "LayerActivationStats",
    "LayerHealth",
    "ModelArchitectureInfo",
    "ModelDiagnostics",
    "ModelHealth",
    "ModelPerformanceMetrics",
    "Occasion",
    "Profiler",
    "TensorAlert",
    "TensorComparison",
    "TensorDistribution",
    "TensorInfo",
    "TensorInspector",
    "TensorStats",
    "TerminalVisualizer",
    "TrainingDynamics",
    "TrainingStopped",
    "UnitActivity",
    "VisualizationConfig",
    "WeightAnalysis",
    "analyze_attention",
    "analyze_weights",
    "count_flops",
    "debug_session",
    "debug_session_with_config",
    "describe_architecture",
    "loss_gradients",
    "receptive_field",
    "resume_run",
]


__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
