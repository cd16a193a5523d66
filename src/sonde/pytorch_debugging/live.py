"""The steps of a watched model, handed from the recorder's thread to the thread that trains."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sonde import schema, vitals
from sonde.hooks.guard import Guard, remove_all, warn_of_fault
from sonde.hooks.on_step import on_step
from sonde.pytorch_debugging.events import LEVELS
from sonde.records import SEVERITIES, Block, Event, Finding, Severity, Site
from sonde.schema import Rows
from sonde.session import Session

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger

MAX_WAITING: Final = 256
"""Steps that may wait for the training thread; older ones are dropped and counted."""
_TIMES: Final = {vitals.part_of(vitals.time_of(phase)): phase for phase in ("forward", "backward")}
_CLIP_NORM: Final = vitals.part_of(vitals.CLIP_NORM)


@dataclass(slots=True, kw_only=True)
class SeenStep:
    """What the recorder measured in one step, as far as the checks of a debugger need it."""

    step: int
    skipped: bool = False
    """A gradient scaler held the optimizer back, as it does when it looks for its scale."""
    gradients: dict[str, Rows] = field(default_factory=dict)
    parameters: dict[str, Rows] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """`loss`, `clip_norm` (the gradient norm before clipping), `forward` and `backward` (seconds)."""


class StepFeed:
    """A sink of the recording session: filled in the recorder's thread, emptied by `take` in the training thread."""

    def __init__(self) -> None:
        self.dropped = 0
        """Steps that were never taken because too many waited."""
        self._lock = threading.Lock()
        self._places: dict[int, tuple[str, str]] = {}
        self._pending: SeenStep | None = None
        self._done = 0
        self._steps: deque[SeenStep] = deque()
        self._findings: deque[Finding] = deque(maxlen=MAX_WAITING)

    def take(self) -> tuple[list[SeenStep], list[Finding]]:
        """Return the steps that are complete and the findings that are new since the last call."""
        with self._lock:
            steps, findings = list(self._steps), list(self._findings)
            self._steps.clear()
            self._findings.clear()
        return steps, findings

    def take_sites(self, sites: list[Site]) -> None:
        """Note the sites whose readings are wanted."""
        self._places |= {site.id: place for site in sites if (place := _place_of(site)) is not None}

    def take_block(self, block: Block) -> None:
        """Add the readings of a block to its step. The step before is complete then."""
        if block.step <= self._done:
            return
        if self._pending is not None and block.step != self._pending.step:
            self._finish_step()
        if self._pending is None:
            self._pending = SeenStep(step=block.step)
        step = self._pending
        step.skipped = step.skipped or block.skipped
        for number, row in zip(block.sites.tolist(), block.rows, strict=True):
            place = self._places.get(number)
            if place is None:
                continue
            what, name = place
            if what == "numbers":
                step.numbers[name] = _number(row)
            else:
                getattr(step, what)[name] = row

    def take_event(self, event: Event) -> None:
        """Leave events to the run."""

    def take_finding(self, finding: Finding) -> None:
        """Keep a finding for the training thread."""
        with self._lock:
            self._findings.append(finding)

    def flush(self) -> None:
        """Count the step under way as complete if its optimizer has stepped."""
        if self._pending is not None and self._pending.gradients:
            self._finish_step()

    def close(self) -> None:
        """Count the step under way as complete: none follows."""
        if self._pending is not None:
            self._finish_step()

    def _finish_step(self) -> None:
        step, self._pending = self._pending, None
        assert step is not None
        self._done = step.step
        with self._lock:
            if len(self._steps) >= MAX_WAITING:
                self._steps.popleft()
                self.dropped += 1
            self._steps.append(step)


def _place_of(site: Site) -> tuple[str, str] | None:
    """Return which part of a step a site belongs to, and under which name; None if nobody needs it."""
    if site.phase != "train" or site.call:
        return None
    if site.quantity in ("gradient", "parameter"):
        return f"{site.quantity}s", site.name
    if site.quantity == "output" and site.name == vitals.LOSS and not site.part:
        return "numbers", "loss"
    if site.quantity == "vital" and site.name == vitals.LOOP and site.part in _TIMES:
        return "numbers", _TIMES[site.part]
    if site.quantity == "vital" and site.part == _CLIP_NORM:
        return "numbers", "clip_norm"
    return None


def _number(row: Rows) -> float:
    """Return the mean of what was measured; NaN or an infinity if an element is one."""
    if row[schema.NAN]:
        return math.nan
    if row[schema.POS_INF] or row[schema.NEG_INF]:
        return math.inf if row[schema.POS_INF] else -math.inf
    return float(row[schema.MEAN])


class LiveChecks:
    """Checks every step of a watched model as soon as its readings have arrived, in the thread that trains.

    A step that the user has checked by hand is not checked again.
    """

    def __init__(self, debugger: PyTorchDebugger, session: Session) -> None:
        self._debugger = debugger
        self._session = session
        self._feed = StepFeed()
        self._by_hand: set[tuple[str, int]] = set()
        self._reported: dict[str, Severity] = {}
        session.subscribe(self._feed)
        guard = Guard("isolate", warn_of_fault)
        self._handles = on_step(
            guard.wrap("checking steps", lambda *_: None), guard.wrap("checking steps", lambda *_: self.update())
        )

    def mark(self, what: str) -> None:
        """Note that the user looks at this part of the present step by hand."""
        self._by_hand.add((what, self._session.current_step))

    def update(self) -> None:
        """Check the steps that have arrived. Findings that are new become events."""
        steps, findings = self._feed.take()
        for step in steps:
            self._check(step)
        if steps:
            self._by_hand = {(what, number) for what, number in self._by_hand if number > steps[-1].step}
        for finding in findings:
            self._report(finding)

    def close(self) -> None:
        """Remove the hooks; what has arrived can still be taken by `update`."""
        remove_all(self._handles)

    def _check(self, step: SeenStep) -> None:
        debugger, number = self._debugger, step.step

        def is_new(what: str) -> bool:
            return (what, number) not in self._by_hand

        if "loss" in step.numbers and is_new("loss"):
            debugger._see_loss(step.numbers["loss"], step=number)
        for name, times in (("forward", debugger.forward_times), ("backward", debugger.backward_times)):
            if name in step.numbers and is_new(name):
                times.append(step.numbers[name])
        if not debugger.enable_gradient_checking:
            return
        if step.gradients and is_new("gradient") and not step.skipped:
            debugger._see_gradients(step.gradients, step=number, norm=step.numbers.get("clip_norm"))
        if step.parameters and is_new("parameter"):
            debugger._see_parameters(step.parameters, step=number)

    def _report(self, finding: Finding) -> None:
        before = self._reported.get(finding.kind)
        if finding.withdrawn:
            if self._reported.pop(finding.kind, None) is not None:
                self._debugger._note(
                    "finding_withdrawn", f"{finding.kind} no longer holds", {"kind": finding.kind}, finding="info"
                )
            return
        if before is None or SEVERITIES.index(finding.severity) > SEVERITIES.index(before):
            self._reported[finding.kind] = finding.severity
            self._debugger._note("finding", str(finding), finding.to_json(), finding=LEVELS[finding.severity])
