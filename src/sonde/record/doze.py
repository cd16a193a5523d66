"""Switch hooks off between recorded steps, where even a look at a step costs more than it is worth.

A few dozen callbacks run in every step, recorded or not: they number the step, take its loss and follow the order of
passes. They take a tenth of a millisecond, which is much for a step of one or two. Such a program dozes: between
two recorded steps the guard of the session sleeps, and the four callbacks that are left only count steps, take the loss
and the learning rates, and see that the loss is finite. Anything that is not the usual step ends the doze at once: an
evaluation, another optimizer, a closure, a loss that is not finite, a call of the session that needs the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sonde.hooks.guard import Guard
from sonde.hooks.on_backward import Reach
from sonde.record.governor import Governor
from sonde.record.packer import Packer


class Dozer(Protocol):
    """Can listen to less during a doze."""

    def doze(self) -> None:
        """Report only that passes begin."""

    def await_pass(self) -> None:
        """Report the next beginning of a pass, of which one was reported before."""

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
        guard: Guard,
        governor: Governor,
        packer: Packer,
        reach: Reach,
        own_seconds: Callable[[], float],
        is_due: Callable[[int], bool],
        after_waking: Callable[[], None],
    ) -> None:
        self.is_on = False
        self.modules: Dozer | None = None
        self._guard, self._governor, self._packer, self._reach = guard, governor, packer, reach
        self._own_seconds, self._is_due, self._after_waking = own_seconds, is_due, after_waking
        self._left = 0
        self._since = (0, 0.0)
        self.begin_pass = packer.begin
        """Begins the next step if the last one has ended."""

    def begin(self) -> None:
        """Doze from the next step on, if that pays."""
        following = self._packer.step + 1
        self._left = self._governor.doze_length(lambda ahead: self._is_due(following + ahead))
        if self._left and self.modules is not None:
            self._since = (self._packer.step, self._own_seconds())
            self.is_on = True
            self._governor.begin_doze()
            self.modules.doze()
            self._guard.sleep()

    def end_step(self) -> None:
        """Count a step."""
        self._packer.end_step()
        self._left -= 1
        if not self._left:
            self.end()
        elif self.modules is not None:
            self.modules.await_pass()

    def end(self) -> None:
        """End the doze: look at everything again."""
        if not self.is_on:
            return
        self.is_on = False
        self._guard.wake()
        first, seconds = self._since
        steps = range(first + 1, self._packer.step + self._packer.has_ended)
        self._reach.forget_passes()
        if self.modules is not None:
            self.modules.wake()
        next_due = (self._is_due(steps.stop), self._is_due(steps.stop + 1))
        self._governor.end_doze(len(steps), sum(map(self._is_due, steps)), next_due, self._own_seconds() - seconds)
        self._after_waking()
