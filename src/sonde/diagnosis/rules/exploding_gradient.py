"""Gradients that grow out of all proportion."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.panel import Panel
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Values
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find a norm of all gradients that leaps a hundredfold, doubles and doubles, or dwarfs the weights."""
    panel = case.panel("gradient")
    if not panel.sites:
        raise NotMeasured("gradients")
    norms = panel.stat("norm")
    totals = np.sqrt(np.nansum(norms**2, axis=1))
    read = np.isfinite(norms).any(axis=1)
    if read.sum() < 5:
        return None
    evidence = _leaps(totals[read]) or _doublings(totals[read]) or _dwarfs(case, totals[read])
    if evidence is None:
        return None
    name = _fastest(panel, norms[read])
    return RULE.finding(
        case,
        gravity(case),
        0.75,
        sites=(name,),
        step=int(panel.steps[read][-1]),
        evidence=(evidence, fact("norm of all gradients now", totals[read][-1], f"{name}:gradient norm")),
        cause=f"Gradients explode, most of all in {name}.",
        fix="Clip them (torch.nn.utils.clip_grad_norm_), lower the learning rate, initialise recurrent weights "
        "orthogonally, or add norms.",
        refute="Train with clip_grad_norm_(…, 1.0): if the loss behaves the same, the gradients are not to blame.",
    )


def _leaps(totals: Values) -> Evidence | None:
    middle = float(np.median(totals))
    leaps = int((totals[-50:] > thresholds.GRADIENT_LEAP.value * middle).sum()) if middle > 0 else 0
    if leaps < thresholds.GRADIENT_LEAPS.value:
        return None
    return above("norms of the last steps beyond a hundred times the median", leaps, thresholds.GRADIENT_LEAPS)


def _doublings(totals: Values) -> Evidence | None:
    last = totals[-6:]
    if len(last) < 6 or not last[0] > 0 or not (last[1:] >= 2 * last[:-1]).all():
        return None
    return above("growth of the norm over five steps", last[-1] / last[0], 32)


def _dwarfs(case: Case, totals: Values) -> Evidence | None:
    weights = np.sqrt(np.nansum(case.panel("parameter").stat("norm") ** 2, axis=1))
    if not len(weights) or not np.median(weights) > 0:
        return None
    ratio = float(np.median(totals[-10:]) / np.median(weights))
    if ratio < thresholds.GRADIENT_OVER_WEIGHT.value:
        return None
    return above("norm of all gradients over that of all weights", ratio, thresholds.GRADIENT_OVER_WEIGHT)


def _fastest(panel: Panel, norms: Values) -> str:
    start, now = np.nan_to_num(norms[0]), np.nan_to_num(norms[-3:].max(axis=0))
    growth = now / np.maximum(start, 1e-30) if (now > 10 * start).any() else now
    return panel.names[int(np.argmax(np.where(now > 0, growth, 0)))]


RULE = Rule(kind="exploding_gradient", check=check, since=6)
