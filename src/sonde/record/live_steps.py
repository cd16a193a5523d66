"""Hand recorded steps and new findings from the worker thread to the thread that trains."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from sonde.core.schema import Rows
from sonde.records import SEVERITIES, Block, Event, Finding, Severity, Sink, Site

Label = TypeVar("Label", bound=Hashable)
_MAX_FINDINGS: Final = 1000


@dataclass(slots=True)
class LiveStep(Generic[Label]):
    """What was measured in one step, by the label of its site."""

    step: int
    skipped: bool = False
    """A gradient scaler held the optimizer back, as it does when it looks for its scale."""
    has_stepped: bool = False
    """Whether there are readings that are made when an optimizer steps."""
    rows: dict[Label, Rows] = field(default_factory=dict)


class StepFeed(Sink, Generic[Label]):
    """A sink of a session: filled in the worker thread, emptied by `take` and `take_findings` in another one.

    Args:
        label: Returns the label of a site whose readings are wanted; None for any other site.
        most: How many steps may wait; when there are more, the oldest one is dropped.

    """

    def __init__(self, label: Callable[[Site], Label | None], most: int) -> None:
        self.dropped = 0
        """Steps that were never taken because too many waited."""
        self._label = label
        self._lock = threading.Lock()
        self._labels: dict[int, Label] = {}
        self._at_step: set[int] = set()
        self._pending: LiveStep[Label] | None = None
        self._done = 0
        self._most = most
        self._steps: deque[LiveStep[Label]] = deque()
        self._severities: dict[str, Severity] = {}
        self._findings: deque[Finding] = deque(maxlen=_MAX_FINDINGS)

    def take(self) -> list[LiveStep[Label]]:
        """Return the steps that have been completed since the last call."""
        with self._lock:
            steps = list(self._steps)
            self._steps.clear()
        return steps

    def take_findings(self) -> list[Finding]:
        """Return the findings since the last call that are new or more severe than before, or were withdrawn."""
        if not self._findings:  # the usual case, at every step of the training
            return []
        with self._lock:
            findings = list(self._findings)
            self._findings.clear()
        return findings

    def take_sites(self, sites: list[Site]) -> None:
        """Note the sites whose readings are wanted."""
        self._labels |= {site.id: label for site in sites if (label := self._label(site)) is not None}
        self._at_step |= {site.id for site in sites if site.quantity in ("gradient", "parameter")}

    def take_block(self, block: Block) -> None:
        """Add the readings of a block to its step. The step before is complete then."""
        if block.step <= self._done:
            return
        if self._pending is not None and block.step != self._pending.step:
            self._complete()
        if self._pending is None:
            self._pending = LiveStep(block.step)
        step, sites = self._pending, list(map(int, block.sites))
        step.skipped = step.skipped or block.skipped
        step.has_stepped = step.has_stepped or not self._at_step.isdisjoint(sites)
        step.rows |= {
            self._labels[site]: row for site, row in zip(sites, block.rows, strict=True) if site in self._labels
        }

    def take_event(self, event: Event) -> None:
        """Leave events to the run."""

    def take_finding(self, finding: Finding) -> None:
        """Keep a finding that changes what is known."""
        with self._lock:
            before = self._severities.get(finding.kind)
            if finding.withdrawn:
                self._severities.pop(finding.kind, None)
            elif before is None or SEVERITIES.index(finding.severity) > SEVERITIES.index(before):
                self._severities[finding.kind] = finding.severity
            if self._severities.get(finding.kind) != before:
                self._findings.append(finding)

    def flush(self) -> None:
        """Count the step under way as complete if its optimizer has stepped."""
        if self._pending is not None and self._pending.has_stepped:
            self._complete()

    def close(self) -> None:
        """Count the step under way as complete: none follows."""
        if self._pending is not None:
            self._complete()

    def _complete(self) -> None:
        step, self._pending = self._pending, None
        assert step is not None
        self._done = step.step
        if not step.rows:  # nothing that is wanted was recorded in it
            return
        with self._lock:
            if len(self._steps) >= self._most:
                self._steps.popleft()
                self.dropped += 1
            self._steps.append(step)
