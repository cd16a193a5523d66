"""A model that learns its training data by heart."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Values
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a validation loss that rises for several evaluations while the training loss falls."""
    found = _validation(case)
    training = case.loss()
    if found is None or training is None:
        raise NotMeasured("a validation loss")
    name, steps, values = found
    wait = int(thresholds.OVERFIT_EVALS.value)
    best = int(np.argmin(values))
    if len(values) < wait + 2 or not np.isfinite(values).all() or values[best] <= 0:
        return None
    rising = run_length(values > thresholds.OVERFIT_RISE.value * values[best])
    if rising < wait or values[-1] <= values[-wait - 1]:
        return None
    at_best = training[1][training[0] <= steps[best]][-10:]
    now = training[1][-10:]
    if not len(at_best) or not np.median(now) < np.median(at_best):
        return None
    ratio = float(values[-1] / values[best])
    return RULE.finding(
        case,
        "warning" if ratio >= thresholds.OVERFIT_GRAVE.value else "info",
        0.85,
        sites=("(model)",),
        step=int(steps[best]),
        evidence=(
            above("validation loss over its best", ratio, thresholds.OVERFIT_RISE, f"{name} mean"),
            above("evaluations in a row above the best", rising, thresholds.OVERFIT_EVALS),
            fact("training loss over that at the best evaluation", float(np.median(now) / np.median(at_best))),
        ),
        cause=f"The model overfits since step {int(steps[best])}: better on what it trains on, worse on the rest.",
        fix="Stop at the best evaluation, add weight decay, dropout or augmentation, or get more data.",
        refute="Evaluate on fresh samples: if they do not get worse, the validation set is too small to tell.",
    )


def _validation(case: Case) -> tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]], Values] | None:
    for name in case.scalars():
        plain = name.lower()
        if "loss" in plain and any(word in plain for word in ("val", "test", "dev", "eval")):
            curve = case.scalar(name)
            return None if curve is None else (f"{name}:scalar", *curve)
    track = case.track(f"{vitals.LOSS}:output@eval")
    return None if track is None else (track.key, track.steps, track.numbers())


RULE = Rule(kind="overfitting", check=check, since=5)
