"""Batch norms whose running statistics never move."""

from __future__ import annotations

from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find batch norms with a momentum of 0, which never learn, or near 1, which forget all but the last batch."""
    case.need_facts()
    norms = [
        (name, momentum)
        for name, module in case.modules.items()
        if module.kind.startswith(("BatchNorm", "SyncBatchNorm"))
        and module.settings.get("track_running_stats", True)
        and isinstance(momentum := module.settings.get("momentum"), int | float)
    ]
    still = [name for name, momentum in norms if momentum == 0]
    hasty = [name for name, momentum in norms if momentum >= 0.9]
    if still:
        return RULE.finding(
            case,
            "warning",
            0.96,
            sites=tuple(still),
            step=0,
            evidence=(below("momentum", 0.0, 0.0), fact("batch norms", len(still))),
            cause=f"{few(still)} {by_number(still, 'has', 'have')} momentum=0: running mean and variance "
            "stay at 0 and 1, and evaluation uses those.",
            fix="Use momentum=0.1, which is torch's default; it is the share of the new batch, not of the old.",
            refute="Print running_mean after some steps: anything but its first value refutes it.",
        )
    if hasty:
        return RULE.finding(
            case,
            "info",
            0.8,
            sites=tuple(hasty),
            step=0,
            evidence=(above("momentum", max(value for _, value in norms), 0.9), fact("batch norms", len(hasty))),
            cause=f"{few(hasty)} {by_number(hasty, 'has', 'have')} a momentum near 1: in torch it is the share "
            "of the new batch, so evaluation uses little but the last batch.",
            fix="Use momentum=0.1 (Keras' 0.9 is torch's 0.1).",
            refute="If the last batch is meant to decide, it is fine.",
        )
    return None


RULE = Rule(kind="batchnorm_stats_stale", check=check, since=0)
