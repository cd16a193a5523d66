"""Model diagnostics: how a training goes as a whole, with a health score whose parts can be seen."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.dynamics import Fit, Stability, State, classify, judge_fit
from sonde.debug.numbers import as_number
from sonde.errors import OptionError


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


WEIGHTS: Final = {"convergence": 0.35, "stability": 0.2, "fit": 0.15, "activations": 0.3}
"""What each part of the health score counts. A part that is not known is left out, and the rest share its weight."""
_CONVERGENCE: Final[dict[State, float]] = {
    "converging": 1.0,
    "converged": 1.0,
    "plateau": 0.4,
    "oscillating": 0.4,
    "diverging": 0.0,
}
_STABILITY: Final[dict[Stability, float]] = {"stable": 1.0, "high_variance": 0.6, "unstable": 0.2}
_FIT: Final[dict[Fit, float]] = {"good": 1.0, "overfitting": 0.4, "underfitting": 0.4}
DEGRADATION: Final = 0.1
DEAD_RATIO: Final = 0.1
SATURATED_RATIO: Final = 0.05
MEMORY_GROWTH: Final = 2.0
_MAX_METRICS: Final = 10_000
_MAX_LAYERS: Final = 10_000
_MAX_ALERTS: Final = 1000

Kind = Literal["performance_degradation", "memory_growth", "dead_neurons", "saturated_neurons", "diverging", "plateau"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticAlert:
    """Something that went wrong, told once."""

    kind: Kind
    severity: Literal["info", "warning", "critical"]
    message: str
    step: int
    layer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDynamics:
    """The verdict on the loss, with the numbers behind it."""

    convergence_status: State
    stability: Stability
    fit: Fit
    initial_loss: float
    best_loss: float
    recent_loss: float
    scatter: float
    learning_efficiency: float | None
    """Share of the initial loss that is gone."""
    steps: int
    recommendations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHealth:
    """The score is the sum of parts times weights, from 0 to 1; None if no part is known."""

    score: float | None
    parts: dict[str, float]
    weights: dict[str, float]
    status: Literal["healthy", "fair", "poor", "unknown"]


class ModelDiagnostics:
    """Takes metrics, an architecture and layer statistics, and judges them.

    Example:
        diagnostics = ModelDiagnostics()
        for step in range(20):
            diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=1.0 / (step + 1)))
        diagnostics.analyze_training_dynamics().convergence_status   # "converging"

    """

    def __init__(self) -> None:
        self.step = 0
        self.architecture: ModelArchitectureInfo | None = None
        self._metrics: deque[ModelPerformanceMetrics] = deque(maxlen=_MAX_METRICS)
        self._layers: OrderedDict[str, LayerActivationStats] = OrderedDict()
        self._alerts: deque[DiagnosticAlert] = deque(maxlen=_MAX_ALERTS)
        self._told: set[tuple[Kind, str | None]] = set()

    # ------------------------------------------------------------------ recording

    def record_performance(self, metrics: ModelPerformanceMetrics) -> None:
        """Take the metrics of a step."""
        _check_kind("record_performance", metrics, ModelPerformanceMetrics)
        self.step = max(self.step, metrics.training_step)
        self._metrics.append(metrics)
        self._watch_performance()

    def record_architecture(self, architecture: ModelArchitectureInfo) -> None:
        """Take what the model is made of; `describe_architecture(model)` tells it."""
        _check_kind("record_architecture", architecture, ModelArchitectureInfo)
        self.architecture = architecture

    def record_layer_stats(self, stats: LayerActivationStats) -> None:
        """Take what a layer put out; the last word on a layer counts."""
        _check_kind("record_layer_stats", stats, LayerActivationStats)
        self._layers[stats.layer_name] = stats
        while len(self._layers) > _MAX_LAYERS:
            self._layers.popitem(last=False)
        self._watch_layer(stats)

    def record_training_dynamics(self, step: int, loss: float, validation_loss: float | None = None) -> None:
        """Take the losses of a step."""
        self.record_performance(ModelPerformanceMetrics(training_step=step, loss=loss, validation_loss=validation_loss))

    def increment_step(self) -> None:
        """Begin the next step."""
        self.step += 1

    # ------------------------------------------------------------------ asking

    def get_metrics(self) -> list[ModelPerformanceMetrics]:
        """Return the last metrics, oldest first."""
        return list(self._metrics)

    def get_layer_stats(self) -> list[LayerActivationStats]:
        """Return the last word on every layer."""
        return list(self._layers.values())

    def get_alerts(self) -> list[DiagnosticAlert]:
        """Return the alerts, oldest first."""
        return list(self._alerts)

    # ------------------------------------------------------------------ conclusions

    def analyze_training_dynamics(self) -> TrainingDynamics:
        """Judge the training by its losses, oldest first."""
        losses = self._curve("loss")
        found = classify(losses)
        fit = self._fit()
        gone = None
        if np.isfinite(found.initial) and found.initial:
            gone = (found.initial - found.recent) / abs(found.initial)
        return TrainingDynamics(
            convergence_status=found.state,
            stability=found.stability,
            fit=fit,
            initial_loss=found.initial,
            best_loss=found.best,
            recent_loss=found.recent,
            scatter=found.scatter,
            learning_efficiency=gone,
            steps=len(losses),
            recommendations=tuple(_recommend(found.state, found.stability, fit)),
        )

    def assess_health(self) -> ModelHealth:
        """Weigh what is known into one number, and show the weights."""
        dynamics = self.analyze_training_dynamics()
        parts: dict[str, float] = {}
        if dynamics.convergence_status != "unknown":
            parts["convergence"] = _CONVERGENCE[dynamics.convergence_status]
        if dynamics.stability != "unknown":
            parts["stability"] = _STABILITY[dynamics.stability]
        if dynamics.fit != "unknown":
            parts["fit"] = _FIT[dynamics.fit]
        activations = self._activation_part()
        if activations is not None:
            parts["activations"] = activations
        total = sum(WEIGHTS[part] for part in parts)
        if not total:
            return ModelHealth(score=None, parts={}, weights={}, status="unknown")
        weights = {part: WEIGHTS[part] / total for part in parts}
        score = sum(weights[part] * value for part, value in parts.items())
        status: Literal["healthy", "fair", "poor"] = "healthy" if score >= 0.8 else "fair" if score >= 0.5 else "poor"
        return ModelHealth(score=score, parts=parts, weights=weights, status=status)

    def generate_report(self) -> dict[str, Any]:
        """Return everything in short, for JSON."""
        return {
            "architecture": None if self.architecture is None else asdict(self.architecture),
            "dynamics": asdict(self.analyze_training_dynamics()),
            "health": asdict(self.assess_health()),
            "layers": [asdict(stats) for stats in self._layers.values()],
            "alerts": [asdict(alert) for alert in self._alerts],
            "last_metrics": asdict(self._metrics[-1]) if self._metrics else None,
        }

    # ------------------------------------------------------------------ how

    def _curve(self, name: str) -> NDArray[np.float64]:
        values = (getattr(metrics, name) for metrics in self._metrics)
        return np.array([value for value in values if value is not None], dtype=np.float64)

    def _fit(self) -> Fit:
        """Judge by those records that hold both losses: without validation data nothing can be said."""
        both = [m for m in self._metrics if m.validation_loss is not None]
        train = np.array([m.loss for m in both], dtype=np.float64)
        validation = np.array([m.validation_loss for m in both], dtype=np.float64)
        return judge_fit(train, validation)

    def _activation_part(self) -> float | None:
        known = [
            stats
            for stats in self._layers.values()
            if stats.dead_neurons_ratio is not None or stats.saturated_neurons_ratio is not None
        ]
        if not known:
            return None
        ill = sum(
            (stats.dead_neurons_ratio or 0) > DEAD_RATIO or (stats.saturated_neurons_ratio or 0) > SATURATED_RATIO
            for stats in known
        )
        return 1 - ill / len(known)

    def _watch_performance(self) -> None:
        dynamics = classify(self._curve("loss")) if len(self._metrics) % 10 == 0 else None
        if dynamics is not None and dynamics.state == "diverging":
            self._alert("diverging", "critical", f"the loss rises: best {dynamics.best:.4g}, now {dynamics.recent:.4g}")
        accuracies = self._curve("accuracy")
        if len(accuracies) >= 10:
            best, recent = float(np.max(accuracies[:-3])), float(np.median(accuracies[-3:]))
            if recent < best * (1 - DEGRADATION):
                what = f"accuracy fell from {best:.4g} to {recent:.4g}"
                self._alert("performance_degradation", "warning", what)
        memory = self._curve("memory_usage_mb")
        if len(memory) >= 20:
            early, late = float(np.median(memory[5:10])), float(np.median(memory[-5:]))
            if early > 0 and late > MEMORY_GROWTH * early:
                self._alert("memory_growth", "warning", f"memory grew from {early:.0f} to {late:.0f} MB")

    def _watch_layer(self, stats: LayerActivationStats) -> None:
        name = stats.layer_name
        if (stats.dead_neurons_ratio or 0) > DEAD_RATIO:
            self._alert(
                "dead_neurons", "warning", f"{name}: {stats.dead_neurons_ratio:.0%} of its units are dead", name
            )
        if (stats.saturated_neurons_ratio or 0) > SATURATED_RATIO:
            share = stats.saturated_neurons_ratio
            self._alert("saturated_neurons", "warning", f"{name}: {share:.0%} of its units are saturated", name)

    def _alert(
        self, kind: Kind, severity: Literal["info", "warning", "critical"], message: str, layer: str | None = None
    ) -> None:
        if (kind, layer) not in self._told:
            self._told.add((kind, layer))
            self._alerts.append(
                DiagnosticAlert(kind=kind, severity=severity, message=message, step=self.step, layer=layer)
            )


def _check_kind(verb: str, given: Any, wanted: type) -> None:
    if not isinstance(given, wanted):
        raise OptionError(f"{verb}(...) takes a {wanted.__name__}(...); got {type(given).__name__}.")


def _recommend(state: State, stability: Stability, fit: Fit) -> list[str]:
    advice: Mapping[str, str] = {
        "diverging": "The loss rises: lower the learning rate, clip gradients, look for bad data.",
        "oscillating": "The loss swings: lower the learning rate or the momentum.",
        "plateau": "The loss does not move: look at gradients and learning rate; sonde.checkup tells more.",
        "unstable": "Losses scatter widely: use larger batches or a lower learning rate.",
        "overfitting": "Validation gets worse while training gets better: regularise, add data, or stop earlier.",
        "underfitting": "Training itself does not get better: use a larger model, or train longer at a higher rate.",
    }
    return [advice[word] for word in (state, stability, fit) if word in advice]
