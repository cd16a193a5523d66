"""A learning rate that is gone long before the training is."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import is_learning_well
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.records import Finding, Severity

_CUTS = 3
_EPOCHS = (
    "it is stepped once a batch, but was made for epochs.",
    "Call scheduler.step() once per epoch, outside the batch loop, or give the schedule its length in steps.",
)
_RISE = (
    "it waits for a number that rises (mode='max') and is given one that falls, such as the loss.",
    "Write mode='min' for a loss; mode='max' is for accuracies and other scores.",
)


def check(case: Case) -> Finding | None:
    """Find a rate that fell to almost nothing early and stays there while training goes on."""
    rate = case.learning_rate()
    if rate is None:
        raise NotMeasured("learning rates")
    steps, values = rate
    peak = float(values.max())
    if not peak > 0:
        return None
    gone = values <= thresholds.LR_COLLAPSED.value * peak
    since_peak = np.arange(len(values)) > int(values.argmax())  # a warm-up begins at nothing
    idle = run_length(gone & since_peak)
    if idle < thresholds.LR_COLLAPSED_STEPS.value:
        return None
    start = len(values) - idle
    useful, total = int(steps[start] - steps[0]), int(steps[-1] - steps[0] + 1)
    share = (total - useful) / total
    if share < thresholds.LR_COLLAPSED_SHARE.value or useful > thresholds.LR_USEFUL_STEPS.value:
        return None
    why, cure = _RISE if _waits_for_a_rise(case) else _EPOCHS
    return RULE.finding(
        case,
        _severity(case, int(steps[start])),
        0.9,
        sites=("scheduler", "optimizer"),
        step=int(steps[start]),
        evidence=(
            below(
                "learning rate over its highest",
                values[-1] / peak,
                thresholds.LR_COLLAPSED,
                "optimizer.group0.lr:scalar mean",
            ),
            above("share of the run spent at that rate", share, thresholds.LR_COLLAPSED_SHARE),
            fact("steps until the rate was gone", useful),
        ),
        cause=f"The schedule has used up the learning rate after {useful} steps: {why}",
        fix=cure,
        refute="Print the learning rate of the last epoch you planned: if it is meant to be this low, it is fine.",
    )


def _severity(case: Case, gone: int) -> Severity:
    scheduler = case.facts.scheduler
    if scheduler is None or scheduler.kind != "ReduceLROnPlateau" or _waits_for_a_rise(case):
        return "warning"
    # This scheduler lowers the rate because the loss stands still: then it is the result of something else.
    return "warning" if case.learning.failed or _was_falling(case, gone) else "info"


def _was_falling(case: Case, gone: int) -> bool:
    """Say whether the loss was on its way down while the rate was used up, and then stayed where it was."""
    found = case.loss()
    if found is None or is_learning_well(case):
        return False
    steps, losses = found
    return judge(losses[steps <= gone]).state == "improving"


def _waits_for_a_rise(case: Case) -> bool:
    """Say whether the scheduler waits for its number to rise and has never seen it rise, while the loss fell.

    Then it cuts the rate at equal distances from the start on: it is given a loss.
    """
    scheduler, rate = case.facts.scheduler, case.learning_rate()
    if scheduler is None or scheduler.settings.get("mode") != "max" or rate is None:
        return False
    cuts = rate[0][1:][rate[1][1:] < rate[1][:-1]]
    if len(cuts) < _CUTS or case.learning.state != "improving":
        return False
    distances = np.diff(cuts)
    first = cuts[0] - rate[0][0]
    return bool(distances.max() <= distances.min() + 1 and first <= 2 * distances.min())


RULE = Rule(kind="lr_schedule_collapse", check=check, since=10)
