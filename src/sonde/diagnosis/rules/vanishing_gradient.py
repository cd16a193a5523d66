"""Gradients that fade on their way to the first layers, cannot change their weights, or have faded in time."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity, is_failing
from sonde.diagnosis.panel import Panel
from sonde.diagnosis.rule import Rule, below, fact
from sonde.diagnosis.track import Values
from sonde.diagnosis.weights import is_weight, last_weights
from sonde.records import Finding, Quantity

_STEPS: Final = int(thresholds.GRADIENT_STEPS.value)


def check(case: Case) -> Finding | None:
    """Find gradients that fade from the last layer to the first, cannot change their weights, or have faded in time."""
    if case.learning.state == "improving" and not is_failing(case):
        return None  # gradients shrink while a model learns
    return _fades_with_depth(case) or _cannot_move(case) or _fades_in_time(case)


def _fades_with_depth(case: Case) -> Finding | None:
    if not is_failing(case) or not case.panel("parameter").sites:
        return None
    weights = last_weights(case)
    ratios = weights.gradient_ratio[-_STEPS:]
    if ratios.shape[1] < 3 or len(ratios) < _STEPS:
        return None
    if not np.isfinite(ratios).all() or (ratios == 0).any():
        return None
    profile = np.median(np.log10(ratios), axis=0)
    fall = 10 ** float(profile[0] - profile[-1])
    if fall > thresholds.GRADIENT_FALL.value or _rank_correlation(profile) < 0.7:
        return None
    faint = [name for name, level in zip(weights.names, profile, strict=True) if level < profile[-1] - 2]
    return RULE.finding(
        case,
        gravity(case),
        0.8,
        sites=tuple(faint[:6]) or (weights.names[0],),
        step=int(weights.steps[-len(ratios)]),
        evidence=(
            below("gradient over weight in the first layer, over that in the last", fall, thresholds.GRADIENT_FALL),
            fact("gradient over weight in the first layer", 10 ** profile[0], f"{weights.names[0]}:gradient rms"),
            fact("the same in the last layer", 10 ** profile[-1], f"{weights.names[-1]}:gradient rms"),
        ),
        cause=f"Gradients vanish on the way down: {weights.names[0]} gets {fall:.1e} of what the last layer gets.",
        fix="Use ReLU or GELU with kaiming_normal_ instead of sigmoid or tanh, add norms or residual connections.",
        refute="Train the first layers alone at a rate a thousand times higher: a loss that stays refutes it.",
    )


def _rank_correlation(profile: Values) -> float:
    """Return how steadily a profile rises with depth: 1 if always."""
    ranks = np.argsort(np.argsort(profile))
    return float(np.corrcoef(ranks, np.arange(len(profile)))[0, 1])


def _cannot_move(case: Case) -> Finding | None:
    """Find weights whose gradient is so small, or zero, that no step along it changes them."""
    panel = _gradients(case)
    if len(panel) < _STEPS:
        return None
    sizes = _typical(case, "parameter", panel.names)
    sizes = np.where(sizes > 0, sizes, thresholds.WEIGHT_SMALL.value)
    pace = _typical(case, "update", panel.names) / sizes
    highest = _highest(panel) / sizes
    # What an optimizer that divides by the gradient's size moves all the same is not stuck.
    faint = (highest < thresholds.GRADIENT_FAINT.value) & ~(pace >= thresholds.PACE_VERY_LOW.value)
    rounded = (highest < thresholds.ROUNDS_AWAY.value) & (pace < thresholds.ROUNDS_AWAY.value)
    stuck = np.flatnonzero(faint | rounded)
    if not len(stuck):
        return None
    names = tuple(panel.names[at] for at in stuck)
    largest = float(highest[stuck].max())
    said = f"at most {largest:.1e} of the weight" if largest > 0 else "exactly zero"
    limit = thresholds.GRADIENT_FAINT if faint[stuck].all() else thresholds.ROUNDS_AWAY
    return RULE.finding(
        case,
        gravity(case),
        0.8,
        sites=names[:6],
        step=int(panel.steps[-_STEPS]),
        evidence=(
            below("gradient over weight, highest of the last steps", largest, limit, f"{names[0]}:gradient rms"),
            fact("weights like this", len(names)),
        ),
        cause=f"Gradients vanish: that of {names[0]} is {said}, too small for a step to change it.",
        fix="Look at what lies between it and the loss: saturated or dead activations, a detach, a constant loss; use "
        "ReLU or GELU, norms, residual connections or a larger initial scale.",
        refute="Compare the weight before and after ten steps: if it has changed beyond rounding, it learns.",
    )


def _fades_in_time(case: Case) -> Finding | None:
    """Find weights whose gradient has fallen by orders of magnitude since the first steps, and stays there."""
    panel, early = _gradients(case), case.first_panel("gradient")
    if len(panel) < _STEPS or case.num_steps < 2 * _STEPS:
        return None
    first = dict(zip(early.names, _middle(early.stat("rms")), strict=True))
    start = np.array([first.get(name, np.nan) for name in panel.names])
    highest = _highest(panel)
    faded = np.flatnonzero(highest < thresholds.GRADIENT_FALL.value * start)
    if not len(faded):
        return None
    names = tuple(panel.names[at] for at in faded)
    left = float((highest[faded] / start[faded]).max())
    return RULE.finding(
        case,
        "warning" if is_failing(case) else "info",
        0.7,
        sites=names[:6],
        step=int(panel.steps[-_STEPS]),
        evidence=(
            below("gradient over that of the first steps", left, thresholds.GRADIENT_FALL, f"{names[0]}:gradient rms"),
            fact("weights like this", len(names)),
        ),
        cause=f"Gradients have vanished: that of {names[0]} is {left:.1e} of what it was at first.",
        fix="Look at what changed when it fell: activations that saturated or died, or a learning rate that was too "
        "high before.",
        refute="Look at the loss: if it has reached its floor, small gradients are what a trained model has.",
    )


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


RULE = Rule(kind="vanishing_gradient", check=check, since=_STEPS)
