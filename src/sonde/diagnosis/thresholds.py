"""Every number that a rule compares with, in one table, with where it comes from.

Exact relations need none. Where a threshold is a matter of judgement it is relative to the run's own history or to
other layers, and the source says what it was measured on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number and the reason for it."""

    value: float
    source: str


# missing_zero_grad
LEFTOVER_SHARE = Threshold(0.5, "exact relation: any parameter left over counts; half keeps partial clearing out")
LEFTOVER_STEPS = Threshold(3, "persistence: once may be meant, three times in a row is a habit")
