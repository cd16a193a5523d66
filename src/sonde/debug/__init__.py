"""Debug sessions: tensor inspector, gradient debugger, model diagnostics, hooks, profiler and visualizers."""

from typing import TYPE_CHECKING

from sonde.core.lazy import attach

if TYPE_CHECKING:  # The one list of public names: `attach` reads it too.
    from sonde.debug.alerts import Alert as Alert
    from sonde.debug.alerts import DiagnosticAlert as DiagnosticAlert
    from sonde.debug.alerts import GradientAlert as GradientAlert
    from sonde.debug.alerts import PerformanceAlert as PerformanceAlert
    from sonde.debug.alerts import TensorAlert as TensorAlert
    from sonde.debug.architecture import ArchitectureEvaluation as ArchitectureEvaluation
    from sonde.debug.architecture import AttentionAnalysis as AttentionAnalysis
    from sonde.debug.architecture import WeightAnalysis as WeightAnalysis
    from sonde.debug.architecture import WeightUse as WeightUse
    from sonde.debug.architecture import analyze_attention as analyze_attention
    from sonde.debug.architecture import analyze_weights as analyze_weights
    from sonde.debug.architecture import describe_architecture as describe_architecture
    from sonde.debug.architecture import evaluate_architecture as evaluate_architecture
    from sonde.debug.architecture import loss_gradients as loss_gradients
    from sonde.debug.architecture import receptive_field as receptive_field
    from sonde.debug.config import DebugConfig as DebugConfig
    from sonde.debug.gradient_debugger import GradientConflict as GradientConflict
    from sonde.debug.gradient_debugger import GradientDebugger as GradientDebugger
    from sonde.debug.gradient_debugger import GradientFlowAnalysis as GradientFlowAnalysis
    from sonde.debug.gradient_debugger import LayerHealth as LayerHealth
    from sonde.debug.gradient_layer import GradientPoint as GradientPoint
    from sonde.debug.gradient_layer import GradientThresholds as GradientThresholds
    from sonde.debug.gradient_layer import UnitActivity as UnitActivity
    from sonde.debug.hook_types import AlertSeverity as AlertSeverity
    from sonde.debug.hook_types import HookAction as HookAction
    from sonde.debug.hook_types import HookCondition as HookCondition
    from sonde.debug.hook_types import HookTrigger as HookTrigger
    from sonde.debug.hook_types import Occasion as Occasion
    from sonde.debug.hooks import Hook as Hook
    from sonde.debug.hooks import HookBuilder as HookBuilder
    from sonde.debug.hooks import HookManager as HookManager
    from sonde.debug.hooks import HookResult as HookResult
    from sonde.debug.hooks import HookStatistics as HookStatistics
    from sonde.debug.hooks import TrainingStopped as TrainingStopped
    from sonde.debug.model_diagnostics import LayerActivationStats as LayerActivationStats
    from sonde.debug.model_diagnostics import ModelArchitectureInfo as ModelArchitectureInfo
    from sonde.debug.model_diagnostics import ModelDiagnostics as ModelDiagnostics
    from sonde.debug.model_diagnostics import ModelHealth as ModelHealth
    from sonde.debug.model_diagnostics import ModelPerformanceMetrics as ModelPerformanceMetrics
    from sonde.debug.model_diagnostics import TrainingDynamics as TrainingDynamics
    from sonde.debug.pause import resume_run as resume_run
    from sonde.debug.profiler import Bottleneck as Bottleneck
    from sonde.debug.profiler import Profiler as Profiler
    from sonde.debug.report import DebugReport as DebugReport
    from sonde.debug.report import DebugSummary as DebugSummary
    from sonde.debug.session import DebugSession as DebugSession
    from sonde.debug.session import debug_session as debug_session
    from sonde.debug.session import debug_session_with_config as debug_session_with_config
    from sonde.debug.tensor_inspector import TensorInfo as TensorInfo
    from sonde.debug.tensor_inspector import TensorInspector as TensorInspector
    from sonde.debug.tensor_stats import Drift as Drift
    from sonde.debug.tensor_stats import TensorComparison as TensorComparison
    from sonde.debug.tensor_stats import TensorDistribution as TensorDistribution
    from sonde.debug.tensor_stats import TensorStats as TensorStats
    from sonde.debug.terminal_visualizer import TerminalVisualizer as TerminalVisualizer
    from sonde.debug.visualizer import DebugVisualizer as DebugVisualizer
    from sonde.debug.visualizer import VisualizationConfig as VisualizationConfig
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
