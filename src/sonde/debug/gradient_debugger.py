"""The gradient debugger: follows the gradient of every layer, and presents the doctor's judgement on them."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from sonde.core.arguments import whole_number
from sonde.debug.alerts import AlertBook, GradientAlert, make_finding
from sonde.debug.gradient_layer import (
    PROBLEMS,
    RELATIVE,
    ActivityWindow,
    GradientPoint,
    GradientThresholds,
    LayerGradients,
    Problem,
    Trend,
    UnitActivity,
    trend_of,
)
from sonde.debug.numbers import as_array, as_floats
from sonde.diagnosis.judgement import (
    Curves,
    Health,
    Judgement,
    Word,
    health,
    judge_curves,
    verdict_of,
)
from sonde.errors import OptionError
from sonde.records import Finding, Reading, Severity

_KINDS: Final[dict[Problem, tuple[str, Severity]]] = {
    "nonfinite": ("nan_backward", "critical"),
    "no_gradient": ("unused_parameters", "warning"),
    "exploding": ("exploding_gradient", "warning"),
    "vanishing": ("vanishing_gradient", "warning"),
    "oscillating": ("loss_oscillation", "info"),
}
"""By problem: the kind of finding that the doctor has for it, and its severity there."""
_ADVICE: Final[dict[Problem, str]] = {
    "nonfinite": "Find the first operation that is not finite (sonde.watch names it) before changing anything else.",
    "no_gradient": "Look for detach(), no_grad() or .data between these layers and the loss, or for frozen parameters.",
    "exploding": "Lower the learning rate, clip with torch.nn.utils.clip_grad_norm_, or normalise what goes in.",
    "vanishing": "Use residual connections, normalisation, ReLU-like activations or a larger initial scale.",
    "oscillating": "Lower the learning rate or the momentum, or use larger batches.",
}
_MAX_LAYERS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHealth:
    """The state of a layer."""

    layer: str
    health: Word
    norm: float
    usual: float | None
    """The median norm of the steps before; None while there are too few."""
    problems: tuple[Problem, ...]
    trend: Trend
    words: str
    """What was found: by the doctor over all steps, or in the last steps only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlowAnalysis:
    """The state of all layers. Health and score are those of the doctor's findings on the recorded steps."""

    overall_health: Word
    score: float | None
    """From 0 to 1; None before any gradient."""
    parts: dict[str, float]
    """By problem: the share of layers that do not have it."""
    layers: tuple[LayerHealth, ...]
    dead_units: tuple[UnitActivity, ...]
    findings: tuple[Finding, ...]
    recommendations: tuple[str, ...]

    def having(self, problem: Problem) -> list[str]:
        """Return the layers with a problem."""
        return [layer.layer for layer in self.layers if problem in layer.problems]

    def to_json(self) -> dict[str, Any]:
        """Return the analysis as JSON-ready values."""
        plain = {name: getattr(self, name) for name in ("overall_health", "score", "parts", "recommendations")}
        return plain | {
            "layers": [asdict(layer) for layer in self.layers],
            "dead_units": [asdict(units) for units in self.dead_units],
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConflict:
    """Two gradients: they pull against each other where the cosine is negative."""

    first: str
    second: str
    cosine: float | None
    """None if one of them is zero."""

    @property
    def conflicting(self) -> bool:
        """Whether a step along one undoes some of the other."""
        return self.cosine is not None and self.cosine < 0


class GradientDebugger:
    """Follows gradients that are passed in or recorded from a model.

    Args:
        max_history: How many steps of each layer are remembered.
        thresholds: Fixed limits for norms; by default a layer is compared with its own past.
        on_alert: Called with every alert.
        accepts: Called with what is passed in and its layer; returns whether to look at it.

    Example:
        debugger = GradientDebugger()
        debugger.record_gradient_flow("layer_1", [0.01, 0.02])
        debugger.analyze_gradient_flow().overall_health

    """

    def __init__(
        self,
        max_history: int = 100,
        thresholds: GradientThresholds = RELATIVE,
        *,
        on_alert: Callable[[GradientAlert], None] | None = None,
        accepts: Callable[[str, str | None], bool] | None = None,
    ) -> None:
        self.max_history = whole_number("max_history", max_history)
        if not isinstance(thresholds, GradientThresholds):
            raise OptionError(f"thresholds takes GradientThresholds(vanishing=..., exploding=...); got {thresholds!r}.")
        self.thresholds = thresholds
        self.step = 0
        self.step_now: Callable[[], int] | None = None
        """Returns the current step, where it is known; else a layer that is recorded again begins the next one."""
        self.known_losses: Callable[[], Mapping[int, float]] = dict
        """Returns the losses of the training, which the doctor looks at beside the gradients."""
        self.known_findings: Callable[[], Iterable[Finding]] = tuple
        """Returns what is wrong with the run that the gradients belong to."""
        self._accepts = accepts or (lambda what, layer: True)
        self._layers: OrderedDict[str, LayerGradients] = OrderedDict()
        self._alerts = AlertBook[GradientAlert](on_alert)
        self._activity: OrderedDict[str, ActivityWindow] = OrderedDict()
        self._watched_units: OrderedDict[str, UnitActivity] = OrderedDict()

    # ------------------------------------------------------------------ recording

    def record_gradient_flow(
        self, layer: str, values: Any, mean: float | None = None, std: float | None = None, *, step: int | None = None
    ) -> None:
        """Record the gradient of a layer: its values, or its norm with mean and standard deviation.

        A layer that is recorded a second time begins the next step, unless `step` is given or the session has a model:
        then it is the current step, of which the first record counts.
        """
        if self._accepts(f"gradient {layer}", layer):
            at = self._step_of(layer) if step is None else step
            self.record_point(layer, self._point(layer, values, mean, std, at))

    def record_point(self, layer: str, point: GradientPoint, *, check: bool = True) -> None:
        """Record a summary of a layer's gradient; `check` compares it with the steps before it, for alerts."""
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = LayerGradients(layer, self.max_history)
            self._forget_oldest()
        self.step = max(self.step, point.step)
        if known.add(point) and check:
            self._alerts.update(layer, {problem: self._alert(known, problem) for problem in self._problems_now(known)})

    def record_activations(self, layer: str, activations: Any) -> None:
        """Record a batch of a layer's activations, to find dead units: `[samples, units, ...]`."""
        if self._accepts(f"activations {layer}", layer):
            self._activity.setdefault(layer, ActivityWindow(layer)).add(activations)
            self._forget_oldest()

    def record_units(self, units: UnitActivity) -> None:
        """Record how many units of a watched layer were ever active."""
        self._watched_units[units.layer] = units
        self._forget_oldest()

    def next_step(self) -> None:
        """Begin the next step."""
        self.step += 1

    def reset(self) -> None:
        """Forget everything."""
        self.step = 0
        for store in (self._layers, self._activity, self._watched_units):
            store.clear()
        self._alerts.clear()

    def _forget_oldest(self) -> None:
        while len(self._layers) > _MAX_LAYERS:
            name, _ = self._layers.popitem(last=False)
            self._alerts.forget(name)
        for store in (self._activity, self._watched_units):
            while len(store) > _MAX_LAYERS:
                store.popitem(last=False)

    # ------------------------------------------------------------------ asking

    @property
    def has_history(self) -> bool:
        """Whether any gradient was recorded."""
        return bool(self._layers)

    def get_layer_history(self, layer: str) -> list[GradientPoint]:
        """Return the last steps of a layer, oldest first."""
        known = self._layers.get(layer)
        return [] if known is None else list(known.points)

    def get_layer_alerts(self, layer: str) -> list[GradientAlert]:
        """Return the alerts of a layer, oldest first."""
        return [alert for alert in self._alerts.all() if alert.layer == layer]

    def get_alerts(self) -> list[GradientAlert]:
        """Return the last alerts of all layers, oldest first."""
        return self._alerts.all()

    def get_status(self) -> dict[str, Any]:
        """Return how much was recorded and how healthy it is."""
        analysis = self.analyze_gradient_flow()
        return {
            "step": self.step,
            "layers": len(self._layers),
            "alerts": len(self._alerts),
            "overall_health": analysis.overall_health,
            "score": analysis.score,
        }

    def dead_units(self) -> list[UnitActivity]:
        """Return for each layer whose units were looked at how many were never active.

        Of a watched model these are its rectifiers (ReLU, ReLU6); without any, weights with units that never had a
        gradient. Activations that were passed in or recorded by a hook also show which units they are.
        """
        found = {name: window.summary() for name, window in self._activity.items()}
        summaries = [summary for summary in found.values() if summary is not None]
        watched = [units for units in self._watched_units.values() if units.layer not in found]
        by_activation = [units for units in watched if units.measured == "activations"]
        return summaries + (by_activation or ([] if summaries else watched))

    # ------------------------------------------------------------------ conclusions

    def judge(self) -> Judgement:
        """Ask the doctor about what was recorded: the rules that `sonde.diagnose` uses for a run.

        Findings of the run that the gradients belong to count as well.
        """
        active = {name: window.curves() for name, window in self._activity.items()}
        judged = judge_curves(
            Curves(
                losses=self.known_losses(),
                gradients={name: layer.curve() for name, layer in self._layers.items()},
                active={name: curves[0] for name, curves in active.items()},
                samples={name: curves[1] for name, curves in active.items()},
            )
        )
        of_run = {finding.kind: finding for finding in self.known_findings()}
        own = tuple(finding for finding in judged.findings if finding.kind not in of_run)
        return replace(judged, findings=(*of_run.values(), *own), symptoms=(*of_run.values(), *judged.symptoms))

    def analyze_gradient_flow(self) -> GradientFlowAnalysis:
        """Return the doctor's judgement on all layers, over the steps that are remembered.

        What only the last step shows makes the health a warning at most, unless a gradient is not finite.
        """
        judged = self.judge()
        layers = tuple(self._health(layer, judged) for layer in self._layers.values())
        rating = self._rate(layers, judged.findings)
        shares = {problem: sum(problem in layer.problems for layer in layers) for problem in _KINDS}
        return GradientFlowAnalysis(
            overall_health=rating.word if layers else "unknown",
            score=rating.score if layers else None,
            parts={problem: 1 - count / len(layers) for problem, count in shares.items() if layers},
            layers=layers,
            dead_units=tuple(self.dead_units()),
            findings=judged.findings,
            recommendations=tuple(_recommend(layers, judged)),
        )

    def _rate(self, layers: tuple[LayerHealth, ...], findings: tuple[Finding, ...]) -> Health:
        known = {PROBLEMS.get(word) for finding in findings if (word := verdict_of(finding)) is not None}
        now = {problem for layer in layers for problem in layer.problems} - known
        return health([*findings, *(self._example(problem) for problem in sorted(now))])

    def quick_analysis(self) -> dict[str, Any]:
        """Return the health and the layers by problem."""
        analysis = self.analyze_gradient_flow()
        problems = {problem: analysis.having(problem) for problem in _KINDS}
        return {"overall_health": analysis.overall_health, "score": analysis.score} | {
            problem: layers for problem, layers in problems.items() if layers
        }

    def generate_recommendations(self) -> list[str]:
        """Return what to do, the most urgent first."""
        return list(self.analyze_gradient_flow().recommendations)

    def generate_comprehensive_report(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return {
            "step": self.step,
            "analysis": self.analyze_gradient_flow().to_json(),
            "alerts": [alert.to_json() for alert in self._alerts.all()],
            "history": {name: [point.to_json() for point in layer.points] for name, layer in self._layers.items()},
        }

    def generate_enhanced_layer_analysis(self) -> list[dict[str, Any]]:
        """Return every layer in numbers, the least healthy first."""
        order = {"critical": 0, "warning": 1, "unknown": 2, "healthy": 3}
        layers = sorted(self.analyze_gradient_flow().layers, key=lambda layer: order[layer.health])
        return [asdict(layer) | {"steps": self._layers[layer.layer].total} for layer in layers]

    def generate_gradient_flow_visualization(self) -> Any:
        """Return a figure of the norms of all layers over the steps. Needs plotly."""
        from sonde.views import figures

        layers = {
            name: (np.array([point.step for point in layer.points]), layer.norms())
            for name, layer in self._layers.items()
        }
        return figures.gradient_flow_over_time(layers)

    def get_performance_insights(self) -> list[str]:
        """Describe the norms of all layers in sentences."""
        layers = [self._health(layer, None) for layer in self._layers.values()]
        flowing = [layer for layer in layers if math.isfinite(layer.norm) and layer.norm > 0]
        if len(flowing) < 2:
            return []
        least, most = min(flowing, key=lambda item: item.norm), max(flowing, key=lambda item: item.norm)
        span = f"{least.layer} ({least.norm:.3g}) to {most.layer} ({most.norm:.3g})"
        sentences = [f"Norms span a factor of {most.norm / least.norm:.3g}: from {span}."]
        rising = [layer.layer for layer in layers if layer.trend == "rising"]
        if rising:
            sentences.append(f"Norms rise in {len(rising)} of {len(layers)} layers, such as {rising[0]}.")
        return sentences

    def analyze_gradient_conflicts(self, gradients: Mapping[str, Any]) -> list[GradientConflict]:
        """Compare the gradients of several losses or batches, by name, and return the cosines of all pairs.

        See `loss_gradients` for how to get them from a model.
        """
        rows = {name: as_floats(as_array(values, f"gradient of {name!r}")) for name, values in gradients.items()}
        return [_conflict(a, rows[a], b, rows[b]) for a, b in itertools.combinations(rows, 2)]

    # ------------------------------------------------------------------ how

    def _step_of(self, layer: str) -> int:
        if self.step_now is not None:
            return self.step_now()
        known = self._layers.get(layer)
        if known is not None and known.points and known.points[-1].step == self.step:
            self.step += 1
        return self.step

    def _point(self, layer: str, values: Any, mean: float | None, std: float | None, step: int) -> GradientPoint:
        if mean is not None or isinstance(values, int | float):
            return _point_of_norm(layer, float(values), mean, std, step)
        flat = as_floats(as_array(values, f"gradient of {layer!r}"))
        with np.errstate(over="ignore", invalid="ignore"):
            return GradientPoint.of(Reading.of(flat, step=step), step)

    def _problems_now(self, layer: LayerGradients) -> list[Problem]:
        """Return what the last steps of a layer show."""
        if not layer.points[-1].nonfinite and layer.silence(self.step).is_wrong:
            return ["no_gradient"]
        problem = PROBLEMS.get(layer.moment(self.thresholds).verdict)
        found: list[Problem] = [] if problem is None else [problem]
        return [*found, "oscillating"] if layer.swinging and problem != "nonfinite" else found

    def _words(self, layer: LayerGradients, problem: Problem) -> str:
        """State a problem, and over which steps it shows."""
        if problem == "no_gradient":
            return f"no gradient: {layer.silence(self.step).words}"
        if problem == "oscillating":
            return f"oscillating gradient: its norm swings regularly over the last {len(layer.points)} steps"
        return f"{problem} gradient: {layer.moment(self.thresholds).words}"

    def _alert(self, layer: LayerGradients, problem: Problem) -> GradientAlert:
        kind, severity = _KINDS[problem]
        last = layer.points[-1]
        message = f"{layer.name}: {self._words(layer, problem)}"
        about: dict[str, Any] = {"site": layer.name, "fix": _ADVICE[problem], "word": problem, "norm": last.norm}
        return GradientAlert(make_finding(kind, severity, message, step=last.step, **about))

    def _example(self, problem: Problem) -> Finding:
        """Return a finding of the severity that a problem has while it lasts."""
        kind, severity = _KINDS[problem]
        return make_finding(kind, severity, problem, step=self.step)

    def _health(self, layer: LayerGradients, judged: Judgement | None) -> LayerHealth:
        trend = trend_of(layer.dynamics())
        moment = layer.moment(self.thresholds)
        now = self._problems_now(layer)
        found = [] if judged is None else judged.about(layer.name)
        lasting = [PROBLEMS[word] for finding in found if (word := verdict_of(finding)) in PROBLEMS]
        problems = tuple(dict.fromkeys([*now, *lasting]))
        words = [self._words(layer, problem) for problem in now if problem not in lasting]
        return LayerHealth(
            layer=layer.name,
            health=health([*(self._example(problem) for problem in problems), *found]).word,
            norm=layer.points[-1].known_norm,
            usual=moment.usual,
            problems=problems,
            trend=trend,
            words="; ".join([*words, *(finding.cause for finding in found)]) or moment.words,
        )


def _point_of_norm(layer: str, norm: float, mean: float | None, std: float | None, step: int) -> GradientPoint:
    if norm < 0:
        raise OptionError(
            f"The gradient of {layer!r} has a norm of {norm:g}; norms are not negative. A single number is taken for "
            "a norm: pass values as a list or a tensor."
        )
    known = None if mean is None else float(mean)
    return GradientPoint(step=step, norm=norm, mean=known, std=std, nonfinite=0 if math.isfinite(norm) else 1)


def _conflict(a: str, left: Any, b: str, right: Any) -> GradientConflict:
    if left.shape != right.shape:
        raise OptionError(f"The gradients of {a!r} and {b!r} have {left.size} and {right.size} elements.")
    lengths = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    cosine = float(left @ right / lengths) if lengths > 0 and math.isfinite(lengths) else None
    return GradientConflict(first=a, second=b, cosine=cosine)


def _recommend(layers: tuple[LayerHealth, ...], judged: Judgement) -> list[str]:
    advice = []
    for problem, text in _ADVICE.items():
        names = [layer.layer for layer in layers if problem in layer.problems]
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            advice.append(f"{problem.replace('_', ' ').capitalize()} in {shown}. {text}")
    known = {kind for kind, _ in _KINDS.values()}
    return advice + [f"{finding.cause} {finding.fix}" for finding in judged.findings if finding.kind not in known]
