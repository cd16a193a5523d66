"""Judge a run while it is recorded, in the worker's thread."""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from sonde.core.collector import fewer_collections
from sonde.diagnosis.case import Case
from sonde.diagnosis.doctor import Doctor
from sonde.diagnosis.examiner import PATIENCE, Examiner
from sonde.diagnosis.tape.reading import Shelf
from sonde.records import Block, Event, Finding, Numbers, Site

# How often to look: at each of the first steps, where exact relations show; then less and less.
_EVERY: Final = ((10, 1), (200, 5), (1000, 10), (10_000, 50))
_LATER: Final = 250
# Steps at which a run is judged in any case where steps are short; later ones double. Rules hold Python's lock, so
# their time is taken from training: where steps are not short, looks at the first steps may take `_EARLY_SHARE` of it,
# later ones the share that was given.
_ALWAYS: Final = (3, 10, 24, 50)
_SHORT_STEP_S: Final = 0.01
_EARLY_STEPS: Final = 24
_EARLY_SHARE: Final = 0.03
# What a look is taken to cost before the first one: every rule, and every site.
_USUAL_LOOK_S: Final = 0.005
_USUAL_LOOK_AT_SITE_S: Final = 2e-5
_USUAL_TAPED_BYTE_S: Final = 4e-8  # the same of reading a tape and asking every question about it


_CLOSING_LOOKS: Final = 3
"""A finding is withdrawn when this many looks in a row have not made it."""


class Monitor:
    """A `Sink` that reports what is wrong as soon as it is known.

    `share` bounds the processor time of looks, as a share of the time that has passed; None looks in its usual rhythm
    whatever it costs. Where `run` is given, taped steps of that run are read, and examined when it looks ill; `earlier`
    is how `signals.SCHEDULE` stood before it was resumed.
    """

    def __init__(
        self,
        report: Callable[[Finding], None],
        doctor: Doctor | None = None,
        *,
        share: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own_time: Callable[[], float] = time.thread_time,
        run: Path | None = None,
        earlier: Mapping[str, float] | None = None,
    ) -> None:
        importlib.import_module("numpy.ma")  # np.median imports it at its first use, which would be beside the training
        self._report = report
        self._doctor = doctor or Doctor()
        self._case = Case()
        self._case.earlier = earlier or {}
        self._lock = threading.Lock()
        self._findings: list[Finding] = []
        self._looked = -1
        self._pending: int | None = None
        self._share = share
        self._examiner = None if run is None else Examiner(run)
        self._tapes = None if run is None else Shelf(run)
        self._case.expects_tapes = run is not None
        self._clock, self._own_time = clock, own_time
        self._began: float | None = None
        """When the first step came: what went before is no time of the training's."""
        self.seconds = 0.0
        """What looks have taken so far."""
        self._last_look: float | None = None
        """What the last look took that read no tape."""
        self._taped_byte = _USUAL_TAPED_BYTE_S
        self._absent: dict[str, int] = {}
        """By kind of a finding that holds: in how many looks in a row it was not made."""
        self._reported: deque[Finding] = deque(maxlen=256)
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
        self._began = self._clock() if self._began is None else self._began
        if self._pending is not None and block.step != self._pending:
            self._look_if_due(self._pending)
        self._pending = block.step
        self._case.history.put(block)

    def take_numbers(self, numbers: Numbers) -> None:
        """Take many steps; the run is judged at the last of them at most."""
        if int(numbers.steps[0]) <= _ALWAYS[-1]:
            for block in numbers.blocks():
                self.take_block(block)
            return
        if self._pending is not None:
            self._look_if_due(self._pending)
        self._pending = int(numbers.steps[-1])
        self._case.history.put_numbers(numbers)

    def take_event(self, event: Event) -> None:
        """Take an event."""
        self._case.take_event(event)

    def take_finding(self, finding: Finding) -> None:
        """Take a finding made elsewhere. Those that came from here are known already."""
        if any(finding is known for known in self._reported):
            return
        if finding.withdrawn:
            self._doctor.drop(finding.kind)
            self._absent[finding.kind] = _CLOSING_LOOKS
        else:
            self._doctor.take(finding)
        self._look()

    def flush(self) -> None:
        """Judge everything taken so far."""
        self._look()

    def close(self) -> None:
        """Judge once more, now that the run is over."""
        self._case.final = True
        self._look()
        if self._examiner is not None and self._examiner.finish(self._case, self._findings):
            self._look()

    @property
    def patience_s(self) -> float:
        """For how many seconds `close` may wait for experiments."""
        return 2 * PATIENCE if self._examiner is not None and self._examiner.waits else 0.0

    def _look_if_due(self, step: int) -> None:
        every = next((every for until, every in _EVERY if step <= until), _LATER)
        if step - self._looked >= every and (self._is_milestone(step) or self._can_afford()):
            self._look()
            # While a run trains, only where its end waits for the results anyway: another process beside the training
            # makes the threads of its operations wait for each other, whatever its priority.
            examiner = self._examiner
            if examiner is not None and examiner.waits and examiner.look(self._case, self._findings):
                self._look()

    def _is_milestone(self, step: int) -> bool:
        """Return whether a step at which a run is always judged has come since the last look."""
        following = next((each for each in _ALWAYS if each > self._looked), 2 * max(self._looked, _ALWAYS[-1]))
        if step < following:
            return False
        is_short = self._passed() < _SHORT_STEP_S * step
        return is_short or self._can_afford(_EARLY_SHARE if step < _EARLY_STEPS else None)

    def _passed(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def _can_afford(self, share: float | None = None) -> bool:
        """Return whether another look stays within a share of the time so far."""
        share = self._share if share is None or self._share is None else share
        if share is None:
            return True
        usual = self._last_look
        if usual is None:
            usual = _USUAL_LOOK_S + _USUAL_LOOK_AT_SITE_S * self._case.num_sites
        left = share * self._passed() - self.seconds - usual
        if left < 0 or self._tapes is None:
            return left >= 0  # asked at every step: the folder of the tapes is not listed for a no
        return self._taped_byte * self._tapes.unread_bytes() <= left  # reading tapes takes several times as long

    def _look(self) -> None:
        self._looked = self._case.step
        began = self._own_time()
        taped_bytes = 0 if self._tapes is None else self._tapes.unread_bytes()
        with fewer_collections:
            for tape in () if self._tapes is None else self._tapes():
                self._case.take_tape(tape)
            before = {finding.kind: finding for finding in self._findings}
            found = self._doctor.look(self._case)
        seconds = self._own_time() - began
        self.seconds += seconds
        if not taped_bytes:
            self._last_look = seconds
        elif self._last_look is not None:
            self._taped_byte = max(0.0, seconds - self._last_look) / taped_bytes
        found += self._still_held(before, {finding.kind for finding in found})
        with self._lock:
            self._findings = found
        for finding in found:
            if _is_news(before.get(finding.kind), finding) or self._case.final:
                self._publish(finding)
        for kind in before.keys() - {finding.kind for finding in found}:
            self._publish(replace(before[kind], withdrawn=True))

    def _still_held(self, before: dict[str, Finding], found: set[str]) -> list[Finding]:
        """Return the findings that this look did not make but that are not withdrawn yet: else one on an edge flaps.

        What is explained by a cause now, or refuted by an experiment, goes at once.
        """
        if self._case.final:
            return []
        gone = {finding.kind for finding in self._doctor.found} | self._doctor.refuted.keys()
        self._absent = {kind: self._absent.get(kind, 0) + 1 for kind in before.keys() - found - gone}
        return [before[kind] for kind, looks in self._absent.items() if looks < _CLOSING_LOOKS]

    def _publish(self, finding: Finding) -> None:
        self._reported.append(finding)
        self._report(finding)


def _is_news(before: Finding | None, now: Finding) -> bool:
    """Return whether a finding differs from what was reported before in more than its last step and its numbers."""
    if before is None:
        return True
    return (before.severity, before.sites, before.explains, before.data) != (
        now.severity,
        now.sites,
        now.explains,
        now.data,
    )
