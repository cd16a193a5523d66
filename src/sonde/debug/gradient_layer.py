"""The history of one layer: its gradients step by step, and which of its units were active."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.debug.numbers import as_array
from sonde.diagnosis.dynamics import Dynamics, classify
from sonde.diagnosis.judgement import MOMENT_WINDOW, Moment, Verdict, gradients_now, silence_now
from sonde.records import Reading

Problem = Literal["nonfinite", "no_gradient", "exploding", "vanishing", "oscillating"]
Trend = Literal["rising", "falling", "steady", "unknown"]

PROBLEMS: Final[dict[Verdict, Problem]] = {
    "non-finite": "nonfinite",
    "exploding": "exploding",
    "vanishing": "vanishing",
}
"""By verdict: the word this package uses for it."""
_RECENT: Final = MOMENT_WINDOW + 10
"""How many of the last steps a check of the last one needs."""
_CHECK_SWING_EVERY: Final = 10
_ACTIVITY_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class GradientThresholds:
    """Fixed limits of a gradient's norm; either may be None. Without them a layer is compared with its own past."""

    vanishing: float | None = None
    exploding: float | None = None


RELATIVE: Final = GradientThresholds()
SEED: Final = GradientThresholds(vanishing=1e-7, exploding=10.0)
"""The limits that the documentation of older tools gives, absolute and the same for every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPoint:
    """A layer's gradient in one step."""

    step: int
    norm: float
    mean: float | None
    std: float | None
    nonfinite: int = 0
    reading: Reading | None = field(default=None, compare=False, repr=False)
    """All statistics, where the values themselves were seen."""

    @classmethod
    def of(cls, reading: Reading, step: int) -> GradientPoint:
        """Return the point that a reading makes."""
        norm = reading.norm
        return cls(
            step=step,
            norm=math.nan if norm is None else norm,
            mean=reading.mean,
            std=reading.std,
            nonfinite=reading.nonfinite,
            reading=reading,
        )

    @property
    def known_norm(self) -> float:
        """The norm; NaN if an element is not finite."""
        return math.nan if self.nonfinite else self.norm

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON-ready values."""
        return {name: getattr(self, name) for name in ("step", "norm", "mean", "std", "nonfinite")}


@dataclass(slots=True)
class LayerGradients:
    """The gradients of a layer, oldest first."""

    name: str
    max_history: int
    points: deque[GradientPoint] = field(init=False)
    total: int = 0
    swinging: bool = False
    """Whether the norms oscillated when that was last checked; the check costs more than everything else here."""

    def __post_init__(self) -> None:
        self.points = deque(maxlen=self.max_history)

    def add(self, point: GradientPoint) -> bool:
        """Add a step and return whether it was new. A step that is known keeps its first value."""
        later = []
        while self.points and self.points[-1].step > point.step:
            later.append(self.points.pop())
        known = bool(self.points) and self.points[-1].step == point.step
        if not known:
            self.points.append(point)
            self.total += 1
        self.points.extend(reversed(later))
        if not known and self.total % max(_CHECK_SWING_EVERY, self.max_history // 4) == 0:
            self.dynamics()
        return not known

    def norms(self) -> NDArray[np.float64]:
        """Return the norms, oldest first; NaN where elements were not finite."""
        return np.array([point.known_norm for point in self.points])

    def curve(self) -> dict[int, float] | dict[int, Reading]:
        """Return the gradients by step, for the doctor."""
        if all(point.reading is not None for point in self.points):
            return {point.step: point.reading for point in self.points if point.reading is not None}
        return {point.step: point.known_norm for point in self.points}

    def dynamics(self) -> Dynamics:
        """Describe the norms as a curve, and remember whether they oscillate."""
        found = classify(self.norms())
        self.swinging = found.state == "oscillating"
        return found

    def moment(self, limits: GradientThresholds) -> Moment:
        """Compare the last norm with the norms before it, and with the limits that the user has set."""
        recent = itertools.islice(self.points, max(0, len(self.points) - _RECENT), None)
        return gradients_now([point.known_norm for point in recent], low=limits.vanishing, high=limits.exploding)

    def silence(self, step: int) -> Moment:
        """Judge whether there has been no gradient for many steps."""
        recent = itertools.islice(self.points, max(0, len(self.points) - _RECENT), None)
        return silence_now([point.norm for point in recent], missing=step - self.points[-1].step)


def trend_of(dynamics: Dynamics) -> Trend:
    """Return where norms are going."""
    words: dict[str, Trend] = {"unknown": "unknown", "converging": "falling", "diverging": "rising"}
    return words.get(dynamics.state, "steady")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitActivity:
    """The units of a layer, and how many of them were never active."""

    layer: str
    units: int
    num_dead: int
    dead: tuple[int, ...] | None
    """Which units were never active; None where only their number is known."""
    samples: int
    """How many samples were looked at; of a watched model: how many values of each unit."""
    measured: Literal["activations", "gradients"] = "activations"
    """`gradients`: units of a weight whose gradient was zero in every step that was looked at."""

    @property
    def dead_share(self) -> float:
        """The share of units that were never active."""
        return self.num_dead / self.units if self.units else 0.0


class ActivityWindow:
    """Remembers for each unit of a layer whether it was active in each of the last batches."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._batches: deque[tuple[NDArray[np.bool_], int, int]] = deque(maxlen=_ACTIVITY_LOOKS)

    def add(self, activations: Any) -> None:
        """Add a batch `[samples, units]` or `[samples, channels, ...]`; a unit is active where it is above zero."""
        array = as_array(activations, f"activations of {self._layer!r}")
        array = array.reshape(1, -1) if array.ndim < 2 else array
        active = np.asarray((array > 0).any(tuple(axis for axis in range(array.ndim) if axis != 1)))
        if self._batches and len(self._batches[-1][0]) != len(active):
            self._batches.clear()  # the layer has another width now
        self._batches.append((active, len(array), array.size // max(1, len(active))))

    def summary(self) -> UnitActivity | None:
        """Return the units that were never active; None before any batch."""
        if not self._batches:
            return None
        ever = np.logical_or.reduce([active for active, _, _ in self._batches])
        dead = tuple(int(unit) for unit in np.flatnonzero(~ever))
        samples = sum(count for _, count, _ in self._batches)
        return UnitActivity(layer=self._layer, units=len(ever), num_dead=len(dead), dead=dead, samples=samples)

    def curves(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the share of units ever active, and the values looked at per unit, after each batch."""
        ever = np.logical_or.accumulate([active for active, _, _ in self._batches])
        return ever.mean(axis=1).tolist(), np.cumsum([values for _, _, values in self._batches]).tolist()
