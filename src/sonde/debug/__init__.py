"""Debug sessions, inspectors, hooks and visualizers, by the names their users know."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.debug.architecture import count_flops, describe_architecture, receptive_field
    from sonde.debug.attention_analysis import AttentionAnalysis, analyze_attention
    from sonde.debug.config import DebugConfig
    from sonde.debug.conflicts import loss_gradients
    from sonde.debug.diagnostics_records import LayerActivationStats, ModelArchitectureInfo, ModelPerformanceMetrics
    from sonde.debug.gradient_debugger import GradientDebugger, GradientFlowAnalysis
    from sonde.debug.gradient_layer import GradientThresholds
    from sonde.debug.hook_types import AlertSeverity, HookAction, HookCondition, HookTrigger, Occasion
    from sonde.debug.hooks import Hook, HookBuilder, HookManager, HookResult, TrainingStopped
    from sonde.debug.model_diagnostics import ModelDiagnostics
    from sonde.debug.pause import resume_run
    from sonde.debug.profiler import Profiler
    from sonde.debug.report import DebugReport, DebugSummary
    from sonde.debug.session import DebugSession, debug_session
    from sonde.debug.tensor_inspector import TensorInspector
    from sonde.debug.terminal_visualizer import TerminalVisualizer
    from sonde.debug.visualizer import DebugVisualizer, VisualizationConfig
    from sonde.debug.weight_analysis import analyze_weights

# Loaded at first use, so that drawing never imports torch, and recording never imports what only drawing needs.
_HOMES: dict[str, str] = {
    "AlertSeverity": "hook_types",
    "AttentionAnalysis": "attention_analysis",
    "DebugConfig": "config",
    "DebugReport": "report",
    "DebugSession": "session",
    "DebugSummary": "report",
    "DebugVisualizer": "visualizer",
    "GradientDebugger": "gradient_debugger",
    "GradientFlowAnalysis": "gradient_debugger",
    "GradientThresholds": "gradient_layer",
    "Hook": "hooks",
    "HookAction": "hook_types",
    "HookBuilder": "hooks",
    "HookCondition": "hook_types",
    "HookManager": "hooks",
    "HookResult": "hooks",
    "HookTrigger": "hook_types",
    "LayerActivationStats": "diagnostics_records",
    "ModelArchitectureInfo": "diagnostics_records",
    "ModelDiagnostics": "model_diagnostics",
    "ModelPerformanceMetrics": "diagnostics_records",
    "Occasion": "hook_types",
    "Profiler": "profiler",
    "TensorInspector": "tensor_inspector",
    "TerminalVisualizer": "terminal_visualizer",
    "TrainingStopped": "hooks",
    "VisualizationConfig": "visualizer",
    "analyze_attention": "attention_analysis",
    "analyze_weights": "weight_analysis",
    "count_flops": "architecture",
    "debug_session": "session",
    "describe_architecture": "architecture",
    "loss_gradients": "conflicts",
    "receptive_field": "architecture",
    "resume_run": "pause",
}

__all__ = [
    "AlertSeverity",
    "AttentionAnalysis",
    "DebugConfig",
    "DebugReport",
    "DebugSession",
    "DebugSummary",
    "DebugVisualizer",
    "GradientDebugger",
    "GradientFlowAnalysis",
    "GradientThresholds",
    "Hook",
    "HookAction",
    "HookBuilder",
    "HookCondition",
    "HookManager",
    "HookResult",
    "HookTrigger",
    "LayerActivationStats",
    "ModelArchitectureInfo",
    "ModelDiagnostics",
    "ModelPerformanceMetrics",
    "Occasion",
    "Profiler",
    "TensorInspector",
    "TerminalVisualizer",
    "TrainingStopped",
    "VisualizationConfig",
    "analyze_attention",
    "analyze_weights",
    "count_flops",
    "debug_session",
    "describe_architecture",
    "loss_gradients",
    "receptive_field",
    "resume_run",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sonde.debug' has no attribute {name!r}")
    value = getattr(import_module(f"sonde.debug.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
