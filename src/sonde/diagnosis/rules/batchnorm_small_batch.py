"""Batch norms that see too few values per channel."""

from __future__ import annotations

import numpy as np

from sonde import schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.modes import modes
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find batch norms in training mode that normalise by a handful of values."""
    thin: dict[str, float] = {}
    norms = [mode for mode in modes(case, "train") if mode.kind.startswith("BatchNorm") and mode.training > 0]
    for mode in norms:
        track = case.track(f"{mode.name}:output")
        channels = case.modules[mode.name].settings.get("num_features")
        if track is None or not isinstance(channels, int) or not channels:
            continue
        recent = track.last(16).rows
        each = float(np.median(recent[:, schema.COUNT] / recent[:, schema.SEEN])) / channels
        if each < thresholds.FEW_PER_CHANNEL.value:
            thin[mode.name] = each
    if norms and not any(case.track(f"{mode.name}:output") for mode in norms):
        raise NotMeasured("outputs of batch norms")
    if not thin:
        return None
    least = min(thin.values())
    return RULE.finding(
        case,
        "warning" if least <= thresholds.TOO_FEW_PER_CHANNEL.value else "info",
        0.9,
        sites=tuple(thin),
        step=1,
        evidence=(
            below("values per channel in a batch", least, thresholds.FEW_PER_CHANNEL),
            fact("batch norms", len(thin)),
        ),
        cause=f"{few(list(thin))} {by_number(list(thin), 'normalises', 'normalise')} by only {least:g} values per "
        "channel: statistics of so few are mostly noise, and evaluation uses quite other ones.",
        fix="Use larger batches, or GroupNorm or LayerNorm, which do not depend on the batch.",
        refute="Compare the loss of one batch in train() and eval() mode: about equal losses refute it.",
    )


RULE = Rule(kind="batchnorm_small_batch", check=check, since=2)
