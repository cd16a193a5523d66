"""Dropout that leaves too little to learn from."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import PATIENCE, is_learning_well
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.facts import ModuleFacts
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find dropouts that drop nearly everything, in a run that does not learn well all the same."""
    ran = set(case.need_facts().order)
    high = [each for each in case.facts.modules if each.name in ran and _share(each) >= thresholds.DROPPED_SHARE.value]
    if not high:
        return None
    names, share = [each.name for each in high], max(map(_share, high))
    harmless = case.learning.points < PATIENCE or case.learning.state == "unknown" or is_learning_well(case)
    return RULE.finding(
        case,
        "info" if harmless else "warning",
        0.85,
        sites=tuple(names),
        step=1,
        evidence=(
            above("share of the units that are dropped", share, thresholds.DROPPED_SHARE),
            fact("dropouts like that", len(names)),
            fact("part of the first loss that is left", case.learning.recent / (case.learning.initial or float("nan"))),
        ),
        cause=f"{few(names)} {by_number(names, 'drops', 'drop')} {share:.0%} of all units in training: p is the share "
        "to drop, not the share to keep.",
        fix=f"Write p={1 - share:.2g} if {share:.2g} was meant to be kept; usual are 0.1 to 0.5.",
        refute="Train 200 steps with p=0.2: if the loss falls no further, it was not the dropout.",
    )


def _share(module: ModuleFacts) -> float:
    p = module.settings.get("p")
    is_dropout = "Dropout" in module.kind and module.training and isinstance(p, int | float)
    return float(p) if is_dropout and isinstance(p, int | float) else 0.0


RULE = Rule(kind="dropout_too_high", check=check, since=PATIENCE)
