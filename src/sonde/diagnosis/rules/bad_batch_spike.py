"""A batch whose loss is far too high each time it comes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import identities, model_input
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Values
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find spikes of the loss that come with the very same batch, every time."""
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    track = model_input(case)
    spikes = set(found[0][spike_flags(found[1])].tolist())
    batches = dict(zip(track.steps.tolist(), identities(track).tolist(), strict=True))
    hit = Counter(batches[step] for step in spikes if batches.get(step, -1) != -1)
    if not hit:
        return None
    batch, times = hit.most_common(1)[0]
    shown = [step for step, each in batches.items() if each == batch]
    if times < 2 or times < 0.8 * len(shown):
        return None
    return RULE.finding(
        case,
        "warning" if times >= 3 else "info",
        0.75,
        sites=("loader",),
        step=min(shown),
        evidence=(
            above("spikes of the loss with the same batch", times, 2, "loss:scalar mean"),
            fact("times that batch was shown", len(shown)),
        ),
        cause=f"One batch is bad: the loss leaps each time it comes (steps {', '.join(map(str, sorted(shown)[:4]))}).",
        fix="Look at its samples: wrong labels, broken files, other units.",
        refute="Compute the loss of each of its samples with the present weights: none far above the rest refutes it.",
        data={"steps": sorted(shown)[:16]},
    )


def spike_flags(losses: Values) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Say which losses stand far above those around them."""
    flags = np.zeros(len(losses), np.bool_)
    if len(losses) < 20:
        return flags
    width = 25
    padded = np.pad(losses, width, mode="reflect" if len(losses) > width else "edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1)
    middle = np.median(around, axis=1)
    spread = np.median(np.abs(around - middle[:, None]), axis=1)
    with np.errstate(invalid="ignore"):
        high = losses > middle + thresholds.SPIKE_MADS.value * np.maximum(spread, 1e-3 * np.abs(middle))
        result: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = high & (
            losses > thresholds.SPIKE_RATIO.value * np.abs(middle)
        )
    return result


RULE = Rule(kind="bad_batch_spike", check=check, since=20)
