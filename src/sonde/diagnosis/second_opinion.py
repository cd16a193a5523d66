"""A second opinion: judge a run from its files, finished or not, whether or not it was judged while it ran."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from sonde.core import examination
from sonde.diagnosis.case import Case
from sonde.diagnosis.doctor import Doctor
from sonde.diagnosis.examiner import is_suspicious
from sonde.diagnosis.nonfinite import is_traced
from sonde.diagnosis.ranks.comparison import compare_ranks
from sonde.diagnosis.tape.reading import Shelf
from sonde.records import SEVERITIES, Event, Finding, Severity
from sonde.store import Run, open_run
from sonde.store.ranks import rank_times, standing_of, with_stops

WHOLE: Final = 2048
"""A run of at most this many steps is gone through step by step."""
START: Final = 512
WINDOWS: Final = 24
WINDOW: Final = 48
END: Final = 256
_SEEN_LIVE: Final = frozenset({"dead_rank", "stuck_rank"})
"""Findings that need a process to be looked at while it runs: what was found then counts later too."""
_MOST_READINGS: Final = 200_000
"""How many readings may be gone through to mark the rows of a table: about a second."""
_JUDGED: Final[WeakKeyDictionary[Run, tuple[Finding, ...]]] = WeakKeyDictionary()
"""What `findings_of` found in runs that are over."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """What is wrong with a run, and what could not be judged."""

    findings: tuple[Finding, ...]
    unmeasured: dict[str, str]
    """By kind: what the run lacks for a verdict."""
    broken: dict[str, str]
    """By kind: the traceback of a rule that failed."""
    steps: int
    """How many steps were looked at; step 0, the state before the first, does not count."""
    asked: int = 0
    """How many rules were asked."""
    looks_ill: bool = False
    """Whether there is a warning, or the loss does not fall."""
    refuted: dict[str, str] = field(default_factory=dict)
    """By kind: what an experiment says against it."""
    thinned: dict[str, int] = field(default_factory=dict)
    """By kind: one in how many steps has the readings that the rule needs, where the budget left some out."""

    @property
    def severity(self) -> Severity | None:
        """The gravest of the findings; None if there is none."""
        found = [SEVERITIES.index(finding.severity) for finding in self.findings]
        return SEVERITIES[max(found)] if found else None

    def __repr__(self) -> str:
        found = ", ".join(f"{finding.kind} ({finding.severity})" for finding in self.findings) or "nothing found"
        return f"<Diagnosis of {self.steps} steps: {found}>"

    def __str__(self) -> str:
        nothing = f"{self.asked} rules found nothing wrong in {self.steps} steps."
        return "\n".join(map(str, self.findings)) or nothing


def diagnose(run: Run | str | Path, *, rank: int | None = None) -> Diagnosis:
    """Judge a run from its files.

    What was found while it ran and cannot be found again from the files (the first bad operation) counts too. A long
    run is looked at in windows: its beginning, its end and evenly between.

    Example:
        for finding in sonde.diagnose("runs/first").findings:
            print(finding.severity, finding.cause, finding.fix)

    """
    run = run if isinstance(run, Run) else open_run(run)
    doctor, case = Doctor(), Case()
    ruled = {rule.kind for rule in doctor.rules}
    for finding in run.findings:
        if finding.kind not in ruled or is_traced(finding) or finding.kind in _SEEN_LIVE:
            doctor.take(finding)
    case.take_sites(run.sites)
    waiting = sorted(run.events, key=_step_of)
    steps = choose_steps(run.steps)
    taped = sorted(Shelf(run.path)(), key=lambda tape: tape.step, reverse=True)
    case.expects_tapes = bool(taped)
    for count, step in enumerate(steps.tolist(), 1):
        while taped and taped[-1].step <= step:
            case.take_tape(taped.pop())
        while waiting and _step_of(waiting[0]) <= step:
            case.take_event(waiting.pop(0))
        case.history.put(run.block(step, rank=rank))
        doctor.look_if_due(case, count)
    for event in waiting:
        case.take_event(event)
    for each in examination.of_run(run.path).values():
        case.take_examination(each)
    for tape in reversed(taped):
        case.take_tape(tape)
    case.final = run.status != "live"
    case.ranks = compare_ranks(run) if rank is None else None
    if rank is None and len(run.ranks) > 1:
        _add_progress(case, run)
    found = doctor.look(case)
    return Diagnosis(
        tuple(found),
        dict(doctor.unmeasured),
        dict(doctor.broken),
        int((steps > 0).sum()),
        len(doctor.rules),
        is_suspicious(case, found),
        dict(doctor.refuted),
        {rule.kind: stride for rule in doctor.rules if (stride := rule.stride(case)) > 1},
    )


def _add_progress(case: Case, run: Run) -> None:
    """Add the heartbeats and the step times of all ranks."""
    standing = standing_of(run.path, time.time(), run.ranks)
    case.standing = None if standing is None else with_stops(run.path, standing)
    times = rank_times(run.path)
    case.rank_times = None if times is None else [times]


def was_judged(run: Run) -> bool:
    """Return whether the doctor looked at the run while it was recorded."""
    return bool(run.findings) or any(site.quantity == "vital" for site in run.sites)


def findings_of(run: Run) -> list[Finding]:
    """Return what is known to be wrong with a run: what was found while it ran, else what its files show.

    A run that was not judged while it ran and is too large to be judged in passing has none; `diagnose` takes its time.
    """
    too_large = len(run.sites) * min(len(run.steps), WHOLE) > _MOST_READINGS
    if was_judged(run) or run.status == "live" or too_large:
        return list(run.findings)
    if run not in _JUDGED:
        _JUDGED[run] = diagnose(run).findings
    return list(_JUDGED[run])


def choose_steps(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which steps of a run to look at."""
    if len(steps) <= WHOLE:
        return steps
    starts = np.linspace(START, len(steps) - END, WINDOWS, endpoint=False).astype(np.int64)
    between = (starts[:, None] + np.arange(WINDOW)).ravel()
    chosen = np.unique(np.concatenate([np.arange(START), between, np.arange(len(steps) - END, len(steps))]))
    result: NDArray[np.int64] = steps[chosen]
    return result


def _step_of(event: Event) -> int:
    return -1 if event.step is None else event.step
