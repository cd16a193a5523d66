"""Debugging tools for PyTorch training: anomaly, profiler and memory scopes, gradient checks, steps, reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonde.lazy import loader

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger
    from sonde.pytorch_debugging.enhanced_training_optimizer import (
        EnhancedTrainingOptimizer,
        create_enhanced_training_optimizer,
        train_model_with_logging,
    )
    from sonde.pytorch_debugging.making import create_pytorch_debugger, debug_training_session
    from sonde.pytorch_debugging.recovery import (
        LastGood,
        clip_gradients_,
        lower_learning_rate,
        replace_nonfinite_,
        step_if_finite,
    )
    from sonde.pytorch_debugging.training_logger import TrainingEventType, TrainingLogger
    from sonde.pytorch_debugging.training_logs import analyze_training_logs, load_training_logs
    from sonde.pytorch_debugging.training_options import TrainingOptions
    from sonde.pytorch_debugging.training_run import TrainingResults

# Loaded at first use: who debugs gradients does not pay for the training optimizer.
_HOMES = {
    "EnhancedTrainingOptimizer": "enhanced_training_optimizer",
    "LastGood": "recovery",
    "PyTorchDebugger": "debugger",
    "TrainingEventType": "training_logger",
    "TrainingLogger": "training_logger",
    "TrainingOptions": "training_options",
    "TrainingResults": "training_run",
    "analyze_training_logs": "training_logs",
    "clip_gradients_": "recovery",
    "create_enhanced_training_optimizer": "enhanced_training_optimizer",
    "create_pytorch_debugger": "making",
    "debug_training_session": "making",
    "load_training_logs": "training_logs",
    "lower_learning_rate": "recovery",
    "replace_nonfinite_": "recovery",
    "step_if_finite": "recovery",
    "train_model_with_logging": "enhanced_training_optimizer",
}

__all__ = [
    "EnhancedTrainingOptimizer",
    "LastGood",
    "PyTorchDebugger",
    "TrainingEventType",
    "TrainingLogger",
    "TrainingOptions",
    "TrainingResults",
    "analyze_training_logs",
    "clip_gradients_",
    "create_enhanced_training_optimizer",
    "create_pytorch_debugger",
    "debug_training_session",
    "load_training_logs",
    "lower_learning_rate",
    "replace_nonfinite_",
    "step_if_finite",
    "train_model_with_logging",
]


__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
