"""Rules about the size of gradients."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.core import schema
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import anomaly_severity, is_failing
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.rates import PACE_VERY_LOW
from sonde.diagnosis.track import Panel, Values
from sonde.diagnosis.weights import first_weights, is_weight, last_weights
from sonde.records import Evidence, Quantity

GRADIENT_STEPS = Threshold(15, "persistence: steps in a row")
GRADIENT_FALL = Threshold(1e-3, "gradient over weight, first layer over last or last steps over first: three decades")
GRADIENT_LAYERS = Threshold(3, "weights: a profile over depth needs a middle")
GRADIENT_TREND = Threshold(0.7, "rank correlation of the gradients with depth: a steady fall, not one small layer")
WEIGHT_SMALL = Threshold(0.02, "rms of a weight whose size is not known; the smallest of common recipes, GPT-2's")
GRADIENT_FAINT = Threshold(
    1e-10, "gradient over weight: float32 rounds a plain step away, and Adam's (eps 1e-8, rate 1e-3) is below 1e-5"
)
ROUNDS_AWAY = Threshold(2.0**-24, "step over weight: float32 rounds to the weight itself")
_STEPS: Final = int(GRADIENT_STEPS)


@rule(
    "vanishing_gradient",
    needs=["gradient", "parameter", "update", "facts.order"],
    explains=["constant_output", "lr_too_low"],
    fix="Use ReLU or GELU with kaiming_normal_ instead of sigmoid or tanh, add norms or residual connections.",
    refute=(
        "Train the first layers alone at a rate a thousand times higher: if the loss does not change, this finding is "
        "wrong."
    ),
    since=_STEPS,
)
def vanishing_gradient(case: Case) -> Found | None:
    """Gradients are too small to learn from.

    They fade from the last layer to the first, are too small to change their weights, or have faded over time.
    """
    if case.learning.state == "improving" and not is_failing(case):
        return None  # gradients shrink while a model learns
    return _fades_with_depth(case) or _cannot_move(case) or _fades_in_time(case)


def _fades_with_depth(case: Case) -> Found | None:
    if not is_failing(case) or not case.panel("parameter").sites:
        return None
    weights = last_weights(case).with_gradients()
    if len(weights.steps) < _STEPS:
        weights = first_weights(case).with_gradients()  # a budget leaves out most of the later steps
    ratios = weights.gradient_ratio[-_STEPS:]
    if ratios.shape[1] < GRADIENT_LAYERS or len(ratios) < _STEPS:
        return None
    if not np.isfinite(ratios).all() or (ratios == 0).any():
        return None
    profile = np.median(np.log10(ratios), axis=0)
    fall = 10 ** float(profile[0] - profile[-1])
    if fall > GRADIENT_FALL or _rank_correlation(profile) < GRADIENT_TREND:
        return None
    faint = [name for name, level in zip(weights.names, profile, strict=True) if level < profile[-1] - 2]
    return Found(
        severity=anomaly_severity(case),
        step=int(weights.steps[-len(ratios)]),
        sites=tuple(faint[:6]) or (weights.names[0],),
        evidence=(
            below("gradient over weight in the first layer, over that in the last", fall, GRADIENT_FALL),
            fact("gradient over weight in the first layer", 10 ** profile[0], f"{weights.names[0]}:gradient rms"),
            fact("the same in the last layer", 10 ** profile[-1], f"{weights.names[-1]}:gradient rms"),
        ),
        cause=f"Gradients vanish towards the first layers: {weights.names[0]} gets {fall:.1e} of what the last layer "
        "gets.",
    )


def _rank_correlation(profile: Values) -> float:
    """Return how steadily a profile rises with depth: 1 if always."""
    ranks = np.argsort(np.argsort(profile))
    return float(np.corrcoef(ranks, np.arange(len(profile)))[0, 1])


def _cannot_move(case: Case) -> Found | None:
    """Find weights whose gradient is so small, or zero, that no step along it changes them."""
    panel = _gradients(case)
    if len(panel) < _STEPS:
        return None
    sizes = _typical(case, "parameter", panel.names)
    sizes = np.where(sizes > 0, sizes, WEIGHT_SMALL)
    pace = _typical(case, "update", panel.names) / sizes
    highest = _highest(panel) / sizes
    # An optimizer that divides by the size of the gradient may still move such a weight.
    faint = (highest < GRADIENT_FAINT) & ~(pace >= PACE_VERY_LOW)
    rounded = (highest < ROUNDS_AWAY) & (pace < ROUNDS_AWAY)
    stuck = np.flatnonzero(faint | rounded)
    if not len(stuck):
        return None
    names = tuple(panel.names[at] for at in stuck)
    largest = float(highest[stuck].max())
    size = f"at most {largest:.1e} of the weight" if largest > 0 else "exactly zero"
    limit = GRADIENT_FAINT if faint[stuck].all() else ROUNDS_AWAY
    if largest == 0 and len(stuck) == len(panel.names) and _never_had_one(case):
        return _nothing_to_learn_from(panel)
    return Found(
        severity=anomaly_severity(case),
        step=int(panel.steps[-_STEPS]),
        sites=names[:6],
        evidence=(
            below("gradient over weight, highest of the last steps", largest, limit, f"{names[0]}:gradient rms"),
            fact("weights like this", len(names)),
        ),
        cause=f"Gradients vanish: that of {names[0]} is {size}, too small for a step to change it.",
        fix="Look at what lies between it and the loss: saturated or dead activations, a detach, a constant loss; use "
        "ReLU or GELU, norms, residual connections or a larger initial scale.",
        refute="Compare the weight before and after ten steps: if it changed beyond rounding, this finding is wrong.",
    )


def _never_had_one(case: Case) -> bool:
    """Return whether no weight has had a gradient other than zero since the first step."""
    first, last = case.first_panel("gradient"), case.panel("gradient")
    return all(bool((panel.column(schema.COUNT) == panel.column(schema.ZERO)).all()) for panel in (first, last))


def _nothing_to_learn_from(panel: Panel) -> Found:
    return Found(
        severity="warning",
        step=int(panel.steps[0]),
        sites=("loss_fn", *panel.names[:4]),
        evidence=(fact("weights whose gradient was exactly zero in every step", len(panel.names)),),
        cause="Every gradient has been exactly zero since the first step: the loss does not depend on the weights, as "
        "where a margin is always kept, a clamp always cuts, or the largest of several numbers is a constant.",
        fix="Print the loss term by term: one that is constant has lost its way to the weights, or its sign or margin "
        "is wrong.",
        refute="Print the norm of a gradient: if it is not zero in some step, this finding is wrong.",
    )


def _fades_in_time(case: Case) -> Found | None:
    """Find weights whose gradient has fallen by orders of magnitude since the first steps, and stays there."""
    panel, early = _gradients(case), case.first_panel("gradient")
    if len(panel) < _STEPS or case.num_steps < 2 * _STEPS:
        return None
    first = dict(zip(early.names, _middle(early.stat("rms")), strict=True))
    start = np.array([first.get(name, np.nan) for name in panel.names])
    highest = _highest(panel)
    faded = np.flatnonzero(highest < GRADIENT_FALL * start)
    if not len(faded) or _has_no_loss_left(case):
        return None
    names = tuple(panel.names[at] for at in faded)
    left = float((highest[faded] / start[faded]).max())
    return Found(
        severity="warning" if is_failing(case) else "info",
        step=int(panel.steps[-_STEPS]),
        sites=names[:6],
        evidence=(
            below("gradient over that of the first steps", left, GRADIENT_FALL, f"{names[0]}:gradient rms"),
            fact("weights like this", len(names)),
        ),
        cause=f"Gradients have vanished: that of {names[0]} is {left:.1e} of what it was at first.",
        fix="Look at what changed when it fell: activations that saturated or died, or a learning rate that was too "
        "high before.",
        refute="Look at the loss: if it has reached its floor, small gradients are normal and this finding is wrong.",
    )


def _has_no_loss_left(case: Case) -> bool:
    """Return whether the last losses are next to nothing beside the largest: gradients are, too, then."""
    found = case.loss()
    losses = np.abs(found[1][np.isfinite(found[1])]) if found is not None else np.empty(0)
    return len(losses) > _STEPS and bool(losses[-_STEPS:].max() <= GRADIENT_FALL * losses.max())


def _gradients(case: Case) -> Panel:
    panel = case.panel("gradient")
    chosen = [at for at, site in enumerate(panel.sites) if is_weight(site)]
    if not chosen:
        raise NotMeasured("gradients")
    return panel.pick(chosen)


def _highest(panel: Panel) -> Values:
    """Return the largest gradient of each weight over the last steps; infinite where it was not read in all of them."""
    last = panel.stat("rms")[-_STEPS:]
    result: Values = np.where(np.isfinite(last), last, np.inf).max(axis=0)
    return result


def _typical(case: Case, quantity: Quantity, names: list[str]) -> Values:
    """Return the median size of a quantity for each of these names; NaN where it was not read."""
    panel = case.panel(quantity)
    known = dict(zip(panel.names, _middle(panel.stat("rms")), strict=True))
    return np.array([known.get(name, np.nan) for name in names])


def _middle(values: Values) -> Values:
    """Return the median of each column over what was read in it."""
    columns = (column[np.isfinite(column)] for column in values.T)
    return np.array([np.median(column) if len(column) else np.nan for column in columns])


GRADIENT_LEAP = Threshold(100, "norm over its running median")
GRADIENT_LEAPS = Threshold(3, "persistence: one leap may be a single odd batch")
GRADIENT_DOUBLINGS = Threshold(5, "persistence: steps in a row that each double the norm")
GRADIENT_GROWN = Threshold(10, "norm over the first, or the first over it: it has grown or fallen as a whole")
GRADIENT_OVER_WEIGHT = Threshold(1e3, "norm of all gradients over that of all weights; healthy runs stay below 10")


@rule(
    "exploding_gradient",
    needs=["gradient", "parameter"],
    explains=["clip_always_active", "exploding_activation"],
    fix=(
        "Clip them (torch.nn.utils.clip_grad_norm_), lower the learning rate, initialise recurrent weights "
        "orthogonally, or add norms."
    ),
    refute="Train with clip_grad_norm_(..., 1.0): if the loss does not change, this finding is wrong.",
    since=GRADIENT_DOUBLINGS + 1,
)
def exploding_gradient(case: Case) -> Found | None:
    """Gradients explode.

    Their total norm leaps a hundredfold, doubles at each step, or dwarfs the norm of the weights.
    """
    panel = case.panel("gradient")
    if not panel.sites:
        raise NotMeasured("gradients")
    norms = panel.stat("norm")
    totals = np.sqrt(np.nansum(norms**2, axis=1))
    read = np.isfinite(norms).any(axis=1)
    if read.sum() < GRADIENT_DOUBLINGS:
        return None
    evidence = _leaps(totals[read]) or _doublings(totals[read]) or _dwarfs(case, totals[read])
    if evidence is None:
        return None
    name = _fastest(panel, norms[read])
    return Found(
        severity=anomaly_severity(case),
        step=int(panel.steps[read][-1]),
        sites=(name,),
        evidence=(evidence, fact("norm of all gradients now", totals[read][-1], f"{name}:gradient norm")),
        cause=f"Gradients explode, most of all in {name}.",
    )


def _leaps(totals: Values) -> Evidence | None:
    """Count norms far above those before them; large norms that come first and then fall are a descent."""
    start = len(totals) - min(len(totals), 50)
    usual = np.array([np.median(totals[:at]) if at else np.inf for at in range(start, len(totals))])
    leaps = int(((totals[start:] > GRADIENT_LEAP * usual) & (usual > 0)).sum())
    if leaps < GRADIENT_LEAPS:
        return None
    return above("norms of the last steps beyond a hundred times the median before them", leaps, GRADIENT_LEAPS)


def _doublings(totals: Values) -> Evidence | None:
    steps = int(GRADIENT_DOUBLINGS)
    last = totals[-steps - 1 :]
    if len(last) <= steps or not last[0] > 0 or not (last[1:] >= 2 * last[:-1]).all():
        return None
    return above(f"growth of the norm over {steps} steps", last[-1] / last[0], 2**steps)


def _dwarfs(case: Case, totals: Values) -> Evidence | None:
    weights = np.sqrt(np.nansum(case.panel("parameter").stat("norm") ** 2, axis=1))
    if not len(weights) or not np.median(weights) > 0:
        return None
    ratio = float(np.median(totals[-10:]) / np.median(weights))
    falling = totals[-1] * GRADIENT_GROWN < totals[0]
    if ratio < GRADIENT_OVER_WEIGHT or falling:
        return None
    return above("norm of all gradients over that of all weights", ratio, GRADIENT_OVER_WEIGHT)


def _fastest(panel: Panel, norms: Values) -> str:
    start, now = np.nan_to_num(norms[0]), np.nan_to_num(norms[-3:].max(axis=0))
    growth = now / np.maximum(start, 1e-30) if (now > GRADIENT_GROWN * start).any() else now
    return panel.names[int(np.argmax(np.where(now > 0, growth, 0)))]
