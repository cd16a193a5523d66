"""Which steps a profile holds, so that its size stays bounded however long the run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from sonde.arguments import whole_number
from sonde.errors import OptionError

# Without a schedule a profile stops by itself after this many steps: every step may add tens of megabytes.
MOST_STEPS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSchedule:
    """Wait some steps, warm the profiler up, record, and do it all again `repeat` times."""

    wait: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 1 if each.name in ("active", "repeat") else 0
            object.__setattr__(self, each.name, whole_number(f"schedule: {each.name}", value, least=least))

    @property
    def cycle(self) -> int:
        """How many steps one repeat takes."""
        return self.wait + self.warmup + self.active

    @property
    def steps(self) -> int:
        """How many steps it needs in all."""
        return self.cycle * self.repeat


def profile_schedule(given: ProfileSchedule | Mapping[str, int] | None) -> ProfileSchedule | None:
    """Read a schedule as users write it.

    >>> profile_schedule({"wait": 2, "active": 5}).steps
    8
    """
    if given is None or isinstance(given, ProfileSchedule):
        return given
    known = {each.name for each in fields(ProfileSchedule)}
    if set(given) - known:
        raise OptionError(
            f"schedule={given!r}: give a ProfileSchedule, or a dict with any of {', '.join(sorted(known))}."
        )
    return ProfileSchedule(**given)
