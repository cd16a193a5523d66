"""Train and evaluate models from a config, with a small loop that can be observed at named moments."""

from sonde.training.base_evaluator import BaseEvaluator
from sonde.training.base_trainer import BaseTrainer
from sonde.training.builder import build_from_config
from sonde.training.checkpoints import checkpoint_indices, load_checkpoint
from sonde.training.config import load_config
from sonde.training.early_stopping import EarlyStopping
from sonde.training.metrics import Accuracy, IoU, LossPerSample, Metric, Metrics
from sonde.training.moments import Glimpse, Moment, Observation
from sonde.training.scores import Scores
from sonde.training.supervised_trainer import SupervisedTrainer
from sonde.training.tensor_ops import apply_tensor_op

__all__ = [
    "Accuracy",
    "BaseEvaluator",
    "BaseTrainer",
    "EarlyStopping",
    "Glimpse",
    "IoU",
    "LossPerSample",
    "Metric",
    "Metrics",
    "Moment",
    "Observation",
    "Scores",
    "SupervisedTrainer",
    "apply_tensor_op",
    "build_from_config",
    "checkpoint_indices",
    "load_checkpoint",
    "load_config",
]
