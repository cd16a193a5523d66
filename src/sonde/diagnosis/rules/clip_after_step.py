"""Gradients that are clipped when they have been used already, or before they are there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find clipping that measures the very gradients that a step has applied whole, or none at all, several times."""
    norms = case.vitals(vitals.CLIP_NORM)
    gradients = case.panel("gradient")
    if not norms or not gradients.sites:
        raise NotMeasured("optimizer:vital.clip_norm and gradients")
    if len(norms) > 1 or case.facts.scaler or len(case.facts.optimizers) > 1:
        return None
    applied = np.sqrt(np.nansum(gradients.stat("norm") ** 2, axis=1))
    by_step = dict(zip(gradients.steps.tolist(), applied.tolist(), strict=True))
    return _judge(case, norms[0].last(32), by_step) or _too_early(case, norms[0].last(32), by_step)


def _judge(case: Case, norms: Track, applied: dict[int, float]) -> Finding | None:
    limits = case.vital(norms.name, vitals.CLIP_MAX)
    if limits is None:
        return None
    limit = float(np.median(limits.numbers()))
    same = _used_whole(norms, applied, 0) | _used_whole(norms, applied, -1)
    over = norms.numbers() > thresholds.APPLIED_OVER_LIMIT.value * limit
    late = same & over
    # Where clipping comes first, the gradients that a step finds never exceed the limit.
    if late.sum() < 3 or late.sum() < 0.8 * over.sum():
        return None
    ratio = float(np.median(norms.numbers()[late])) / limit
    return RULE.finding(
        case,
        "warning",
        0.95,
        sites=(norms.name,),
        step=int(norms.steps[late][0]),
        evidence=(
            above(
                "norm of the applied gradients over the limit",
                ratio,
                thresholds.APPLIED_OVER_LIMIT,
                f"{norms.key} mean",
            ),
            above("steps that applied gradients before they were clipped", int(late.sum()), 3),
        ),
        cause="Gradients are clipped after optimizer.step() has used them: clipping has no effect.",
        fix="Call clip_grad_norm_ between loss.backward() and optimizer.step().",
        refute="Print the norm of all gradients right before optimizer.step(): never above max_norm refutes it.",
    )


def _too_early(case: Case, norms: Track, applied: dict[int, float]) -> Finding | None:
    """Find clipping that met no gradient, in steps that had one: it came before the backward pass."""
    used = np.array([applied.get(step, np.nan) for step in norms.steps.tolist()])
    early = (norms.numbers() == 0) & (used > 0)
    if early.sum() < 3 or early.sum() < 0.8 * len(norms):
        return None
    limits = case.vital(norms.name, vitals.CLIP_MAX)
    limit = float("nan") if limits is None else float(np.median(limits.numbers()))
    return RULE.finding(
        case,
        "warning",
        0.97,
        sites=(norms.name,),
        step=int(norms.steps[early][0]),
        evidence=(
            below("norm of what was clipped", 0, 0, f"{norms.key} mean"),
            fact("norm of the gradients that were applied then", float(np.nanmedian(used[early]))),
            fact("norm to clip to", limit),
            above("steps in which it was so", int(early.sum()), 3),
        ),
        cause="Gradients are clipped before loss.backward() has made them: there is nothing to clip, and the step "
        "applies them whole.",
        fix="Call clip_grad_norm_ between loss.backward() and optimizer.step().",
        refute="Print what clip_grad_norm_ returns: anything but 0 refutes it.",
    )


def _used_whole(norms: Track, applied: dict[int, float], shift: int) -> NDArray[np.bool_]:
    used = np.array([applied.get(step + shift, np.nan) for step in norms.steps.tolist()])
    result: NDArray[np.bool_] = np.isclose(norms.numbers(), used, rtol=1e-3)
    return result


RULE = Rule(kind="clip_after_step", check=check, since=4)
