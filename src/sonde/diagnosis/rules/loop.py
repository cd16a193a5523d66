"""Rules about the training loop: gradients that are cleared, passes and steps in the wrong order or number."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, signals, statistics
from sonde.core.facts import OptimizerFacts
from sonde.core.robust import growth, less
from sonde.diagnosis.case import Case, NotMeasured, longest_run, run_length
from sonde.diagnosis.ownership import held, marked, need_optimizers, ran, recent_rates, runner_of
from sonde.diagnosis.rule import Found, Threshold, above, below, by_number, fact, few, rule
from sonde.diagnosis.symptoms import ANY_STATISTIC, NOT_TRAINED
from sonde.diagnosis.tape.flow import added_gradients, thrown_between
from sonde.diagnosis.track import Panel, Track
from sonde.records import Evidence, Severity

LEFTOVER_SHARE = Threshold(0.5, "share of parameters: exact for each; half leaves out optimizers that clear some")
LEFTOVER_STEPS = Threshold(3, "persistence: once may be intended, three times in a row is not")
LEFTOVER_MOST = Threshold(0.5, "share of the last 64 steps: clearing once an epoch is as wrong as never")


@rule(
    "missing_zero_grad",
    needs=[signals.LEFTOVER],
    explains=[*ANY_STATISTIC, "momentum_state_stale"],
    severity="critical",
    exact=True,
    fix="Call optimizer.zero_grad() once per step, before loss.backward().",
    refute=(
        "Compare p.grad after backward with that of a fresh copy of the model on the same batch: if they are equal, "
        "this "
        "finding is wrong."
    ),
    since=LEFTOVER_STEPS,
)
def missing_zero_grad(case: Case) -> Found | None:
    """Gradients are not cleared between steps, so each step applies the sum of all before."""
    if (taped := added_gradients(case)) is not None:
        return taped
    tracks = case.need_vitals("optimizer", signals.LEFTOVER)
    for track in tracks:
        track = track.last(64)
        shares = track.numbers()
        left_over = shares >= LEFTOVER_SHARE
        longest = longest_run(left_over)
        if longest >= LEFTOVER_STEPS and left_over.mean() > LEFTOVER_MOST:
            return Found(
                step=int(track.steps[left_over][0]),
                sites=(track.name, signals.LOOP),
                evidence=(
                    above(
                        "share of parameters whose gradient still held the last step's when the next was added",
                        shares[left_over][-1],
                        LEFTOVER_SHARE,
                        f"{track.key} mean",
                    ),
                    above("steps in a row", longest, LEFTOVER_STEPS),
                ),
                cause=f"Gradients are not cleared between steps: each step of {track.name} applies the sum of those "
                "before.",
            )
    return None


CLEARED_STEPS = Threshold(2, "persistence: a step without any gradient after a backward pass, twice in a row")
THROWN_STEPS = Threshold(3, "persistence: steps that had only the gradient of the last of several passes")
THROWN_MOST = Threshold(0.8, "share of steps with several passes: a loop that accumulates does so at nearly every step")


@rule(
    "zero_grad_misplaced",
    needs=[signals.BACKWARDS_SEEN, signals.NO_GRADIENT, signals.THROWN_AWAY, "facts.input_gradient"],
    explains=[*NOT_TRAINED, "graph_break_detach", "optimizer_step_noop", "unused_parameters"],
    exact=True,
    fix="Move optimizer.zero_grad() before loss.backward(), or after optimizer.step().",
    refute="Print p.grad of any parameter on the line before optimizer.step(): if it is set, this finding is wrong.",
    since=CLEARED_STEPS,
)
def zero_grad_misplaced(case: Case) -> Found | None:
    """Gradients are cleared after the backward pass, before the optimizer steps.

    Or between the backward passes of one step, so that only the last one counts.
    """
    if (taped := thrown_between(case)) is not None:
        return taped
    found = (_cleared(case, optimizer) for optimizer in need_optimizers(case))
    return next((each for each in found if each is not None), None) or _thrown_away(case)


def _cleared(case: Case, optimizer: OptimizerFacts) -> Found | None:
    missing = case.need_vital(optimizer.name, signals.NO_GRADIENT)
    backwards = case.vital(optimizer.name, signals.BACKWARDS_SEEN)
    if backwards is None:
        raise NotMeasured(f"{optimizer.name}:vital.backwards_seen")
    # Where two optimizers hold the same parameters, one clears what the backward pass of the other left.
    if any(len(case.parameters[name].owners) > 1 for name in held(optimizer) if name in case.parameters):
        return None
    trainable = sum(case.parameters[name].trainable for name in set(held(optimizer)) if name in case.parameters)
    reached = dict(zip(backwards.steps.tolist(), (backwards.numbers() > 0).tolist(), strict=True))
    bare = [
        bool(count >= trainable > 0 and reached.get(step, False))
        for step, count in zip(missing.steps.tolist(), missing.numbers().tolist(), strict=True)
    ]
    if run_length(bare) < CLEARED_STEPS:
        return None
    first = int(missing.steps[len(bare) - run_length(bare)])
    return Found(
        severity="critical",
        step=first,
        sites=(optimizer.name, signals.LOOP),
        evidence=(
            above("parameters without a gradient at the step", missing.numbers()[-1], trainable, f"{missing.key} mean"),
            above("backward passes that reached them before", backwards.numbers()[-1], 1, f"{backwards.key} mean"),
            fact("steps in a row", run_length(bare)),
        ),
        cause=f"Gradients are cleared after the backward pass{marked(case, 'zero_grad', after='backward')}: "
        f"{optimizer.name} steps without any gradient.",
    )


def _thrown_away(case: Case) -> Found | None:
    optimizers = need_optimizers(case)
    if len(optimizers) != 1 or case.facts.input_gradient:
        return None  # passes for another optimizer, or for the gradient of an input, may come between
    name = optimizers[0].name
    thrown, passes = case.vital(name, signals.THROWN_AWAY), case.vital(name, signals.BACKWARDS_SEEN)
    if thrown is None or passes is None:
        return None
    lost = thrown.numbers() == 1
    if run_length(lost) < THROWN_STEPS or len(thrown) < THROWN_MOST * len(passes):
        return None
    return Found(
        severity="warning",
        step=int(thrown.steps[len(lost) - run_length(lost)]),
        sites=(name, signals.LOOP),
        evidence=(
            above("steps in a row that had only the last backward pass", run_length(lost), THROWN_STEPS),
            fact("backward passes before a step", float(passes.numbers()[-1]), f"{passes.key} mean"),
        ),
        cause=f"Gradients are cleared between the {passes.numbers()[-1]:.0f} backward passes of a step: {name} applies "
        "only the last one, and the others are wasted.",
        fix="To accumulate gradients, call optimizer.zero_grad() once after optimizer.step(), not before each "
        "backward().",
        refute="Print p.grad before each loss.backward(): if only the first is None or zero, this finding is wrong.",
    )


IDLE_STEPS = Threshold(50, "persistence: steps of other optimizers while one never steps")
NEVER_STEPPED = Threshold(5, "backward passes of a run that ended without a step; more than usual accumulation")


@rule(
    "step_not_called",
    needs=[signals.BACKWARDS, signals.BACKWARDS_SEEN, signals.STEPS_TAKEN, signals.WRITTEN, "facts.order"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix="Call {optimizer}.step() after loss.backward().",
    refute="Print something where step() is called: if it is printed, this finding is wrong.",
    since=0,
)
def step_not_called(case: Case) -> Found | None:
    """An optimizer never steps, though backward passes run."""
    optimizers = need_optimizers(case)
    tracks = (*case.vitals(signals.BACKWARDS_SEEN), *case.vitals(signals.STEPS_TAKEN))
    stepped = {track.name for track in tracks}
    idle = [each for each in optimizers if each.name not in stepped]
    if not idle:
        return None
    if len(idle) == len(optimizers):
        return _nobody_steps(case, idle)
    # The model of the next fold or phase has not run yet, so there is nothing to step with.
    used = ran(case) if case.facts.order else frozenset()
    idle = [each for each in idle if not used or any(runner_of(case, name) in used for name in held(each))]
    if case.num_steps < IDLE_STEPS or not idle:
        return None
    counted = above("steps of the other optimizers", case.num_steps, IDLE_STEPS)
    return _never_stepped(idle[0], "warning", counted)


def _nobody_steps(case: Case, idle: list[OptimizerFacts]) -> Found | None:
    track = case.vital(signals.LOOP, signals.BACKWARDS)
    if track is None:
        raise NotMeasured("(loop):vital.backwards")
    if case.step > 0:
        return None  # steps are counted by hand or from the weights, so something steps that cannot be seen
    written = case.vital(signals.LOOP, signals.WRITTEN)
    if written is not None and written.numbers()[-1] > 0:
        return None
    passes = float(track.numbers().sum())
    if not case.final or passes < NEVER_STEPPED:
        return None
    counted = above("backward passes until the run ended", passes, NEVER_STEPPED, f"{track.key} mean")
    return _never_stepped(idle[0], "critical", counted, below("steps of the optimizer", 0, 0))


def _never_stepped(optimizer: OptimizerFacts, severity: Severity, *evidence: Evidence) -> Found:
    return Found(
        severity=severity,
        step=0,
        sites=(optimizer.name, signals.LOOP),
        evidence=evidence,
        cause=f"{optimizer.name} has never stepped: {few(held(optimizer))} "
        + by_number(held(optimizer), "keeps its initial values.", "keep their initial values."),
        values={"optimizer": optimizer.name},
    )


DOUBLE_STEPS = Threshold(4, "persistence: two rounds of two steps")
DOUBLE_SHARE = Threshold(0.4, "share of steps without a backward pass: every second one, with room for an odd start")


@rule(
    "double_step",
    needs=[signals.BACKWARDS_SEEN, signals.NO_GRADIENT],
    explains=["exploding_gradient", "loss_divergence", "lr_too_high"],
    exact=True,
    fix=(
        "Call optimizer.step() once per backward pass; look for a second call in a helper, a callback or at the "
        "end of the loop."
    ),
    refute=(
        "Count the calls of loss.backward() and of optimizer.step() over an epoch: if there are not more steps, this "
        "finding is wrong."
    ),
    since=DOUBLE_STEPS,
)
def double_step(case: Case) -> Found | None:
    """The optimizer steps twice with the same gradients."""
    sizes = {optimizer.name: len(set(held(optimizer))) for optimizer in need_optimizers(case)}
    tracks = case.need_vitals("optimizer", signals.BACKWARDS_SEEN)
    for track in tracks:
        recent = track.last(int(DOUBLE_STEPS))
        again = recent.numbers() == 0
        # All zero means that backward passes are not seen here at all, as with some compiled loops.
        if len(recent) < DOUBLE_STEPS or not DOUBLE_SHARE < again.mean() < 1:
            continue
        if _has_gradients(case, recent, again, sizes.get(track.name, 0)):
            return _repeats(case, track, float(again.mean()))
    return None


def _has_gradients(case: Case, recent: Track, again: NDArray[np.bool_], size: int) -> bool:
    """Return whether those steps had gradients: a step after clearing does nothing."""
    missing = case.vital(recent.name, signals.NO_GRADIENT)
    if missing is None:
        return False
    bare = dict(zip(missing.steps.tolist(), missing.numbers().tolist(), strict=True))
    return all(bare.get(step, size) < size for step in recent.steps[again].tolist())


def _repeats(case: Case, track: Track, share: float) -> Found:
    empty = track.numbers() == 0
    places = [call.place for call in case.facts.calls("optimizer.step") if call.about == track.name and call.place]
    return Found(
        step=int(track.steps[empty][0]),
        sites=(track.name, signals.LOOP),
        evidence=(
            above("share of the last steps without a backward pass", share, DOUBLE_SHARE, f"{track.key} mean"),
            below("backward passes before such a step", 0, 0),
            fact("such steps so far", int(empty.sum())),
        ),
        cause=f"{track.name} steps more than once with the same gradients: every other step repeats the previous one."
        + (f" It is stepped{few(places)}." if places else ""),
    )


NOOP_STEPS = Threshold(3, "persistence: steps in a row after which a weight is bitwise the same")
RATE_0_STEPS = Threshold(40, "persistence: steps at a rate of 0, longer than a short warm-up")
NOOP_RELATIVE_STEP = Threshold(1e-6, "step over weight: float32 resolves 1.2e-7, so a larger step must show")
_RECENT: Final = 8
_COARSE: Final = ("bfloat16", "float16", "float8")


@rule(
    "optimizer_step_noop",
    needs=["gradient", "parameter", "update"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix=(
        "Check that step() writes to the model's own tensors (p.add_(...), not p = p + ...) and that no hook or "
        "wrapper prevents the update; update torch if the device's kernel is at fault."
    ),
    refute="Copy one of them, call optimizer.step(), and compare: if they differ, this finding is wrong.",
    since=NOOP_STEPS,
)
def optimizer_step_noop(case: Case) -> Found | None:
    """Optimizer steps leave weights bitwise unchanged: despite gradients and a learning rate, or for want of a rate."""
    optimizers = need_optimizers(case)
    updates, gradients = case.panel("update", last=_RECENT), case.panel("gradient", last=_RECENT)
    if not updates.sites or not gradients.sites:
        raise NotMeasured("updates and gradients")
    for optimizer in optimizers:
        if case.num_steps >= RATE_0_STEPS and _has_no_rate(case, optimizer, updates):
            return _without_a_rate(optimizer)
    stuck = _stuck(case, updates, gradients)
    if not stuck:
        return None
    rates, sizes, pulls = recent_rates(case, int(NOOP_STEPS)), _sizes(case), _relative_pulls(case, stuck)
    # A line search may find nothing better, whichever other optimizer holds the parameter too.
    searched = {name for optimizer in optimizers if optimizer.traits.searches for name in held(optimizer)}
    for optimizer in optimizers:
        adaptive = optimizer.traits.adaptive
        mine = [
            name
            for name in held(optimizer)
            if name in stuck
            and name not in searched
            and case.parameters[name].dtype not in _COARSE
            and _would_show(rates.get(name), (pulls if adaptive else stuck)[name], sizes.get(name))
        ]
        if mine:
            return _unchanged(case, optimizer, mine)
    return None


def _has_no_rate(case: Case, optimizer: OptimizerFacts, updates: Panel) -> bool:
    """Return whether all rates of an optimizer were 0 all along, and none of its steps moved anything."""
    rates = [case.learning_rate(optimizer.name, at) for at in range(len(optimizer.groups))]
    mine = updates.pick([at for at, name in enumerate(updates.names) if name in held(optimizer)])
    return (
        all(rate is not None and not rate[1].any() for rate in rates)
        and bool(mine.read.any())
        and not np.nan_to_num(mine.stat("abs_max")).any()
    )


def _without_a_rate(optimizer: OptimizerFacts) -> Found:
    return Found(
        severity="warning",
        step=1,
        sites=(optimizer.name,),
        evidence=(below("learning rate, highest so far", 0, 0, f"{optimizer.name}.group0.lr:scalar mean"),),
        cause=f"The learning rate of {optimizer.name} is 0 in every step: it changes nothing.",
        fix="Set a learning rate, such as lr=1e-3 for Adam or lr=0.1 for SGD, and look at what computes it.",
        refute="Print optimizer.param_groups[0]['lr'] before a step: if it is not 0, this finding is wrong.",
    )


def _stuck(case: Case, updates: Panel, gradients: Panel) -> dict[str, float]:
    """Return by parameter the largest gradient of the last steps, where none of them changed it."""
    steps = int(NOOP_STEPS)
    skipped = np.isin(updates.steps, case.history.skipped_steps())
    stepped = updates.read & ~skipped[:, None]
    # Of each parameter, the last few steps of its own optimizer.
    last = stepped & (np.cumsum(stepped[::-1], axis=0)[::-1] <= steps)
    unchanged = updates.column(schema.ZERO) == updates.column(schema.COUNT)
    still = (last.sum(axis=0) == steps) & ~(last & ~unchanged).any(axis=0)
    places = {name: at for at, name in enumerate(gradients.names)} if still.any() else {}
    chosen = [at for at in np.flatnonzero(still).tolist() if updates.sites[at].name in places]
    if not chosen:
        return {}
    names = [updates.sites[at].name for at in chosen]
    rows = gradients.rows[:, [places[name] for name in names]]
    pulled = (rows[..., schema.SEEN] > 0) & (statistics.norm(rows) > 0) & (statistics.nonfinite(rows) == 0)
    always = ~(last[:, chosen] & ~pulled).any(axis=0)
    largest = np.nanmax(np.where(last[:, chosen] & pulled, statistics.abs_max(rows), 0.0), axis=0)
    return {name: float(most) for name, most, found in zip(names, largest, always, strict=True) if found}


def _relative_pulls(case: Case, stuck: dict[str, float]) -> dict[str, float]:
    """Return gradients over the largest ones seen of the same parameter: what an adaptive optimizer steps by."""
    most = dict(stuck)
    for panel in (case.panel("gradient"), case.first_panel("gradient")):
        largest = np.nan_to_num(panel.stat("abs_max"), nan=0.0).max(axis=0, initial=0.0)
        for at, name in enumerate(panel.names):
            if name in most:
                most[name] = max(most[name], float(largest[at]))
    return {name: pull / most[name] if most[name] > 0 else 1.0 for name, pull in stuck.items()}


def _sizes(case: Case) -> dict[str, float]:
    """Return by parameter the largest magnitude of its last reading."""
    panel = case.panel("parameter", last=_RECENT)
    largest = panel.stat("abs_max")
    at = np.where(panel.read, np.arange(len(panel))[:, None], -1).max(axis=0, initial=-1)
    return {name: float(largest[at[i], i]) for i, name in enumerate(panel.names) if at[i] >= 0}


def _would_show(rate: float | None, pull: float, size: float | None) -> bool:
    """Return whether a step of the present length would change a float32 weight of this size."""
    return rate is not None and size is not None and rate * pull > NOOP_RELATIVE_STEP * size


def _unchanged(case: Case, optimizer: OptimizerFacts, names: list[str]) -> Found:
    rates = recent_rates(case, 1)
    return Found(
        severity="critical" if len(names) == len(held(optimizer)) else "warning",
        step=max(1, case.step - int(NOOP_STEPS) + 1),
        sites=(optimizer.name, *names),
        evidence=(
            above("steps in a row that changed no element", NOOP_STEPS, NOOP_STEPS),
            fact("learning rate", rates.get(names[0], float("nan"))),
            fact("parameters", len(names), f"{names[0]}:update norm"),
        ),
        cause=f"{optimizer.name} steps with gradients and a learning rate of {rates.get(names[0], 0):g}, but "
        f"{few(names)} {by_number(names, 'stays', 'stay')} bitwise the same.",
    )


LEAK_BYTES = Threshold(32 << 20, "bytes: allocators and caches vary by less")
LEAK_SHARE = Threshold(0.05, "growth over the memory after warm-up: allocators round and caches fill by less")
LEAK_ALONE = Threshold(0.5, "the same in a process that keeps few graphs: buffers of libraries grow by less")
LEAK_STEPS = Threshold(50, "steps: a slope over fewer is uncertain")
GRAPHS = Threshold(32, "earlier steps whose graphs still exist: a loop may keep those of a few on purpose")
_RSS = "process.rss"
_MEMORIES = ("cuda.allocated", _RSS)
_OWN = "process.sonde"
_MIB = 1 << 20


@rule(
    "retained_graph_leak",
    needs=[signals.GRAPHS_KEPT],
    fix=(
        "Sum up loss.item() or loss.detach(), not loss; do not append outputs to a list without .detach(); "
        "look for retain_graph=True and create_graph=True."
    ),
    refute="Train on one batch without keeping any result: if memory still grows, this finding is wrong.",
    since=GRAPHS,
)
def retained_graph_leak(case: Case) -> Found | None:
    """Memory grows with every step, as when losses are kept with their graphs.

    A graph that still exists many steps later is an exact sign; memory of a process grows for other reasons too.
    """
    track = case.vital(signals.LOOP, signals.GRAPHS_KEPT)
    if track is None and not _names(case):
        raise NotMeasured("process.rss")
    kept = 0.0 if track is None else float(track.numbers().max(initial=0.0))
    growing = None if case.num_steps < LEAK_STEPS else _growth(case, keeps_few=track is not None and kept < GRAPHS)
    if kept < GRAPHS:
        return growing
    assert track is not None  # it has counted graphs
    return Found(
        exact=True,
        step=max(1, int(track.steps[track.numbers() > 0][0]) - 1),
        sites=("(loop)",),
        evidence=(
            above("earlier steps whose graph still exists", kept, GRAPHS, f"{track.key} mean"),
            *(() if growing is None else growing.evidence),
        ),
        cause=f"The graphs of {kept:.0f} or more earlier steps still exist: something computed from the loss or the "
        "outputs is kept from each step, with everything that it was computed from.",
    )


def _growth(case: Case, *, keeps_few: bool) -> Found | None:
    curves = [(name, curve) for name in _names(case) if (curve := case.scalar(name)) is not None]
    for name, (steps, values) in curves:
        own = case.scalar(_OWN) if name == _RSS else None
        if own is not None:  # what Sonde holds grows within its bounds during the first steps
            values = less(steps, values, *own)
        # A slope over all pairs of points is expensive; a curve that has not risen needs none.
        if np.nanmax(values) - np.nanmin(values) < LEAK_BYTES:
            continue
        found = growth(steps.astype(np.float64), values)
        base = float(values[np.isfinite(values)][:1].sum())
        share = found.total / base if base > 0 else 0.0
        least = LEAK_ALONE if keeps_few and name == _RSS else LEAK_SHARE
        if found.steady and found.total >= LEAK_BYTES and share >= least:
            return Found(
                step=int(steps[0]),
                sites=("(loop)",),
                evidence=(
                    above("growth in MiB", found.total / _MIB, LEAK_BYTES / _MIB, f"{name}:scalar mean"),
                    above("growth over memory at the start", share, least),
                    fact("MiB per step", found.per_step / _MIB),
                ),
                cause=f"Memory ({name}) grows by {found.per_step / _MIB:.2f} MiB with every step: something is kept "
                "from each step" + ("." if keeps_few else ", most often the loss with its graph."),
            )
    return None


def _names(case: Case) -> list[str]:
    return [name for name in case.scalars() if name in _MEMORIES or name.endswith(".allocated")]
