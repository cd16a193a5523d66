"""Rules about state that is lost when a run is resumed, or on the way."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema, vitals
from sonde.core import statistics
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import held
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.track import Panel, Track, Values
from sonde.diagnosis.weights import is_weight
from sonde.facts import OptimizerFacts
from sonde.records import Evidence, Site

FRESH_STEP_EVENNESS = Threshold(0.97, "rms over largest element of an update: Adam's first step moves all alike")
FRESH_STEP_WEIGHTS = Threshold(0.8, "share of weights for which that holds")


def fresh_steps(case: Case) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the remembered steps of Adam-like optimizers, and whether each looks like the first.

    Raises:
        NotMeasured: Updates are not recorded, or the optimizer is not of this family.

    """
    names = {
        name: (optimizer.name, index)
        for optimizer in case.need_facts().optimizers
        if optimizer.traits.even_first_step
        for index, group in enumerate(optimizer.groups)
        for name in group.parameters
    }
    if not names:
        raise NotMeasured("updates of an optimizer of Adam's family")
    parts = [_look(case, panel, names) for panel in (case.first_panel("update"), case.panel("update"))]
    if not any(len(steps) for steps, _ in parts):
        raise NotMeasured("updates")
    found: dict[int, bool] = {}
    for steps, fresh in parts:
        found |= dict(zip(steps.tolist(), fresh.tolist(), strict=True))
    ordered = sorted(found)
    return np.array(ordered, np.int64), np.array([found[step] for step in ordered], np.bool_)


def _look(case: Case, panel: Panel, names: dict[str, tuple[str, int]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    chosen = [at for at, site in enumerate(panel.sites) if is_weight(site) and site.name in names]
    if not chosen:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    panel = panel.pick(chosen)
    rates = np.stack([_rates(case, *names[name], panel.steps) for name in panel.names], axis=1)
    moved = panel.column(schema.COUNT) - panel.column(schema.ZERO)
    with np.errstate(invalid="ignore", divide="ignore"):
        size = statistics.norm(panel.rows) / np.sqrt(moved)
        even = (size / statistics.abs_max(panel.rows) >= FRESH_STEP_EVENNESS) & (np.abs(size / rates - 1) < 0.1)
    read = panel.read & (moved > 0)
    counted = read.sum(axis=1)
    share = np.divide((even & read).sum(axis=1), counted, out=np.zeros(len(panel)), where=counted > 0)
    kept = counted > 0
    return panel.steps[kept], share[kept] >= FRESH_STEP_WEIGHTS


def _rates(case: Case, optimizer: str, group: int, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    found = case.learning_rate(optimizer, group)
    if found is None:
        return np.full(len(steps), np.nan)
    at = np.clip(np.searchsorted(found[0], steps), 0, len(found[0]) - 1)
    result: NDArray[np.float64] = np.where(found[0][at] == steps, found[1][at], np.nan)
    return result


def boundaries(case: Case) -> tuple[int, ...]:
    """Return the first step of each attempt after the first."""
    first = case.history.first_step
    # A session that takes a run up again begins with a later step than 1.
    found = [first] if first is not None and first > 1 else []
    for event in case.events:
        if event.event_type != "resumed":
            continue
        start, last = event.data.get("start_step"), event.data.get("last_step")
        if isinstance(start, int):
            found.append(start)
        elif isinstance(last, int):
            found.append(last + 1)
    return tuple(sorted(set(found)))


@rule(
    "resume_incomplete",
    needs=["update"],
    explains=["momentum_state_stale"],
    exact=True,
    fix=(
        "Save and load optimizer.state_dict(), scheduler.state_dict() and scaler.state_dict() together with the "
        "model's."
    ),
    refute=(
        "Print optimizer.state_dict()['state'] and scheduler.last_epoch right after loading: if they hold what "
        "they held before, it is wrong."
    ),
    since=1,
)
def resume_incomplete(case: Case) -> Found | None:
    """A run was taken up again without all of its state.

    Find an optimizer, a schedule or a scaler that began anew where the run was taken up again.
    """
    for start in boundaries(case):
        lost = [*_optimizer(case, start), *_counter(case, start), *_rate(case, start)]
        if lost:
            return _finding_of_resume_incomplete(case, start, lost)
    return None


def _finding_of_resume_incomplete(case: Case, start: int, lost: list[tuple[str, Evidence]]) -> Found:
    names = list(dict.fromkeys(name for name, _ in lost))
    return Found(
        step=start,
        sites=tuple(names),
        evidence=tuple(evidence for _, evidence in lost),
        cause=f"The run was taken up again at step {start} without the state of its {' and '.join(names)}.",
    )


def _optimizer(case: Case, start: int) -> list[tuple[str, Evidence]]:
    try:
        steps, fresh = fresh_steps(case)
    except NotMeasured:
        return []
    at = np.flatnonzero(steps == start)
    later = fresh[steps > start][:5]
    if not len(at) or not fresh[at[0]] or (len(later) and later.mean() > 0.5):
        return []
    return [("optimizer", fact("weights moved by just the learning rate, as by a fresh optimizer, in step", start))]


def _counter(case: Case, start: int) -> list[tuple[str, Evidence]]:
    before, after = _around(case, "scheduler.last_epoch", start)
    if before is None or after is None or after >= before:
        return []
    return [
        ("scheduler", fact(f"scheduler.last_epoch after it was {before:g}", after, "scheduler.last_epoch:scalar mean"))
    ]


def _rate(case: Case, start: int) -> list[tuple[str, Evidence]]:
    before, after = _around(case, "optimizer.group0.lr", start)
    counted = case.scalar("scheduler.last_epoch") is not None
    if before is None or after is None or not counted or after <= 2 * before:
        return []
    return [("scheduler", fact(f"learning rate after it was {before:g}", after, "optimizer.group0.lr:scalar mean"))]


def _around(case: Case, name: str, start: int) -> tuple[float | None, float | None]:
    curve = case.scalar(name)
    if curve is None:
        return None, None
    steps, values = curve
    earlier, later = values[steps < start], values[steps >= start]
    return (float(earlier[-1]) if len(earlier) else None), (float(later[0]) if len(later) else None)


EVEN_UPDATE = Threshold(0.97, "mean over largest magnitude of an update: 1 at Adam's first step, about 0.2 later")


FIRST_STEPS: Final = 3


RATE_MARGIN: Final = 0.03  # eps and weight decay take a little from the first step


@rule(
    "momentum_state_stale",
    needs=[vitals.STATE_STEPS, vitals.WRITTEN, "update"],
    exact=True,
    fix="Make the optimizer once, before the loop, and step that one; hand the same one to sonde.watch.",
    refute="Print id(optimizer) in every step: if it stays the same, and is the one handed in, it is not this.",
    since=1,
    lasting=True,
)
def momentum_state_stale(case: Case) -> Found | None:
    """The optimizer has lost its memory on the way.

    Find an Adam whose memory counts fewer steps than before, or that moves as only a fresh one does.
    """
    written = case.vital(vitals.LOOP, vitals.WRITTEN)
    if case.final and written is not None and written.numbers()[-1] > 0 and case.facts.optimizers:
        return _another_steps(case, float(written.numbers()[-1]))
    if not any(optimizer.traits.adam for optimizer in case.facts.optimizers):
        raise NotMeasured("an optimizer of Adam's kind")
    return next((found for each in case.facts.optimizers if (found := _check_one(case, each)) is not None), None)


def _another_steps(case: Case, written: float) -> Found:
    """Say that the weights are changed, but not by the optimizer that is watched."""
    optimizer = case.facts.optimizers[0]
    return Found(
        step=1,
        sites=(optimizer.name,),
        evidence=(above("parameters that were written to", written, 1), fact(f"steps of {optimizer.name}", 0)),
        cause=f"{optimizer.name} has never stepped, yet the weights change: another optimizer does it. If it is made "
        "inside the loop, its moments are lost each time.",
    )


def _check_one(case: Case, optimizer: OptimizerFacts) -> Found | None:
    counted = case.vital(optimizer.name, vitals.STATE_STEPS)
    if counted is not None and len(counted) > 1:
        return _look_at_count(case, optimizer, counted)
    return _look_at_updates(case, optimizer)


def _look_at_count(case: Case, optimizer: OptimizerFacts, counted: Track) -> Found | None:
    """Find a memory that counts fewer steps than it did before."""
    numbers = counted.numbers()
    lost = np.flatnonzero(np.diff(numbers) < 0)
    if not len(lost):
        return None
    at = int(lost[0])
    return _began_anew(
        optimizer,
        int(counted.steps[at + 1]),
        below("steps its memory counts then", numbers[at + 1], numbers[at], f"{counted.key} mean"),
        fact("times that this happened", len(lost)),
    )


def _look_at_updates(case: Case, optimizer: OptimizerFacts) -> Found | None:
    """Find updates that only a fresh memory makes, where it does not say itself how old it is."""
    panel = case.panel("update")
    mine = set(held(optimizer))
    chosen = [at for at, site in enumerate(panel.sites) if site.name in mine and _is_telling(case, site)]
    if not optimizer.traits.adam or len(chosen) < 2:
        return None
    panel = panel.pick(chosen)
    moved = panel.column(schema.COUNT) - panel.column(schema.ZERO)
    usable = (moved >= 16) & panel.read
    typical = np.divide(panel.column(schema.ABS_SUM), moved, out=np.zeros_like(moved), where=moved > 0)
    even = usable & (typical >= EVEN_UPDATE * np.nan_to_num(panel.stat("abs_max"), nan=np.inf))
    fresh = (even.sum(axis=1) >= 0.9 * usable.sum(axis=1)) & (usable.sum(axis=1) >= 2)
    fresh &= _moves_by_the_rate(case, optimizer, panel.steps, typical, usable)
    # Its own first steps are those of a fresh state: an optimizer may join in late, or not step each time.
    fresh &= np.cumsum(panel.read.any(axis=1)) > FIRST_STEPS
    count = int(fresh.sum())
    if not count or count > 0.2 * panel.read.any(axis=1).sum():  # optimizers of signs always move like this
        return None
    return _began_anew(
        optimizer,
        int(panel.steps[fresh][0]),
        above(
            "typical update over the largest, at that step",
            _ratio(typical, panel.stat("abs_max"), fresh),
            EVEN_UPDATE,
        ),
        fact("such steps among the last", count),
    )


def _began_anew(optimizer: OptimizerFacts, step: int, *evidence: Evidence) -> Found:
    return Found(
        step=step,
        sites=(optimizer.name,),
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
