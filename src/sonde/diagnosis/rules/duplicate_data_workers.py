"""Every worker of the loader delivers the same data."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import identities, model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find batches that equal one of the few before them, again and again, though not all are the same."""
    track = model_input(case).last(64)
    known = identities(track)
    if len(known) < 8 or (known == -1).any() or len(set(known.tolist())) <= 2:
        return None
    workers = _workers(case)
    reach = max(1, workers - 1) if workers else 3
    repeats = np.zeros(len(known), np.bool_)
    for lag in range(1, reach + 1):
        repeats[lag:] |= known[lag:] == known[:-lag]
    share = float(repeats.mean())
    if share < thresholds.DUPLICATE_SHARE.value:
        return None
    return RULE.finding(
        case,
        "warning",
        0.9 if workers else 0.75,
        sites=("loader",),
        step=int(track.steps[repeats][0]),
        evidence=(
            above(
                "share of batches equal to one of the few before",
                share,
                thresholds.DUPLICATE_SHARE,
                f"{track.key} mean",
            ),
            fact("workers of the loader", float(workers) if workers else float("nan")),
        ),
        cause="Batches come several times: each worker of the loader goes through the whole iterable dataset.",
        fix="Share the data out in __iter__ by torch.utils.data.get_worker_info(): worker k takes every n-th item.",
        refute="Count how often each sample comes in one epoch: once each refutes it.",
    )


def _workers(case: Case) -> int:
    count = None if case.facts.loader is None else case.facts.loader.settings.get("num_workers")
    return count if isinstance(count, int) else 0


RULE = Rule(kind="duplicate_data_workers", check=check, since=8)
