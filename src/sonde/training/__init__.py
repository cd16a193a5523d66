"""Train and evaluate models from a config, with a small loop that can be observed at named moments."""

from sonde.training.base_evaluator import BaseEvaluator
from sonde.training.base_trainer import BaseTrainer, SupervisedTrainer
from sonde.training.checkpoints import checkpoint_indices, load_checkpoint
from sonde.training.config import build_from_config, load_config
from sonde.training.datapoints import apply_tensor_op
from sonde.training.early_stopping import EarlyStopping
from sonde.training.moments import Glimpse, Moment, Observation
from sonde.training.scores import Accuracy, IoU, LossPerSample, Metric, Metrics, Scores

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
