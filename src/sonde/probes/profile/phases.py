"""Time the phases of a step on the host: waiting for data, forward, backward, optimizer, and the rest.

Every phase is timed by itself: what runs inside another (a forward in an optimizer's closure) is taken out of it, so
the phases of a step add up to the step. Several micro-batches add up too. On a GPU the host runs ahead of the device:
these are the host's times; the device's come from `CudaTiming`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn

from sonde.core import signals
from sonde.hooks.guard import UNGUARDED, Guard, Guarded, Handle, remove_all
from sonde.hooks.on_call import ModuleCalls
from sonde.hooks.replace_function import BACKWARD, LOADING
from sonde.probes.memory.process import ProcessMemory
from sonde.stats.protocol import Recorder

T = TypeVar("T")
StepPhase = Literal["data_wait", "to_device", "forward", "backward", "optimizer", "evaluation", "watching", "other"]
Change = Callable[[StepPhase, StepPhase], None]
"""Called at every change of phase with the one that ends and the one that begins."""
OTHER: Final[StepPhase] = "other"


class PhaseClock(threading.local):
    """The stack of phases one thread is in, and the seconds spent in each since the last step ended."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_change: Change | None = None,
        own_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._own_seconds = own_seconds
        self._own = own_seconds()
        self._stack: list[StepPhase] = []
        self.roots: list[StepPhase] = []
        """Models that are being called, outermost first, each with its phase."""
        self._between: StepPhase = OTHER
        self._since = clock()
        self._began: float | None = None
        self._spent: dict[StepPhase, float] = {}

    @property
    def phase(self) -> StepPhase:
        """The current phase."""
        return self._stack[-1] if self._stack else self._between

    def got_batch(self) -> None:
        """Count what follows, up to the next phase, as bringing the batch to the device."""
        if not self._stack:
            self._turn("to_device")
            self._between = "to_device"

    def begin(self, phase: StepPhase) -> None:
        """Enter a phase; the clock of the one around it stops."""
        # A forward inside a backward is a checkpoint being recomputed: a part of that backward.
        inside = "backward" if phase == "forward" and "backward" in self._stack else phase
        self._turn(inside)
        self._between = OTHER
        self._stack.append(inside)

    def end(self, phase: StepPhase) -> None:
        """Leave a phase, and whatever was entered inside it and not left, because it raised."""
        if phase == "forward" and phase not in self._stack:
            phase = "backward"
        if phase not in self._stack:
            return
        at = len(self._stack) - 1 - self._stack[::-1].index(phase)
        self._turn(self._stack[at - 1] if at else OTHER)
        del self._stack[at:]

    def end_step(self) -> tuple[float | None, dict[StepPhase, float]]:
        """End a step: return its seconds, None for the first, whose beginning is unknown, and those of phases."""
        self._turn(OTHER)
        self._between = OTHER
        self._stack.clear()
        self.roots.clear()
        began, self._began = self._began, self._since
        spent, self._spent = self._spent, {}
        return None if began is None else self._since - began, spent

    def _turn(self, coming: StepPhase) -> None:
        now, own, spent = self._clock(), self._own_seconds(), self._spent
        going = self._stack[-1] if self._stack else self._between
        # What Sonde did meanwhile, in hooks of its own, belongs to no phase of the user's.
        watched = 0.0 if going == "watching" else min(max(own - self._own, 0.0), now - self._since)
        spent[going] = spent.get(going, 0.0) + now - self._since - watched
        self._since, self._own = now, own
        if self._on_change is not None:
            self._on_change(going, coming)
            self._since = self._clock()
            watched += self._since - now
        if watched:
            spent["watching"] = spent.get("watching", 0.0) + watched


class LoopPhases:
    """Listens to data loaders, models and backward passes. The tap on optimizers calls `begin` and `end` for them.

    `roots` are the models, or None if any module may be one: their outermost call is the forward, or an evaluation if
    gradients are disabled there. `own_seconds` tells how long Sonde's own hooks have run in this thread so far, which
    is taken out of the phases they ran in. Process-wide hooks and wrapped calls are taken back by `remove`.
    """

    def __init__(
        self,
        roots: Collection[nn.Module] | None,
        *,
        clock: Callable[[], float],
        guard: Guard = UNGUARDED,
        on_change: Change | None = None,
        own_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.saw_loader = False
        self._is_paused = False
        self._clock = PhaseClock(clock, on_change, own_seconds)
        self._guard = guard
        self._wrap = functools.partial(guard.wrap, "step phases")
        self.begin = self._wrap(self._clock.begin)
        """Enter a phase that is seen elsewhere."""
        self.end = self._wrap(self._clock.end)
        """Leave a phase that is seen elsewhere."""
        # The entries refer to the modules without keeping them alive.
        entries = None if roots is None else dict.fromkeys(map(id, roots), True)
        enter, leave = self._wrap(self._enter), self._wrap(self._leave)
        self._calls: ModuleCalls[Any] = ModuleCalls(entries, enter, leave, leave)
        self._handles: list[Handle] = []

    @property
    def phase(self) -> StepPhase:
        """The phase this thread is in."""
        return self._clock.phase

    def attach(self) -> None:
        """Start listening."""
        clock = self._clock
        self._calls.attach()
        self._handles += [
            self._calls,
            LOADING.listen(
                before=self._unless_paused(lambda *_: self._begin_loading()),
                end=self._unless_paused(lambda: clock.end("data_wait")),
                after=self._unless_paused(lambda *_: clock.got_batch()),
                during="awake",
            ),
            BACKWARD.listen(
                before=self._unless_paused(lambda *_: clock.begin("backward")),
                end=self._unless_paused(lambda: clock.end("backward")),
                during="awake",
            ),
        ]

    def _unless_paused(self, action: Callable[..., None]) -> Guarded:
        guarded = self._wrap(action)

        def call(*args: Any) -> None:
            if not self._is_paused:
                guarded(*args)

        return self._guard.catch("step phases", call)

    def pause(self, paused: bool) -> None:
        """Time nothing until it is called with False."""
        if paused is not self._is_paused:
            self._is_paused = paused
            self._clock.end_step()
            if paused:
                self._calls.rest()
            else:
                self._calls.wake()

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def end_step(self) -> tuple[float | None, dict[StepPhase, float]]:
        """End a step; see `PhaseClock.end_step`. Waiting for data is absent as long as no loader was seen."""
        seconds, spent = self._clock.end_step()
        if self.saw_loader:
            spent.setdefault("data_wait", 0.0)
        return seconds, spent

    def loading(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader` and time its `next` as waiting for data."""
        batches = iter(loader)
        begin, got_batch = self._wrap(self._begin_loading), self._wrap(self._clock.got_batch)
        while True:
            begin()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.end("data_wait")
            got_batch()
            yield batch

    def _enter(self, _: object, args: Any) -> None:
        phases = self._clock.roots
        phases.append("forward" if torch.is_grad_enabled() else "evaluation")
        if len(phases) == 1:
            self._clock.begin(phases[0])

    def _leave(self, _: object, *returned: Any) -> None:
        phases = self._clock.roots
        if phases:
            phase = phases.pop()
            if not phases:
                self._clock.end(phase)

    def _begin_loading(self) -> None:
        self.saw_loader = True
        self._clock.begin("data_wait")


class StepVitals:
    """Step time, waiting for data and the phases of a step, in seconds; resident and available memory, in bytes.

    A part that was not seen is absent: waiting for data as long as there is no loader to time, an evaluation in steps
    without one, the length of the first step.
    """

    def __init__(
        self,
        roots: Collection[nn.Module],
        recorder: Recorder,
        guard: Guard,
        *,
        own_seconds: Callable[[], float] = lambda: 0.0,
        own_bytes: Callable[[], int | None] = lambda: None,
        on_change: Change | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._recorder = recorder
        self._phases = LoopPhases(roots, clock=clock, guard=guard, on_change=on_change, own_seconds=own_seconds)
        self._memory = ProcessMemory(recorder, clock=clock, held=own_bytes)
        self._sites: dict[str, int] = {}
        self.mark = guard.wrap("step phases", self._mark)
        self.end_step = guard.wrap("step phases", self._end_step)

    def attach(self) -> None:
        """Begin to listen."""
        self._phases.attach()

    def pause(self, paused: bool) -> None:
        """Time no phases until it is called with False."""
        self._phases.pause(paused)

    def remove(self) -> None:
        """Stop listening."""
        self._phases.remove()

    def loading(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader` and time its `next` as waiting for data."""
        return self._phases.loading(loader)

    def _mark(self, phase: str) -> None:
        """Handle a mark of the optimizer tap: "optimizer" begins its work, "" ends it and begins Sonde's own."""
        if phase == "optimizer":
            self._phases.end("watching")
            self._phases.begin("optimizer")
        elif not phase:
            self._phases.end("optimizer")
            self._phases.begin("watching")

    def _end_step(self, due: bool) -> None:
        seconds, spent = self._phases.end_step()
        if not due:
            return
        waited = spent.pop("data_wait", None)
        if seconds is None:
            spent.pop("other", None)  # when the first step began is unknown
        else:
            self._put(signals.STEP_TIME, seconds)
        if waited is not None:
            self._put(signals.DATA_WAIT, waited)
        for phase, each in spent.items():
            self._put(signals.time_of(phase), each)
        self._memory.see()

    def _put(self, name: str, value: float) -> None:
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = self._recorder.site(signals.LOOP, "vital", part=signals.part_of(name))
        self._recorder.put(site, value)
