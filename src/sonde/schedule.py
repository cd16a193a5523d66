"""When to record: a schedule is a function from a step number to a bool.

>>> sparse = first(10) | every(100)
>>> [step for step in range(301) if sparse(step)]
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 200, 300]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sonde.errors import OptionError


@dataclass(frozen=True, slots=True)
class Schedule:
    """A predicate over step numbers, with the text that describes it."""

    text: str
    test: Callable[[int], bool]

    def __call__(self, step: int) -> bool:
        """Return whether to look at this step."""
        return self.test(step)

    def __or__(self, other: Schedule) -> Schedule:
        one, two = self.test, other.test
        return Schedule(f"({self.text} | {other.text})", lambda step: one(step) or two(step))

    def __and__(self, other: Schedule) -> Schedule:
        one, two = self.test, other.test
        return Schedule(f"({self.text} & {other.text})", lambda step: one(step) and two(step))

    def __invert__(self) -> Schedule:
        return Schedule(f"~{self.text}", lambda step: not self(step))


When = int | Schedule | Callable[[int], bool]


def every(n: int, *, offset: int = 0) -> Schedule:
    """Choose each n-th step: those where `step - offset` is a multiple of n."""
    _at_least("every", n, 1)
    return Schedule(
        f"every({n})" if not offset else f"every({n}, offset={offset})", lambda step: (step - offset) % n == 0
    )


def at(*steps: int) -> Schedule:
    """Choose exactly these steps."""
    chosen = frozenset(steps)
    return Schedule(f"at({', '.join(map(str, steps))})", lambda step: step in chosen)


def between(start: int, stop: int) -> Schedule:
    """Choose steps from `start` up to, not including, `stop`."""
    if stop <= start:
        raise OptionError(f"between({start}, {stop}) holds no step: the second number must be the larger one.")
    return Schedule(f"between({start}, {stop})", lambda step: start <= step < stop)


def first(n: int) -> Schedule:
    """Choose the steps below n."""
    _at_least("first", n, 1)
    return Schedule(f"first({n})", lambda step: step < n)


def log_spaced(per_decade: int = 20) -> Schedule:
    """Choose steps evenly spaced on a logarithmic axis: all early ones, then ever fewer.

    >>> [step for step in range(200) if log_spaced(5)(step)]
    [0, 1, 2, 3, 4, 7, 10, 16, 26, 40, 64, 100, 159]
    """
    _at_least("log_spaced", per_decade, 1)

    def test(step: int) -> bool:
        if step <= 1:
            return step >= 0
        return math.floor(math.log10(step) * per_decade + 1e-9) > math.floor(math.log10(step - 1) * per_decade + 1e-9)

    return Schedule(f"log_spaced({per_decade})", test)


def schedule(when: When) -> Schedule:
    """Turn any accepted form into a schedule; a number n means every n-th step."""
    if isinstance(when, Schedule):
        return when
    if isinstance(when, int) and not isinstance(when, bool):
        return every(when)
    if callable(when):
        return Schedule(getattr(when, "__name__", "custom"), lambda step: bool(when(step)))
    raise OptionError(f"A schedule is a number, a Schedule or a function of the step; got {when!r}. Try every(10).")


def _at_least(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise OptionError(f"{name}(n) takes a whole number of at least {least}; got {value!r}.")
