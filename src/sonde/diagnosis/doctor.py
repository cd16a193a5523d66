"""The doctor: asks every rule about a case, keeps each rule's fault to itself, and puts causes before symptoms."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.nonfinite import READINGS, TOLD_FROM, is_better_told, is_earlier
from sonde.diagnosis.ranking import fold
from sonde.diagnosis.reliability import confidence_of
from sonde.diagnosis.rule import Rule
from sonde.diagnosis.rules import RULES
from sonde.records import Finding

logger = logging.getLogger("sonde")


_LOOK_EVERY: Final = 25


def is_due(count: int) -> bool:
    """Return whether to look after the `count`-th step of a recording: at each of the first ten, then at every 25th."""
    return count <= 10 or count % _LOOK_EVERY == 0


@dataclass
class Doctor:
    """Remembers since when each finding has held. One doctor per run."""

    rules: Sequence[Rule] = field(default_factory=lambda: RULES)
    unmeasured: dict[str, str] = field(default_factory=dict)
    """By kind: what the run lacks for a verdict."""
    broken: dict[str, str] = field(default_factory=dict)
    """By kind: the traceback of a rule that raised; it is not asked again."""
    found: list[Finding] = field(default_factory=list)
    """Everything that the last look found, before symptoms were folded under their causes."""
    _first: dict[str, int] = field(default_factory=dict)
    _given: dict[str, Finding] = field(default_factory=dict)
    _lasting: dict[str, Finding] = field(default_factory=dict)

    def take(self, finding: Finding) -> None:
        """Take a finding that was made elsewhere, such as the first bad operation; it counts like a rule's."""
        confidence = confidence_of(finding.kind, finding.severity)
        self._given[finding.kind] = finding if confidence is None else replace(finding, confidence=confidence)

    def look_if_due(self, case: Case, count: int) -> None:
        """Look after the `count`-th step of a recording if that `is_due`.

        Exact relations show in the first steps; the later looks find what has passed by the end.
        """
        if is_due(count):
            self.look(case)

    def look(self, case: Case) -> list[Finding]:
        """Return what is wrong now, best first, with symptoms folded under their causes."""
        found = {rule.kind: finding for rule in self.rules if (finding := self._ask(rule, case)) is not None}
        for kind, finding in found.items():
            first = self._first.setdefault(kind, finding.step)
            found[kind] = replace(finding, step=min(first, finding.step), last_step=max(case.step, finding.last_step))
        told = [finding for finding in self._given.values() if is_better_told(finding)]
        if told:
            found = {
                kind: finding
                for kind, finding in found.items()
                if finding.data.get(TOLD_FROM) != READINGS or all(is_earlier(finding, other) for other in told)
            }
        self.found = list((found | self._given).values())
        return fold(self.found)

    def _ask(self, rule: Rule, case: Case) -> Finding | None:
        too_early = case.num_steps < rule.since or (rule.final and not case.final)
        if rule.kind in self.broken or too_early:
            return None
        try:
            finding = rule.check(case) or (self._lasting.get(rule.kind) if rule.lasting else None)
        except NotMeasured as missing:
            self.unmeasured[rule.kind] = str(missing)
            return self._lasting.get(rule.kind) if rule.lasting or case.is_thinned else None
        except Exception:  # noqa: BLE001 - one rule's fault must not silence the others
            self.broken[rule.kind] = traceback.format_exc()
            logger.warning("the rule %s failed and is not asked again.\n%s", rule.kind, self.broken[rule.kind].rstrip())
            return None
        self.unmeasured.pop(rule.kind, None)
        # An exact relation that was broken while every step was recorded is not mended by recording fewer of them.
        if finding is not None and (rule.lasting or (finding.exact and not case.is_thinned)):
            self._lasting[rule.kind] = finding
        elif finding is None and not case.is_thinned:
            self._lasting.pop(rule.kind, None)
        return finding or (self._lasting.get(rule.kind) if case.is_thinned else None)
