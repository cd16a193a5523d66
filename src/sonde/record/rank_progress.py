"""Track what a rank's training thread is doing: its phase, and the seconds of each phase since the last step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, distributed

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.on_backward import on_accumulated
from sonde.hooks.replace_function import ReplacedFunction

COMMUNICATION: Final = "communication"
_MOST_WAITING: Final = 8192  # steps that the heartbeat has not written yet
_MOST_PARAMETERS: Final = 16
_COLLECTIVES: Final = (
    *("all_reduce", "barrier", "monitored_barrier", "broadcast", "reduce", "gather", "scatter"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather_object", "broadcast_object_list"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "scatter_object_list"),
    *("send", "recv", "batch_isend_irecv"),
)
FUNCTIONS: Final = tuple(ReplacedFunction(distributed, name) for name in _COLLECTIVES)
"""What a program calls to exchange tensors with other ranks. DDP's own reductions do not come through here."""
Interval = tuple[int, float, dict[str, float]]
"""Step, time of day at its end, and seconds by phase."""


@dataclass(frozen=True, slots=True)
class Now:
    """What the training thread is doing."""

    step: int
    phase: str
    since: float
    """When it last entered a phase or a collective, by the clock of the process."""
    collective: str
    collectives: int
    thread: int


class Progress:
    """Follows phases and collectives; the training thread writes, the heartbeat reads.

    An interval ends where the optimizer begins its step: there all ranks have just received each other's gradients.
    """

    def __init__(
        self,
        step: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._step = step
        self._clock = clock
        self._time = now
        self._phase = "other"
        self._outer = 0
        self._since = clock()
        self._ready = 0.0
        self._backward_began = 0.0
        self._spent: dict[str, float] = {}
        self._has_begun = self._was_cut = False
        self._done: deque[Interval] = deque(maxlen=_MOST_WAITING)
        self._collective = ""
        self._collectives = 0
        self._ended = 0
        self._thread = threading.get_ident()
        self._handles: list[Handle] = []

    def attach(self, guard: Guard, parameters: Sequence[Tensor]) -> None:
        """Listen to collectives, and to the gradients of some parameters."""
        for function in (each for each in FUNCTIONS if each.exists):
            name = str(function).rpartition(".")[2]
            before = guard.wrap("collectives", lambda args, kwargs, name=name: self._begin_collective(name))
            self._handles.append(function.listen(before=before, end=guard.wrap("collectives", self._end_collective)))
        note = guard.wrap("gradients that are ready", self._note_ready)
        for parameter in _spread([each for each in parameters if each.requires_grad]):
            self._handles.append(on_accumulated(parameter, note))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    # ------------------------------------------------------------------ the training thread

    def change(self, going: str, coming: str) -> None:
        """Handle a change of phase."""
        if going == coming:
            return
        now = self._clock()
        if self._phase == "backward" and self._ready > self._backward_began:
            # From the last own gradient on, a backward pass only waits for the other ranks.
            self._turn(COMMUNICATION, max(self._ready, self._since))
        if coming == "backward":
            self._backward_began = now
        self._turn(coming, now)
        self._thread = threading.get_ident()

    def begin_step(self) -> None:
        """Handle the beginning of an optimizer's step; the first of an iteration ends an interval."""
        self._turn("optimizer", self._clock())
        if not self._was_cut:
            self._cut()
        self._was_cut = True

    def end_step(self) -> None:
        """Handle the end of a step; a loop without an optimizer ends its intervals here."""
        self._turn("other", self._clock())
        if not self._was_cut:
            self._cut()
        self._was_cut = False
        self._ended = self._step()

    def _turn(self, coming: str, now: float) -> None:
        self._add(self._phase, now - self._since)
        self._phase, self._since = coming, now

    def _cut(self) -> None:
        spent, self._spent = self._spent, {}
        if self._has_begun:  # when the first interval began is unknown
            self._done.append((self._step(), self._time(), spent))
        self._has_begun = True

    def _add(self, phase: str, seconds: float) -> None:
        self._spent[phase] = self._spent.get(phase, 0.0) + seconds

    def _begin_collective(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            return  # a checkpoint that is saved beside the training, say
        self._outer += 1
        if self._outer > 1:
            return  # one collective may be made of others
        now = self._clock()
        self._add(self._phase, now - self._since)
        self._since = now
        self._collective = name
        self._collectives += 1

    def _end_collective(self, *_: Any) -> None:
        if threading.get_ident() != self._thread or not self._outer:
            return
        self._outer -= 1
        if not self._outer:
            now = self._clock()
            self._add(COMMUNICATION, now - self._since)
            self._since = now

    def _note_ready(self, _: Tensor) -> None:
        self._ready = self._clock()

    # ------------------------------------------------------------------ the heartbeat

    def take(self) -> list[Interval]:
        """Return the intervals that have ended since the last call."""
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def now(self) -> Now:
        """Return what the training thread is doing."""
        phase, since = self._phase, self._since
        if self._outer:
            phase = COMMUNICATION
        elif phase == "backward" and self._ready > self._backward_began:
            phase, since = COMMUNICATION, self._ready
        return Now(self._ended, phase, since, self._collective, self._collectives, self._thread)


def _spread(parameters: list[Tensor]) -> list[Tensor]:
    """Return the first parameters, whose gradients usually come last, and some between them and the end."""
    first, rest = parameters[: _MOST_PARAMETERS // 2], parameters[_MOST_PARAMETERS // 2 :]
    return first + rest[:: max(1, 2 * len(rest) // _MOST_PARAMETERS)][: _MOST_PARAMETERS // 2]
