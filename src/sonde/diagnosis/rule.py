"""What a rule is: one function that looks for one fault, with everything known about that fault beside it."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sonde.diagnosis.case import Case
from sonde.diagnosis.reliability import confidence_of
from sonde.diagnosis.tape.reading import TapeReading
from sonde.records import Evidence, Finding, Severity

logger = logging.getLogger("sonde")


class Threshold(float):
    """A number that rules compare with, and where it comes from.

    Where a threshold is a matter of judgement it is relative to the run's own history or to other layers, and the
    source says what it was measured on. Exact relations need none.

    >>> ratio = Threshold(0.5, "half of it")
    >>> 0.7 > ratio, ratio.source
    (True, 'half of it')
    """

    source: str

    def __new__(cls, value: float, source: str) -> Threshold:  # noqa: D102 - documented by the class
        threshold = super().__new__(cls, value)
        threshold.source = source
        return threshold


# What is thinned together with what, to keep the budget; all other readings are made for the diagnosis alone.
_RECORDED_WITH: Final = {
    **dict.fromkeys(("parameter", "gradient", "update"), "parameters"),
    **dict.fromkeys(("input", "output"), "outputs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rule has found in a case. The rest of the finding is the same for all cases and belongs to the rule."""

    cause: str
    sites: tuple[str, ...]
    evidence: tuple[Evidence, ...] = ()
    severity: Severity | None = None
    """The rule's own if None."""
    step: int | None = None
    """Where it began; the present step if that is not known."""
    fix: str = ""
    """Instead of the rule's, where the fault has more than one form."""
    refute: str = ""
    """Instead of the rule's."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Values for the `{names}` in the rule's `fix` and `refute`."""
    data: dict[str, Any] = field(default_factory=dict)
    experiment: str = ""
    """What was changed when a taped step was repeated, and what that did."""
    exact: bool | None = None
    """Whether it rests on an exact relation, where that differs from the rule: a tape shows what statistics suggest."""


def on_tape(find: Callable[[TapeReading], Found | None]) -> Callable[[Case], Found | None]:
    """Make a question about a case of one about the last taped step of every kind; without a tape the answer is None.

    The answer is found once for each tape, however often rules look at a run.
    """
    name = f"{find.__module__}.{find.__qualname__}"

    @functools.wraps(find)
    def ask(case: Case) -> Found | None:
        answers = (each.once(name, lambda reading: _answer(find, reading)) for each in case.rounds)
        return next((answer for answer in answers if answer is not None), None)

    return ask


def on_first_tape(find: Callable[[TapeReading], Found | None]) -> Callable[[Case], Found | None]:
    """Make a question about a case of one about the first taped step, for what training changes."""
    name = f"{find.__module__}.{find.__qualname__}"

    @functools.wraps(find)
    def ask(case: Case) -> Found | None:
        first = case.first_taped
        return None if first is None else first.once(name, lambda reading: _answer(find, reading))

    return ask


def on_every_tape(find: Callable[[TapeReading], Found | None]) -> Callable[[Case], Found | None]:
    """Make a question about a case of one that has to be answered for every kind of taped step.

    What one kind of step leaves out, such as the head of another task, the next one may use.
    """
    name = f"{find.__module__}.{find.__qualname__}"

    @functools.wraps(find)
    def ask(case: Case) -> Found | None:
        answers = [each.once(name, lambda reading: _answer(find, reading)) for each in case.rounds]
        return answers[0] if answers and None not in answers else None

    return ask


def _answer(find: Callable[[TapeReading], Found | None], reading: TapeReading) -> Found | None:
    try:
        return _dated(find(reading), reading)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # A tape of a form that was not foreseen must not silence the rest of the rule.
        logger.warning("the question %s about a tape failed.\n%s", find.__name__, traceback.format_exc().rstrip())
        return None


def _dated(found: Found | None, reading: TapeReading) -> Found | None:
    return found if found is None or found.step is not None else replace(found, step=reading.tape.step)


@dataclass(frozen=True, slots=True)
class Refuted:
    """What an experiment says against a finding that other evidence may point to."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What experiments on a tape say about a kind of finding that a rule looks for. Made by the decorator `opinion`."""

    kind: str
    find: Callable[[Case], Found | Refuted | None]
    exact: bool = False
    """Whether it rests on an exact relation that the experiment tested."""


def opinion(kind: str, *, exact: bool = False) -> Callable[[Callable[[Case], Found | Refuted | None]], Opinion]:
    """Make an opinion of a function; everything else about the kind belongs to its rule."""

    def make(find: Callable[[Case], Found | Refuted | None]) -> Opinion:
        return Opinion(kind=kind, find=find, exact=exact)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of finding and how to look for it. Made by the decorator `rule`."""

    kind: str
    find: Callable[[Case], Found | None]
    """Looks only at its argument, never at files, clocks or torch, and gives the same answer for the same case. Raises
    `NotMeasured` where the run lacks what it needs."""
    needs: tuple[str, ...] = ()
    """What it reads: signals of `sonde.core.signals`, quantities of readings, and `facts.<name>`."""
    explains: frozenset[str] = frozenset()
    """Kinds of findings that follow from it and are folded under it."""
    fix: str = ""
    """What to do about it. May have `{names}` that `Found.values` fills in; so may `refute`."""
    refute: str = ""
    """A test that would show that the finding is wrong."""
    severity: Severity = "warning"
    """How severe it is, unless `Found` overrides it for this case."""
    exact: bool = False
    """Whether it rests on an exact relation, which holds or does not, rather than on statistics."""
    since: float = 1
    """How many steps must have been recorded before it makes sense to look; 0 looks as soon as facts are known."""
    final: bool = False
    """Whether it can be judged only when the run is over."""
    lasting: bool = False
    """Whether it stays true once it was found: something that happened, not a state that may pass."""
    outcome: bool = False
    """Whether any fault can lead to it, so that it is reported on its own only if nothing else was found."""

    @property
    def theme(self) -> str:
        """The name of the module that the rule is in, which sensors for it share."""
        return self.find.__module__.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """What is wrong, in a sentence: the first line of the function's docstring."""
        return (self.find.__doc__ or "").partition("\n")[0]

    def stride(self, case: Case) -> int:
        """Return in one of how many steps the run holds all that the rule needs."""
        return max((case.strides.get(_RECORDED_WITH.get(need, "diagnosis"), 1) for need in self._readings), default=1)

    @property
    def _readings(self) -> list[str]:
        return [need for need in self.needs if not need.startswith("facts.")]

    def check(self, case: Case) -> Finding | None:
        """Look at a case and return a finding, or None where nothing is wrong in this respect.

        Raises:
            NotMeasured: The run lacks what the rule needs.

        """
        found = self.find(case)
        return (
            None
            if found is None
            else self.finding(case, found, exact=self.exact if found.exact is None else found.exact)
        )

    def finding(self, case: Case, found: Found, *, exact: bool) -> Finding:
        """Return what was found in a case as a finding of this kind."""
        severity = found.severity or self.severity
        step = case.step if found.step is None else found.step
        return Finding(
            kind=self.kind,
            severity=severity,
            confidence=confidence_of(self.kind, severity),
            exact=exact,
            experiment=found.experiment,
            step=step,
            last_step=max(case.step, step),  # a tape may hold a step whose readings are still on their way
            sites=found.sites,
            evidence=tuple(_with_existing_series(case, each) for each in found.evidence),
            cause=found.cause,
            fix=found.fix or self.fix.format_map(found.values),
            refute=found.refute or self.refute.format_map(found.values),
            data=found.data,
        )


def _with_existing_series(case: Case, evidence: Evidence) -> Evidence:
    """Return evidence that cites only a series that the run has.

    Rules cite the loss as `loss:scalar`; it may have been logged under another name, or not at all.
    """
    key, _, statistic = evidence.series.rpartition(" ")
    if not evidence.series or case.has_site(key):
        return evidence
    loss = case.loss_site() if key == "loss:scalar" else None
    return replace(evidence, series="" if loss is None else f"{loss.key} {statistic}")


def rule(
    kind: str,
    *,
    fix: str,
    refute: str,
    needs: Sequence[str] = (),
    explains: Sequence[str] = (),
    severity: Severity = "warning",
    exact: bool = False,
    since: float = 1,
    final: bool = False,
    lasting: bool = False,
    outcome: bool = False,
) -> Callable[[Callable[[Case], Found | None]], Rule]:
    """Make a rule of a function; see `Rule` for what the arguments mean."""

    def make(find: Callable[[Case], Found | None]) -> Rule:
        return Rule(
            kind=kind,
            find=find,
            needs=tuple(needs),
            explains=frozenset(explains),
            fix=fix,
            refute=refute,
            severity=severity,
            exact=exact,
            since=since,
            final=final,
            lasting=lasting,
            outcome=outcome,
        )

    return make


def above(name: str, value: float, threshold: float, series: str = "") -> Evidence:
    """Return evidence that a value reaches its threshold."""
    return Evidence(name=name, value=float(value), threshold=float(threshold), relation=">=", series=series)


def below(name: str, value: float, threshold: float, series: str = "") -> Evidence:
    """Return evidence that a value does not exceed its threshold."""
    return Evidence(name=name, value=float(value), threshold=float(threshold), relation="<=", series=series)


def fact(name: str, value: float, series: str = "") -> Evidence:
    """Return evidence that is a number to know, without a threshold."""
    return Evidence(name=name, value=float(value), series=series)


def few(names: Sequence[str], most: int = 3) -> str:
    """Write some names of many.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    >>> few(["a", "b"])
    'a and b'
    """
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def by_number(names: Sequence[object], one: str, several: str) -> str:
    """Return the words that fit the number of names.

    >>> by_number(["a"], "is", "are")
    'is'
    """
    return one if len(names) == 1 else several
