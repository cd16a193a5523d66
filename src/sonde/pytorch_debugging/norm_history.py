"""What gradient norms usually are in this run, so that an unusual one can be told without a number from outside."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

WINDOW: Final = 100
MIN_HISTORY: Final = 10
"""With fewer norms nothing is called unusual: the first steps of a training are wild."""
EXPLODED_RATIO: Final = 10.0
VANISHED_RATIO: Final = 1e-4
MIN_SPREADS: Final = 6.0
"""How many robust standard deviations (of the logarithm) away from the median; a noisy run is given more room."""
VANISHED_NORM: Final = 1e-6
"""Below this a gradient has vanished, whatever the run is used to."""
_MAD_TO_STD: Final = 1.4826

Verdict = Literal["usual", "exploding", "vanishing"]


@dataclass(frozen=True, slots=True)
class Usual:
    """The median norm of the last checks and how far, in natural logarithms, norms usually are from it."""

    median: float
    spread: float


class NormHistory:
    """The last finite gradient norms."""

    def __init__(self, window: int = WINDOW) -> None:
        self._logs: deque[float] = deque(maxlen=window)

    def usual(self) -> Usual | None:
        """Return what is usual, or None while too few norms are known."""
        if len(self._logs) < MIN_HISTORY:
            return None
        middle = statistics.median(self._logs)
        mad = statistics.median(abs(value - middle) for value in self._logs)
        return Usual(math.exp(middle), _MAD_TO_STD * mad)

    def add(self, norm: float) -> None:
        """Remember a norm; one that is not finite, or zero, says nothing about what is usual."""
        if math.isfinite(norm) and norm > 0:
            self._logs.append(math.log(norm))


def judge(norm: float, threshold: float | None, usual: Usual | None) -> Verdict:
    """Judge a norm against a threshold if there is one, else against what is usual. NaN and infinity explode.

    >>> judge(2.0, 1.0, None), judge(2.0, None, None), judge(2.0, None, Usual(0.1, 0.2))
    ('exploding', 'usual', 'exploding')
    """
    if not math.isfinite(norm):
        return "exploding"
    if norm < VANISHED_NORM:
        return "vanishing"
    if threshold is not None:
        return "exploding" if norm > threshold else "usual"
    if usual is None:
        return "usual"
    away = math.log(norm / usual.median)
    if away > max(math.log(EXPLODED_RATIO), MIN_SPREADS * usual.spread):
        return "exploding"
    return "vanishing" if away < min(math.log(VANISHED_RATIO), -MIN_SPREADS * usual.spread) else "usual"
