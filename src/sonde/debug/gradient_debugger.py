"""The gradient debugger: follows every layer's gradient and says which do not flow as they should, and why."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from sonde.arguments import whole_number
from sonde.debug.gradient_layer import (
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
from sonde.errors import OptionError

Health = Literal["healthy", "warning", "critical", "unknown"]

WEIGHTS: Final = {"finite": 0.4, "flowing": 0.25, "bounded": 0.2, "steady": 0.15}
"""What each part of the health score counts; a part is the share of layers without that problem."""
_PARTS: Final[dict[Problem, str]] = {
    "nonfinite": "finite",
    "no_gradient": "flowing",
    "exploding": "bounded",
    "vanishing": "flowing",
    "oscillating": "steady",
}
_ADVICE: Final[dict[Problem, str]] = {
    "nonfinite": "Find the first operation that is not finite (sonde.watch names it) before changing anything else.",
    "no_gradient": "Look for detach(), no_grad() or .data between these layers and the loss, or for frozen parameters.",
    "exploding": "Lower the learning rate, clip with torch.nn.utils.clip_grad_norm_, or normalise what goes in.",
    "vanishing": "Use residual connections, normalisation, ReLU-like activations or a larger initial scale.",
    "oscillating": "Lower the learning rate or the momentum, or use larger batches.",
}
DEAD_SHARE: Final = 0.1
_MAX_ALERTS: Final = 1000
_MAX_LAYERS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAlert:
    """A layer whose gradient has a problem, told once when it begins."""

    layer: str
    kind: Problem
    step: int
    norm: float
    low: float
    high: float

    @property
    def message(self) -> str:
        """The alert in words."""
        if self.kind in ("exploding", "vanishing"):
            bound = f"> {self.high:.3g}" if self.kind == "exploding" else f"< {self.low:.3g}"
            return f"{self.layer}: {self.kind} gradient at step {self.step}: norm {self.norm:.3g} {bound}"
        return f"{self.layer}: {self.kind.replace('_', ' ')} gradient at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHealth:
    """A layer now."""

    layer: str
    health: Health
    norm: float
    low: float
    high: float
    problems: tuple[Problem, ...]
    trend: Trend


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlowAnalysis:
    """All layers together. `score` is the sum of `parts` times `weights`, from 0 to 1; None before any gradient."""

    overall_health: Health
    score: float | None
    parts: dict[str, float]
    weights: dict[str, float]
    layers: tuple[LayerHealth, ...]
    dead_units: tuple[UnitActivity, ...]
    recommendations: tuple[str, ...]

    def having(self, problem: Problem) -> list[str]:
        """Return the layers with a problem."""
        return [layer.layer for layer in self.layers if problem in layer.problems]


class GradientDebugger:
    """Follows gradients, handed in or recorded from a model.

    Args:
        max_history: How many steps of each layer are remembered.
        thresholds: Fixed bounds for norms; by default a layer is held against its own past.

    Example:
        debugger = GradientDebugger()
        debugger.record_gradient_flow("layer_1", [0.01, 0.02])
        debugger.analyze_gradient_flow().overall_health

    """

    def __init__(self, max_history: int = 100, thresholds: GradientThresholds = RELATIVE) -> None:
        whole_number("max_history", max_history)
        if not isinstance(thresholds, GradientThresholds):
            raise OptionError(f"thresholds takes GradientThresholds(vanishing=..., exploding=...); got {thresholds!r}.")
        self.max_history = max_history
        self.thresholds = thresholds
        self.step = 0
        self._layers: OrderedDict[str, LayerGradients] = OrderedDict()
        self._open: dict[str, set[Problem]] = {}
        self._alerts: deque[GradientAlert] = deque(maxlen=_MAX_ALERTS)
        self._activity: OrderedDict[str, ActivityWindow] = OrderedDict()
        self.step_now: Callable[[], int] | None = None
        """Tells the step under way, where somebody knows it; else each layer's second record begins the next."""

    # ------------------------------------------------------------------ recording

    def record_gradient_flow(
        self, layer: str, values: Any, mean: float | None = None, std: float | None = None, *, step: int | None = None
    ) -> None:
        """Take the gradient of a layer: its values, or its norm with mean and standard deviation.

        A layer that is recorded a second time begins the next step, unless `step` says which it is, or the session has
        a model: then it is the step under way, of which the first word counts.
        """
        point = self._point(layer, values, mean, std, self._step_of(layer) if step is None else step)
        self.record_point(layer, point)

    def record_point(self, layer: str, point: GradientPoint) -> None:
        """Take a summary of a layer's gradient."""
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = LayerGradients(layer, self.max_history)
            self._forget_oldest()
        self.step = max(self.step, point.step)
        if known.add(point):
            self._raise_alerts(known)

    def _forget_oldest(self) -> None:
        while len(self._layers) > _MAX_LAYERS:
            name, _ = self._layers.popitem(last=False)
            self._open.pop(name, None)
        while len(self._activity) > _MAX_LAYERS:
            self._activity.popitem(last=False)

    def record_activations(self, layer: str, activations: Any) -> None:
        """Take a batch of a layer's activations, to tell dead units: `[samples, units, ...]`."""
        self.activity_of(layer).add(activations)

    def activity_of(self, layer: str) -> ActivityWindow:
        """Return the window that remembers a layer's units."""
        window = self._activity.setdefault(layer, ActivityWindow(layer))
        self._forget_oldest()
        return window

    def next_step(self) -> None:
        """Begin the next step."""
        self.step += 1

    def reset(self) -> None:
        """Forget everything."""
        self.step = 0
        for store in (self._layers, self._open, self._activity):
            store.clear()
        self._alerts.clear()

    # ------------------------------------------------------------------ asking

    def get_layer_history(self, layer: str) -> list[GradientPoint]:
        """Return the last steps of a layer, oldest first."""
        known = self._layers.get(layer)
        return [] if known is None else list(known.points)

    def get_layer_alerts(self, layer: str) -> list[GradientAlert]:
        """Return the alerts of a layer, oldest first."""
        return [alert for alert in self._alerts if alert.layer == layer]

    def get_alerts(self) -> list[GradientAlert]:
        """Return the last alerts of all layers, oldest first."""
        return list(self._alerts)

    def get_status(self) -> dict[str, Any]:
        """Return how far the recording is and how it looks."""
        analysis = self.analyze_gradient_flow()
        return {
            "step": self.step,
            "layers": len(self._layers),
            "alerts": len(self._alerts),
            "overall_health": analysis.overall_health,
            "score": analysis.score,
        }

    def dead_units(self) -> list[UnitActivity]:
        """Return the layers of which enough samples were seen, with their dead units."""
        found = (window.summary() for window in self._activity.values())
        return [summary for summary in found if summary is not None]

    # ------------------------------------------------------------------ conclusions

    def analyze_gradient_flow(self) -> GradientFlowAnalysis:
        """Judge all layers as of now."""
        layers = tuple(self._health(layer) for layer in self._layers.values())
        dead = tuple(self.dead_units())
        if not layers:
            return GradientFlowAnalysis(
                overall_health="unknown",
                score=None,
                parts={},
                weights=dict(WEIGHTS),
                layers=(),
                dead_units=dead,
                recommendations=tuple(_recommend(layers, dead)),
            )
        parts = {
            part: 1 - sum(any(_PARTS[p] == part for p in layer.problems) for layer in layers) / len(layers)
            for part in WEIGHTS
        }
        score = sum(WEIGHTS[part] * value for part, value in parts.items())
        return GradientFlowAnalysis(
            overall_health=_overall(layers, score),
            score=score,
            parts=parts,
            weights=dict(WEIGHTS),
            layers=layers,
            dead_units=dead,
            recommendations=tuple(_recommend(layers, dead)),
        )

    def quick_analysis(self) -> dict[str, Any]:
        """Return the verdict and the layers by problem."""
        analysis = self.analyze_gradient_flow()
        problems = {problem: analysis.having(problem) for problem in _PARTS}
        return {"overall_health": analysis.overall_health, "score": analysis.score} | {
            problem: layers for problem, layers in problems.items() if layers
        }

    def generate_recommendations(self) -> list[str]:
        """Return what to do, the most urgent first."""
        return list(self.analyze_gradient_flow().recommendations)

    def generate_comprehensive_report(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "step": self.step,
            "analysis": asdict(self.analyze_gradient_flow()),
            "alerts": [asdict(alert) for alert in self._alerts],
            "history": {name: [asdict(point) for point in layer.points] for name, layer in self._layers.items()},
        }

    def generate_enhanced_layer_analysis(self) -> list[dict[str, Any]]:
        """Return every layer in numbers, the sickest first."""
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
        """Return what the norms say about the training, in sentences."""
        analysis = self.analyze_gradient_flow()
        flowing = [layer for layer in analysis.layers if math.isfinite(layer.norm) and layer.norm > 0]
        if len(flowing) < 2:
            return []
        least, most = min(flowing, key=lambda item: item.norm), max(flowing, key=lambda item: item.norm)
        span = f"{least.layer} ({least.norm:.3g}) to {most.layer} ({most.norm:.3g})"
        sentences = [f"Norms span a factor of {most.norm / least.norm:.3g}: from {span}."]
        rising = [layer.layer for layer in analysis.layers if layer.trend == "rising"]
        if rising:
            sentences.append(f"Norms rise in {len(rising)} of {len(analysis.layers)} layers, such as {rising[0]}.")
        return sentences

    def analyze_gradient_conflicts(self, gradients: Mapping[str, Any]) -> list[GradientConflict]:
        """Compare the gradients of several losses or batches, by name, and return all pairs by their true cosine.

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
            return _told_point(layer, float(values), mean, std, step)
        flat = as_floats(as_array(values, f"gradient of {layer!r}"))
        good = flat[np.isfinite(flat)]
        return GradientPoint(
            step=step,
            norm=float(np.linalg.norm(good)),
            mean=float(good.mean()) if good.size else None,
            std=float(good.std(ddof=1)) if good.size > 1 else None,
            nonfinite=int(flat.size - good.size),
        )

    def _raise_alerts(self, layer: LayerGradients) -> None:
        problems = set(layer.problems(self.thresholds, self.step))
        new = sorted(problems - self._open.get(layer.name, set()))
        self._open[layer.name] = problems
        if not new:
            return
        low, high = layer.bounds(self.thresholds)
        last = layer.points[-1]
        for problem in new:
            alert = GradientAlert(layer=layer.name, kind=problem, step=last.step, norm=last.norm, low=low, high=high)
            self._alerts.append(alert)

    def _health(self, layer: LayerGradients) -> LayerHealth:
        trend = trend_of(layer.dynamics())
        problems = tuple(layer.problems(self.thresholds, self.step))
        low, high = layer.bounds(self.thresholds)
        health: Health = "healthy"
        if problems:
            health = "critical" if {"nonfinite", "exploding"} & set(problems) else "warning"
        norm = math.nan if layer.points[-1].nonfinite else layer.points[-1].norm
        return LayerHealth(
            layer=layer.name, health=health, norm=norm, low=low, high=high, problems=problems, trend=trend
        )


def _told_point(layer: str, norm: float, mean: float | None, std: float | None, step: int) -> GradientPoint:
    if norm < 0:
        raise OptionError(
            f"The gradient of {layer!r} has a norm of {norm:g}; norms are not negative. A single number is taken for "
            "a norm: hand in values as a list or a tensor."
        )
    known = None if mean is None else float(mean)
    return GradientPoint(step=step, norm=norm, mean=known, std=std, nonfinite=0 if math.isfinite(norm) else 1)


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


def _conflict(a: str, left: Any, b: str, right: Any) -> GradientConflict:
    if left.shape != right.shape:
        raise OptionError(f"The gradients of {a!r} and {b!r} have {left.size} and {right.size} elements.")
    lengths = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    cosine = float(left @ right / lengths) if lengths > 0 and math.isfinite(lengths) else None
    return GradientConflict(first=a, second=b, cosine=cosine)


def _overall(layers: tuple[LayerHealth, ...], score: float) -> Health:
    if any("nonfinite" in layer.problems for layer in layers) or score < 0.5:
        return "critical"
    return "warning" if any(layer.problems for layer in layers) else "healthy"


def _recommend(layers: tuple[LayerHealth, ...], dead: tuple[UnitActivity, ...]) -> list[str]:
    advice = []
    for problem, text in _ADVICE.items():
        names = [layer.layer for layer in layers if problem in layer.problems]
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            advice.append(f"{problem.replace('_', ' ').capitalize()} in {shown}. {text}")
    return advice + [
        f"{len(units.dead)} of {units.units} units of {units.layer} were never active over {units.samples} samples. "
        "Lower the learning rate, or use LeakyReLU or a smaller negative bias."
        for units in dead
        if units.dead_share > DEAD_SHARE
    ]
