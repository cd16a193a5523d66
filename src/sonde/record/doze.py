"""Switch hooks off between recorded steps, where even a look at a step costs more than it is worth.

A few callbacks run in every step, recorded or not: they number the step, take its loss and follow the order of passes.
They take a fraction of a millisecond, which is much for a step of a few milliseconds. Such a program dozes: of 32
steps that are not recorded, 31 are only counted, and their loss and learning rates are recorded. Where even that is
much, the loss is only looked at to see that it is finite. Anything that is not the usual step ends the doze at once: an
evaluation, another optimizer, a closure, a loss that is not finite, a call of the session that needs the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sonde.hooks.on_backward import Reach
from sonde.record.governor import Governor
from sonde.record.packer import Packer


class Dozer(Protocol):
    """Can listen to less during a doze."""

    def doze(self) -> None:
        """Report only that passes begin."""

    def wake(self) -> None:
        """Report everything again."""


class Doze:
    """Counts the steps of a doze, and ends it.

    Args:
        own_seconds: Returns the time spent in Sonde so far in the training thread.
        is_due: Returns whether a step is recorded by the user's schedule.
        after_waking: Called when a doze has ended.

    """

    def __init__(
        self,
        governor: Governor,
        packer: Packer,
        reach: Reach,
        own_seconds: Callable[[], float],
        is_due: Callable[[int], bool],
        after_waking: Callable[[], None],
    ) -> None:
        self.is_on = False
        self.modules: Dozer | None = None
        self._governor, self._packer, self._reach = governor, packer, reach
        self._own_seconds, self._is_due, self._after_waking = own_seconds, is_due, after_waking
        self._left = 0
        self._since = (0, 0.0)

    def begin(self) -> None:
        """Doze from the next step on, if that pays."""
        following = self._packer.step + 1
        self._left = self._governor.doze_length(lambda ahead: self._is_due(following + ahead))
        if self._left and self.modules is not None:
            self._since = (self._packer.step, self._own_seconds())
            self.is_on = True
            self._governor.begin_doze()
            self.modules.doze()

    def begin_pass(self) -> None:
        """Begin the next step if the last one has ended."""
        self._packer.begin()

    def end_step(self) -> None:
        """Count a step."""
        self._packer.end_step()
        self._left -= 1
        if not self._left:
            self.end()
        elif self.modules is not None:
            self.modules.doze()

    def end(self) -> None:
        """End the doze: look at everything again."""
        if not self.is_on:
            return
        self.is_on = False
        first, seconds = self._since
        steps = range(first + 1, self._packer.step + self._packer.has_ended)
        self._reach.forget_passes()
        if self.modules is not None:
            self.modules.wake()
        self._governor.end_doze(len(steps), sum(map(self._is_due, steps)), self._own_seconds() - seconds)
        self._after_waking()
