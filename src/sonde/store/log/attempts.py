"""Attempts: a run that was resumed has several, and later ones replace the steps that they repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from sonde.core import files
from sonde.core.files import Finite

_Step = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Attempt(msgspec.Struct, frozen=True):
    """One stretch of writing. From its first step on, it replaces what earlier attempts wrote."""

    number: int = msgspec.field(name="attempt")
    start_step: _Step | None
    """Where it continued, if the recorder said so; otherwise its first step, or None while it has none."""
    time: Finite

    def to_json(self) -> dict[str, Any]:
        """Return the attempt as JSON-ready values."""
        return {"attempt": self.number, "start_step": self.start_step, "time": self.time}


def parse(text: bytes | memoryview, where: str) -> Attempt:
    """Read the description of the attempt that wrote a journal.

    Raises:
        RunDamaged: It does not describe an attempt.

    """
    return files.decode(text, Attempt, where, "the description of an attempt")


def resolve(attempts: Iterable[Attempt], first_step: int | None) -> list[Attempt]:
    """Fill in missing start steps: an attempt without one started at the first step of its file."""
    return [
        attempt if attempt.start_step is not None else Attempt(attempt.number, first_step, attempt.time)
        for attempt in attempts
    ]


def merge(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Put together what several files say, in order; an attempt starts at the earliest step any of them names."""
    found: dict[int, Attempt] = {}
    for attempt in attempts:
        known = found.get(attempt.number, attempt)
        starts = [start for start in (attempt.start_step, known.start_step) if start is not None]
        found[attempt.number] = Attempt(attempt.number, min(starts, default=None), min(attempt.time, known.time))
    return [found[number] for number in sorted(found)]


def replaced_from(attempts: Iterable[Attempt], number: int) -> int | None:
    """Return the step from which attempts later than `number` replace it, or None."""
    starts = [a.start_step for a in attempts if a.number > number and a.start_step is not None]
    return min(starts, default=None)
