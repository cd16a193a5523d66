"""Model diagnostics: how a training goes as a whole. Verdicts and health are the doctor's."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.debug.alerts import AlertBook, DiagnosticAlert, make_finding
from sonde.debug.numbers import as_number
from sonde.diagnosis.dynamics import Fit, Stability, State, classify, judge_fit
from sonde.diagnosis.judgement import Moment, ScalarJudge, Word, health, level_now, loss_now, units_now
from sonde.errors import OptionError
from sonde.records import Finding, Severity

if TYPE_CHECKING:
    from sonde.debug.architecture import ArchitectureEvaluation

_MAX_METRICS: Final = 10_000
_MAX_LAYERS: Final = 10_000
_RECENT: Final = 200
"""How many of the last metrics a single step is compared with."""
_WORDS: Final = {
    "loss_divergence": "diverging",
    "not_learning": "plateau",
    "loss_plateau": "plateau",
    "retained_graph_leak": "memory_growth",
    "nan_in_loss": "nan_loss",
}
"""By kind of finding: what its alert is called here."""
_DECLINES: Final = {
    "accuracy": ("performance_degradation", "accuracy"),
    "throughput_samples_per_sec": ("throughput_degradation", "throughput (samples per second)"),
    "gpu_utilization": ("low_device_use", "device use"),
}
"""By metric that should not fall: the kind of its alert, and its name in words."""
_ADVICE: Final = {
    "diverging": "The loss rises: lower the learning rate, clip gradients, look for bad data.",
    "oscillating": "The loss swings: lower the learning rate or the momentum.",
    "plateau": "The loss does not move: look at gradients and learning rate; sonde.checkup looks closer.",
    "unstable": "Losses scatter widely: use larger batches or a lower learning rate.",
    "overfitting": "Validation gets worse while training gets better: regularise, add data, or stop earlier.",
    "underfitting": "Training itself does not get better: use a larger model, or train longer at a higher rate.",
    "throughput_degradation": "Profile a step (DebugConfig(enable_profiling=True)): look for a loader that waits, or "
    "work that grows with the steps.",
    "low_device_use": "Keep the device busy: more loader workers, larger batches, fewer .item() calls in a step.",
    "performance_degradation": "Compare with the best step: look at the learning rate and the data since then.",
    "loss_spike": "Look at the batch of this step, and clip gradients.",
    "nan_loss": "Find the first operation that is not finite: sonde.watch names it.",
    "dead_neurons": "Lower the learning rate, or use LeakyReLU or GELU.",
    "saturated_neurons": "Scale down what goes in, normalise it, or use an activation that does not saturate.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPerformanceMetrics:
    """Metrics of a training at a step. Leave out what is not known.

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
    receptive_field: tuple[int, ...] | None = None
    """Of a plain chain of convolutions and poolings: how much of the input one output sees, for each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivationStats:
    """Statistics of a layer's outputs."""

    layer_name: str
    mean_activation: float
    std_activation: float | None = None
    min_activation: float | None = None
    max_activation: float | None = None
    dead_neurons_ratio: float | None = None
    saturated_neurons_ratio: float | None = None
    sparsity: float | None = None
    output_shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDynamics:
    """How the loss moves, with the numbers behind it."""

    convergence_status: State
    """`non-finite` if the last loss is NaN or infinite."""
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
    """The doctor's rating of everything that was found, from 0 to 1; None if nothing could be judged."""

    score: float | None
    status: Word
    """With a critical finding it is never `healthy`."""
    parts: dict[str, float]
    """The score of each part that is known: `training` (losses and metrics), `activations` (layers)."""
    findings: tuple[str, ...]
    """What lowers the score, in sentences."""


class ModelDiagnostics:
    """Takes metrics, an architecture and layer statistics, and presents the doctor's judgement on them.

    Args:
        on_alert: Called with every alert.
        enabled: Whether to record anything at all.

    Example:
        diagnostics = ModelDiagnostics()
        for step in range(20):
            diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=1.0 / (step + 1)))
        diagnostics.analyze_training_dynamics().convergence_status   # "converging"

    """

    def __init__(self, on_alert: Callable[[DiagnosticAlert], None] | None = None, *, enabled: bool = True) -> None:
        self.step = 0
        self.architecture: ModelArchitectureInfo | None = None
        self.evaluation: ArchitectureEvaluation | None = None
        """How well the architecture uses its parameters, where that was evaluated."""
        self.known_findings: Callable[[], Iterable[Finding]] = tuple
        """Returns what is wrong with the run that the metrics belong to."""
        self._enabled = enabled
        self._metrics: deque[ModelPerformanceMetrics] = deque(maxlen=_MAX_METRICS)
        self._recent: dict[str, deque[float]] = {}
        self._layers: OrderedDict[str, LayerActivationStats] = OrderedDict()
        self._alerts = AlertBook[DiagnosticAlert](on_alert)
        self._start_judging()

    # ------------------------------------------------------------------ recording

    def record_performance(self, metrics: ModelPerformanceMetrics) -> None:
        """Record the metrics of a step."""
        _check_kind("record_performance", metrics, ModelPerformanceMetrics)
        if self._enabled:
            self.step = max(self.step, metrics.training_step)
            self._metrics.append(metrics)
            self._total += 1
            self._check_step(metrics)
            self._check_curve(metrics)

    def record_architecture(self, architecture: ModelArchitectureInfo) -> None:
        """Record what the model is made of; `describe_architecture(model)` finds it."""
        _check_kind("record_architecture", architecture, ModelArchitectureInfo)
        self.architecture = architecture

    def record_layer_stats(self, stats: LayerActivationStats) -> None:
        """Record statistics of a layer's outputs; the last ones of a layer count."""
        _check_kind("record_layer_stats", stats, LayerActivationStats)
        if not self._enabled:
            return
        self._layers[stats.layer_name] = stats
        while len(self._layers) > _MAX_LAYERS:
            name, _ = self._layers.popitem(last=False)
            self._alerts.forget(name)
        wrong = self._layer_findings(stats)
        self._alerts.update(stats.layer_name, {finding.kind: DiagnosticAlert(finding) for finding in wrong})

    def record_training_dynamics(self, step: int, loss: float, validation_loss: float | None = None) -> None:
        """Record the losses of a step."""
        self.record_performance(ModelPerformanceMetrics(training_step=step, loss=loss, validation_loss=validation_loss))

    def record_metric(self, name: str, value: float) -> None:
        """Compare a metric that should not fall with its values before: accuracy, throughput, device use."""
        if self._enabled and name in _DECLINES:
            kind, words = _DECLINES[name]
            moment = level_now(words, [*self._values(name), value])
            self._update(name, kind if moment.is_wrong else None, moment, "warning")
            self._values(name).append(value)

    def increment_step(self) -> None:
        """Begin the next step."""
        self.step += 1

    def clear(self) -> None:
        """Forget metrics, layers and alerts; what the model is made of stays."""
        for store in (self._metrics, self._recent, self._layers):
            store.clear()
        self._alerts.clear()
        self._start_judging()

    def _start_judging(self) -> None:
        self._doctor = ScalarJudge()
        self._total = self._last_step = 0
        self._judged: tuple[int, tuple[Finding, ...]] = (0, ())

    # ------------------------------------------------------------------ asking

    def get_metrics(self) -> list[ModelPerformanceMetrics]:
        """Return the last metrics, oldest first."""
        return list(self._metrics)

    def get_alerts(self) -> list[DiagnosticAlert]:
        """Return the alerts, oldest first."""
        return self._alerts.all()

    def losses(self) -> dict[int, float]:
        """Return the losses by step; by their place where steps repeat, as they do when each epoch starts at 0."""
        steps = [metrics.training_step for metrics in self._metrics]
        rising = all(after > before for before, after in itertools.pairwise(steps))
        return {(m.training_step if rising else at): m.loss for at, m in enumerate(self._metrics, 1)}

    # ------------------------------------------------------------------ conclusions

    def judge(self) -> tuple[Finding, ...]:
        """Ask the doctor about the metrics: the rules that `sonde.diagnose` uses for a run."""
        if self._judged[0] != self._total:
            self._judged = (self._total, self._doctor.look())
        return self._judged[1]

    def analyze_training_dynamics(self) -> TrainingDynamics:
        """Describe how the loss moves, oldest first."""
        losses = np.array([metrics.loss for metrics in self._metrics], dtype=np.float64)
        found = classify(losses)
        fit = self._fit()
        gone = None
        if np.isfinite(found.initial) and found.initial:
            gone = (found.initial - found.recent) / abs(found.initial)
        advice = [_ADVICE[word] for word in (found.state, found.stability, fit) if word in _ADVICE]
        advice += [f"{finding.cause} {finding.fix}" for finding in self.judge() if finding.severity != "info"]
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
            recommendations=tuple(advice),
        )

    def assess_health(self) -> ModelHealth:
        """Rate what is known. The most severe finding decides the status."""
        known = {finding.kind: finding for finding in (*self.judge(), *self.known_findings())}
        layers = [finding for stats in self._layers.values() for finding in self._layer_findings(stats)]
        parts = {}
        if self._metrics:
            parts["training"] = health(known.values()).score
        if any(_knows_units(stats) for stats in self._layers.values()):
            parts["activations"] = health(layers).score
        if not parts and not known:
            return ModelHealth(score=None, status="unknown", parts={}, findings=())
        found = [*known.values(), *layers]
        rating = health(found)
        return ModelHealth(
            score=rating.score,
            status=rating.word,
            parts={name: score for name, score in parts.items() if score is not None},
            findings=tuple(finding.cause for finding in found),
        )

    def generate_report(self) -> dict[str, Any]:
        """Return a summary as JSON-ready values."""
        return {
            "architecture": None if self.architecture is None else asdict(self.architecture),
            "architecture_evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "dynamics": asdict(self.analyze_training_dynamics()),
            "health": asdict(self.assess_health()),
            "layers": [asdict(stats) for stats in self._layers.values()],
            "alerts": [alert.to_json() for alert in self.get_alerts()],
            "last_metrics": asdict(self._metrics[-1]) if self._metrics else None,
        }

    # ------------------------------------------------------------------ how

    def _fit(self) -> Fit:
        """Judge by those records that hold both losses: without validation data nothing can be said."""
        both = [m for m in self._metrics if m.validation_loss is not None]
        train: NDArray[np.float64] = np.array([m.loss for m in both], dtype=np.float64)
        validation = np.array([m.validation_loss for m in both], dtype=np.float64)
        return judge_fit(train, validation)

    def _check_step(self, metrics: ModelPerformanceMetrics) -> None:
        """Compare this step with those before it."""
        loss = loss_now(metrics.loss, self._values("loss"))
        words = {"non-finite": "nan_loss" if math.isnan(metrics.loss) else "infinite_loss", "unstable": "loss_spike"}
        self._update("loss", words.get(loss.verdict), loss, "critical" if loss.verdict == "non-finite" else "warning")
        self._values("loss").append(metrics.loss)
        for name in _DECLINES:
            value = getattr(metrics, name)
            if value is not None:
                self.record_metric(name, value)

    def _values(self, name: str) -> deque[float]:
        return self._recent.setdefault(name, deque(maxlen=_RECENT))

    def _check_curve(self, metrics: ModelPerformanceMetrics) -> None:
        """Ask the doctor about the whole curve now and then. Its steps rise across epochs."""
        self._last_step = max(self._last_step + 1, metrics.training_step)
        memory = None if metrics.memory_usage_mb is None else metrics.memory_usage_mb * 2**20
        known = {"loss": metrics.loss, "val_loss": metrics.validation_loss, "process.rss": memory}
        if not self._doctor.add(self._last_step, {name: value for name, value in known.items() if value is not None}):
            return
        found = {finding.kind: finding for finding in self.judge() if finding.severity != "info"}
        now = {kind: DiagnosticAlert(_named(finding, _WORDS.get(kind, kind))) for kind, finding in found.items()}
        now.pop("nan_in_loss", None)  # reported at its step
        self._alerts.update("training", now)

    def _update(self, subject: str, kind: str | None, moment: Moment, severity: Severity) -> None:
        found = {}
        if kind is not None:
            fix = _ADVICE.get(kind, "")
            found[kind] = DiagnosticAlert(make_finding(kind, severity, moment.words, step=self.step, fix=fix))
        self._alerts.update(subject, found)

    def _layer_findings(self, stats: LayerActivationStats) -> list[Finding]:
        dead = units_now(dead=stats.dead_neurons_ratio)
        saturated = units_now(saturated=stats.saturated_neurons_ratio)
        wrong = {"dead_neurons": dead, "saturated_neurons": saturated}
        return [
            make_finding(
                kind, "warning", f"{stats.layer_name}: {moment.words}", step=self.step, site=stats.layer_name,
                fix=_ADVICE[kind],
            )
            for kind, moment in wrong.items()
            if moment.is_wrong
        ]  # fmt: skip


def _knows_units(stats: LayerActivationStats) -> bool:
    return stats.dead_neurons_ratio is not None or stats.saturated_neurons_ratio is not None


def _named(finding: Finding, word: str) -> Finding:
    return replace(finding, data=finding.data | {"alert": word})


def _check_kind(verb: str, given: Any, wanted: type) -> None:
    if not isinstance(given, wanted):
        raise OptionError(f"{verb}(...) takes a {wanted.__name__}(...); got {type(given).__name__}.")


def _number(name: str, value: Any) -> float:
    if name == "timestamp" and hasattr(value, "timestamp"):
        return float(value.timestamp())
    return as_number(value, name)
