"""The doctor: asks every rule about a case, isolates faults of rules, and puts causes before symptoms."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.nonfinite import BASIS, READINGS, is_earlier, is_traced
from sonde.diagnosis.ranking import OUTCOMES, fold
from sonde.diagnosis.reliability import confidence_of
from sonde.diagnosis.rule import Found, Opinion, Refuted, Rule, few
from sonde.diagnosis.rules import OPINIONS, RULES
from sonde.errors import RunDamaged
from sonde.records import SEVERITIES, Finding

logger = logging.getLogger("sonde")


_LOOK_EVERY: Final = 25


def is_due(count: int) -> bool:
    """Return whether to look after the `count`-th step of a recording: at each of the first ten, then at every 25th."""
    return count <= 10 or count % _LOOK_EVERY == 0


def confirm(finding: Finding, tried: Finding) -> Finding:
    """Return a finding with what an experiment adds to it: its numbers, and a fix that was tried."""
    severity = max(finding.severity, tried.severity, key=SEVERITIES.index)
    return replace(
        finding,
        severity=severity,
        confidence=tried.confidence if severity == tried.severity else finding.confidence,
        exact=finding.exact or tried.exact,
        experiment=tried.experiment,
        evidence=(*finding.evidence, *tried.evidence),
        fix=tried.fix or finding.fix,
        sites=finding.sites or tried.sites,
        data={**tried.data, **finding.data},
    )


@dataclass
class Doctor:
    """Remembers since when each finding has held. One doctor per run."""

    rules: Sequence[Rule] = field(default_factory=lambda: RULES)
    unmeasured: dict[str, str] = field(default_factory=dict)
    """By kind: what the run lacks for a verdict."""
    broken: dict[str, str] = field(default_factory=dict)
    """By kind: the traceback of a rule that raised; it is not asked again."""
    refuted: dict[str, str] = field(default_factory=dict)
    """By kind: what an experiment says against it. Such a kind is not reported unless it rests on an exact relation."""
    found: list[Finding] = field(default_factory=list)
    """Everything that the last look found, before symptoms were folded under their causes."""
    _first: dict[str, int] = field(default_factory=dict)
    _given: dict[str, Finding] = field(default_factory=dict)
    _lasting: dict[str, Finding] = field(default_factory=dict)

    def take(self, finding: Finding) -> None:
        """Take a finding that was made elsewhere, such as the first bad operation; it counts like a rule's."""
        confidence = confidence_of(finding.kind, finding.severity)
        self._given[finding.kind] = finding if confidence is None else replace(finding, confidence=confidence)

    def drop(self, kind: str) -> None:
        """Forget a finding that was made elsewhere and no longer holds."""
        self._given.pop(kind, None)

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
        self._weigh(found, case)
        better = [finding for finding in self._given.values() if is_traced(finding)]
        if better:
            found = {
                kind: finding
                for kind, finding in found.items()
                if finding.data.get(BASIS) != READINGS or all(is_earlier(finding, other) for other in better)
            }
        self.found = list((found | self._given).values())
        return [self._as_symptom(case, each) if each.kind in OUTCOMES else each for each in fold(self.found)]

    def _as_symptom(self, case: Case, finding: Finding) -> Finding:
        """Return an outcome that nothing explains with the causes that were looked for and not found."""
        asked = [
            rule.kind
            for rule in self.rules
            if not (rule.outcome or rule.exact or rule.kind in self.unmeasured or rule.kind in self.broken)
            and rule.severity != "info"
            and self._is_due(rule, case)
        ]
        # What an experiment refuted comes first.
        looked_for = dict.fromkeys((*self.refuted, *asked))
        ruled_out = [kind for kind in looked_for if kind not in {each.kind for each in self.found}]
        if not ruled_out or finding.severity == "info":
            return finding
        words = few([kind.replace("_", " ") for kind in ruled_out], 8)
        cause = f"{finding.cause} This is a symptom; ruled out: {words}."
        return replace(finding, cause=cause, data=finding.data | {"ruled_out": ruled_out})

    @staticmethod
    def _is_due(rule: Rule, case: Case) -> bool:
        return case.num_steps >= rule.since and (case.final or not rule.final)

    def _weigh(self, found: dict[str, Finding], case: Case) -> None:
        """Confirm, add or drop findings by what experiments on taped steps showed; exact relations stay."""
        self.refuted = {}
        rules = {rule.kind: rule for rule in self.rules}
        for opinion in OPINIONS if case.examinations else ():
            if opinion.kind not in rules or opinion.kind in self.broken:
                continue
            answer = self._consult(opinion, case)
            if isinstance(answer, Refuted):
                self.refuted[opinion.kind] = answer.why
            elif answer is not None:
                tried = rules[opinion.kind].finding(case, answer, exact=opinion.exact)
                found[opinion.kind] = confirm(found[opinion.kind], tried) if opinion.kind in found else tried
        for kind in self.refuted.keys() & found.keys():
            if not found[kind].exact and not found[kind].experiment:
                del found[kind]

    def _consult(self, opinion: Opinion, case: Case) -> Found | Refuted | None:
        try:
            return opinion.find(case)
        except (NotMeasured, RunDamaged):
            return None
        except Exception:  # noqa: BLE001 - one opinion's fault must not silence the others
            self.broken[opinion.kind] = traceback.format_exc()
            logger.warning("the opinion on %s failed.\n%s", opinion.kind, self.broken[opinion.kind].rstrip())
            return None

    def _ask(self, rule: Rule, case: Case) -> Finding | None:
        if rule.kind in self.broken or not self._is_due(rule, case):
            return None
        try:
            finding = rule.check(case) or (self._lasting.get(rule.kind) if rule.lasting else None)
        except (NotMeasured, RunDamaged) as missing:  # a file that is damaged, such as a tape, is no fault of the rule
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
