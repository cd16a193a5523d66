"""A module whose output is the first that is not finite."""

from __future__ import annotations

from sonde.diagnosis.case import Case
from sonde.diagnosis.origin_words import explain_origin
from sonde.diagnosis.rule import Rule
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Tell from the order of readings; repeating the step says more, where that was possible."""
    return explain_origin(RULE, case, "forward")


RULE = Rule(kind="nan_forward", check=check, since=0)
