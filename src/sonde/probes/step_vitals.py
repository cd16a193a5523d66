"""Writes where the time of every recorded step went, and what memory the process held, as vital signs of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from torch import nn

from sonde import vitals
from sonde.hooks.guard import Guard
from sonde.probes.memory.process import ProcessMemory
from sonde.probes.phases import LoopPhases
from sonde.stats.protocol import Recorder

T = TypeVar("T")


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._recorder = recorder
        self._phases = LoopPhases(roots, clock=clock, guard=guard, own_seconds=own_seconds)
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
        """Take the optimizer tap's word: "optimizer" begins its work, "" ends it and begins Sonde's own."""
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
            spent.pop("other", None)  # nobody knows when the first step began
        else:
            self._put(vitals.STEP_TIME, seconds)
        if waited is not None:
            self._put(vitals.DATA_WAIT, waited)
        for phase, each in spent.items():
            self._put(vitals.time_of(phase), each)
        self._memory.see()

    def _put(self, name: str, value: float) -> None:
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = self._recorder.site(vitals.LOOP, "vital", part=vitals.part_of(name))
        self._recorder.put(site, value)
