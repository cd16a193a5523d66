"""Decide whether a run is learning, and so whether an anomaly is a warning or only a note."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sonde.core.robust import fit_line, mad
from sonde.diagnosis.track import Values

State = Literal["improving", "flat", "worse", "broken", "unknown"]
MIN_POINTS: Final = 10
START: Final = 5
"""How many of the first losses are averaged as the start of the run."""
RELATIVE: Final = 0.05
"""A fall by less than this part of the initial loss does not count as improvement."""
_CERTAIN: Final = 4.0
"""How many standard errors a slope must be from nothing."""
_OUTLIER: Final = 4.0


@dataclass(frozen=True, slots=True)
class Learning:
    """How the loss has gone so far. Levels are medians; `noise` is the spread from one step to the next."""

    state: State
    initial: float = float("nan")
    recent: float = float("nan")
    best: float = float("nan")
    noise: float = float("nan")
    points: int = 0
    margin: float = float("nan")
    """How far the level must have moved to stand out from noise."""
    falls: bool = False
    """Whether the curve as a whole falls for certain, by however little."""

    @property
    def failed(self) -> bool:
        """Whether the loss is known not to have improved."""
        return self.state in ("flat", "worse", "broken")

    @property
    def may_have_fallen(self) -> bool:
        """Whether the level is lower than at the start, be it by no more than noise could make it."""
        return self.recent < self.initial - RELATIVE * abs(self.initial)


def judge(losses: Values) -> Learning:
    """Judge a curve of losses, oldest first.

    >>> judge(np.linspace(2.0, 0.5, 40)).state
    'improving'
    >>> judge(np.full(40, 2.3)).state
    'flat'
    >>> judge(np.array([2.3] * 39 + [np.nan])).state
    'broken'
    """
    points = len(losses)
    if points and not np.isfinite(losses[-1]):
        return Learning("broken", points=points)
    losses = losses[np.isfinite(losses)]
    if len(losses) < MIN_POINTS:
        return Learning("unknown", points=points)
    initial = float(np.median(losses[:START]))
    thrown_off = initial > 2 * abs(losses[0])
    if thrown_off:  # by the first steps: it began where the first loss was
        initial = float(losses[0])
    tail = losses[-max(START, len(losses) // 5) :]
    recent, best = float(np.median(tail)), float(np.median(np.sort(losses)[:START]))
    steps = np.diff(losses)
    noise = mad(steps) / np.sqrt(2)
    # The difference of two medians is uncertain by about this much; below it nothing can be said to have moved.
    known = 1 if thrown_off else START
    margin = max(RELATIVE * abs(initial), 2.5 * noise * 1.253 * np.sqrt(1 / known + 1 / len(tail)))
    state: State = "flat"
    # A fall from where the first steps threw it to is none, unless it ends well below where it began.
    change, certain = _trend(losses)
    slowly = not thrown_off and recent < initial and certain
    if recent < initial - margin or (slowly and change < -RELATIVE * abs(initial)):
        state = "improving"
    elif recent > initial + margin:
        state = "worse"
    # What takes both signs, such as the loss of a policy, does not measure a distance from the truth: that it stays
    # says nothing. Nor does one that begins at nothing and cannot fall, such as that of a policy without a reward yet.
    if state != "improving" and (losses.min() < 0 < losses.max() or losses.min() == initial == 0):
        state = "unknown"
    return Learning(state, initial, recent, best, noise, points, margin, bool(slowly))


def _trend(losses: Values) -> tuple[float, bool]:
    """Return the change along the whole curve, and whether it is a fall that its scatter cannot make: a slow one."""
    middle, spread = np.median(losses), mad(losses)
    # A few outliers must not make a trend.
    kept = np.clip(losses, middle - _OUTLIER * spread, middle + _OUTLIER * spread)
    slope, scatter, weight = fit_line(kept)
    return slope * len(kept), slope < -_CERTAIN * scatter / weight
