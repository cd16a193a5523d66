"""Judge a run while it is recorded, in the worker's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sonde.diagnosis.case import Case
from sonde.diagnosis.doctor import Doctor
from sonde.records import Block, Event, Finding, Site

# How often to look: at each of the first steps, where exact relations show; then less and less.
_EVERY: Final = ((10, 1), (200, 5), (1000, 10), (10_000, 50))
_LATER: Final = 250
# Steps at which a run is judged whatever that costs; later ones double. Rules hold Python's lock, so their time is
# taken from training.
_ALWAYS: Final = (3, 10, 24, 50)


class Monitor:
    """A `Sink` that reports what is wrong as soon as it is known.

    `share` bounds the processor time of looks, as a share of the time that has passed; None looks in its usual rhythm
    whatever it costs.
    """

    def __init__(
        self,
        report: Callable[[Finding], None],
        doctor: Doctor | None = None,
        *,
        share: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._report = report
        self._doctor = doctor or Doctor()
        self._case = Case()
        self._lock = threading.Lock()
        self._findings: list[Finding] = []
        self._looked = -1
        self._pending: int | None = None
        self._share = share
        self._clock, self._own_time = clock, own_time
        self._began = clock()
        self._spent = 0.0
        self._said: deque[Finding] = deque(maxlen=256)
        """What was reported from here; it comes back to all sinks."""

    @property
    def findings(self) -> list[Finding]:
        """What is wrong as of the last look, best first; from any thread."""
        with self._lock:
            return list(self._findings)

    @property
    def nbytes(self) -> int:
        """Bytes of history currently held; can be read from any thread."""
        return self._case.history.nbytes

    @property
    def unmeasured(self) -> dict[str, str]:
        """By kind of finding: what the run lacks for a verdict."""
        return dict(self._doctor.unmeasured)

    @property
    def broken(self) -> dict[str, str]:
        """By kind of finding: the traceback of its rule, if it failed."""
        return dict(self._doctor.broken)

    def take_sites(self, sites: list[Site]) -> None:
        """Take new sites."""
        self._case.take_sites(sites)

    def take_block(self, block: Block) -> None:
        """Take a step. It is judged when the next one begins: only then is everything about it known."""
        if self._pending is not None and block.step != self._pending:
            self._look_if_due(self._pending)
        self._pending = block.step
        self._case.history.put(block)

    def take_event(self, event: Event) -> None:
        """Take an event."""
        self._case.take_event(event)

    def take_finding(self, finding: Finding) -> None:
        """Take a finding made elsewhere. Those that came from here are known already."""
        if not finding.withdrawn and not any(finding is said for said in self._said):
            self._doctor.take(finding)
            self._look()

    def flush(self) -> None:
        """Judge everything taken so far."""
        self._look()

    def close(self) -> None:
        """Judge once more, now that the run is over."""
        self._case.final = True
        self._look()

    def _look_if_due(self, step: int) -> None:
        every = next((every for until, every in _EVERY if step <= until), _LATER)
        if step - self._looked >= every and (self._is_milestone(step) or self._can_afford()):
            self._look()

    def _is_milestone(self, step: int) -> bool:
        """Return whether a step at which a run is always judged has come since the last look."""
        following = next((each for each in _ALWAYS if each > self._looked), 2 * max(self._looked, _ALWAYS[-1]))
        return step >= following

    def _can_afford(self) -> bool:
        return self._share is None or self._spent <= self._share * (self._clock() - self._began)

    def _look(self) -> None:
        self._looked = self._case.step
        began = self._own_time()
        before = {finding.kind: finding for finding in self._findings}
        found = self._doctor.look(self._case)
        self._spent += self._own_time() - began
        with self._lock:
            self._findings = found
        for finding in found:
            if _is_news(before.get(finding.kind), finding) or self._case.final:
                self._say(finding)
        for kind in before.keys() - {finding.kind for finding in found}:
            self._say(replace(before[kind], withdrawn=True))

    def _say(self, finding: Finding) -> None:
        self._said.append(finding)
        self._report(finding)


def _is_news(before: Finding | None, now: Finding) -> bool:
    """Return whether a finding differs from what was said before in more than its last step and its numbers."""
    if before is None:
        return True
    return (before.severity, before.sites, before.explains, before.data) != (
        now.severity,
        now.sites,
        now.explains,
        now.data,
    )
