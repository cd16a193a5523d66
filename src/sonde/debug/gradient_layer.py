"""What is known of one layer's gradients, and whether they are well."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.dynamics import Dynamics, classify
from sonde.debug.numbers import as_array

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
LASTING: Final = 3
"""For how many steps in a row a norm must be that low."""
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
    mean: float | None
    std: float | None
    nonfinite: int = 0


@dataclass(slots=True)
class LayerGradients:
    """The history of a layer, oldest first."""

    name: str
    max_history: int
    points: deque[GradientPoint] = field(init=False)
    total: int = 0
    swinging: bool = False
    """Whether the norms swung regularly when that was last looked at; a look costs more than all else."""

    def __post_init__(self) -> None:
        self.points = deque(maxlen=self.max_history)

    def add(self, point: GradientPoint) -> bool:
        """Take a step; say whether it was new. A step that is known already keeps what was told of it first."""
        later = []
        while self.points and self.points[-1].step > point.step:
            later.append(self.points.pop())
        known = bool(self.points) and self.points[-1].step == point.step
        if not known:
            self.points.append(point)
            self.total += 1
        self.points.extend(reversed(later))
        if not known and self.total % max(MIN_HISTORY, self.max_history // 4) == 0:
            self.dynamics()
        return not known

    def norms(self) -> NDArray[np.float64]:
        """Return the norms, oldest first; NaN where elements were not finite."""
        return np.array([math.nan if point.nonfinite else point.norm for point in self.points])

    def dynamics(self) -> Dynamics:
        """Judge the norms as a curve, and remember whether it swings."""
        found = classify(self.norms())
        self.swinging = len(self.points) >= 3 * MIN_HISTORY and found.state == "oscillating"
        return found

    def bounds(self, thresholds: GradientThresholds) -> tuple[float, float]:
        """Return the norms below and above which the last one is out of order.

        They come from the median and the spread of the logarithms of the norms before it, so one NaN or one spike
        cannot bend them.
        """
        low, high = VANISHED, EXPLODED
        if thresholds.vanishing is None or thresholds.exploding is None:
            past = [
                point.norm
                for point in itertools.islice(self.points, max(0, len(self.points) - LASTING))
                if not point.nonfinite and 0 < point.norm < math.inf
            ]
            if len(past) >= MIN_HISTORY:
                low, high = _usual(past)
        return (
            low if thresholds.vanishing is None else thresholds.vanishing,
            high if thresholds.exploding is None else thresholds.exploding,
        )

    def problems(self, thresholds: GradientThresholds, step: int) -> list[Problem]:
        """Return what is wrong with the layer now."""
        if not self.points:
            return []
        last = self.points[-1]
        if last.nonfinite or not math.isfinite(last.norm):
            return ["nonfinite"]
        if self._is_silent(step):
            return ["no_gradient"]
        found: list[Problem] = []
        low, high = self.bounds(thresholds)
        if last.norm > high:
            found.append("exploding")
        elif self._has_vanished(low, lasting=thresholds.vanishing is None):
            found.append("vanishing")
        if self.swinging:
            found.append("oscillating")
        return found

    def _has_vanished(self, low: float, *, lasting: bool) -> bool:
        """Say whether norms are below a bound: for several steps, if the bound is the layer's own past.

        A gradient that changes its sign passes through zero, and is none the worse for it.
        """
        recent = [point.norm for point in self._recent(LASTING if lasting else 1)]
        return all(0 < norm < low for norm in recent)

    def _recent(self, count: int) -> Iterator[GradientPoint]:
        return itertools.islice(reversed(self.points), count)

    def _is_silent(self, step: int) -> bool:
        if step - self.points[-1].step >= NO_GRADIENT_STEPS:
            return True
        return len(self.points) >= NO_GRADIENT_STEPS and all(p.norm == 0 for p in self._recent(NO_GRADIENT_STEPS))


def trend_of(dynamics: Dynamics) -> Trend:
    """Say where norms are going."""
    if dynamics.state == "unknown":
        return "unknown"
    return {"converging": "falling", "diverging": "rising"}.get(dynamics.state, "steady")  # type: ignore[return-value]


def _usual(norms: list[float]) -> tuple[float, float]:
    """Return the bounds of what is usual for a layer."""
    logs = sorted(map(math.log, norms))
    middle = _quantile(logs, 0.5)
    away = _quantile(sorted(abs(log - middle) for log in logs), 0.5)
    # The middle 80 % as well: norms that jump between two levels have no spread around their median.
    width = _quantile(logs, 0.9) - _quantile(logs, 0.1)
    spread = max(1.4826 * away, width / 2.56, LEAST_SPREAD)
    low = middle - max(SIGMAS * spread, math.log(LEAST_FALL))
    return math.exp(max(low, -700.0)), math.exp(min(middle + SIGMAS * spread, 700.0))


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


WINDOW: Final = 20
MIN_SAMPLES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitActivity:
    """The units of a layer over the last batches."""

    layer: str
    units: int
    dead: tuple[int, ...]
    """Numbers of the units that were never active."""
    samples: int
    """How many samples were looked at."""

    @property
    def dead_share(self) -> float:
        """The share of units that were never active."""
        return len(self.dead) / self.units if self.units else 0.0


class ActivityWindow:
    """Remembers for each unit of a layer whether it was active in each of the last batches."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._batches: deque[tuple[NDArray[np.bool_], int]] = deque(maxlen=WINDOW)

    def add(self, activations: Any) -> None:
        """Take a batch `[samples, units]` or `[samples, channels, ...]`; a unit is active where it is above zero."""
        array = as_array(activations, f"activations of {self._layer!r}")
        array = array.reshape(1, -1) if array.ndim < 2 else array
        active = array > 0
        places = tuple(axis for axis in range(active.ndim) if axis != 1)
        self.add_units(np.asarray(active.any(places)), len(array))

    def add_units(self, active: NDArray[np.bool_], samples: int) -> None:
        """Take which units were active in a batch of so many samples."""
        if self._batches and len(self._batches[-1][0]) != len(active):
            self._batches.clear()  # the layer has another width now
        self._batches.append((active, samples))

    def summary(self) -> UnitActivity | None:
        """Return the dead units; None before enough samples were seen to say."""
        samples = sum(count for _, count in self._batches)
        if samples < MIN_SAMPLES:
            return None
        ever = np.logical_or.reduce([active for active, _ in self._batches])
        dead = tuple(int(unit) for unit in np.flatnonzero(~ever))
        return UnitActivity(layer=self._layer, units=len(ever), dead=dead, samples=samples)
