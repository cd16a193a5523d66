"""Weight decay that leaves nothing of the weights."""

from __future__ import annotations

import math

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import is_failing
from sonde.diagnosis.ownership import few, is_adaptive
from sonde.diagnosis.rule import Rule, below, fact
from sonde.diagnosis.weights import Weights, first_weights, last_weights
from sonde.facts import GroupFacts, OptimizerFacts
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights that have shrunk as far as the decay, by its own numbers, must shrink them, in a run that fails."""
    if case.loss() is None:
        raise NotMeasured("the loss")
    first, last = first_weights(case), last_weights(case)
    for optimizer in case.facts.optimizers:
        for at, group in enumerate(optimizer.groups):
            decay = _number(group, "weight_decay")
            chosen = [index for index, name in enumerate(first.names) if name in group.parameters]
            if not decay > 0 or not chosen or first.names != last.names:
                continue
            left = _left(first, last, chosen)
            gone = left <= thresholds.DECAY_LEFT.value
            if gone.mean() < thresholds.DECAY_SHARE.value or not _must_shrink(case, optimizer, at, first, chosen):
                continue
            if is_failing(case):
                names = [first.names[index] for index, is_gone in zip(chosen, gone.tolist(), strict=True) if is_gone]
                return _finding(case, optimizer, decay, float(np.median(left)), names)
    return None


def _number(group: GroupFacts, name: str) -> float:
    value = group.settings.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _left(first: Weights, last: Weights, chosen: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return what is left of the size that each weight had."""
    before, now = first.sizes[0, chosen], last.sizes[-1, chosen]
    return np.divide(now, before, out=np.ones(len(chosen)), where=before > 0)


def _must_shrink(case: Case, optimizer: OptimizerFacts, at: int, first: Weights, chosen: list[int]) -> bool:
    """Say whether the decay alone takes the weights that far within the steps so far.

    Plain descent and decoupled decay multiply a weight by 1 - rate * decay at each step, momentum adds to that. Where
    the decay is a part of a gradient that is scaled to the same size anyway, it counts by its share of the gradient.
    """
    group = optimizer.groups[at]
    decay = _number(group, "weight_decay")
    decoupled = optimizer.kind == "AdamW" or group.settings.get("decoupled_weight_decay") is True
    if is_adaptive(optimizer) and not decoupled:
        pull = decay * first.sizes[:, chosen]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.nanmedian(pull / first.gradients[:, chosen])
        return bool(share >= thresholds.DECAY_GRADIENT.value)
    curve = case.learning_rate(optimizer.name, at)
    rate = _number(group, "lr") if curve is None else float(np.mean(curve[1]))
    momentum = 0.0 if decoupled else _number(group, "momentum")
    each = rate * decay / max(1 - momentum, 1e-3)
    return each * case.num_steps >= -math.log(thresholds.DECAY_LEFT.value)


def _finding(case: Case, optimizer: OptimizerFacts, decay: float, left: float, names: list[str]) -> Finding:
    return RULE.finding(
        case,
        "warning",
        0.92,
        sites=(optimizer.name, *names[:8]),
        step=1,
        evidence=(
            below("size of the weights over what it was, median", left, thresholds.DECAY_LEFT, f"{names[0]} rms"),
            fact("weight decay", decay),
            fact("weights that have shrunk like that", len(names)),
        ),
        cause=f"A weight decay of {decay:g} pulls weights to zero faster than gradients can hold them: {few(names)} "
        f"have {left:.0%} of their size left, and the loss does not fall.",
        fix="Divide weight_decay by 100 or more; 1e-4 is usual for SGD, 0.01 for AdamW.",
        refute="Train 100 steps with weight_decay=0: if the loss does not fall then either, it was not the decay.",
    )


RULE = Rule(kind="weight_decay_too_large", check=check, since=20)
