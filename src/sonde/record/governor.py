"""Keep what recording costs within a share of the training's own time, by recording less often.

Every step has a level: 0 records nothing, 1 parameters, gradients and updates, 2 also module outputs, 3 also what only
the diagnosis needs. The first steps are of level 3 as long as that adds no more than 10 % to them, and so is the first
second of recording tiny models. What a level costs is how much longer its steps take than those of level 0, and at
least the time that Sonde's own clocks and its worker thread measured. From that follows how often each level can be
afforded. What the diagnosis needs is thinned first, then outputs, and parameters last; nothing ever stops.

An account keeps the budget in every stretch of the run, not only on average: each step earns its share of the budget,
each recorded step is paid for, and one that cannot be paid yet records less. Steps 32, 48, 64, 96, ... and those after
the first evaluations are of level 3 whatever that costs, and are paid for afterwards: a few full looks show most faults
of a loop. Logged numbers are recorded in every step.

A few callbacks cost time in unrecorded steps too. Most unrecorded steps are therefore only counted
(`sonde.record.doze`). What is left cannot be saved by recording less often, so where it takes up most of the budget,
recorded steps may still use half of it.

Decisions depend on clocks only, and nothing of the training depends on them. One value of the training counts: steps
whose loss is not finite are recorded in full, as far as that is known without waiting for a device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

NOTHING, PARAMETERS, OUTPUTS, EVERYTHING = range(4)
LEVELS: Final = (NOTHING, PARAMETERS, OUTPUTS, EVERYTHING)

FULL_STEPS: Final = 24
"""Steps at the start that are recorded in full as far as `EARLY_SHARE` allows: most faults of a loop show there."""
EARLY_SHARE: Final = 0.10
"""What recording may add to the first steps. The first three are always recorded in full."""
ONCE: Final = 0.2
"""The part of the budget that is set aside for occasional work after the first steps, such as taping a step."""
SHORT_STEP_S: Final = 0.01
FREE_S: Final = 1.0
"""A training whose steps are shorter than `SHORT_STEP_S` is recorded in full until recording has taken `FREE_S`, in the
training thread and in the worker: trials on tiny models end before the budget matters, and their diagnosis needs every
step. So the beginning of a run costs at most that much; the budget holds after it."""
SENSORS_ALWAYS: Final = 64
"""Steps in which sensors run where recording has no budget; after them they run in one of eight."""
JUDGING: Final = 0.2
"""The part of the budget that is set aside for judging the run; the rest is for recording it."""
UNLIMITED_JUDGING: Final = 0.02
"""The share of the time that judging may take where recording has no budget: rules hold Python's lock."""
_WARM_UP: Final = 1  # of those, how many do not count for the cost: sites and facts are written
_ENOUGH: Final = 2  # of them that must be known; times of a device's last steps arrive late
_SAVED: Final = 64  # steps whose share of the budget can be saved up
_GUESS: Final = 0.5  # of what the level above costs, for a level that was not recorded yet
_SPARSE: Final = 2.0  # a schedule that records one step in ten may use this many tenths of the budget
_KEPT: Final = 32  # times of unrecorded steps that are remembered
_KEPT_OF_LOOKS: Final = 8  # the same of recorded ones: they are rare, and old ones may have been slower
_SPREAD: Final = 256  # steps over which the cost of early milestones is spread
_AFTER_EVALUATION: Final = 3  # evaluations after which the next step is recorded in full: a mode may have changed
_ALARMS: Final = 4  # how often a step that goes wrong is recorded in full, with the next one, beyond the budget
_TIMED, _TIMED_OF = 6, 32  # unrecorded steps in a row that are timed, of how many; device events arrive later
_REVIEW: Final = 64  # steps between two decisions, at least
_REVIEW_S: Final = 2.0  # and seconds: a decision takes a millisecond or two
MOST_DOZED: Final = 255
"""How many steps in a row are only counted; see `sonde.record.doze`."""
_DOZE_FROM: Final = 0.05  # of the budget: if looking at unrecorded steps costs more, most of them are only counted
_LONG_DOZE: Final = 8  # steps; the mean of so many is timed well by the host's clock, also where a device works
_MOST: Final = 1024  # the longest stride
# How much rarer the level above may become before the level below is thinned as well.
_RARER_EXTRAS: Final = 16
_RARER_OUTPUTS: Final = 8
# A looser setting is taken up again only if it would need less than this share of the budget.
_SLACK: Final = 0.7
_GOLDEN_RATIO: Final = (math.sqrt(5) - 1) / 2
# Where that clock is too coarse, as on Windows, wall-clock time serves.
_THREAD_CLOCK: Final = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-4 else time.perf_counter
_LEAST_OWN: Final = 0.1  # of a step's time that is taken to be the training's own, whatever the clocks say


@dataclass(frozen=True, slots=True)
class Strides:
    """One in how many steps records parameters, outputs, and what only the diagnosis needs; each divides the next.

    Of as many steps as a stride is long one is chosen, never at a fixed rhythm: loops have rhythms of their own (a
    second optimizer that steps every other time, a batch of another kind), and one in step with them would be blind.
    """

    parameters: int = 1
    outputs: int = 1
    extras: int = 1

    def level(self, step: int) -> int:
        """Return the level of a step."""
        number, is_chosen = _choose(step, self.parameters)
        if not is_chosen:
            return NOTHING
        number, is_chosen = _choose(number, self.outputs // self.parameters)
        if not is_chosen:
            return PARAMETERS
        return EVERYTHING if _choose(number, self.extras // self.outputs)[1] else OUTPUTS

    def next_recorded(self, step: int) -> int:
        """Return the first step from `step` on that records anything."""
        block = step // self.parameters
        while (chosen := _chosen(block, self.parameters)) < step:
            block += 1
        return chosen

    def shares(self) -> tuple[float, ...]:
        """Return the share of steps of each level."""
        at_least = (1.0, 1 / self.parameters, 1 / self.outputs, 1 / self.extras, 0.0)
        return tuple(at_least[level] - at_least[level + 1] for level in LEVELS)

    def thinner(self) -> Strides:
        """Return the next setting that records less."""
        if self.extras < min(_RARER_EXTRAS * self.outputs, _MOST):
            return replace(self, extras=2 * self.extras)
        if self.outputs < min(_RARER_OUTPUTS * self.parameters, _MOST):
            return replace(self, outputs=2 * self.outputs, extras=max(self.extras, 2 * self.outputs))
        parameters = 2 * self.parameters
        return Strides(parameters, max(self.outputs, parameters), max(self.extras, parameters))

    def __str__(self) -> str:
        names = {"parameters and gradients": self.parameters, "outputs": self.outputs, "diagnosis": self.extras}
        return ", ".join(f"{name} {describe_stride(stride)}" for name, stride in names.items() if stride > 1)


def _choose(number: int, size: int) -> tuple[int, bool]:
    """Return the block of `size` numbers, a power of two, that a number belongs to, and whether it is the one chosen.

    One of each pair is chosen, then one of each pair of these, and so on: what is chosen at a long stride is chosen at
    all shorter ones, so ranks with different strides have steps in common. Which of a pair moves on by the golden
    ratio, which is in step with no period.
    """
    is_chosen = True
    while size > 1:
        number, place = divmod(number, 2)
        is_chosen &= place == int(2 * (number * _GOLDEN_RATIO % 1.0))
        size //= 2
    return number, is_chosen


def _chosen(block: int, size: int) -> int:
    """Return the number that is chosen of a block of `size` numbers; see `_choose`."""
    while size > 1:
        block = 2 * block + int(2 * (block * _GOLDEN_RATIO % 1.0))
        size //= 2
    return block


def next_milestone(step: int) -> int:
    """Return the first step from `step` on that is recorded in full whatever that costs: 32, 48, 64, 96, 128, 192, ...

    >>> sorted({next_milestone(step) for step in range(200)})
    [32, 48, 64, 96, 128, 192, 256]
    """
    power = 1 << (max(step, 32) - 1).bit_length()
    between = power * 3 // 4
    return between if max(step, 32) <= between else power


def _level_without_budget(number: int) -> int:
    """Return the level of a step where there is no budget: all tensors are recorded, sensors run in many steps.

    After a milestone they run once more: some compare two steps in a row.
    """
    is_full = number < SENSORS_ALWAYS or number - next_milestone(number - 1) in (0, 1)
    return EVERYTHING if is_full else _WITHOUT_BUDGET.level(number)


def describe_stride(stride: int) -> str:
    """Return a stride in words.

    Strides are powers of two.

    >>> describe_stride(1), describe_stride(16), describe_stride(32)
    ('every step', 'every 16th step', 'every 32nd step')
    >>> describe_stride(512)
    'every 512th step'
    """
    ending = "nd" if stride % 10 == 2 and stride % 100 != 12 else "th"
    return "every step" if stride == 1 else f"every {stride}{ending} step"


@dataclass(frozen=True, slots=True)
class Cost:
    """What recording costs: seconds of a step without Sonde, and the share that Sonde adds at the present strides."""

    step_seconds: float
    share: float
    budget: float | None
    strides: Strides

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "step_ms": round(1e3 * self.step_seconds, 4),
            "share": round(self.share, 4),
            "budget": self.budget,
            "parameters_every": self.strides.parameters,
            "outputs_every": self.strides.outputs,
            "diagnosis_every": self.strides.extras,
        }

    def __str__(self) -> str:
        own = self.step_seconds
        parts = [f"cost {100 * self.share:.1f}% of {_time(own)} a step"]
        if self.share >= 1:  # the first steps of tiny models are recorded in full, whatever the budget
            parts = [f"cost {_time(own * self.share)} on a step of {_time(own)}"]
        if self.budget is not None:
            parts.append(f"budget {100 * self.budget:.3g}%")
        if str(self.strides):
            parts.append(str(self.strides))
        return ", ".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _usual(durations: Iterable[float]) -> float:
    """Return how long a step takes when nothing else disturbs it: the lower quartile."""
    ordered = sorted(durations)
    return ordered[len(ordered) // 4]


_WITHOUT_BUDGET: Final = Strides(extras=8)


class _Account:
    """What the steps so far have earned and what looks at them have cost, in seconds."""

    def __init__(self) -> None:
        self.income = 0.0
        """What a step earns beyond what it costs anyway."""
        self.prices: tuple[float, ...] = (0.0,) * len(LEVELS)
        self._balance = 0.0
        self._aside = math.nan
        """What judging and occasional work had taken at the last step."""

    def open(self, aside: float) -> None:
        """Begin to count."""
        self._balance, self._aside = 0.0, aside

    def earn(self, steps: int, aside: float) -> None:
        """Take what steps have earned, less what was done aside meanwhile."""
        most = max(_SAVED * self.income, *self.prices)
        self._balance = min(most, self._balance + steps * self.income - (aside - self._aside))
        self._aside = aside

    def can_pay(self, level: int) -> bool:
        """Return whether a look at a level has been earned."""
        return self._balance >= self.prices[level]

    def pay(self, level: int) -> int:
        """Pay for a look at a level, earned or not, and return the level."""
        self._balance -= self.prices[level] if level else 0.0
        return level


def _new_times() -> dict[int, deque[float]]:
    return {level: deque(maxlen=_KEPT if level == NOTHING else _KEPT_OF_LOOKS) for level in LEVELS}


class Governor:
    """Chooses the level of every step so that the average cost stays within the budget.

    Args:
        budget: The share of a step's own time that recording may add; None records all tensors in every step.
        own_seconds: Returns the time spent in Sonde so far in the training thread, which waits for it.
        worker_seconds: Returns the processor time that the worker thread needs for a step of a level, None if it has
            had none. It runs beside the training, but takes a processor and Python's lock.
        busy_seconds: Returns the processor time that the worker thread has needed so far, judging included.
        aside_seconds: Returns the time that judging and occasional work have taken so far.
        decided: Takes a new setting, to be named in the run.
        rests: Whether to leave a few steps unrecorded, to compare with, even if Sonde's clocks are within the budget:
            on a device, work that the host does not see costs time too.
        clock: Returns the time.
        thread_clock: Returns the processor time of the training thread. Differences between levels are taken from it
            where steps are not timed on a device: on a busy machine wall-clock time differs far more by chance.

    """

    def __init__(
        self,
        budget: float | None,
        own_seconds: Callable[[], float],
        worker_seconds: Callable[[int], float | None],
        decided: Callable[[Cost], None],
        *,
        busy_seconds: Callable[[], float] = lambda: 0.0,
        aside_seconds: Callable[[], float] = lambda: 0.0,
        rests: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        thread_clock: Callable[[], float] = _THREAD_CLOCK,
    ) -> None:
        self.budget = budget
        self.strides = Strides()
        self._own_seconds = own_seconds
        self._worker_seconds = worker_seconds
        self._busy_seconds = busy_seconds
        self._aside_seconds = aside_seconds
        self._decided = decided
        self._rests_anyway = rests
        self._clock = clock
        self._thread_clock = thread_clock
        self.skips = False
        """Whether the present step is to cost nothing: neither it nor the next is recorded. What compares a recorded
        step with the one before sees both."""
        self._is_free = True
        self._levels = (EVERYTHING, EVERYTHING)
        """The levels of the present step and the next."""
        self._forced = 0
        """How many of the next due steps are recorded in full whatever that costs."""
        self._account = _Account()
        self._start: tuple[float, float, float] | None = None
        """When the first pass began, what Sonde had taken then, and the processor time of the training thread."""
        self._shortest = math.inf
        self._steps = self._due_steps = 0
        self._is_guess = False
        """Whether the present setting rests on guesses of what levels cost."""
        self._rests = 0
        """How many of the next steps are not recorded, to see how long a step takes by itself."""
        self._next_review = FULL_STEPS
        self._durations = _new_times()
        self._worked = _new_times()
        """Processor time of the training thread in the steps of each level that were not timed on a device."""
        self._waited = _new_times()
        self._alarms = self._evaluations = 0
        self._evaluated_at = -1
        """The number of steps at the last evaluation."""
        self._dozing_pays = False
        self._dozed: deque[float] = deque(maxlen=_KEPT)
        """The time spent in Sonde in steps that were only counted."""
        self._undisturbed: deque[float] = deque(maxlen=_KEPT)
        """How long steps that were only counted took, less the time spent in Sonde."""
        self._dozed_steps = self._looked_at = 0
        """Unrecorded steps that were only counted, and those that were looked at, since dozing pays."""
        self._ahead: deque[float] = deque(maxlen=_KEPT)
        """The time spent in Sonde in unrecorded steps that come before a recorded one."""
        self._free_until: tuple[float, float] | None = None
        """When the first steps ended, and what judging and occasional work had taken then."""
        self._doze_began = 0.0
        self._last: tuple[float, float, float] | None = None

    @property
    def level(self) -> int:
        """The level of the present step, if the schedule records it at all; it stays until the step has ended."""
        return EVERYTHING if self._forced else self._levels[0]

    @property
    def wants_duration(self) -> bool:
        """Whether the step that ends is to be timed: one in a few is enough of those that record nothing."""
        return not self.skips or len(self._durations[NOTHING]) < _KEPT or self._steps % _TIMED_OF < _TIMED

    def affords(self, seconds: float, spent: float) -> bool:
        """Return whether something that is done once in a while, and has taken `spent` seconds before, is affordable.

        In the first steps it must fit into what they may cost, later into a part (`ONCE`) of the budget for the time
        that has passed.
        """
        if self.budget is None or self._start is None or self._last is None or (self._is_free and self._is_short()):
            return self.budget is None or self._start is not None
        passed = self._last[0] - self._start[0]
        if self._is_free:
            busy = self._last[1] + self._busy_seconds() - self._start[1]
            return busy + seconds <= EARLY_SHARE * max(0.0, passed - busy)
        return spent + seconds <= ONCE * self.budget * passed

    def doze_length(self, is_due: Callable[[int], bool]) -> int:
        """Return how many of the next steps to count only: none if looking at unrecorded steps can be afforded.

        `is_due` returns whether the schedule records the next step (0), the one after it (1), and so on.
        """
        if not (self.skips and self._dozing_pays) or self._is_free:
            return 0
        number = self._due_steps
        left = min(self.strides.next_recorded(number), next_milestone(number)) - number
        for ahead in range(MOST_DOZED + 1):
            if is_due(ahead):
                if not left:
                    return max(0, ahead - 1)  # what compares a recorded step with the one before needs to see both
                left -= 1
        return MOST_DOZED

    def begin_doze(self) -> None:
        """Handle the beginning of a doze."""
        self._doze_began = self._clock()

    def end_doze(self, steps: int, due: int, next_due: tuple[bool, bool], seconds: float) -> None:
        """Handle the end of a doze: how many steps passed, how many of them were due, and what they took in Sonde."""
        self._steps += steps
        self._due_steps += due
        self._dozed_steps += steps
        if steps:
            self._dozed.append(seconds / steps)
        if steps >= _LONG_DOZE:
            passed = self._clock() - self._doze_began
            self._durations[NOTHING].append(passed / steps)
            self._undisturbed.append((passed - seconds) / steps)
        self._last = None
        self._account.earn(steps, self._aside_seconds())
        first = self._choose(self._due_steps) if next_due[0] else NOTHING
        self._levels = (first, self._choose(self._due_steps + next_due[0]) if next_due[1] else NOTHING)
        self.skips = not any(self._levels)

    def raise_alarm(self) -> None:
        """Record the present step and the next in full: something is wrong with it. Later alarms are ignored."""
        if not self._is_free and self._alarms < _ALARMS:
            self._alarms += 1
            self._forced = 2
            self.skips = False

    def evaluation_level(self, number: int) -> int:
        """Return the level of an evaluation pass, by how many there were before.

        Evaluations come between steps, seldom or often: they are thinned as steps are, but counted by themselves.
        """
        is_free = self._is_free or number < FULL_STEPS
        if self.budget is not None and not self._is_free and self._steps != self._evaluated_at:
            self._evaluated_at = self._steps
            if self._evaluations < _AFTER_EVALUATION:
                self._evaluations += 1
                self._forced = max(1, self._forced)
                self.skips = False
        return EVERYTHING if self.budget is None or is_free else self.strides.level(number)

    def end_step(self, *, due: bool, next_due: tuple[bool, bool] = (True, True), timed: bool = False) -> None:
        """Handle the end of a step, `due` by the user's schedule or not; `next_due` is the same for the next two.

        If it is `timed` elsewhere, its duration comes by `take_duration`.
        """
        level = self.level if due else NOTHING
        now, waited, worked = self._clock(), self._own_seconds(), self._thread_clock()
        is_affordable = self._see_early(now, waited)
        # A step before a recorded one runs some hooks: it does not show what a skipped step costs.
        is_usual = self._steps >= _WARM_UP and (level or self.skips or not self._waited[NOTHING])
        self._looked_at += self._dozing_pays and level == NOTHING
        if self._last is not None and level == NOTHING and not self.skips:
            self._ahead.append(waited - self._last[1])
        if self._last is not None and is_usual:
            self._waited[level].append(waited - self._last[1])
            if not timed:
                self._worked[level].append(worked - self._last[2])
                self._take_duration(level, now - self._last[0])
        self._last = (now, waited, worked)
        self._steps += 1
        if due:
            self._due_steps += 1
            if self._forced:
                self._forced -= 1
                self._account.pay(EVERYTHING)
        was_free, self._is_free = self._is_free, self._is_free and self._stays_free(now, waited, worked)
        if was_free and not self._is_free:
            self._free_until = (now, self._aside_seconds())
            self._account.open(self._free_until[1])
        if self.budget is not None:
            if not self._is_free:
                self._account.earn(1, self._aside_seconds())
                if self._steps >= self._next_review and not self._rests:
                    self._review()
            self._levels = (self._levels[1], self._following(next_due, is_affordable) if next_due[1] else NOTHING)
            self.skips = not (any(self._levels) or self._forced)
        else:
            self._levels = (self._levels[1], _level_without_budget(self._due_steps + next_due[0]))

    def _following(self, next_due: tuple[bool, bool], is_affordable: bool) -> int:
        """Return the level of the step after the next."""
        if self._is_free:
            return EVERYTHING if is_affordable else NOTHING
        return self._choose(self._due_steps + next_due[0])

    def _choose(self, number: int) -> int:
        """Return the level of one of the steps that are due, and pay for it: one that cannot be paid yet waits.

        Most relations between the parts of a loop are exact: a few full looks show them, however expensive a look is.
        So milestones are recorded in full, and what comes after them pays for that. Parameters never wait.
        """
        if number == next_milestone(number):
            return self._account.pay(EVERYTHING)
        if self._rests:
            self._rests -= 1
            return NOTHING
        wanted = self.strides.level(number)
        affordable = (level for level in range(wanted, PARAMETERS, -1) if self._account.can_pay(level))
        return self._account.pay(next(affordable, min(wanted, PARAMETERS)))

    def begin(self) -> None:
        """Handle the beginning of the first pass: what the first step costs counts as well."""
        if self._start is None:
            self._start = (self._clock(), self._own_seconds() + self._busy_seconds(), self._thread_clock())

    def _see_early(self, now: float, waited: float) -> bool:
        """Return whether the step after the next is affordable, at the start of the run."""
        if not self._is_free:
            return False
        busy = waited + self._busy_seconds()
        if self._start is None:
            self._start = (now, busy, self._thread_clock())
        if self._last is None:
            return True
        self._shortest = min(self._shortest, (now - self._last[0]) - (waited - self._last[1]))
        passed, spent = now - self._start[0], busy - self._start[1]
        return self._is_short() or spent <= EARLY_SHARE * max(0.0, passed - spent)

    def _is_short(self) -> bool:
        return self._shortest < SHORT_STEP_S

    def _stays_free(self, now: float, waited: float, worked: float) -> bool:
        if self._steps < FULL_STEPS or self._start is None:
            return True
        began, busy, worked_before = self._start
        # On a busy machine the training thread waits for a processor, which is not what Sonde takes.
        running = min(1.0, (worked - worked_before) / max(now - began, 1e-9))
        return self._is_short() and running * (waited + self._busy_seconds() - busy) < FREE_S

    def take_duration(self, level: int, seconds: float) -> None:
        """Take how long a step of a level took on its device."""
        if self._steps >= _WARM_UP:
            self._take_duration(level, seconds)

    def _take_duration(self, level: int, seconds: float) -> None:
        self._durations[level].append(seconds)
        if len(self._durations[level]) == _ENOUGH and not self._is_free:
            self._next_review = self._steps  # what this level costs is no longer a guess

    # ------------------------------------------------------------------ deciding

    def cost(self) -> Cost | None:
        """Return what recording costs now; None before a few steps have ended."""
        bare = self._bare_seconds()
        if bare is None or bare <= 0:
            return None
        return Cost(bare, self._share(self.strides, bare) + self._aside_share(), self.budget, self.strides)

    def _aside_share(self) -> float:
        """Return the share that judging and occasional work have taken since the first steps."""
        if self._free_until is None:
            return 0.0
        passed = self._clock() - self._free_until[0]
        spent = self._aside_seconds() - self._free_until[1]
        return spent / (passed - spent) if passed > 2 * spent else 0.0

    def _bare_seconds(self) -> float | None:
        """Return how long a step takes without Sonde: measured where steps without it are known, else by its clocks."""
        if len(self._undisturbed) >= _ENOUGH:
            return _usual(self._undisturbed)
        level = NOTHING if len(self._durations[NOTHING]) >= _ENOUGH else self._level_seen_most()
        if not self._durations[level] or not self._waited[level]:
            return None
        whole = _usual(self._durations[level])
        return max(whole - statistics.median(self._waited[level]), _LEAST_OWN * whole)

    def _level_seen_most(self) -> int:
        return max(LEVELS, key=lambda level: len(self._durations[level]))

    def _seconds(self, level: int, bare: float) -> float:
        """Return what a step of a level costs; a level that was not seen is guessed from the nearest one above."""
        seen = next((each for each in LEVELS[level:] if self._waited[each]), None)
        if seen is None:
            return 0.0
        guess = _GUESS ** (seen - level) if level else 1.0
        levels = LEVELS[level:] if level else (NOTHING,)  # a step that records nothing usually needs no worker
        beside = next((cost for each in levels if (cost := self._worker_seconds(each)) is not None), 0.0)
        # What the diagnosis needs is not the same in every step; the rest is, but for the machine's own hiccups.
        waited = (statistics.fmean if seen == EVERYTHING else statistics.median)(self._waited[seen])
        waited *= self._running_share()
        return guess * max(waited, self._added(seen, bare) if seen != NOTHING else 0.0) + beside

    def _running_share(self) -> float:
        """Return the share of a bare step in which the training thread runs; Sonde's clocks count all of it.

        The rest it waits: for its data, or on a busy machine for a processor, which Sonde does not make it do.
        """
        if min(len(self._worked[NOTHING]), len(self._durations[NOTHING])) < _ENOUGH:
            return 1.0
        return min(1.0, _usual(self._worked[NOTHING]) / max(_usual(self._durations[NOTHING]), 1e-9))

    def _added(self, level: int, bare: float) -> float:
        """Return how much longer steps of a level take than bare ones, beyond chance; 0 if too few were seen."""
        if min(len(self._worked[level]), len(self._worked[NOTHING])) >= _ENOUGH:
            unrecorded = self._worked[NOTHING]
            chance = statistics.median(unrecorded) - _usual(unrecorded)
            more = _usual(self._worked[level]) - _usual(unrecorded) - chance
            return more + self._running_share() * statistics.median(self._waited[NOTHING])
        if min(len(self._durations[level]), len(self._durations[NOTHING])) >= _ENOUGH:
            return _usual(self._durations[level]) - bare
        return 0.0

    def _unrecorded_seconds(self, bare: float) -> float:
        """Return the cost of a step that is not recorded; most of them are only counted if that pays."""
        looked_at = self._seconds(NOTHING, bare)
        if not self._dozing_pays or not self._dozed:
            return looked_at
        counted = self._dozed_steps / max(1, self._dozed_steps + self._looked_at)
        # What was logged in a step that is only counted is written like that of any other.
        dozed = statistics.median(self._dozed) * self._running_share() + (self._worker_seconds(NOTHING) or 0.0)
        return looked_at + counted * min(0.0, dozed - looked_at)

    def _milestone_seconds(self, bare: float) -> float:
        """Return what milestones add to a step on average: two until the number of steps has doubled.

        Early ones are spread over the steps to come: a setting that is chosen for a few dozen steps would stay.
        """
        return self._seconds(EVERYTHING, bare) * 2 / max(_SPREAD, self._due_steps)

    def _share(self, strides: Strides, bare: float) -> float:
        due = self._due_steps / max(1, self._steps)
        costs = [self._unrecorded_seconds(bare), *(self._seconds(level, bare) for level in LEVELS[1:])]
        if self._ahead and (strides.parameters > 1 or due < 1):  # an unrecorded step comes before each recorded one
            ahead = max(0.0, statistics.median(self._ahead) * self._running_share() - costs[NOTHING])
            costs[1:] = [cost + ahead for cost in costs[1:]]
        average = math.fsum(share * cost for share, cost in zip(strides.shares(), costs, strict=True))
        average += self._milestone_seconds(bare)
        return (due * average + (1 - due) * costs[NOTHING]) / bare

    def _review(self) -> None:
        assert self.budget is not None
        bare = self._bare_seconds()
        if bare is None or bare <= 0:
            return
        unrecorded = self._seconds(NOTHING, bare) / (self.budget * bare)
        self._dozing_pays = unrecorded > _DOZE_FROM
        self._set_prices()
        if len(self._durations[NOTHING]) < _ENOUGH and self._wants_to_rest(bare):
            self._rests = _ENOUGH + 1  # the last one comes before a recorded step and is not measured
            return
        strides, allowed = Strides(), self._allowed(bare)
        while self._share(strides, bare) > allowed and strides.parameters < _MOST:
            strides = strides.thinner()
        now = self._share(self.strides, bare)
        was_guess, self._is_guess = self._is_guess, any(len(self._durations[each]) < _ENOUGH for each in LEVELS)
        # A looser setting must be well within the budget, not to change back and forth; unless a guess was too low.
        while not was_guess and self._share(strides, bare) > max(now, _SLACK * allowed) and strides.parameters < _MOST:
            strides = strides.thinner()
        if strides != self.strides:
            self.strides = strides
            self._decided(Cost(bare, self._share(strides, bare), self.budget, strides))
        self._next_review = self._steps + max(_REVIEW, math.ceil(_REVIEW_S / bare))

    def _set_prices(self) -> None:
        """Tell the account what a step earns, and what a look at each level costs."""
        bare = self._bare_seconds()
        if bare is None or bare <= 0:
            return
        assert self.budget is not None
        whole, unrecorded = self.budget * bare, self._unrecorded_seconds(bare)
        self._account.income = self._due_share() * max(whole - unrecorded, whole / 2)
        self._account.prices = tuple(max(0.0, self._seconds(level, bare) - unrecorded) for level in LEVELS)

    def _due_share(self) -> float:
        """Return the share of the budget for a schedule that leaves steps out: who records less wants to pay less."""
        return min(1.0, _SPARSE * self._due_steps / max(1, self._steps))

    def _allowed(self, bare: float) -> float:
        """Return the share that recording may use: the budget, but at least half of it beyond the fixed cost."""
        assert self.budget is not None
        whole = (1 - JUDGING - ONCE) * self.budget * self._due_share()
        fixed = self._unrecorded_seconds(bare) + self._milestone_seconds(bare)
        return max(whole, fixed / bare + whole / 2)

    def _wants_to_rest(self, bare: float) -> bool:
        assert self.budget is not None
        return self._rests_anyway() or self._share(Strides(), bare) > self.budget / 2
