"""What people tell the model diagnostics, as plain records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sonde.debug.numbers import as_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPerformanceMetrics:
    """How a training does at a step. What is not known is left out.

    Numbers may be tensors; their values are taken, so that no graph is kept alive. A time may be a `datetime`.
    """

    training_step: int
    loss: float
    accuracy: float | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    throughput_samples_per_sec: float | None = None
    memory_usage_mb: float | None = None
    gpu_utilization: float | None = None
    timestamp: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                object.__setattr__(self, name, _number(name, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitectureInfo:
    """What a model is made of."""

    total_parameters: int
    trainable_parameters: int
    model_size_mb: float
    layer_count: int
    layer_types: dict[str, int] = field(default_factory=dict)
    """How many modules of each class, leaves only."""
    depth: int | None = None
    """The deepest nesting of modules."""
    dtypes: dict[str, int] = field(default_factory=dict)
    """How many parameters of each type."""
    flops_per_forward: int | None = None
    """Operations of one forward with the example that was given."""
    receptive_field: tuple[int, ...] | None = None
    """Of a plain chain of convolutions and poolings: how much of the input one output sees, for each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivationStats:
    """What a layer put out."""

    layer_name: str
    mean_activation: float
    std_activation: float | None = None
    min_activation: float | None = None
    max_activation: float | None = None
    dead_neurons_ratio: float | None = None
    saturated_neurons_ratio: float | None = None
    sparsity: float | None = None
    output_shape: tuple[int, ...] = ()


def _number(name: str, value: Any) -> float:
    if name == "timestamp" and hasattr(value, "timestamp"):
        return float(value.timestamp())
    return as_number(value, name)
