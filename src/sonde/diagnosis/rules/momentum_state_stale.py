"""An optimizer that has lost its memory on the way."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import held
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Track, Values
from sonde.facts import OptimizerFacts
from sonde.records import Evidence, Finding, Site

FIRST_STEPS: Final = 3
RATE_MARGIN: Final = 0.03  # eps and weight decay take a little from the first step


def check(case: Case) -> Finding | None:
    """Find an Adam whose memory counts fewer steps than before, or that moves as only a fresh one does."""
    written = case.vital(vitals.LOOP, vitals.WRITTEN)
    if case.final and written is not None and written.numbers()[-1] > 0 and case.facts.optimizers:
        return _another_steps(case, float(written.numbers()[-1]))
    if not any("Adam" in optimizer.kind for optimizer in case.facts.optimizers):
        raise NotMeasured("an optimizer of Adam's kind")
    return next((found for each in case.facts.optimizers if (found := _check_one(case, each)) is not None), None)


def _another_steps(case: Case, written: float) -> Finding:
    """Say that the weights are changed, but not by the optimizer that is watched."""
    optimizer = case.facts.optimizers[0]
    return RULE.finding(
        case,
        "warning",
        0.85,
        sites=(optimizer.name,),
        step=1,
        evidence=(above("parameters that were written to", written, 1), fact(f"steps of {optimizer.name}", 0)),
        cause=f"{optimizer.name} has never stepped, yet the weights change: another optimizer does it. If it is made "
        "inside the loop, its moments are lost each time.",
        fix="Make the optimizer once, before the loop, and step that one; hand the same one to sonde.watch.",
        refute="Print id(optimizer) in every step: if it stays the same, and is the one handed in, it is not this.",
    )


def _check_one(case: Case, optimizer: OptimizerFacts) -> Finding | None:
    counted = case.vital(optimizer.name, vitals.STATE_STEPS)
    if counted is not None and len(counted) > 1:
        return _look_at_count(case, optimizer, counted)
    return _look_at_updates(case, optimizer)


def _look_at_count(case: Case, optimizer: OptimizerFacts, counted: Track) -> Finding | None:
    """Find a memory that counts fewer steps than it did before."""
    numbers = counted.numbers()
    lost = np.flatnonzero(np.diff(numbers) < 0)
    if not len(lost):
        return None
    at = int(lost[0])
    return _finding(
        case,
        optimizer,
        0.98,
        int(counted.steps[at + 1]),
        below("steps its memory counts then", numbers[at + 1], numbers[at], f"{counted.key} mean"),
        fact("times that this happened", len(lost)),
    )


def _look_at_updates(case: Case, optimizer: OptimizerFacts) -> Finding | None:
    """Find updates that only a fresh memory makes, where it does not say itself how old it is."""
    panel = case.panel("update")
    mine = set(held(optimizer))
    chosen = [at for at, site in enumerate(panel.sites) if site.name in mine and _is_telling(case, site)]
    if "Adam" not in optimizer.kind or len(chosen) < 2:
        return None
    panel = panel.pick(chosen)
    moved = panel.column(schema.COUNT) - panel.column(schema.ZERO)
    usable = (moved >= 16) & panel.read
    typical = np.divide(panel.column(schema.ABS_SUM), moved, out=np.zeros_like(moved), where=moved > 0)
    even = usable & (typical >= thresholds.EVEN_UPDATE.value * np.nan_to_num(panel.stat("abs_max"), nan=np.inf))
    fresh = (even.sum(axis=1) >= 0.9 * usable.sum(axis=1)) & (usable.sum(axis=1) >= 2)
    fresh &= _moves_by_the_rate(case, optimizer, panel.steps, typical, usable)
    # Its own first steps are those of a fresh state: an optimizer may join in late, or not step each time.
    fresh &= np.cumsum(panel.read.any(axis=1)) > FIRST_STEPS
    count = int(fresh.sum())
    if not count or count > 0.2 * panel.read.any(axis=1).sum():  # optimizers of signs always move like this
        return None
    return _finding(
        case,
        optimizer,
        0.85,
        int(panel.steps[fresh][0]),
        above(
            "typical update over the largest, at that step",
            _ratio(typical, panel.stat("abs_max"), fresh),
            thresholds.EVEN_UPDATE,
        ),
        fact("such steps among the last", count),
    )


def _finding(case: Case, optimizer: OptimizerFacts, confidence: float, step: int, *evidence: Evidence) -> Finding:
    return RULE.finding(
        case,
        "warning",
        confidence,
        sites=(optimizer.name,),
        step=step,
        evidence=evidence,
        cause=f"{optimizer.kind} began anew at step {step}: its moments were lost, as if it had just been made.",
        fix="Make the optimizer once, before the loop, and load its state_dict when resuming.",
        refute="Print optimizer.state[p]['step'] around that step: if it goes on counting, nothing was lost.",
    )


def _moves_by_the_rate(
    case: Case, optimizer: OptimizerFacts, steps: NDArray[np.int64], typical: Values, usable: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Say for each step whether elements moved by just the learning rate: the first step of Adam, and no other."""
    rates = case.learning_rate(optimizer.name)
    if rates is None:
        raise NotMeasured(f"{optimizer.name}'s learning rate")
    rate = rates[1][np.clip(np.searchsorted(rates[0], steps), 0, len(rates[1]) - 1)]
    counted = usable.sum(axis=1)
    length = np.divide((typical * usable).sum(axis=1), counted, out=np.zeros(len(counted)), where=counted > 0)
    off = np.abs(np.divide(length, rate, out=np.zeros_like(length), where=rate > 0) - 1)
    result: NDArray[np.bool_] = off < RATE_MARGIN
    return result


def _is_telling(case: Case, site: Site) -> bool:
    """Say whether equal updates of a weight mean something: units that began equal get equal gradients."""
    facts = case.parameters.get(site.name)
    return len(site.shape) >= 2 and (facts is None or not (facts.equal_rows or facts.constant))


def _ratio(typical: Values, largest: Values, fresh: NDArray[np.bool_]) -> float:
    known = typical[fresh] / np.where(largest[fresh] > 0, largest[fresh], np.nan)
    return float(np.nanmedian(known))


RULE = Rule(kind="momentum_state_stale", check=check, since=1, lasting=True)
