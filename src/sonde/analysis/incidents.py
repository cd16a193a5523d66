"""List spikes and jumps of a run as events: what changed, when, by how much, and what changed just before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.analysis.run_curves import LEARNING_RATE, RunCurve, curves_of, is_training_loss
from sonde.core.facts import EVENT_TYPE as FACTS
from sonde.core.facts import PROGRAM_EVENT
from sonde.diagnosis.jumps import Jump, find_rate_jumps, find_spikes
from sonde.records import Event
from sonde.store import Run

SPIKE: Final = "spike"
JUMP: Final = "jump"
_LOSS_FACTOR: Final = 1.2
_FACTOR: Final = 3.0
"""A gradient norm or an update ratio changes by less than this from batch to batch as a matter of course."""
_REACH: Final = 5
"""Steps in which a cause shows: momentum carries a bad update on for a few."""
_MOST: Final = 50
_CAUSES: Final = ("nonfinite", "skipped", "resume", "rollback", "fault")


@dataclass(frozen=True, slots=True)
class Incident:
    """One spike or jump, and the changes that came with it or just before it."""

    curve: str
    jump: Jump
    causes: tuple[tuple[str, Jump], ...] = ()
    event: Event | None = None
    """What the run recorded just before it, if nothing else explains it."""

    @property
    def step(self) -> int:
        """The step it happened at."""
        return self.jump.step

    @property
    def is_spike(self) -> bool:
        """Whether a loss rose; else a setting or a norm changed."""
        return "loss" in self.curve.lower()

    @property
    def what(self) -> str:
        """What happened, without its cause."""
        return _words(self.curve, self.jump)

    @property
    def cause(self) -> str:
        """What came just before it, with how many steps before; empty where nothing was recorded."""
        if not self.causes:
            return "" if self.event is None else f"{_after(self.step - (self.event.step or 0))} {self.event.message}"
        first = min(jump.step for _, jump in self.causes)
        return f"{_after(self.step - first)} {' and '.join(_words(name, jump) for name, jump in self.causes)}"

    @property
    def text(self) -> str:
        """What happened and why, as one line."""
        return f"{self.what} {self.cause}".strip()


def _words(name: str, jump: Jump) -> str:
    factor = f"\N{MULTIPLICATION SIGN}{jump.factor:.3g}" if np.isfinite(jump.factor) else "rose"
    return f"{name} {factor} ({jump.before:.3g} \N{RIGHTWARDS ARROW} {jump.after:.3g})"


def _after(steps: int) -> str:
    if steps == 0:
        return "at the same step as"
    return "one step after" if steps == 1 else f"{steps} steps after"


def incidents_of(run: Run, *, whole: bool = True) -> list[Incident]:
    """Return the spikes of losses and the jumps of learning rates, gradient norms and update ratios, in order."""
    known = curves_of(run, whole=whole)
    losses = [(curve.name, jump) for curve in known.of("loss") if is_training_loss(curve)
              for jump in find_spikes(curve.steps, curve.values, least_factor=_LOSS_FACTOR)]  # fmt: skip
    others = [(name, jump) for name, jump in _rates(known.of("rate"))]
    others += [(curve.name, jump) for curve in known.of("gradient", "update")
               for jump in find_spikes(curve.steps, curve.values, least_factor=_FACTOR)]  # fmt: skip
    recorded = [event for event in run.events if event.step is not None and event.event_type in _CAUSES]
    made = [_with_causes(name, jump, others, recorded) for name, jump in losses]
    # What explains a spike is named there; a learning rate is also an event of its own, because the user set it.
    explained = {(name, jump.step) for each in made for name, jump in each.causes}
    made += [
        _with_causes(name, jump, [pair for pair in others if pair[0].startswith(LEARNING_RATE)], recorded)
        for name, jump in others
        if name.startswith(LEARNING_RATE) or (name, jump.step) not in explained
    ]
    return sorted(made, key=lambda each: (each.step, not each.is_spike))[:_MOST]


def _rates(curves: list[RunCurve]) -> list[tuple[str, Jump]]:
    """Return the jumps of learning rates; groups that jump together are one."""
    found: dict[tuple[int, float], list[tuple[str, Jump]]] = {}
    for curve in curves:
        for jump in find_rate_jumps(curve.steps, curve.values):
            found.setdefault((jump.step, round(jump.factor, 6)), []).append((curve.name, jump))
    many = len(curves) > 1
    return [
        (LEARNING_RATE if not many or len(group) == len(curves) else f"{LEARNING_RATE} of {group[0][0]}", group[0][1])
        for group in found.values()
    ]


def _with_causes(name: str, jump: Jump, others: list[tuple[str, Jump]], recorded: list[Event]) -> Incident:
    near = [pair for pair in others if 0 <= jump.step - pair[1].step <= _REACH and pair != (name, jump)]
    near = [pair for pair in near if not name.startswith(LEARNING_RATE)]
    first = {pair[0]: pair for pair in sorted(near, key=lambda pair: -pair[1].step)}
    causes = tuple(sorted(first.values(), key=lambda pair: (not pair[0].startswith(LEARNING_RATE), pair[1].step)))
    before = [event for event in recorded if 0 <= jump.step - (event.step or 0) <= _REACH]
    return Incident(name, jump, causes, before[-1] if before and not causes else None)


def events_of(run: Run, *, whole: bool = True) -> list[Event]:
    """Return what happened in a run, in order of time: its recorded events, and its spikes and jumps."""
    recorded = [event for event in run.events if event.event_type not in (FACTS, PROGRAM_EVENT)]
    made = [_as_event(run, incident) for incident in incidents_of(run, whole=whole)]
    return sorted([*recorded, *made], key=lambda event: event.timestamp)


def _as_event(run: Run, incident: Incident) -> Event:
    at = int(np.searchsorted(run.blocks.step, incident.step))
    jump = incident.jump
    return Event(
        event_type=SPIKE if incident.is_spike else JUMP,
        message=incident.text,
        step=incident.step,
        timestamp=float(run.blocks.time[min(at, len(run.blocks.time) - 1)]),
        data={"curve": incident.curve, "before": jump.before, "after": jump.after, "cause": incident.cause},
    )
