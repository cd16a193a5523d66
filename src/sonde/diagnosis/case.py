"""A case: everything the rules may ask about a run, at one moment. No torch, no files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sonde.core import facts, signals
from sonde.core.examination import Examination, Result
from sonde.core.facts import Facts, LossFacts, ModuleFacts, ParameterFacts
from sonde.core.heartbeat import Standing
from sonde.core.metric_names import is_loss_name
from sonde.core.step_times import RankTimes
from sonde.core.tape import Tape
from sonde.diagnosis.dynamics import Dynamics, classify
from sonde.diagnosis.history import HEAD, Curve, History, Stretch
from sonde.diagnosis.learning import Learning, judge
from sonde.diagnosis.ranks.comparison import RankComparison
from sonde.diagnosis.tape.reading import TapeReading
from sonde.diagnosis.track import Panel, Track, Values
from sonde.records import Event, Phase, Quantity, Site

LOSS_NAMES: Final = ("loss", "train_loss", "train/loss", "training_loss", "loss/train")
# Steps without a backward pass may differ by this share from what one loss for all optimizers leads to.
_UNEVEN: Final = 0.05
_MANY_LOSSES: Final = 100
"""Losses after which a curve is as good as a longer one."""
# What is written once must not be forgotten when the run gets long.
_ONCE: Final = frozenset(map(signals.part_of, (signals.NEIGHBOUR_AGREEMENT, signals.DISTINCT_ROWS, signals.BATCH_MARK)))
MAX_EVENTS: Final = 1000
TAPE_STEPS: Final = 25
"""Steps after which the first tapes are there, if there are any."""
MAX_ROUNDS: Final = 3
"""Kinds of rounds of a loop of which a tape is remembered."""
PANEL_STEPS: Final = 64
"""How many of the last steps layers are compared over."""
_OF_LAYERS: Final[tuple[Quantity, ...]] = ("parameter", "gradient", "update", "output", "output_gradient")
T = TypeVar("T")


class NotMeasured(Exception):
    """Raised by a rule that needs something the run does not have: it gives no verdict instead of a wrong one."""


class Case:
    """The state of a run as the rules see it. `step` is the last one recorded; `final` is true once the run is over."""

    def __init__(self) -> None:
        self.history = History()
        self.facts = Facts()
        self.events: list[Event] = []
        self.final = False
        self.strides: Mapping[str, int] = {}
        """One in how many steps holds what, by `parameters`, `outputs` and `diagnosis`; empty if nothing is thinned."""
        """Whether not every step is recorded any more, to keep within the budget."""
        self.earlier: Mapping[str, float] = {}
        """How `signals.SCHEDULE` stood at the end of an earlier attempt whose readings are not part of the case."""
        self.taped: TapeReading | None = None
        """The last whole step that was taped, if there is one."""
        self.first_taped: TapeReading | None = None
        """The first whole step that was taped."""
        self.rounds: list[TapeReading] = []
        """The last taped step of every kind, the latest first: a loop may train two models in turn."""
        self.expects_tapes = False
        """Whether steps of the run are taped as far as that can be afforded."""
        self.examinations: dict[int, Examination] = {}
        """Experiments on taped steps, by step."""
        self.standing: Standing | None = None
        """What each rank does or did last, by its heartbeat; None where there is none."""
        self.rank_times: list[RankTimes] | None = None
        """The times of all ranks' steps; None where fewer than two recorded any."""
        self.ranks: RankComparison | None = None
        """How the ranks compare; None where there is one, or they were not compared."""
        self._sites: dict[int, Site] = {}
        self._by_key: dict[str, Site] = {}
        self._groups: dict[tuple[Quantity, Phase], list[Site]] = {}
        self._known: dict[str, tuple[int, Any]] = {}

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` makes, made once for all rules until more of the run is taken."""
        version, value = self._known.get(name, (-1, None))
        if version != self.history.version:
            value = make()
            self._known[name] = (self.history.version, value)
        result: T = value
        return result

    # ------------------------------------------------------------------ what a monitor feeds in

    def take_sites(self, sites: Iterable[Site]) -> None:
        """Take sites that are new."""
        for site in sites:
            self.history.version += 1
            self._sites[site.id] = site
            self._by_key[site.key] = site
            self._groups.setdefault((site.quantity, site.phase), []).append(site)
            if _is_followed(site):
                self.history.follow(site.id)
            if site.quantity == "vital" and site.part in _ONCE:
                self.history.keep(site.id)

    def take_event(self, event: Event) -> None:
        """Take an event; facts replace those that were stated before."""
        self.history.version += 1
        if event.event_type == facts.PROGRAM_EVENT:
            self.facts = replace(self.facts, program=Facts.from_json(event.data).program)
            return
        if event.event_type == facts.EVENT_TYPE:
            self.facts = replace(Facts.from_json(event.data), program=self.facts.program)
            self.__dict__.pop("modules", None)
            self.__dict__.pop("parameters", None)
            return
        if event.event_type == "budget":
            self.strides = {name: event.data.get(f"{name}_every", 1) for name in ("parameters", "outputs", "diagnosis")}
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)

    @property
    def num_sites(self) -> int:
        """How many sites the run has so far."""
        return len(self._sites)

    @property
    def is_thinned(self) -> bool:
        """Whether some steps lack readings, to keep the recording within its budget."""
        return bool(self.strides)

    def take_examination(self, examination: Examination) -> None:
        """Take the experiments on a taped step."""
        self.history.version += 1
        self.examinations[examination.step] = examination

    def take_tape(self, tape: Tape) -> None:
        """Take the tape of a step; the last one that is whole counts."""
        if tape.truncated or not tape.loss_values():
            return
        self.history.version += 1
        self.taped = TapeReading(tape)
        self.first_taped = self.first_taped or self.taped
        others = [each for each in self.rounds if each.losses_at != self.taped.losses_at]
        self.rounds = [self.taped, *others[: MAX_ROUNDS - 1]]

    def wait_for_tape(self) -> None:
        """Leave a judgement that a tape may refute to the time when there is one, in the first steps of a run.

        Raises:
            NotMeasured: A tape is due soon.

        """
        if self.expects_tapes and self.taped is None and not self.final and self.num_steps < TAPE_STEPS:
            raise NotMeasured("a tape of a step")

    def need_tape(self) -> TapeReading:
        """Return the last whole step that was taped.

        Raises:
            NotMeasured: There is none.

        """
        if self.taped is None:
            raise NotMeasured("a tape of a step")
        return self.taped

    # ------------------------------------------------------------------ experiments

    @property
    def examination(self) -> Examination | None:
        """The experiments on the last step that was taped and could be repeated; None if there are none."""
        steps = [step for step, each in self.examinations.items() if each.results]
        return self.examinations[max(steps)] if steps else None

    def results(self, experiment: str) -> list[tuple[int, Result]]:
        """Return the results of an experiment by step, in order."""
        found = ((step, each.result(experiment)) for step, each in sorted(self.examinations.items()))
        return [(step, result) for step, result in found if result is not None]

    # ------------------------------------------------------------------ steps

    @property
    def step(self) -> int:
        """The last step recorded."""
        return self.history.step

    @property
    def num_steps(self) -> int:
        """How many steps were recorded."""
        return self.history.num_steps

    @property
    def recent_steps(self) -> NDArray[np.int64]:
        """The last steps that are remembered."""
        return self.history.recent_steps()

    # ------------------------------------------------------------------ tracks

    def track(self, key: str) -> Track | None:
        """Return the readings of the site with this key, or None if it was never read."""
        site = self._by_key.get(key)
        return None if site is None else self._track(site)

    def of(self, quantity: Quantity, phase: Phase = "train") -> list[Track]:
        """Return the tracks of all sites of a quantity that were read, in the order in which they turned up.

        For outputs this is the order of the first forward pass; for parameters, gradients and updates it is the order
        of the model's parameters.
        """
        sites = [site for site in self._groups.get((quantity, phase), ()) if site.same_as is None]
        tracks = (self._track(site) for site in sites)
        return [track for track in tracks if track is not None]

    def panel(self, quantity: Quantity, phase: Phase = "train", *, last: int = PANEL_STEPS) -> Panel:
        """Return all sites of a quantity side by side over the last steps, for rules that look at many at once."""
        name = f"panel {quantity} {phase} {last}"
        return self.once(name, lambda: self._panel(self.history.recent, quantity, phase, last))

    def first_panel(self, quantity: Quantity, phase: Phase = "train") -> Panel:
        """Return all sites of a quantity side by side over the first steps of the run."""
        name = f"first panel {quantity} {phase}"
        return self.once(name, lambda: self._panel(self.history.head, quantity, phase, HEAD))

    def _panel(self, stretch: Stretch, quantity: Quantity, phase: Phase, last: int) -> Panel:
        sites = tuple(site for site in self._groups.get((quantity, phase), ()) if site.same_as is None)
        # A step that is only counted holds losses and rates, and nothing of a layer.
        layers = [site for each in _OF_LAYERS for site in self._groups.get((each, phase), ())]
        steps, rows = stretch.table(_ids(sites), last, _ids(layers))
        return Panel(sites, steps, rows)

    def vital(self, subject: str, name: str, phase: Phase = "train") -> Track | None:
        """Return the track of a vital sign, or None if it was not measured."""
        return self.track(f"{subject}:vital{signals.part_of(name)}{'@eval' if phase == 'eval' else ''}")

    def vitals(self, name: str, phase: Phase = "train") -> list[Track]:
        """Return the tracks of a vital sign for all subjects that have it."""
        part = signals.part_of(name)
        sites = [site for site in self._groups.get(("vital", phase), ()) if site.part == part]
        return [track for site in sites if (track := self._track(site)) is not None]

    def site(self, number: int) -> Site | None:
        """Return a site by its id."""
        return self._sites.get(number)

    def sites(self, quantity: Quantity, phase: Phase = "train") -> list[Site]:
        """Return all sites of a quantity, read or not, in the order in which they turned up."""
        return self._groups.get((quantity, phase), [])

    def curve(self, key: str) -> tuple[NDArray[np.int64], Values] | None:
        """Return the whole curve of a site that is followed (a number, a loss, a mode); None if it was never read."""
        site = self._by_key.get(key)
        return None if site is None else self._curve(site)

    def need_vital(self, subject: str, name: str, phase: Phase = "train") -> Track:
        """Return the track of a vital sign.

        Raises:
            NotMeasured: The run does not have it.

        """
        track = self.vital(subject, name, phase)
        if track is None:
            raise NotMeasured(f"{subject}:vital{signals.part_of(name)}")
        return track

    def need_vitals(self, subject: str, name: str) -> list[Track]:
        """Return the tracks of a vital sign for all subjects that have it; `subject` describes them.

        Raises:
            NotMeasured: The run does not have it.

        """
        tracks = self.vitals(name)
        if not tracks:
            raise NotMeasured(f"{subject}:vital{signals.part_of(name)}")
        return tracks

    def scalar(self, name: str) -> tuple[NDArray[np.int64], Values] | None:
        """Return the whole curve of a logged number, thinned out if long; None if there is none."""
        site = self._by_key.get(f"{name}:scalar")
        return None if site is None else self._curve(site)

    def scalars(self) -> list[str]:
        """Return the names of all logged numbers."""
        return [site.name for site in self._groups.get(("scalar", "train"), ())]

    def _track(self, site: Site) -> Track | None:
        # Several rules ask for the same track in one look.
        return self.once(f"track {site.id}", lambda: self._make_track(site))

    def _make_track(self, site: Site) -> Track | None:
        source = self._sites.get(site.same_as, site) if site.same_as is not None else site
        steps, rows = self.history.rows(source.id)
        return Track(site, steps, rows) if len(steps) else None

    def _curve(self, site: Site) -> tuple[NDArray[np.int64], Values] | None:
        curve = self.history.curves.get(site.id, Curve())
        if not curve.steps:
            return None
        return np.array(curve.steps, np.int64), np.array(curve.values)

    # ------------------------------------------------------------------ the loss

    def loss(self) -> tuple[NDArray[np.int64], Values] | None:
        """Return the curve of the training loss: what the user logged, else what the loss function returned."""
        site = self.loss_site()
        return None if site is None else self._curve(site)

    def loss_site(self) -> Site | None:
        """Return the site of the training loss."""
        named = sorted(name for name in self.scalars() if is_loss_name(name))
        only = [f"{named[0]}:scalar"] if len(named) == 1 else []
        keys = [*(f"{name}:scalar" for name in LOSS_NAMES), f"{signals.LOSS}:output", *only]
        known = [site for key in keys if (site := self._by_key.get(key)) is not None]
        lengths = [(len(found[0]), site) for site in known if (found := self._curve(site)) is not None]
        # One number for each epoch says little of a run that has more of another.
        enough = min(_MANY_LOSSES, max((length for length, _ in lengths), default=0))
        return next((site for length, site in lengths if length >= enough), None)

    def has_site(self, key: str) -> bool:
        """Return whether anything was recorded under this key."""
        return key in self._by_key

    def need_loss(self) -> tuple[NDArray[np.int64], Values]:
        """Return the curve of the training loss.

        Raises:
            NotMeasured: There is none.

        """
        found = self.loss()
        if found is None:
            raise NotMeasured("the loss")
        return found

    @property
    def learning(self) -> Learning:
        """How the loss has gone so far.

        Where several optimizers take turns, as in a GAN, each may make the other's loss worse: nothing can be said.
        Where they step one after the other on the gradients of one loss, it is judged like that of a single one.
        Nor can anything be said of a loss whose targets grow with what the model has learnt, or of one that rises and
        has a single label, as where one key is right and all others come from a queue that the model fills.
        """
        return self.once("learning", self._judge_loss)

    def _judge_loss(self) -> Learning:
        found = self.loss()
        if found is None or self.take_turns():
            return Learning("unknown")
        learning = judge(found[1])
        moves = any(each.has_moving_target for each in self.rounds)
        grows_harder = learning.state == "worse" and self._has_one_label()
        return Learning("unknown") if grows_harder or (moves and learning.state != "broken") else learning

    def _has_one_label(self) -> bool:
        entropy = self.vital(signals.LOSS, signals.RUNNING_LABEL_ENTROPY)
        return self.loss_facts("cross_entropy") is not None and entropy is not None and not entropy.numbers().any()

    @property
    def dynamics(self) -> Dynamics:
        """Where the loss is going now; unknown where `learning` is, because then a loss need not fall."""
        return self.once("dynamics", self._classify_loss)

    def _classify_loss(self) -> Dynamics:
        found = self.loss()
        return classify(np.zeros(0) if found is None or self.learning.state == "unknown" else found[1])

    def take_turns(self) -> bool:
        """Return whether each of several optimizers has backward passes of its own."""
        optimizers = len(self.facts.optimizers)
        if optimizers < 2:
            return False
        turns = self.vital(signals.LOOP, signals.TURNS)
        if turns is not None:
            return float((turns.numbers() > 1).mean()) > _UNEVEN
        # In runs of earlier versions each step of an optimizer is a step of the run.
        backwards = self.vital(signals.LOOP, signals.BACKWARDS)
        if backwards is None:
            return True
        without = float((backwards.numbers() == 0).mean())
        return abs(without - (1 - 1 / optimizers)) > _UNEVEN

    # ------------------------------------------------------------------ facts

    @functools.cached_property
    def modules(self) -> dict[str, ModuleFacts]:
        """What is known of modules, by name."""
        return {module.name: module for module in self.facts.modules}

    @functools.cached_property
    def parameters(self) -> dict[str, ParameterFacts]:
        """What is known of parameters, by name."""
        return {parameter.name: parameter for parameter in self.facts.parameters}

    def need_facts(self) -> Facts:
        """Return the facts.

        Raises:
            NotMeasured: None were stated.

        """
        if not self.facts.parameters and not self.facts.modules:
            raise NotMeasured("facts about the program's objects")
        return self.facts

    def loss_facts(self, *kinds: str) -> LossFacts | None:
        """Return the loss that was called, if it is of one of these kinds (any, if none is given)."""
        return next((loss for loss in self.facts.losses if not kinds or loss.kind in kinds), None)

    def learning_rate(self, optimizer: str = "optimizer", group: int = 0) -> tuple[NDArray[np.int64], Values] | None:
        """Return the curve of a group's learning rate."""
        return self.scalar(f"{optimizer}.group{group}.lr")


def _ids(sites: Iterable[Site]) -> NDArray[np.intp]:
    return np.array([site.id for site in sites], np.intp)


def _is_followed(site: Site) -> bool:
    """Return whether a site's numbers are kept for the whole run: what is rarely written must not be forgotten."""
    if site.quantity == "vital":
        return site.part == signals.part_of(signals.TRAINING)
    return site.quantity == "scalar" or (site.name == signals.LOSS and site.quantity == "output")


def run_length(flags: Sequence[bool] | NDArray[np.bool_]) -> int:
    """Return how many of the last flags are true without a break.

    >>> run_length([True, False, True, True])
    2
    """
    array = np.asarray(flags, dtype=np.bool_)
    broken = np.flatnonzero(~array)
    return len(array) - (int(broken[-1]) + 1 if len(broken) else 0)


def longest_run(flags: Sequence[bool] | NDArray[np.bool_]) -> int:
    """Return the length of the longest stretch of true flags.

    >>> longest_run([True, True, False, True])
    2
    """
    array = np.concatenate([[False], np.asarray(flags, dtype=np.bool_), [False]])
    edges = np.flatnonzero(array[1:] != array[:-1])
    return int((edges[1::2] - edges[::2]).max(initial=0))
