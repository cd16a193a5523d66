"""A second opinion: judge a run from its files, finished or not, whether or not it was judged while it ran."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from sonde.diagnosis.case import Case
from sonde.diagnosis.doctor import Doctor
from sonde.diagnosis.nonfinite import is_better_told
from sonde.diagnosis.rules.ranks import compare_ranks
from sonde.records import SEVERITIES, Event, Finding, Severity
from sonde.store import Run, open_run

WHOLE: Final = 2048
"""A run of at most this many steps is gone through step by step."""
START: Final = 512
WINDOWS: Final = 24
WINDOW: Final = 48
END: Final = 256
_MOST_READINGS: Final = 200_000
"""How many readings may be gone through to mark the rows of a table: about a second."""
_JUDGED: Final[WeakKeyDictionary[Run, tuple[Finding, ...]]] = WeakKeyDictionary()
"""What `findings_of` found in runs that are over."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """What is wrong with a run, and what could not be told."""

    findings: tuple[Finding, ...]
    unmeasured: dict[str, str]
    """By kind: what the run lacks for a verdict."""
    broken: dict[str, str]
    """By kind: the traceback of a rule that failed."""
    steps: int
    """How many steps were looked at; step 0, the state before the first, does not count."""
    asked: int = 0
    """How many rules were asked."""

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
        if finding.kind not in ruled or is_better_told(finding):
            doctor.take(finding)
    case.take_sites(run.sites)
    waiting = sorted(run.events, key=_step_of)
    steps = choose_steps(run.steps)
    for count, step in enumerate(steps.tolist(), 1):
        while waiting and _step_of(waiting[0]) <= step:
            case.take_event(waiting.pop(0))
        case.history.put(run.block(step, rank=rank))
        doctor.look_if_due(case, count)
    for event in waiting:
        case.take_event(event)
    case.final = run.status != "live"
    case.replicas = compare_ranks(run) if rank is None else None
    found = doctor.look(case)
    return Diagnosis(
        tuple(found), dict(doctor.unmeasured), dict(doctor.broken), int((steps > 0).sum()), len(doctor.rules)
    )


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
