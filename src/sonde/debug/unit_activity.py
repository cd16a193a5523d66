"""Dead neurons, from what the neurons themselves did: a unit that was never active over a window of batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.debug.numbers import as_array

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
