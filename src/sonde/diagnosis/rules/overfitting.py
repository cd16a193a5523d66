"""A model that learns its training data by heart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.outlook import chance_loss, is_averaged
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Values
from sonde.records import Finding

Steps = NDArray[np.int64]


def check(case: Case) -> Finding | None:
    """Find a validation loss that rises while the training loss falls, or stays high while that goes to nothing."""
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
    if (by_heart := _by_heart(case, name, steps, values)) is not None:
        return by_heart
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


def _by_heart(case: Case, name: str, steps: Steps, values: Values) -> Finding | None:
    """Find training data known by heart, and a validation loss that no longer falls, nearer to guessing than to 0."""
    wait, chance = int(thresholds.OVERFIT_EVALS.value), chance_loss(case)
    if chance is None or chance <= 0 or not is_averaged(case) or int(np.argmin(values)) >= len(values) - wait:
        return None
    level = float(np.median(values[-wait:]))
    ratio = case.learning.recent / level
    if not (ratio <= thresholds.BY_HEART.value and level >= thresholds.NOT_MORE.value * chance):
        return None
    return RULE.finding(
        case,
        "warning",
        0.85,
        sites=("(model)",),
        step=int(steps[int(np.argmin(values))]),
        evidence=(
            below("training loss over validation loss", ratio, thresholds.BY_HEART, f"{name} mean"),
            above("validation loss over that of guessing", level / chance, thresholds.NOT_MORE, f"{name} mean"),
        ),
        cause="The model knows its training data by heart and little else: the training loss is almost nothing, and "
        "the validation loss has stopped falling far above it.",
        fix="Get more data, or check that all of it is read; add augmentation, dropout or weight decay, or take a "
        "smaller model.",
        refute="Evaluate on fresh samples: a loss near that of training refutes it.",
    )


def _validation(case: Case) -> tuple[str, Steps, Values] | None:
    for name in case.scalars():
        plain = name.lower()
        if "loss" in plain and any(word in plain for word in ("val", "test", "dev", "eval")):
            curve = case.scalar(name)
            return None if curve is None else (f"{name}:scalar", *curve)
    track = case.track(f"{vitals.LOSS}:output@eval")
    return None if track is None else (track.key, track.steps, track.numbers())


RULE = Rule(kind="overfitting", check=check, since=5)
