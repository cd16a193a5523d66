"""A loss that is the first number that is not finite."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.nonfinite import find_origin
from sonde.diagnosis.origin_words import explain_origin
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Tell from the order of readings; repeating the step says more, where that was possible."""
    return explain_origin(RULE, case, "loss") or _logged(case)


def _logged(case: Case) -> Finding | None:
    """Find a logged loss that has become NaN or infinite, where no tensor that was recorded says why."""
    curve = case.loss()
    if curve is None or np.isfinite(curve[1][-1]) or find_origin(case) is not None:
        return None
    steps, losses = curve
    bad = ~np.isfinite(losses)
    word = "NaN" if np.isnan(losses[-1]) else "infinite"
    return RULE.finding(
        case,
        "critical",
        0.9,
        sites=(vitals.LOSS,),
        step=int(steps[bad][0]),
        evidence=(above("losses that are not finite", int(bad.sum()), 1, "loss:scalar mean"),),
        cause=f"The loss is {word}, since step {int(steps[bad][0])}; no tensor that was recorded shows where it comes "
        "from.",
        fix="Record the model's outputs and gradients (sonde.watch does) to find the first operation that is not "
        "finite; lower the learning rate, and look for log(0) and divisions by 0 in the loss.",
        refute="Print the loss of that step: a finite number refutes it.",
    )


RULE = Rule(kind="nan_in_loss", check=check, since=0)
