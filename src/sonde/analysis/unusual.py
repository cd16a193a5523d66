"""Mark the sites of a table that stand out: by a finding, or by a step outside the bands of the rules.

A mark is `bad` where a warning or a critical finding names the site, and `odd` where a step leaves the bands of
`sonde.diagnosis.judgement`; its reason then names that step. All else is `fine`: notes mark nothing, and neither does
what is true of most sites, because then none of them stands out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sonde.analysis.downsample import Steps, Values
from sonde.core import signals
from sonde.diagnosis.judgement import LEAST_RATIO, MOMENT_WINDOW, Moment, gradient_now, output_now, verdict_of
from sonde.diagnosis.rules.gradients import GRADIENT_LEAPS
from sonde.records import QUANTITIES, SEVERITIES, Finding, Quantity, RunHeader, Site

# --------------------------------------------------------------------------------
# Model order: which layer comes first, and which layer a site belongs to.


# Quantities whose name is a parameter's, so that the layer is its owner.
_OF_PARAMETERS = frozenset({"parameter", "gradient", "update", "state"})


class ModelOrder:
    """Sorts names of modules and parameters as the model lists them; names it does not know come in site order."""

    def __init__(self, header: RunHeader, sites: Iterable[Site]) -> None:
        self._kinds = {_text(entry, "name"): _text(entry, "kind") for entry in model_entries(header, "modules")}
        names = [*self._kinds, *(_text(entry, "name") for entry in model_entries(header, "parameters"))]
        names += [site.name for site in sites]
        self._position: dict[str, int] = {}
        for name in names:
            self._position.setdefault(name, len(self._position))
        # Without a module tree the owners are known only through their parameters.
        self._first_inside: dict[str, int] = {}
        for name, position in self._position.items():
            self._first_inside.setdefault(name.rpartition(".")[0], position)

    def of_layer(self, name: str) -> int:
        """Return where a layer stands: its own place, or that of the first thing inside it."""
        return self._position.get(name, self._first_inside.get(name, len(self._position)))

    def of_site(self, site: Site) -> tuple[int, int, int]:
        """Return a sort key: by layer, then by parameter, then by site."""
        return self.of_layer(layer_of(site)), self._position.get(site.name, 0), site.id

    def kind(self, layer: str) -> str:
        """Return the class of a layer, or an empty string where the run does not say."""
        return self._kinds.get(layer, "")


def layer_of(site: Site) -> str:
    """Return the name of the module a site belongs to: a parameter's owner, or the module itself."""
    return site.name.rpartition(".")[0] if site.quantity in _OF_PARAMETERS else site.name


def model_entries(header: RunHeader, name: str) -> list[dict[str, Any]]:
    """Return a list from the description of the model: `modules` or `parameters`."""
    # A header comes from a file that a stranger may have written.
    entries = header.model.get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _text(entry: dict[str, Any], name: str) -> str:
    return str(entry.get(name, ""))


# --------------------------------------------------------------------------------


Level = Literal["bad", "odd", "fine"]
LEVELS: Final[tuple[Level, ...]] = ("bad", "odd", "fine")

RECENT: Final = 20
"""Readings that make up "now"."""
TIMES: Final = "\N{MULTIPLICATION SIGN}"
# How many steps that may be outside the bands are compared with the steps before them: those farthest out.
_MOST_STEPS: Final = 20
_FEW: Final = 8
"""How many sites may share a mark in a model of any size."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How much a site stands out and why. `score` sorts within a level; `step` is where it began, if that is known."""

    level: Level = "fine"
    score: float = 0.0
    reason: str = ""
    step: int | None = None

    @property
    def sort_key(self) -> tuple[int, float]:
        """Sort worst first by this."""
        return LEVELS.index(self.level), -self.score


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What a mark is made from: for each reading of a site a magnitude, and how many elements were not finite."""

    site: Site
    steps: Steps
    values: Values
    nonfinite: Values
    """Without what is harmless: the minus infinities of a mask, and a step that a gradient scaler held back."""


def mark_all(histories: Sequence[History], findings: Iterable[Finding] = ()) -> list[Mark]:
    """Return a mark for each history, given the findings of its run."""
    findings = list(findings)
    notes = [finding for finding in findings if finding.severity == "info" and verdict_of(finding)]
    grave = [finding for finding in findings if finding.severity != "info"]
    layers = {layer_of(history.site) for history in histories}
    special = [each for each in grave if len(each.sites) <= max(_FEW, len(layers) // 2)]
    special.sort(key=lambda each: -SEVERITIES.index(each.severity))
    return _without_common(histories, [_mark(history, special, notes) for history in histories])


def _without_common(histories: Sequence[History], marks: list[Mark]) -> list[Mark]:
    """Remove marks of single steps where most sites of a quantity have one at the same step: a bad batch."""
    alike: Counter[tuple[str, int | None]] = Counter()
    quantities: Counter[str] = Counter(history.site.quantity for history in histories)
    for history, mark in zip(histories, marks, strict=True):
        alike[history.site.quantity, mark.step] += mark.level == "odd"
    return [
        Mark() if mark.level == "odd" and count > max(_FEW, quantities[history.site.quantity] // 2) else mark
        for history, mark in zip(histories, marks, strict=True)
        for count in [alike[history.site.quantity, mark.step]]
    ]


def _mark(history: History, findings: list[Finding], notes: list[Finding]) -> Mark:
    if history.site.quantity == "vital":
        return Mark()
    return (
        _non_finite(history)
        or next((_of_finding(finding) for finding in findings if _names(finding, history.site)), None)
        or _all_zero(history)
        or _in_words_of(notes, history.site, _one_step(history))
        or Mark()
    )


def _in_words_of(notes: list[Finding], site: Site, mark: Mark | None) -> Mark | None:
    """Add the kind of a note about the site to the reason of its mark; a note alone marks nothing."""
    word = next((verdict_of(note) for note in notes if _names(note, site)), None)
    return mark if mark is None or word is None else replace(mark, reason=f"{word}: {mark.reason}")


def is_one_number(site: Site) -> bool:
    """Return whether a site is a logged number or a loss."""
    return site.quantity == "scalar" or (site.name == signals.LOSS and site.quantity == "output")


def _names(finding: Finding, site: Site) -> bool:
    """Return whether a finding is about a site: it names the site or its layer, and what is measured there."""
    if site.name not in finding.sites and layer_of(site) not in finding.sites:
        return False
    measured = set(_measured(finding, site))
    return not measured or site.quantity in measured


def _measured(finding: Finding, site: Site) -> Iterator[Quantity]:
    for evidence in finding.evidence:
        name, _, rest = evidence.series.rpartition(":")
        if name == site.name or name == layer_of(site):
            yield from (each for each in QUANTITIES if rest.split(" ")[0] == each)


def _of_finding(finding: Finding) -> Mark:
    word = verdict_of(finding) or finding.kind.replace("_", " ")
    score = SEVERITIES.index(finding.severity) + (finding.confidence or 0.0)
    return Mark("bad", score, f"{word} since step {finding.step}", finding.step)


def _non_finite(history: History) -> Mark | None:
    where = np.flatnonzero(history.nonfinite > 0)
    if not len(where):
        return None
    step = int(history.steps[where[0]])
    # One bad step that passed, or bad ever since?
    word = "since" if len(where) > 1 and history.nonfinite[-1] > 0 else "at"
    # A model may fill the gaps of its input; if it does not, what it computes from them is marked.
    level: Level = "odd" if history.site.quantity == "input" else "bad"
    return Mark(level, len(SEVERITIES) + float(len(where)), f"non-finite {word} step {step}", step)


def _all_zero(history: History) -> Mark | None:
    if history.site.quantity not in ("gradient", "output_gradient") or not len(history.values) or history.values[-1]:
        return None
    alive = np.flatnonzero(history.values != 0)
    if not len(alive):
        return Mark("odd", 0.0, "all zero")
    step = int(history.steps[alive[-1] + 1])
    return Mark("odd", 1.0, f"all zero since step {step}", step)


def _one_step(history: History) -> Mark | None:
    """Mark a site one of whose steps was outside the bands, compared with the steps before it; the farthest one."""
    if is_one_number(history.site) or history.site.quantity not in ("gradient", "output_gradient", "output"):
        return None
    known = np.isfinite(history.values) & (history.values != 0)
    steps, values = history.steps[known], np.abs(history.values[known])
    if not len(values) or values.max() < LEAST_RATIO * values.min():
        return None
    # A gradient too small to move its weights is reported by the rules: a table compares a site with itself.
    moments = ((at, _moment(history.site.quantity, values, at)) for at in _extremes(values))
    found = [(at, moment) for at, moment in moments if moment.against == "history" and not _is_slow(moment, values, at)]
    if not found:
        return None
    at, moment = max(found, key=lambda pair: abs(np.log(pair[1].ratio or 1.0)))
    decades = float(np.log10(moment.ratio or 1.0))
    verb = "jumped" if decades > 0 else "faded"
    return Mark("odd", abs(decades), f"{verb} {times(decades)} at step {steps[at]}", int(steps[at]))


def _is_slow(moment: Moment, values: Values, at: int) -> bool:
    """Return whether a value is above the history but not far above those right before it: it did not jump there."""
    near = values[max(0, at - int(GRADIENT_LEAPS)) : at]
    return (moment.ratio or 0.0) > 1 and bool(values[at] < LEAST_RATIO * near.max())


def _moment(quantity: Quantity, values: Values, at: int) -> Moment:
    """Compare a value with those before it; a fall must last: a gradient that changes its sign passes through zero."""
    judge = output_now if quantity == "output" else gradient_now
    past = values[max(0, at - MOMENT_WINDOW) : at].tolist()
    moment = judge(float(values[at]), past)
    is_fall = moment.ratio is not None and moment.ratio < 1
    return judge(float(values[at : at + int(GRADIENT_LEAPS)].max()), past) if is_fall else moment


def _extremes(values: Values) -> list[int]:
    """Return the readings that are farthest above or below any of those before them, in order."""
    if len(values) < 2:
        return []
    window = min(MOMENT_WINDOW, len(values) - 1)
    before = sliding_window_view(np.log(values), window)[:-1]
    now = np.log(values[window:])
    early = np.log(values[:window])
    low = np.concatenate([np.minimum.accumulate(early), before.min(axis=1)])
    high = np.concatenate([np.maximum.accumulate(early), before.max(axis=1)])
    logs = np.concatenate([early, now])
    away = np.maximum(logs - low, high - logs)
    chosen = np.argsort(-away)[:_MOST_STEPS]
    return sorted(int(at) for at in chosen if at)


def times(decades: float) -> str:
    """Write a factor given in decades, to two digits and with a multiplication sign; its direction is not written.

    >>> [times(decades).rstrip(TIMES) for decades in (0.5, 1.6, -2.08, 5.2, 9.0)]
    ['3.2', '40', '120', '160,000', '1e9']
    """
    factor = 10 ** abs(decades)
    if factor >= 1e6:
        return f"{factor:.0e}{TIMES}".replace("e+0", "e").replace("e+", "e")
    rounded = float(f"{factor:.1e}")
    return f"{rounded:,.0f}{TIMES}" if rounded >= 10 else f"{rounded:.1f}{TIMES}"
