"""A loss that leaps for a moment."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.rules.bad_batch_spike import spike_flags
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find single losses far above those around them."""
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    steps, losses = found
    if case.learning.state in ("unknown", "broken"):
        return None
    spikes = spike_flags(losses)
    spikes[:10] = False
    count = int(spikes.sum())
    if not 1 <= count <= 0.05 * len(losses):  # more of them are the nature of a heavy-tailed loss
        return None
    worst = int(np.argmax(np.where(spikes, losses, -np.inf)))
    ratio = float(losses[worst] / np.median(losses))
    return RULE.finding(
        case,
        "info",
        0.7,
        sites=("(loop)",),
        step=int(steps[worst]),
        evidence=(
            above("highest of them over the median loss", ratio, thresholds.SPIKE_RATIO, "loss:scalar mean"),
            fact("spikes", count),
        ),
        cause=f"The loss leaps at {count} of {len(losses)} steps and comes back.",
        fix="Clip gradients to the norm that nine of ten stay below, and look at the batches of these steps.",
        refute="Repeat the step from a checkpoint: if the leap is gone, the batch is not to blame.",
        data={"steps": steps[spikes][:16].tolist()},
    )


RULE = Rule(kind="loss_spike", check=check, since=40)
