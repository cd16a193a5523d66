"""How the mean of one named tensor went, kept in little room."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

DRIFT_POINTS: Final = 5
DRIFT_SHARE: Final = 0.5
_MAX_POINTS: Final = 1000
_FIELDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the mean of a named tensor has moved, from the first to the last of its looks."""

    name: str
    first: float
    last: float
    change: float
    """As a part of the larger of: where it began, and its typical spread."""
    drifted: bool


@dataclass(slots=True)
class MeanSeries:
    """Time, mean and standard deviation (NaN if not known) of the last looks at a tensor."""

    name: str
    total: int = 0
    """How many looks there were, those that are forgotten included."""
    told: bool = False
    """Whether somebody has been told of its drift."""
    _flat: array[float] = field(default_factory=lambda: array("d"))

    def add(self, time: float, mean: float, std: float | None) -> None:
        """Take a look."""
        self.total += 1
        self._flat.extend((time, mean, float("nan") if std is None else std))
        # The oldest go a quarter at a time: cutting the front moves all the rest.
        if len(self._flat) >= _FIELDS * (_MAX_POINTS + _MAX_POINTS // 4):
            del self._flat[: _FIELDS * (_MAX_POINTS // 4)]

    def __len__(self) -> int:
        return min(len(self._flat) // _FIELDS, _MAX_POINTS)

    def points(self) -> NDArray[np.float64]:
        """Return the looks as rows, oldest first."""
        return np.array(self._flat).reshape(-1, _FIELDS)[-_MAX_POINTS:]

    def drift(self) -> Drift | None:
        """Say how far the mean has moved; None below ten looks."""
        if len(self) < 2 * DRIFT_POINTS:
            return None
        points = self.points()
        first, last = float(points[:DRIFT_POINTS, 1].mean()), float(points[-DRIFT_POINTS:, 1].mean())
        spreads = points[:, 2][np.isfinite(points[:, 2])]
        scale = max(abs(first), float(np.median(spreads)) if len(spreads) else 0.0, 1e-300)
        change = (last - first) / scale
        return Drift(name=self.name, first=first, last=last, change=change, drifted=abs(change) > DRIFT_SHARE)
