"""The one judgement on numbers that are passed in: the doctor's rules for curves, the same bands for a single step.

`judge_curves` builds a `Case` from plain curves and asks the rules that `sonde.diagnose` asks; a run on disk is not
needed. `gradient_now`, `loss_now` and the other functions in `_now` compare what is there now with its own history.
They use the bands of those rules and say in words that they look at this step only: the rules wait until something
lasts.

Callers present the result. They have no thresholds of their own, except a limit that the user has set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, signals
from sonde.core.robust import MAD_TO_STD, mad
from sonde.core.schema import Rows
from sonde.diagnosis.case import Case
from sonde.diagnosis.doctor import Doctor, is_due
from sonde.diagnosis.rule import Threshold
from sonde.diagnosis.rules.activations import ACTIVATION_GROWTH, ACTIVATION_HIGH, DEAD_SHARE, SATURATED_SHARE
from sonde.diagnosis.rules.data import INPUT_SHIFT
from sonde.diagnosis.rules.gradients import (
    GRADIENT_FAINT,
    GRADIENT_FALL,
    GRADIENT_LEAP,
    GRADIENT_LEAPS,
    GRADIENT_OVER_WEIGHT,
    WEIGHT_SMALL,
)
from sonde.diagnosis.rules.loading import SPIKE_MADS, SPIKE_RATIO
from sonde.diagnosis.rules.parameters import UNUSED_STEPS
from sonde.records import SEVERITIES, Block, Finding, Quantity, Reading, Severity, Site

Verdict = Literal[
    "non-finite", "exploding", "vanishing", "dead", "saturated", "diverging", "stuck", "unstable", "healthy", "unknown"
]
Word = Literal["healthy", "warning", "critical", "unknown"]
Curve = Sequence[float] | Sequence[Reading] | Mapping[int, float] | Mapping[int, Reading] | NDArray[np.float64]
"""Values oldest first, from step 1 on, or values by step. A value is a number (the norm of a tensor, a loss) or the
`Reading` of a tensor."""

VERDICTS: Final[dict[str, Verdict]] = {
    **dict.fromkeys(("nan_in_data", "nan_in_weights", "nan_forward", "nan_in_loss", "nan_backward"), "non-finite"),
    **dict.fromkeys(("nan_in_optimizer", "fp16_overflow", "fully_masked_attention"), "non-finite"),
    **dict.fromkeys(("exploding_gradient", "exploding_activation"), "exploding"),
    **dict.fromkeys(("vanishing_gradient", "grad_underflow"), "vanishing"),
    **dict.fromkeys(("dead_relu",), "dead"),
    **dict.fromkeys(("saturated_activation",), "saturated"),
    **dict.fromkeys(("loss_divergence",), "diverging"),
    **dict.fromkeys(("not_learning", "loss_plateau", "underfitting", "lr_too_low", "low_precision_stall"), "stuck"),
    **dict.fromkeys(("loss_oscillation", "loss_spike", "bad_batch_spike"), "unstable"),
}
"""By kind of finding: the word that tables, alerts and health checks use. Kinds that name a cause have no such word."""
# By the worst severity: the score of one such finding, and what many of them approach.
_SCORES: Final[dict[Severity, tuple[float, float]]] = {
    "critical": (0.3, 0.0),
    "warning": (0.7, 0.4),
    "info": (0.95, 0.75),
}
MOMENT_HISTORY = Threshold(10, "values before it: the first steps of a training are unlike the rest")
VALUE_EXTREME = Threshold(1e10, "largest magnitude: a product of four such numbers is beyond float32's 3.4e38")
LEVEL_VALUES = Threshold(5, "values whose median is a level: one odd step is not a decline")
LEVEL_LOST = Threshold(0.1, "of the best level: what scheduling and noise take from throughput or accuracy is less")
LEVEL_SCATTER = Threshold(3.0, "times the usual change from one value to the next")
MOMENT_WINDOW: Final = 64
"""How many values before a step make its history: as many steps as the rules compare layers over."""
LEAST_RATIO: Final = float(min(GRADIENT_LEAP, 1 / GRADIENT_FALL, ACTIVATION_GROWTH))
"""A curve whose largest value is below this many times its smallest has no step outside the bands of its history."""
THIS_STEP: Final = "at this step only"
"""What every `Moment` that finds something says about its window."""


class Health(NamedTuple):
    """A score from 0 to 1 with its word; the score is None where nothing could be judged."""

    score: float | None
    word: Word


def health(findings: Iterable[Finding]) -> Health:
    """Rate findings. The worst one sets the word: a critical finding is never healthy, whatever else is well.

    >>> health([])
    Health(score=1.0, word='healthy')
    """
    severities = [finding.severity for finding in findings]
    if not severities:
        return Health(1.0, "healthy")
    worst = max(severities, key=SEVERITIES.index)
    one, many = _SCORES[worst]
    score = many + (one - many) * 0.8 ** (severities.count(worst) - 1)
    return Health(score, "healthy" if worst == "info" else worst)


def verdict_of(finding: Finding) -> Verdict | None:
    """Return the one-word verdict of a finding; None for one that names another kind of cause."""
    return VERDICTS.get(finding.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What is known of a training, as curves by layer or parameter. Leave out what was not measured."""

    losses: Curve = ()
    gradients: Mapping[str, Curve] = field(default_factory=dict)
    parameters: Mapping[str, Curve] = field(default_factory=dict)
    updates: Mapping[str, Curve] = field(default_factory=dict)
    outputs: Mapping[str, Curve] = field(default_factory=dict)
    """Readings of a layer's outputs, or their largest magnitudes."""
    active: Mapping[str, Curve] = field(default_factory=dict)
    """Share of a rectifier's units that were ever positive, one number per look."""
    samples: Mapping[str, Curve] = field(default_factory=dict)
    """How many values per unit `active` has looked at so far, one number per look."""
    saturated: Mapping[str, Curve] = field(default_factory=dict)
    """Share of a sigmoid's or tanh's inputs beyond +-5, one number per look."""
    scalars: Mapping[str, Curve] = field(default_factory=dict)
    """Other logged numbers, by the name that `session.log` would take."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of gradients, parameters and updates; without one a matrix is assumed."""
    finished: bool = False
    """Whether the training is over: some verdicts wait for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The doctor's answer."""

    findings: tuple[Finding, ...]
    """What is wrong, best first, with symptoms folded under their causes."""
    symptoms: tuple[Finding, ...]
    """Everything that was found, including what `findings` folds under a cause."""
    steps: int

    def verdicts(self, name: str | None = None) -> tuple[Verdict, ...]:
        """Return the one-word verdicts on a layer or parameter, or on everything; empty where nothing is wrong."""
        words = (VERDICTS[each.kind] for each in self.about(name) if each.kind in VERDICTS)
        return tuple(dict.fromkeys(words))

    def about(self, name: str | None = None) -> list[Finding]:
        """Return everything that was found about a layer or one of its parameters, gravest first."""
        found = [each for each in self.symptoms if name is None or any(_is_of(name, site) for site in each.sites)]
        return sorted(found, key=lambda each: -SEVERITIES.index(each.severity))

    @property
    def health(self) -> Health:
        """The score of all findings."""
        return health(self.findings) if self.steps else Health(None, "unknown")


def judge_curves(curves: Curves) -> Judgement:
    """Ask the doctor about curves: the same rules, in the same rhythm, as for a run on disk.

    >>> judge_curves(Curves(losses=[2.0 - 0.02 * step for step in range(60)])).findings
    ()
    >>> judge_curves(Curves(losses=[2.0] * 20 + [float("nan")])).verdicts()
    ('non-finite',)
    """
    sites, rows = _sites_and_rows(curves)
    doctor, case = Doctor(), Case()
    case.take_sites(sites)
    for count, step in enumerate(sorted(rows), 1):
        case.history.put(_block(step, rows[step]))
        doctor.look_if_due(case, count)
    case.final = curves.finished
    found = doctor.look(case) if rows else []
    return Judgement(findings=tuple(found), symptoms=tuple(doctor.found), steps=len(rows))


class ScalarJudge:
    """Asks the doctor about logged numbers while they come in, in the rhythm of `judge_curves`.

    >>> judge = ScalarJudge()
    >>> for step, loss in enumerate([2.0] * 20 + [math.nan], 1):
    ...     is_look = judge.add(step, {"loss": loss})
    >>> [finding.kind for finding in judge.look()]
    ['nan_in_loss']
    """

    def __init__(self) -> None:
        self._doctor, self._case = Doctor(), Case()
        self._sites: dict[str, Site] = {}
        self._steps = 0

    def add(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Add the numbers of a step and return whether it is one to look at; steps must rise."""
        new = [name for name in scalars if name not in self._sites]
        for number, name in enumerate(new, len(self._sites)):
            self._sites[name] = Site(id=number, name=name, quantity="scalar")
        self._case.take_sites([self._sites[name] for name in new])
        self._case.history.put(
            _block(step, {self._sites[name].id: schema.row_of_value(value) for name, value in scalars.items()})
        )
        self._steps += 1
        return is_due(self._steps)

    def look(self) -> tuple[Finding, ...]:
        """Return what is wrong as of now, best first."""
        return tuple(self._doctor.look(self._case))


def _is_of(name: str, site: str) -> bool:
    return site == name or site.startswith(f"{name}.")


def _sites_and_rows(curves: Curves) -> tuple[list[Site], dict[int, dict[int, Rows]]]:
    """Return the sites of all curves, and by step and site the rows of their values."""
    sites: list[Site] = []
    rows: dict[int, dict[int, Rows]] = {}
    for quantity, part, name, curve in _all(curves):
        shape = curves.shapes.get(name, (1, 1)) if quantity in ("gradient", "parameter", "update") else ()
        site = Site(id=len(sites), name=name, quantity=quantity, part=part, shape=shape)
        sites.append(site)
        steps = curve.items() if isinstance(curve, Mapping) else enumerate(curve, 1)
        for step, value in steps:
            row = value.row if isinstance(value, Reading) else schema.row_of_value(float(value))
            rows.setdefault(int(step), {})[site.id] = row
    return sites, rows


def _all(curves: Curves) -> Iterable[tuple[Quantity, str, str, Curve]]:
    groups: tuple[tuple[Quantity, str, Mapping[str, Curve]], ...] = (
        ("scalar", "", {"loss": curves.losses} if len(curves.losses) else {}),
        ("scalar", "", curves.scalars),
        ("output", "", curves.outputs),
        ("parameter", "", curves.parameters),
        ("gradient", "", curves.gradients),
        ("update", "", curves.updates),
        ("vital", signals.part_of(signals.EVER_ACTIVE), curves.active),
        ("vital", signals.part_of(signals.UNIT_SAMPLES), curves.samples),
        ("vital", signals.part_of(signals.SATURATED), curves.saturated),
    )
    for quantity, part, group in groups:
        for name, curve in group.items():
            yield quantity, part, name, curve


def _block(step: int, rows: dict[int, Rows]) -> Block:
    numbers = np.array(sorted(rows), np.uint32)
    return Block(
        step=step,
        time=time.time(),
        sites=numbers,
        rows=np.stack([rows[int(number)] for number in numbers]),
        bins=np.zeros((len(numbers), schema.NUM_BINS), np.uint64),
        binned=np.zeros(len(numbers), np.bool_),
    )


# ---------------------------------------------------------------- one step against its own history


@dataclass(frozen=True, slots=True)
class Moment:
    """What one value says when compared with the values before it. `words` states that it is about this step only."""

    verdict: Verdict
    words: str
    value: float
    usual: float | None = None
    """The median of the history; None while it is too short."""
    against: Literal["history", "weights", "limit"] | None = None
    """What a value that is wrong was compared with; None for one that is not finite, or not wrong."""

    @property
    def ratio(self) -> float | None:
        """The value over what is usual."""
        return self.value / self.usual if self.usual else None

    @property
    def is_wrong(self) -> bool:
        """Whether the value is outside the bands."""
        return self.verdict not in ("healthy", "unknown")


def gradient_now(
    norm: float,
    past: Sequence[float] = (),
    *,
    weight: float | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Moment:
    """Judge a gradient norm: against limits that the user set, the norms before it, and the norm of its weights.

    `past` holds the norms of earlier steps, oldest first; what is not finite or zero in it has no say. `weight` is the
    norm of the parameters, where it is known.

    >>> gradient_now(15.0, [1.0] * 50).verdict, gradient_now(150.0, [1.0] * 50).verdict
    ('healthy', 'exploding')
    >>> gradient_now(150.0, [1.0] * 50).words
    'the gradient norm is 150, 150 times its usual 1, at this step only'
    """
    if not math.isfinite(norm):
        return Moment("non-finite", f"the gradient norm is {_number(norm)} {THIS_STEP}", norm)
    usual = usual_level(past)
    text = f"the gradient norm is {norm:.3g}"
    if high is not None and norm > high:
        return Moment("exploding", f"{text}, above the given limit of {high:g}, {THIS_STEP}", norm, usual, "limit")
    if low is not None and norm < low:
        return Moment("vanishing", f"{text}, below the given limit of {low:g}, {THIS_STEP}", norm, usual, "limit")
    if high is None and usual is not None and norm > GRADIENT_LEAP * usual:
        words = f"{text}, {_times(norm / usual)} its usual {usual:.3g}, {THIS_STEP}"
        return Moment("exploding", words, norm, usual, "history")
    if high is None and weight and norm >= GRADIENT_OVER_WEIGHT * weight:
        words = f"{text}, {_times(norm / weight)} the norm of its weights, {weight:.3g}, {THIS_STEP}"
        return Moment("exploding", words, norm, usual, "weights")
    if low is None and usual is not None and norm < GRADIENT_FALL * usual:
        words = f"{text}, {norm / usual:.1e} of its usual {usual:.3g}, {THIS_STEP}"
        return Moment("vanishing", words, norm, usual, "history")
    if low is None and norm < GRADIENT_FAINT * (weight or WEIGHT_SMALL):
        return Moment("vanishing", f"{text}, too small to change its weights, {THIS_STEP}", norm, usual, "weights")
    if usual is None and weight is None and low is None and high is None:
        return Moment("unknown", f"{text}; there is no history to compare it with yet", norm)
    return Moment("healthy", text, norm, usual)


def gradients_now(norms: Sequence[float], *, low: float | None = None, high: float | None = None) -> Moment:
    """Judge the last of a layer's gradient norms as `gradient_now` does, if it lasts where it seems to vanish.

    A gradient that changes its sign passes through zero.

    >>> gradients_now([1.0] * 20 + [1e-9]).verdict, gradients_now([1.0] * 20 + [1e-9] * 3).verdict
    ('healthy', 'vanishing')
    """
    now = gradient_now(norms[-1], norms[:-1], low=low, high=high)
    if now.verdict != "vanishing" or low is not None:
        return now
    steps = int(GRADIENT_LEAPS)
    lasting = gradient_now(max(norms[-steps:]), norms[:-steps], high=high)
    if lasting.verdict == "vanishing" and len(norms) >= steps:
        return replace(lasting, words=lasting.words.replace(THIS_STEP, f"in the last {steps} steps only"))
    return Moment("healthy", f"the gradient norm is {norms[-1]:.3g}", norms[-1], now.usual)


def silence_now(norms: Sequence[float], missing: int = 0) -> Moment:
    """Judge whether a gradient has been exactly zero, or missing, for as many steps as the rules wait.

    >>> silence_now([0.0] * 10).words
    'it was zero or absent in the last 10 steps'
    """
    steps = int(UNUSED_STEPS)
    if missing >= steps or (len(norms) >= steps and not any(norms[-steps:])):
        return Moment("vanishing", f"it was zero or absent in the last {steps} steps", 0.0)
    return Moment("healthy", "there is a gradient", norms[-1])


def loss_now(loss: float, past: Sequence[float] = ()) -> Moment:
    """Judge a loss against those before it; one that is NaN is called NaN.

    >>> loss_now(float("nan"), [2.0] * 20).words
    'the loss is NaN at this step only'
    """
    if not math.isfinite(loss):
        return Moment("non-finite", f"the loss is {_number(loss)} {THIS_STEP}", loss)
    known = _finite(past)
    if len(known) < MOMENT_HISTORY:
        return Moment("unknown", f"the loss is {loss:.4g}; there is no history to compare it with yet", loss)
    usual = float(np.median(known))
    spread = max(mad(known) / MAD_TO_STD, 1e-3 * abs(usual))
    high = usual + SPIKE_MADS * spread
    if loss > high and loss > SPIKE_RATIO * abs(usual):
        words = f"the loss is {loss:.4g}, far above its usual {usual:.4g}, {THIS_STEP}"
        return Moment("unstable", words, loss, usual, "history")
    return Moment("healthy", f"the loss is {loss:.4g}", loss, usual)


def output_now(largest: float, past: Sequence[float] = ()) -> Moment:
    """Judge the largest magnitude of an output against those of the steps before."""
    if not math.isfinite(largest):
        return Moment("non-finite", f"the largest magnitude is {_number(largest)} {THIS_STEP}", largest)
    usual = usual_level(past)
    text = f"the largest magnitude is {largest:.3g}"
    if largest > VALUE_EXTREME:
        return Moment("exploding", f"{text}, close to overflow in what follows, {THIS_STEP}", largest, usual)
    if usual is None:
        return Moment("unknown", f"{text}; there is no history to compare it with yet", largest)
    if largest >= max(ACTIVATION_HIGH, ACTIVATION_GROWTH * usual):
        words = f"{text}, {_times(largest / usual)} its usual {usual:.3g}, {THIS_STEP}"
        return Moment("exploding", words, largest, usual, "history")
    return Moment("healthy", text, largest, usual)


def units_now(*, dead: float | None = None, saturated: float | None = None) -> Moment:
    """Judge the share of a layer's units that were never active, or that are saturated.

    >>> units_now(dead=0.15).verdict, units_now(dead=0.95).verdict, units_now(saturated=0.6).verdict
    ('healthy', 'dead', 'saturated')
    """
    if dead is not None and dead >= DEAD_SHARE:
        return Moment("dead", f"{dead:.0%} of the units are dead in what was looked at", dead)
    if saturated is not None and saturated > SATURATED_SHARE:
        return Moment("saturated", f"{saturated:.0%} of the units are saturated in what was looked at", saturated)
    known = [share for share in (dead, saturated) if share is not None]
    if not known:
        return Moment("unknown", "nothing is known of its units", math.nan)
    return Moment("healthy", f"at most {max(known):.0%} of the units are dead or saturated", max(known))


def level_now(name: str, values: Sequence[float]) -> Moment:
    """Compare the level of a metric over its last values with the best level that it held before.

    >>> level_now("accuracy", [0.8] * 20 + [0.5] * 5).words
    'accuracy fell from 0.8 to 0.5 over the last 5 values only'
    """
    known, size = _finite(values), int(LEVEL_VALUES)
    if len(known) < 2 * size:
        return Moment("unknown", f"{name} has too short a history", float(known[-1]) if len(known) else math.nan)
    now = float(np.median(known[-size:]))
    levels = np.median(np.lib.stride_tricks.sliding_window_view(known[:-size], size), axis=1)
    best = float(levels.max())
    scatter = float(np.median(np.abs(np.diff(known[:-size]))))
    if best - now <= max(LEVEL_LOST * abs(best), LEVEL_SCATTER * scatter):
        return Moment("healthy", f"{name} is {now:.4g}", now, best)
    return Moment("unstable", f"{name} fell from {best:.4g} to {now:.4g} over the last {size} values only", now, best)


def shift_now(means: Sequence[float], spread: float) -> Moment:
    """Compare the last means of a tensor with its first ones, in units of its spread or of where it began.

    >>> shift_now([0.0] * 5 + [2.0] * 5, spread=1.0).words
    'the mean moved from 0 to 2 between the first and the last 5 values'
    """
    size = int(LEVEL_VALUES)
    if len(means) < 2 * size:
        return Moment("unknown", "too few values to compare", float(means[-1]) if len(means) else math.nan)
    first, last = float(np.mean(means[:size])), float(np.mean(means[-size:]))
    words = f"the mean moved from {first:.3g} to {last:.3g} between the first and the last {size} values"
    moved = abs(last - first) > INPUT_SHIFT * max(abs(first), spread)
    return Moment("unstable" if moved else "healthy", words, last, first)


def usual_level(past: Sequence[float]) -> float | None:
    """Return the median of the magnitudes before a step; None while there are too few of them."""
    known = np.abs(_finite(past)[-MOMENT_WINDOW:])
    known = known[known > 0]
    return float(np.median(known)) if len(known) >= MOMENT_HISTORY else None


def _finite(past: Sequence[float]) -> NDArray[np.float64]:
    known = np.asarray(past, np.float64)
    result: NDArray[np.float64] = known[np.isfinite(known)]
    return result


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"
