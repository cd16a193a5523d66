"""What is known of one layer's gradients, and whether they are well."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.dynamics import classify

Problem = Literal["nonfinite", "no_gradient", "exploding", "vanishing", "oscillating"]
Trend = Literal["rising", "falling", "steady", "unknown"]

MIN_HISTORY: Final = 10
NO_GRADIENT_STEPS: Final = 10
SIGMAS: Final = 6.0
"""How many robust standard deviations of its own logarithm a norm must be off to be called a jump."""
LEAST_SPREAD: Final = 0.25
"""Norms of a healthy layer vary at least this much, in natural logarithms; a calmer past must not make us jumpy."""
LEAST_FALL: Final = 100.0
"""How far below its past a norm must be to have vanished: gradients shrink while a model learns."""
EXPLODED: Final = 1e6
VANISHED: Final = 1e-12
"""Bounds for a layer without a history of its own."""


@dataclass(frozen=True, slots=True)
class GradientThresholds:
    """Fixed bounds of a gradient's norm; either may be None. Without them a layer is held against its own past."""

    vanishing: float | None = None
    exploding: float | None = None


RELATIVE: Final = GradientThresholds()
SEED: Final = GradientThresholds(vanishing=1e-7, exploding=10.0)
"""The bounds that the documentation of older tools gives, absolute and the same for every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPoint:
    """A layer's gradient in one step."""

    step: int
    norm: float
    mean: float
    std: float | None
    nonfinite: int = 0


@dataclass(slots=True)
class LayerGradients:
    """The history of a layer, oldest first."""

    name: str
    max_history: int
    points: deque[GradientPoint] = field(init=False)
    total: int = 0

    def __post_init__(self) -> None:
        self.points = deque(maxlen=self.max_history)

    def add(self, point: GradientPoint) -> None:
        """Take a step."""
        self.points.append(point)
        self.total += 1

    def norms(self) -> NDArray[np.float64]:
        """Return the norms, oldest first; NaN where elements were not finite."""
        return np.array([math.nan if point.nonfinite else point.norm for point in self.points])

    def bounds(self, thresholds: GradientThresholds) -> tuple[float, float]:
        """Return the norms below and above which the last one is out of order.

        They come from the median and the spread of the logarithms of the norms before it, so one NaN or one spike
        cannot bend them.
        """
        past = self.norms()[:-1]
        past = past[np.isfinite(past) & (past > 0)]
        low, high = VANISHED, EXPLODED
        if len(past) >= MIN_HISTORY:
            logs = np.log(past)
            middle = float(np.median(logs))
            # The middle 80 % as well: norms that jump between two levels have no spread around their median.
            low_end, high_end = np.percentile(logs, (10, 90))
            spread = max(1.4826 * float(np.median(np.abs(logs - middle))), (high_end - low_end) / 2.56, LEAST_SPREAD)
            low, high = (
                math.exp(middle - max(SIGMAS * spread, math.log(LEAST_FALL))),
                math.exp(min(middle + SIGMAS * spread, 700.0)),
            )
        if thresholds.vanishing is not None:
            low = thresholds.vanishing
        if thresholds.exploding is not None:
            high = thresholds.exploding
        return low, high

    def problems(self, thresholds: GradientThresholds, step: int) -> list[Problem]:
        """Return what is wrong with the layer now."""
        if not self.points:
            return []
        last = self.points[-1]
        if last.nonfinite or not math.isfinite(last.norm):
            return ["nonfinite"]
        found: list[Problem] = []
        if self._is_silent(step):
            return ["no_gradient"]
        low, high = self.bounds(thresholds)
        if last.norm > high:
            found.append("exploding")
        elif 0 < last.norm < low:
            found.append("vanishing")
        if len(self.points) >= 3 * MIN_HISTORY and classify(self.norms()).state == "oscillating":
            found.append("oscillating")
        return found

    def trend(self) -> Trend:
        """Say where the norms are going."""
        state = classify(self.norms()).state
        if state == "unknown":
            return "unknown"
        return {"converging": "falling", "diverging": "rising"}.get(state, "steady")  # type: ignore[return-value]

    def _is_silent(self, step: int) -> bool:
        recent = list(self.points)[-NO_GRADIENT_STEPS:]
        zero = len(recent) >= NO_GRADIENT_STEPS and all(point.norm == 0 for point in recent)
        return zero or step - self.points[-1].step >= NO_GRADIENT_STEPS
