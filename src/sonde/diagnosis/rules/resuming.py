"""Rules about state that is lost when a run is resumed, or on the way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, signals
from sonde.core.facts import OptimizerFacts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.track import Panel, Track, Values
from sonde.diagnosis.weights import is_weight
from sonde.records import Evidence, Site

EVEN_UPDATE = Threshold(0.97, "mean over largest magnitude of an update: 1 at Adam's first step, about 0.2 later")
EVEN_SIZE = Threshold(0.03, "distance of that mean from the learning rate: eps and weight decay change it a little")
EVEN_WEIGHTS = Threshold(0.9, "share of weights for which both hold")
EVEN_ELEMENTS = Threshold(16, "elements of a weight that moved: fewer may be equal by chance")


def fresh_steps(case: Case, optimizer: OptimizerFacts) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the remembered steps of an optimizer like Adam, and whether each looks like its first.

    Adam's first step moves every element by the learning rate, whatever its gradient. Later steps do not, unless its
    state was lost.

    Raises:
        NotMeasured: Updates or learning rates are not recorded, or the optimizer is not like Adam.

    """
    if not optimizer.traits.even_first_step:
        raise NotMeasured("an optimizer like Adam")
    groups = {name: index for index, group in enumerate(optimizer.groups) for name in group.parameters}
    found: dict[int, bool] = {}
    for panel in (case.first_panel("update"), case.panel("update")):
        chosen = [at for at, site in enumerate(panel.sites) if site.name in groups and _is_telling(case, site)]
        if len(chosen) > 1:
            panel = panel.pick(chosen)
            rates = [_rates(case, optimizer.name, groups[name], panel.steps) for name in panel.names]
            found |= _look_fresh(panel, np.stack(rates, axis=1))
    if not found:
        raise NotMeasured("updates")
    steps = sorted(found)
    return np.array(steps, np.int64), np.array([found[step] for step in steps], np.bool_)


def _look_fresh(panel: Panel, rates: Values) -> dict[int, bool]:
    """Return by step whether nearly all weights moved evenly, by the learning rate."""
    moved = panel.column(schema.COUNT) - panel.column(schema.ZERO)
    usable = (moved >= EVEN_ELEMENTS) & panel.read
    typical = np.divide(panel.column(schema.ABS_SUM), moved, out=np.zeros_like(moved), where=moved > 0)
    even = typical >= EVEN_UPDATE * np.nan_to_num(panel.stat("abs_max"), nan=np.inf)
    off = np.abs(np.divide(typical, rates, out=np.zeros_like(typical), where=rates > 0) - 1)
    counted = usable.sum(axis=1)
    fresh = (even & (off < EVEN_SIZE) & usable).sum(axis=1) >= EVEN_WEIGHTS * counted
    read = panel.read.any(axis=1)
    return dict(zip(panel.steps[read].tolist(), (fresh & (counted > 1))[read].tolist(), strict=True))


def _rates(case: Case, optimizer: str, group: int, steps: NDArray[np.int64]) -> Values:
    found = case.learning_rate(optimizer, group)
    if found is None:
        raise NotMeasured(f"{optimizer}'s learning rate")
    at = np.clip(np.searchsorted(found[0], steps), 0, len(found[0]) - 1)
    result: Values = np.where(found[0][at] == steps, found[1][at], 0.0)
    return result


def _is_telling(case: Case, site: Site) -> bool:
    """Return whether even updates of a weight mean something: units that started equal get equal gradients."""
    facts = case.parameters.get(site.name)
    return is_weight(site) and (facts is None or not (facts.equal_rows or facts.constant))


def boundaries(case: Case) -> tuple[int, ...]:
    """Return the first step of each attempt after the first."""
    first = case.history.first_step
    # A session that resumes a run starts with a later step than 1.
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


FRESH_LATER = Threshold(0.5, "share of the next five steps that look fresh too")
SAME_RATE = Threshold(1e-6, "relative difference of learning rates: rounding is less")
RATE_JUMP = Threshold(2.0, "learning rate after resuming over before: a schedule that restarted")


@rule(
    "resume_incomplete",
    needs=["update", signals.STATE_STEPS, "facts.parameters", "facts.program"],
    explains=["momentum_state_stale", "lr_schedule_collapse", "loss_spike", "lr_too_high"],
    exact=True,
    fix=(
        "Save and load optimizer.state_dict(), scheduler.state_dict() and scaler.state_dict() together with the "
        "model's."
    ),
    refute=(
        "Print optimizer.state_dict()['state'] and scheduler.last_epoch right after loading: if they are as before, "
        "this finding is wrong."
    ),
)
def resume_incomplete(case: Case) -> Found | None:
    """A run was resumed without the state of its optimizer or scheduler."""
    for start in boundaries(case):
        lost = [*_optimizer(case, start), *_counter(case, start), *_rate(case, start)]
        if lost:
            names = list(dict.fromkeys(name for name, _ in lost))
            return Found(
                step=start,
                sites=tuple(names),
                evidence=tuple(evidence for _, evidence in lost),
                cause=f"The run was resumed at step {start} without the state of its {' and '.join(names)}.",
            )
    return _fresh_schedule(case) or _left_in_checkpoint(case)


def _left_in_checkpoint(case: Case) -> Found | None:
    """Find a model that has the weights of a checkpoint whose optimizer or scheduler state was not taken over."""
    calls = case.facts.calls("checkpoint.left")
    if not calls:
        return None
    names = [str(call.data.get("what")) for call in calls]
    paths = " and ".join(f"`{call.data.get('path')}`" for call in calls)
    counts = [call for call in calls if isinstance(call.data.get("counted"), int)]
    what = " and ".join(dict.fromkeys(names))
    return Found(
        step=(case.history.first_step or 1),
        sites=tuple(dict.fromkeys((*(call.about for call in calls), *names))),
        evidence=tuple(
            fact(f"steps that the stored {call.data.get('what')} has counted", float(call.data.get("counted") or 0))
            for call in counts
        )
        or (fact("states that were not loaded", len(calls)),),
        cause=f"The model has the weights of a checkpoint, which also holds {paths}; but the {what} that is used "
        "begins anew, with the same settings and without that state.",
        fix=f"Load {paths} with {' and '.join(f'{name}.load_state_dict(...)' for name in dict.fromkeys(names))}, after "
        "the last line that creates it.",
        refute=f"Print the state of the {what} before the first step: if it is the stored one, this finding is wrong.",
    )


def _fresh_schedule(case: Case) -> Found | None:
    """Find a schedule that begins at 0 for an optimizer that has stepped before.

    Its rate differs from the one that the schedule gave it, or its state has counted steps that the schedule has not.
    """
    for call in case.facts.calls("optimizer.found"):
        rate, begins = call.data.get("lr"), call.data.get("begins")
        if (
            isinstance(rate, int | float)
            and isinstance(begins, int | float)
            and abs(rate - begins) > SAME_RATE * begins
        ):
            return Found(
                step=(case.history.first_step or 1),
                sites=("scheduler", call.about),
                evidence=(
                    fact("learning rate in the state of the optimizer", rate, f"{call.about}.group0.lr:scalar mean"),
                    fact("learning rate at which its schedule begins", begins),
                    fact("steps that the schedule counted before", 0),
                ),
                cause=f"The state of {call.about} was loaded with a learning rate of {rate:.3g}, but its scheduler "
                f"begins at 0, with {begins:.3g}: warm-up and decay start over.",
            )
    for call in case.facts.calls("scheduler.step"):
        counted = case.vital(call.about, signals.STATE_STEPS) if call.about else None
        in_every_step = len(call.steps) > 1 and call.steps[1] == call.steps[0] + 1
        if counted is None or not in_every_step or call.data.get("counted") != 1:
            continue
        before = float(counted.numbers()[0]) - 1
        if counted.steps[0] == (case.history.first_step or 1) and call.steps[0] <= counted.steps[0] and before >= 1:
            return Found(
                step=int(counted.steps[0]),
                sites=("scheduler", call.about),
                evidence=(
                    fact("steps that the optimizer's state counted before", before, f"{counted.key} mean"),
                    fact("steps that the schedule counted before", 0),
                ),
                cause=f"The state of {call.about} was loaded and counts {before:.0f} steps, but its scheduler begins "
                f"at 0{call.place}: warm-up and decay start over.",
            )
    return None


def _optimizer(case: Case, start: int) -> list[tuple[str, Evidence]]:
    moved = fact("weights moved by just the learning rate, as by a fresh optimizer, in step", start)
    return [("optimizer", moved)] if any(_is_fresh_at(case, each, start) for each in case.facts.optimizers) else []


def _is_fresh_at(case: Case, optimizer: OptimizerFacts, start: int) -> bool:
    try:
        steps, fresh = fresh_steps(case, optimizer)
    except NotMeasured:
        return False
    at, later = np.flatnonzero(steps == start), fresh[steps > start][:5]
    # An optimizer that steps by the sign looks fresh at every step.
    return bool(len(at) and fresh[at[0]] and not (len(later) and later.mean() > FRESH_LATER))


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
    if before is None or after is None or not counted or after <= RATE_JUMP * before:
        return []
    return [("scheduler", fact(f"learning rate after it was {before:g}", after, "optimizer.group0.lr:scalar mean"))]


def _around(case: Case, name: str, start: int) -> tuple[float | None, float | None]:
    curve = case.scalar(name)
    if curve is None:
        return None, None
    steps, values = curve
    earlier, later = values[steps < start], values[steps >= start]
    before = float(earlier[-1]) if len(earlier) else case.earlier.get(name)
    return before, (float(later[0]) if len(later) else None)


FIRST_STEPS = Threshold(3, "steps: an optimizer's own first steps are those of a fresh state")
CREATED_AGAIN = Threshold(2, "persistence: a second phase of training may well begin with a new optimizer")
FRESH_MOST = Threshold(0.2, "share of steps that look fresh: optimizers that step by the sign always do")


@rule(
    "momentum_state_stale",
    needs=[signals.STATE_STEPS, signals.REPLACED, "update", "facts.parameters"],
    exact=True,
    fix="Create the optimizer once, before the loop, and load its state_dict when resuming.",
    refute="Print optimizer.state[p]['step'] around that step: if it continues to count, this finding is wrong.",
    lasting=True,
)
def momentum_state_stale(case: Case) -> Found | None:
    """An optimizer has lost its state during the run.

    Adam's state counts fewer steps than before, or it moves weights as only a fresh one does.
    """
    again = next((found for each in case.facts.optimizers if (found := _created_again(case, each)) is not None), None)
    if again is not None:
        return again
    if not any(optimizer.traits.adam for optimizer in case.facts.optimizers):
        raise NotMeasured("an optimizer like Adam")
    return next((found for each in case.facts.optimizers if (found := _restarted(case, each)) is not None), None)


def _created_again(case: Case, optimizer: OptimizerFacts) -> Found | None:
    """Find an optimizer that the program creates again and again, so that its state is lost each time."""
    replaced = case.vital(optimizer.name, signals.REPLACED)
    if replaced is None or replaced.numbers()[-1] < CREATED_AGAIN:
        return None
    times = replaced.numbers()[-1]
    return Found(
        step=int(replaced.steps[0]),
        sites=(optimizer.name,),
        evidence=(above("optimizers dropped after they had stepped", times, CREATED_AGAIN, f"{replaced.key} mean"),),
        cause=f"A new {optimizer.kind} was created {times:.0f} times in the course of training: its state is lost each "
        "time.",
        fix="Create the optimizer once, before the loop.",
        refute="Print id(optimizer) in every step: if it is always the same, this finding is wrong.",
    )


def _restarted(case: Case, optimizer: OptimizerFacts) -> Found | None:
    counted = case.vital(optimizer.name, signals.STATE_STEPS)
    if counted is not None and len(counted) > 1:
        replaced = case.vital(optimizer.name, signals.REPLACED)
        return _count_fell(optimizer, counted, np.zeros(0, np.int64) if replaced is None else replaced.steps)
    return _moves_afresh(case, optimizer) if optimizer.traits.even_first_step else None


def _count_fell(optimizer: OptimizerFacts, counted: Track, begun: NDArray[np.int64]) -> Found | None:
    """Find a state that began to count anew, though no new optimizer `begun` in that step.

    A fresh state counts at most the steps since the reading before. One that counts less than before, but more than
    that, was loaded from an earlier checkpoint.
    """
    numbers = counted.numbers()
    since = np.diff(counted.steps)
    lost = np.flatnonzero((np.diff(numbers) < 0) & (numbers[1:] <= since) & ~np.isin(counted.steps[1:], begun))
    if not len(lost):
        return None
    at = int(lost[0])
    return _lost_state(
        optimizer,
        int(counted.steps[at + 1]),
        below("steps its memory counts then", numbers[at + 1], numbers[at], f"{counted.key} mean"),
        fact("times that this happened", len(lost)),
    )


def _moves_afresh(case: Case, optimizer: OptimizerFacts) -> Found | None:
    """Find steps that only a fresh state makes, where the state does not count its steps."""
    steps, fresh = fresh_steps(case, optimizer)
    recent = steps >= case.recent_steps[0]
    fresh = fresh & recent & (np.arange(len(steps)) >= FIRST_STEPS)
    count = int(fresh.sum())
    if not count or count > FRESH_MOST * recent.sum():
        return None
    moved = fact("weights moved by just the learning rate, as by a fresh optimizer, in step", int(steps[fresh][0]))
    return _lost_state(optimizer, int(steps[fresh][0]), moved, fact("such steps among the last", count))


def _lost_state(optimizer: OptimizerFacts, step: int, *evidence: Evidence) -> Found:
    return Found(
        step=step,
        sites=(optimizer.name,),
        evidence=evidence,
        cause=f"{optimizer.kind} restarted at step {step}: its state was lost, as if it had just been created.",
    )
