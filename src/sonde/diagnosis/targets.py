"""Whether what a model is to say stays the same. Where it makes its own targets, the loss says little."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.seen_loss import seen_losses
from sonde.diagnosis.track import Values

_COMPARED: Final = 20
"""Readings from the beginning and from the end."""
_ERRORS: Final = 4.0
"""Standard errors by which the two must differ: by luck once in ten thousand times."""
_REGRESSIONS: Final = ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss")


def targets_move(case: Case) -> bool:
    """Say whether the targets of a regression have another mean or spread than they had at the beginning.

    Those of bootstrapped values, as in Q-learning, have.
    """
    try:
        losses = seen_losses(case, *_REGRESSIONS)
    except NotMeasured:
        return False
    targets = [loss.target for loss in losses]
    return any(
        _differ(target.stat(name)[:_COMPARED], target.stat(name)[-_COMPARED:])
        for target in targets
        if target is not None and len(target) >= 2 * _COMPARED
        for name in ("mean", "std")
    )


def _differ(first: Values, last: Values) -> bool:
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    return bool(abs(last.mean() - first.mean()) > _ERRORS * error)
