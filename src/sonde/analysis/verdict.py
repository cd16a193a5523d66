"""Give the verdict on a run in one line: whether it is all right, what happened, and where its losses are.

Viewer, terminal and report show this line. What is wrong is the doctor's; how it ended is the program's; the rest
describes curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sonde.analysis.incidents import Incident, incidents_of
from sonde.analysis.overview import Ending, ending_of
from sonde.analysis.run_curves import RunCurve, curves_of, is_training_loss
from sonde.analysis.scores import guess_direction
from sonde.analysis.trend import describe
from sonde.core.metric_names import UNLIKE, likeness
from sonde.diagnosis.dynamics import MIN_POINTS, classify
from sonde.diagnosis.judgement import Health, health
from sonde.diagnosis.second_opinion import findings_of, was_judged
from sonde.records import Finding, words_of
from sonde.store import Run
from sonde.store.timeline import rank_of_finding

Tone = Literal["bad", "odd", "fine", "unknown"]
_EARNED_POINTS: Final = 100
"""Losses that a training must have before it may be called converged."""
_MOST_LOSSES: Final = 20_000
_MOST_CLAUSES: Final = 4
_MOST_INCIDENTS: Final = 2


@dataclass(frozen=True, slots=True)
class MetricNow:
    """Where a loss or metric is: its last and its best value, and where it is going."""

    name: str
    is_training: bool
    last: float
    last_step: int
    best: float
    best_step: int | None
    going: str
    """`falling`, `rising`, `flat`, `oscillating`; that it is no lower than at the start, or no longer finite; empty
    where that is not known."""

    @property
    def changes(self) -> Literal["better", "worse", ""]:
        """Whether it gets better or worse; empty where it stays or that is not known."""
        if self.going not in ("rising", "falling"):
            return ""
        return "better" if (self.going == "rising") == (guess_direction(self.name) > 0) else "worse"

    @property
    def text(self) -> str:
        """The metric as a clause: name, last value, direction, best value."""
        if not np.isfinite(self.last):
            return f"{self.name} {self.going}"
        going = f" and {self.going}" if self.going else ""
        best = "" if self.best_step in (None, self.last_step) else f" (best {self.best:.4g} at step {self.best_step:,})"
        return f"{self.name} {self.last:.4g}{going}{best}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to know about a run first."""

    tone: Tone
    headline: str
    """A few words: `still learning`, `failed at step 20`, `NaN in loss since step 41`."""
    details: tuple[str, ...]
    """Clauses that follow: the cause, losses and metrics, spikes."""
    metrics: tuple[MetricNow, ...]
    health: Health

    @property
    def text(self) -> str:
        """All of it in one line."""
        head = f"{self.headline[:1].upper()}{self.headline[1:]}"
        return f"{head}: {'; '.join(self.details)}." if self.details else f"{head}."


def verdict_on(run: Run, findings: Sequence[Finding] | None = None, *, whole: bool = True) -> Verdict:
    """Return the verdict on a run, given what was found in it; by default what `findings_of` returns.

    Without `whole` norms over all layers are not read, as in `curves_of`.
    """
    curves = curves_of(run, whole=whole)
    findings = sorted(findings_of(run) if findings is None else findings, key=rank_of_finding)
    losses = [curve for curve in curves.of("loss") if is_training_loss(curve)]
    states = {curve.name: _state(curve) for curve in losses}
    if len(losses) == 1 and states[losses[0].name] == "converging" and _is_on_plateau(losses[0], findings):
        states[losses[0].name] = "stalled"
    shown = [_metric(curve, states.get(curve.name)) for curve in curves.of("loss", "metric") if len(curve.values)]
    incidents = incidents_of(run, whole=whole)
    tone, headline, cause = _headline(run, findings, ending_of(run), states, incidents, shown)
    shown.sort(key=lambda each: not each.is_training)
    details = [cause] if cause else []
    details += [metric.text for metric in shown[:_MOST_CLAUSES]]
    details += _incident_clauses(incidents)
    rated = health(findings) if was_judged(run) or findings else Health(None, "unknown")
    return Verdict(tone, headline, tuple(details), tuple(shown), rated)


def _state(loss: RunCurve) -> str:
    """Return where a loss is going; one that falls but has only come back from a rise is not learning."""
    found = classify(_thinned(loss.values))
    return "recovering" if found.state == "converging" and found.recent >= found.initial else found.state


def _is_on_plateau(loss: RunCurve, findings: Sequence[Finding]) -> bool:
    """Return whether the doctor found that the loss stopped falling, and has not seen it fall since."""
    last = int(loss.steps[-1]) if len(loss.steps) else 0
    return any(each.kind == "loss_plateau" and last - each.last_step <= each.last_step - each.step for each in findings)


def _thinned(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    stride = -(-len(values) // _MOST_LOSSES) or 1
    # Keep the last value: it shows whether the curve ends finite.
    return values[(len(values) - 1) % stride :: stride]


def _headline(
    run: Run,
    findings: Sequence[Finding],
    ending: Ending | None,
    states: dict[str, str],
    incidents: Sequence[Incident],
    metrics: Sequence[MetricNow],
) -> tuple[Tone, str, str]:
    """Return how bad it is, the words for it, and the cause: how it ended first, then the doctor, then the loss."""
    if ending is not None and not ending.by_hand:
        at = "" if ending.step is None else f" at step {ending.step:,}"
        return "bad", f"{run.status}{at}", ending.text.rstrip(".")
    grave = [finding for finding in findings if finding.severity != "info"]
    if grave:
        worst = grave[0]
        more = f", and {len(grave) - 1} more" if len(grave) > 1 else ""
        tone: Tone = "bad" if worst.severity == "critical" else "odd"
        return tone, f"{words_of(worst.kind)} since step {worst.step:,}{more}", worst.cause.rstrip(".")
    stopped = "interrupted, " if ending is not None else ""
    if not len(run.steps):
        return "unknown", f"{stopped}no step was recorded{' yet' if run.status == 'live' else ''}", ""
    tone, words = _learning(states, incidents, metrics)
    return tone, f"{stopped}{words}", ""


def _learning(states: dict[str, str], incidents: Sequence[Incident], metrics: Sequence[MetricNow]) -> tuple[Tone, str]:
    if not states:
        return "unknown", "no loss was logged"
    if "non-finite" in states.values():
        return "bad", "the loss is no longer finite"
    if len(states) > 1:
        return "fine", f"nothing wrong was found; {len(states)} losses"
    (state,) = states.values()
    others = [metric for metric in metrics if not metric.is_training and likeness(metric.name) < UNLIKE]
    improving = [metric.name for metric in others if metric.changes == "better"]
    if state in ("converged", "plateau", "stalled") and improving:
        return "fine", f"still learning ({improving[0]} improves)"
    if state == "converged" and not _is_earned(metrics, incidents):
        return "fine", "the loss is flat now"
    return _STATES[state]


_STATES: Final[dict[str, tuple[Tone, str]]] = {
    "converging": ("fine", "still learning"),
    "converged": ("fine", "converged"),
    "stalled": ("fine", "the loss is flat now"),
    "plateau": ("odd", "the loss has not fallen"),
    "recovering": ("odd", "the loss is no lower than at the start"),
    "oscillating": ("odd", "the loss oscillates"),
    "diverging": ("bad", "the loss is rising"),
    "unknown": ("unknown", f"too early to tell (fewer than {MIN_POINTS} losses)"),
}


def _is_earned(metrics: Sequence[MetricNow], incidents: Sequence[Incident]) -> bool:
    """Return whether a flat loss is converged: long enough, without late spikes, and every metric is flat too."""
    last = max((metric.last_step for metric in metrics), default=0)
    late = any(incident.is_spike and incident.step > 2 * last / 3 for incident in incidents)
    return last >= _EARNED_POINTS and not late and not any(metric.changes for metric in metrics)


def _metric(curve: RunCurve, state: str | None) -> MetricNow:
    finite = np.isfinite(curve.values)
    last = float(curve.values[-1])
    direction = -1 if curve.role == "loss" else guess_direction(curve.name)
    best, best_step = float("nan"), None
    if finite.any():
        at = np.flatnonzero(finite)[int(np.argmin(-direction * curve.values[finite]))]
        best, best_step = float(curve.values[at]), int(curve.steps[at])
    return MetricNow(
        curve.name, state is not None, last, int(curve.steps[-1]), best, best_step, _going(curve, finite, state)
    )


def _going(curve: RunCurve, finite: np.ndarray[tuple[int], np.dtype[np.bool_]], state: str | None) -> str:
    if not finite[-1]:
        since = int(curve.steps[np.flatnonzero(finite)[-1] + 1]) if finite.any() else int(curve.steps[0])
        what = "NaN" if np.isnan(curve.values[-1]) else "infinite"
        return f"{what} since step {since:,}"
    if state is not None:
        return _GOING.get(state, "")
    direction = describe(curve.steps, curve.values).direction
    return direction if len(curve.steps) >= 3 and direction != "broken" else ""


_GOING: Final = {
    "converging": "falling",
    "converged": "flat",
    "stalled": "flat",
    "plateau": "flat",
    "recovering": "no lower than at the start",
    "oscillating": "oscillating",
    "diverging": "rising",
}


def _incident_clauses(incidents: Sequence[Incident]) -> list[str]:
    spikes = [each for each in incidents if each.is_spike] or list(incidents)
    largest = sorted(spikes, key=lambda each: -each.jump.factor if np.isfinite(each.jump.factor) else 0)
    shown = sorted(largest[:_MOST_INCIDENTS], key=lambda each: each.step)
    more = len(spikes) - len(shown)
    clauses = [f"{'spike' if each.is_spike else 'jump'} at step {each.step:,}: {each.text}" for each in shown]
    return [*clauses, f"{more} more of them"] if more > 0 else clauses
