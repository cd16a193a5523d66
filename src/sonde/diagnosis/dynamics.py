"""Classify where a loss is going: converging, converged, on a plateau, oscillating or diverging.

`sonde.diagnosis.learning` compares a loss with where it began; this module classifies the later part of the curve. The
curve is read oldest first. Levels are medians of blocks, so that single bad batches have no say; what counts as a move
is compared with the scatter of the curve itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sonde.core.robust import Values, fit_line, mad

State = Literal["converging", "converged", "plateau", "oscillating", "diverging", "non-finite", "unknown"]
Stability = Literal["stable", "high_variance", "unstable", "unknown"]
Fit = Literal["overfitting", "underfitting", "good", "unknown"]

MIN_POINTS: Final = 12
_BLOCKS: Final = 24
CERTAIN: Final = 3.0
"""How many standard errors a move must be from nothing."""
FAR_ABOVE: Final = 2.0
"""Times its best level: a loss that is so far above it has diverged, whether or not it still rises."""
_DROP: Final = 0.1
"""A loss that has lost less than this part of itself since the start has not moved."""
_SWING: Final = 0.08
"""Swings of less than this part of the level are not reported."""
REGULAR: Final = 0.6
"""How strongly swings must repeat themselves (autocorrelation) to be an oscillation and not noise."""
_CHANCE: Final = 4.0
"""Of white noise's autocorrelations none comes beyond this over the root of its length, but once in thousands."""
_OUTLIER: Final = 4.0
_NOISY: Final = 0.15
_WILD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Dynamics:
    """A verdict with the numbers it rests on. Numbers are NaN where they are unknown."""

    state: State
    stability: Stability
    initial: float
    best: float
    recent: float
    scatter: float
    """Spread of single losses around their local level, as a part of that level."""
    trend: float
    """Change of the level over the last third, in standard errors; negative falls."""
    regularity: float
    """Largest autocorrelation of the swings; near 1 they repeat, near 0 they are noise."""


def classify(losses: Values) -> Dynamics:
    """Classify a curve of losses; one that ends in NaN or an infinity is `non-finite`, whatever came before.

    >>> classify(2.0 * np.exp(-np.arange(60) / 40.0)).state
    'converging'
    >>> classify(0.1 * np.exp(np.arange(60) / 20.0)).state
    'diverging'
    """
    nan = float("nan")
    values = np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(values)
    if len(values) >= 2 and not finite[-1]:
        return Dynamics("non-finite", "unknown", nan, nan, nan, nan, nan, nan)
    values = values[finite]
    if len(values) < MIN_POINTS:
        return Dynamics("unknown", "unknown", nan, nan, nan, nan, nan, nan)
    level = _level(values)
    residual = values - level
    typical = max(float(np.median(np.abs(level))), 1e-300)
    noise = mad(residual)
    blocks = _blocks(values)
    # A bad batch now and then is neither a trend nor a swing.
    values = level + np.clip(residual, -_OUTLIER * noise, _OUTLIER * noise) if noise > 0 else values
    regularity, swing = _regularity(values)
    trend = _trend(values, noise)
    initial, recent, best = float(blocks[0]), float(np.median(blocks[-3:])), float(np.median(np.sort(blocks)[:3]))
    scatter = noise / typical
    facts = _Facts(initial, best, recent, noise, trend, regularity, swing / typical, len(values))
    return Dynamics(_state(facts), _stability(scatter), initial, best, recent, scatter, trend, regularity)


@dataclass(frozen=True, slots=True)
class _Facts:
    initial: float
    best: float
    recent: float
    noise: float
    trend: float
    regularity: float
    swing: float
    points: int


def _state(facts: _Facts) -> State:
    error = facts.noise * np.sqrt(3 * _BLOCKS / facts.points) + 1e-12 * abs(facts.initial)
    risen = facts.recent - facts.best
    if risen > max(CERTAIN * error, (FAR_ABOVE - 1) * max(abs(facts.best), abs(facts.initial))):
        return "diverging"
    if risen > max(CERTAIN * error, 0.25 * abs(facts.best)) and facts.trend > CERTAIN:
        return "diverging"
    # Few points repeat themselves by chance more easily than many.
    regular = max(REGULAR, _CHANCE / np.sqrt(facts.points / 2))
    if facts.regularity > regular and facts.swing > _SWING:
        return "oscillating"
    fallen = facts.initial - facts.recent
    moved = fallen > max(CERTAIN * error, _DROP * abs(facts.initial))
    if facts.trend < -CERTAIN:
        return "converging"
    if facts.trend > CERTAIN and risen > max(CERTAIN * error, _DROP * abs(facts.best)):
        return "diverging"
    return "converged" if moved else "plateau"


def _stability(scatter: float) -> Stability:
    if scatter > _WILD:
        return "unstable"
    return "high_variance" if scatter > _NOISY else "stable"


def _blocks(values: Values) -> Values:
    pieces = np.array_split(values, min(_BLOCKS, max(4, len(values) // 3)))
    return np.array([np.median(piece) for piece in pieces])


def _level(values: Values) -> Values:
    """Return the local level: medians of blocks, joined by lines."""
    pieces = np.array_split(np.arange(len(values)), min(_BLOCKS, max(4, len(values) // 3)))
    centres = np.array([piece.mean() for piece in pieces])
    return np.interp(np.arange(len(values)), centres, [np.median(values[piece]) for piece in pieces])


def _trend(values: Values, noise: float) -> float:
    """Return the change of the last third, from its fitted line, in standard errors of that change.

    The error has a floor of a small part of the level: a fall by one part in a thousand does not count as progress,
    however certain it is.
    """
    part = values[-max(MIN_POINTS // 2, len(values) // 3) :]
    slope, scatter, weight = fit_line(part)
    error = (min(scatter, 2 * noise) if noise > 0 else scatter) * len(part) / weight
    floor = 0.01 * float(np.median(np.abs(part))) / CERTAIN
    return float(slope * len(part) / max(error, floor, 1e-300))


def _regularity(values: Values) -> tuple[float, float]:
    """Return how regularly the second half swings around its line, and how far (as a standard deviation)."""
    part = values[len(values) // 2 :]
    x = np.arange(len(part), dtype=np.float64)
    swings = part - np.polyval(np.polyfit(x, part, 2), x)
    power = float(swings @ swings)
    if power <= 1e-24 * float(part @ part) or len(part) < MIN_POINTS // 2:
        return 0.0, 0.0
    full = np.correlate(swings, swings, "full")[len(swings) - 1 :] / power
    lags = np.arange(len(full))
    # A short overlap correlates by chance, so only lags up to half the length count; correct for the lost overlap.
    usable = full[: len(full) // 2] * (len(full) / (len(full) - lags[: len(full) // 2]))
    below = np.flatnonzero(usable < 0)
    if not len(below):
        return 0.0, 0.0
    # After the first fall below zero a swing that repeats comes back up; a mere drift does not.
    back = float(usable[below[0] :].max())
    return back, float(np.std(swings))


def judge_fit(train: Values, validation: Values) -> Fit:
    """Tell over- from underfitting, from the losses of the same epochs on training and validation data.

    Overfitting: validation has risen from its best while training went on falling. Underfitting: neither has fallen.
    """
    size = min(len(train), len(validation))
    train, validation = np.asarray(train[-size:], dtype=np.float64), np.asarray(validation[-size:], dtype=np.float64)
    known = np.isfinite(train) & np.isfinite(validation)
    train, validation = train[known], validation[known]
    if len(train) < 4:
        return "unknown"
    best = int(np.argmin(validation))
    last = float(np.median(validation[-3:]))
    noise = mad(np.diff(validation), about=0.0) if len(validation) > 2 else 0.0
    risen = last - validation[best]
    falling = float(np.median(train[-3:])) < train[best] or len(train) - 1 - best >= 3
    if len(train) - 1 - best >= 2 and falling and risen > max(0.05 * abs(validation[best]), noise):
        return "overfitting"
    if float(np.median(train[-3:])) > 0.9 * float(np.median(train[:2])):
        return "underfitting"
    return "good"
