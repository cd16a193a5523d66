"""Time the phases of a step on a CUDA device, by events in its streams, without waiting for them.

Each step hands its events to the worker thread together with its rows. The copy of the rows is queued after the
last event, so once the rows have arrived the events have happened, and the times belong to the step they were taken
in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from sonde.hooks.guard import is_capturing
from sonde.stats.cuda.driver import beside_captures
from sonde.stats.protocol import Recorder

# --------------------------------------------------------------------------------
# Events in the streams of one CUDA device: they show when work is done, without waiting for it.


_MOST_FREE: Final = 1024


class EventPool:
    """Events of one device, used again when they have been read.

    An event belongs to the device whose stream it was put into first, so no two devices may share a pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: deque[torch.cuda.Event] = deque(maxlen=_MOST_FREE)

    def record(self) -> torch.cuda.Event | None:
        """Put an event into the device's current stream; None while that is captured into a graph."""
        if self.is_captured():
            return None
        try:
            event = self._free.popleft()
        except IndexError:  # without asking first: several threads may take and give back
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def give_back(self, events: Iterable[torch.cuda.Event]) -> None:
        """Take back events that are no longer needed."""
        self._free.extend(events)

    def is_captured(self) -> bool:
        """Return whether the device's current stream is captured into a graph."""
        if torch.cuda.current_device() == self.device.index:
            return is_capturing()
        with torch.cuda.device(self.device):
            return is_capturing()


# --------------------------------------------------------------------------------


# Marks of one step; a program that keeps calling its model without a step is not timed any more.
_MOST_MARKS: Final = 10_000
_STEP: Final = "step"
_Mark = tuple[str, torch.cuda.Event]
"""The phase that begins at an event; empty where no phase does."""


class CudaTiming:
    """Times phases on one device and reports scalars such as `cuda:0.forward_ms`.

    A phase that occurs several times in a step, as in gradient accumulation, adds up. `step_ms` runs from the end of
    one recorded step to the end of the next, so it has everything in between, such as waiting for data. What runs while
    a graph is captured is not timed: the device does it later, if at all.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._sites: dict[str, int] = {}
        self._marks: list[_Mark] = []
        self._events = EventPool(device)

    def mark(self, phase: str) -> None:
        """Begin a phase here in the device's current stream, which ends the one before; "" begins none."""
        event = self._events.record() if len(self._marks) < _MOST_MARKS else None
        if event is not None:
            self._marks.append((phase, event))

    def end_step(self) -> None:
        """Hand this step's times over; the next step begins where it ends."""
        end = self._events.record()
        if end is None:
            self.forget()
            return
        marks, self._marks = self._marks, [("", end)]
        if marks and len(marks) < _MOST_MARKS:
            sites = {phase: self._site(phase) for phase, _ in (*marks, (_STEP, end)) if phase}
            self._recorder.put_late(lambda: self._read(marks, end, sites))

    def forget(self) -> None:
        """Leave this step out, and the way from it to the next."""
        self._marks = []

    def _read(self, marks: list[_Mark], end: torch.cuda.Event, sites: dict[str, int]) -> Sequence[tuple[int, float]]:
        """Return milliseconds by site, or nothing if the events have not happened yet. Runs in the worker thread."""
        times: dict[str, float] = {}
        with beside_captures():
            if not all(event.query() for event in (*(event for _, event in marks), end)):  # type: ignore[no-untyped-call]
                return []
            following = [*(event for _, event in marks[1:]), end]
            for (phase, event), after in zip(marks, following, strict=True):
                if phase:
                    times[phase] = times.get(phase, 0.0) + event.elapsed_time(after)
            if not marks[0][0]:  # it begins at the end of the step before
                times[_STEP] = marks[0][1].elapsed_time(end)
        # `end` is the first mark of the next step, which gives it back.
        self._events.give_back(event for _, event in marks)
        return [(sites[phase], time) for phase, time in times.items()]

    def _site(self, phase: str) -> int:
        site = self._sites.get(phase)
        if site is None:
            site = self._sites[phase] = self._recorder.site(f"{self._device}.{phase}_ms", "scalar")
        return site


class StepClock:
    """Measures how long steps take on a device: the time between events at their ends, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._events = EventPool(device)
        self._waiting: deque[tuple[torch.cuda.Event, int]] = deque()

    def end_step(self, level: int, take: Callable[[int, float], None]) -> None:
        """Mark the end of a step of a level, and hand over the seconds of earlier steps that are known by now."""
        event = self._events.record()
        if event is None:  # captured into a graph: the device does it later, if at all
            self.forget()
            return
        self._waiting.append((event, level))
        while len(self._waiting) > 1 and self._waiting[1][0].query():  # type: ignore[no-untyped-call]
            before, _ = self._waiting.popleft()
            after, level = self._waiting[0]
            take(level, before.elapsed_time(after) / 1e3)
            self._events.give_back([before])

    def forget(self) -> None:
        """Leave this step out, and what is not known yet of those before it."""
        if self._waiting:
            self._events.give_back(event for event, _ in self._waiting)
            self._waiting.clear()
