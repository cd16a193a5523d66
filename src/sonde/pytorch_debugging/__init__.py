"""Debugging tools for PyTorch training: anomaly, profiler and memory scopes, gradient checks, steps, reports."""

from typing import TYPE_CHECKING

from sonde.core.lazy import attach

if TYPE_CHECKING:  # The one list of public names: `attach` reads it too.
    from sonde.pytorch_debugging.debugger import PyTorchDebugger as PyTorchDebugger
    from sonde.pytorch_debugging.enhanced_training_optimizer import (
        EnhancedTrainingOptimizer as EnhancedTrainingOptimizer,
    )
    from sonde.pytorch_debugging.enhanced_training_optimizer import (
        create_enhanced_training_optimizer as create_enhanced_training_optimizer,
    )
    from sonde.pytorch_debugging.enhanced_training_optimizer import train_model_with_logging as train_model_with_logging
    from sonde.pytorch_debugging.recovery import LastGood as LastGood
    from sonde.pytorch_debugging.recovery import clip_gradients_ as clip_gradients_
    from sonde.pytorch_debugging.recovery import lower_learning_rate as lower_learning_rate
    from sonde.pytorch_debugging.recovery import replace_nonfinite_ as replace_nonfinite_
    from sonde.pytorch_debugging.recovery import step_if_finite as step_if_finite
    from sonde.pytorch_debugging.sessions import create_pytorch_debugger as create_pytorch_debugger
    from sonde.pytorch_debugging.sessions import debug_training_session as debug_training_session
    from sonde.pytorch_debugging.training_logger import TrainingEventType as TrainingEventType
    from sonde.pytorch_debugging.training_logger import TrainingLogger as TrainingLogger
    from sonde.pytorch_debugging.training_logs import analyze_training_logs as analyze_training_logs
    from sonde.pytorch_debugging.training_logs import load_training_logs as load_training_logs
    from sonde.pytorch_debugging.training_options import TrainingOptions as TrainingOptions
    from sonde.pytorch_debugging.training_options import TrainingResults as TrainingResults
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
