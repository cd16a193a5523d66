"""What a program does between its steps: the calls of torch that a training loop is made of, as a bounded timeline.

Schedulers, checkpoints, seeds, data loaders, averaged models, and parameters that are replaced or unfrozen. Each
call is noted with the user's line, the object it is about and what came of it; calls from one line about one object are
one entry. What happened before the session began is read from the objects, and from the variables of the functions that
called `watch`.
"""

from __future__ import annotations

import contextlib
import dis
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import CO_OPTIMIZED
from itertools import permutations
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from sonde.core.collector import uncollected
from sonde.core.facts import PROGRAM_EVENT, CallFacts, Facts, Plain
from sonde.core.metric_names import is_held_out
from sonde.hooks.guard import Guarded, Handle, is_capturing
from sonde.hooks.names import named_parameters, unwrap
from sonde.hooks.on_step import after_step
from sonde.hooks.replace_function import LOADING, ReplacedFunction
from sonde.hooks.user_line import current_line, is_users
from sonde.sensors.checkpoints import left_in_checkpoint
from sonde.sensors.copies import Copies, within
from sonde.sensors.facts import loader_facts, scheduler_facts
from sonde.sensors.loss_functions import LossCall
from sonde.sensors.preparation import Preparation, changed_through_a_part, preparation, prepared_apart
from sonde.sensors.sensor import Clip, Context, PassInputs, Sensor, Step, StepEnd
from sonde.sensors.tables import Tables

MAX_ENTRIES: Final = 64
MAX_STEPS: Final = 64
_FIRST_CALLS: Final = 8
_MAX_STATEMENTS: Final = 64
_MAX_HELD: Final = 64
_MAX_PASSES: Final = 16
_MAX_SCOPES: Final = 8
_COMPARED: Final = 8
_TABLE_LOOKS: Final = 3
"""How often the tables of a program are looked at: after the first step, and in the first evaluations."""
_EPOCHS: Final = re.compile(r"(n|nb|num|max|total)_?(train_?)?epochs?|(train_?)?epochs|epochs?_(num|count|total)")
_CALLS: Final = re.compile(r"(num|max|total)_?(train(ing)?_?)?(steps|iters|iterations|updates)|t_total")
_OF_LOADER: Final = ("dataset_kind", "dataset_length", "batch_size", "length", "sampler", "drop_last")
_MAX_FIELDS: Final = 16
_MAX_CLASSES: Final = 100
_INSPECTING: Final = frozenset({"locals", "vars", "eval", "exec", "f_locals", "currentframe", "_getframe"})
"""Functions that look at their own variables may hold the very dict that Python would hand to us, and update."""
_OF_FRAMES: Final = frozenset({"f_locals", "currentframe", "_getframe"})
"""Those of them that are attributes; `model.eval()` is not Python's own function."""
_OWN_REFERENCES: Final = 3
"""References to the variables of a frame: the frame's, ours, and that of the question for their number."""
_LEAST_STEPS: Final = 2
"""Steps of a pass over the data for its order to matter."""
_ROLES: Final = ("best", "target", "ema", "teacher", "old", "frozen", "averaged", "swa", "reference", "snapshot")
"""Words in the names of variables that hold a model which is not the one that is trained."""
_KEEPERS: Final = ("best", "snapshot")
"""Those of variables that get a copy when there is something to keep: until then they may well hold the model."""

_SCHEDULERS: Final = [
    each for each in vars(lr_scheduler).values() if isinstance(each, type) and issubclass(each, LRScheduler)
]
_SCHEDULER_STEPS: Final = [ReplacedFunction(each, "step") for each in _SCHEDULERS if "step" in vars(each)]
# These make others step, or do not call the constructor of their base class.
_NEW_SCHEDULERS: Final = [
    ReplacedFunction(each, "__init__")
    for each in _SCHEDULERS
    if each.__name__ in ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")
]
_LOAD_MODULE: Final = ReplacedFunction(nn.Module, "load_state_dict")
_MODULE_STATE: Final = ReplacedFunction(nn.Module, "state_dict")
_OPTIMIZER_STATE: Final = ReplacedFunction(Optimizer, "state_dict")
_SAVE: Final = ReplacedFunction(torch, "save")
_PASS: Final = ReplacedFunction(DataLoader, "__iter__")
_INITIALISING: Final = [
    ReplacedFunction(nn.init, name)
    for name, each in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_") and callable(each)
]
_GOING_ON: Final = (lr_scheduler.ExponentialLR, lr_scheduler.MultiplicativeLR, lr_scheduler.ReduceLROnPlateau)
"""These change the rate that an optimizer has, wherever it comes from, and need no count."""
_AVERAGED_CALL: Final = ReplacedFunction(AveragedModel, "forward")
_EVALUATING: Final = ReplacedFunction(nn.Module, "eval")
"""Unlike `train`, it is not called for each of the parts of a model."""


@dataclass(slots=True, eq=False)
class _Entry:
    """Calls from one line about one object."""

    verb: str
    about: str
    line: str
    count: int = 0
    steps: list[int] = field(default_factory=list)
    data: dict[str, Plain] = field(default_factory=dict)

    def facts(self) -> CallFacts:
        return CallFacts(
            verb=self.verb,
            about=self.about,
            line=self.line,
            count=self.count,
            steps=tuple(self.steps),
            data=dict(self.data),
        )


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A state dict that the program took, known by one of its tensors."""

    tensor: weakref.ref[Tensor]
    step: int
    entry: _Entry


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass over the data of a loader."""

    entry: _Entry
    order: tuple[int, int] | None = None
    """What a DistributedSampler seeds its order by."""
    batches: int = 0
    asked: int = 0
    """How many batches were asked for; the last question of a pass gets none."""
    steps: int = 0
    """Steps that the program took between a batch of this pass and the next batch of any."""


@dataclass(slots=True, eq=False)
class _Copy:
    """The parameter groups that `optimizer.state_dict()` returned, and the rates in them."""

    optimizer: weakref.ref[Optimizer]
    groups: list[dict[str, Any]]
    rates: list[Any]
    entry: _Entry


@dataclass(slots=True, eq=False)
class _Schedule:
    """A scheduler that was there when the session began, or was made since."""

    scheduler: weakref.ref[LRScheduler]
    count: int
    entry: _Entry
    is_heard: bool
    """Whether a step of it would be seen: its class does not replace torch's method."""
    has_stepped: bool = False

    def is_idle(self) -> bool:
        """Return whether it has never been stepped. One that no longer exists was not if none of its steps was seen."""
        present = self.scheduler()
        same = self.is_heard if present is None else present.last_epoch == self.count
        return same and not self.has_stepped


class _Seeding:
    """The seeds of one random generator, and whether training goes on from the same state after each."""

    def __init__(self, verb: str, function: ReplacedFunction, mark: Callable[[], int]) -> None:
        self.verb = verb
        self.function = function
        self.mark = mark
        """Returns a number made of the generator's state."""
        self.entry: _Entry | None = None
        """The last call."""
        self.given: Any = None
        self.fresh = self.trained = 0
        """Marks of the state after that call, and at the first training pass since; 0 if there was none."""
        self.before: dict[_Entry, tuple[Any, int]] = {}
        """By line: the seed and the state of the first training pass, as they were last time."""

    def end(self) -> None:
        """Note where the last seed led to, if training went on from it and random numbers were drawn."""
        if self.entry is not None and self.trained and self.mark() != self.fresh:
            self.before[self.entry] = (self.given, self.trained)
        self.entry, self.trained = None, 0

    def is_same(self, entry: _Entry) -> bool:
        """Take the first training pass after a seed; return whether it begins as the one after the last seed."""
        self.trained = self.mark()
        return self.before.get(entry) == (self.given, self.trained)


def _seedings() -> list[_Seeding]:
    return [
        _Seeding("torch.manual_seed", ReplacedFunction(torch, "manual_seed"), _torch_mark),
        _Seeding("numpy.random.seed", ReplacedFunction(np.random, "seed"), _numpy_mark),
        _Seeding("random.seed", ReplacedFunction(random, "seed"), lambda: hash(random.getstate())),
    ]


def _torch_mark() -> int:
    state = uncollected(torch.get_rng_state)  # always on the CPU
    return hash(np.asarray(state).tobytes())


def _numpy_mark() -> int:
    state: Any = np.random.get_state()
    return hash((state[1].tobytes(), state[2]))


class ProgramCalls(Sensor):
    """The calls of a program around its steps. Nothing is counted for each operation, module or batch but a number."""

    produces = ("facts.program", "facts.loader")
    cost = (
        "some microseconds at each of these calls, a look at the parameters after 1, 2, 4, 8, ... steps, and three "
        "looks at the tables in the variables of the program: 30 ms for a million numbers"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._stated = 0
        self._is_new = False
        self._inside = 0
        self._fillers: dict[str, str] = {}
        """Variables for the best model that have held the trained one since the start, and the other name of that."""
        self._names: dict[int, str] = {}
        """The names of the watched optimizers, by id."""
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        self._snapshots: list[_Snapshot] = []
        self._passes: dict[int, _Pass] = {}
        self._last_fetch: tuple[_Pass, int] | None = None
        """The pass that the last batch came from, and the step then."""
        self._prepared: dict[_Entry, Preparation] = {}
        """By pass over a loader: the numbers that its data set prepares samples by."""
        self._orders: dict[_Entry, tuple[int, int]] = {}
        self._copies: list[_Copy] = []
        self._seedings = _seedings()
        self._models: dict[int, str] = {}
        self._trainable: set[int] = set()
        self._loads_own = False
        self._schedulers: list[_Schedule] = []
        self._scheduled: set[str] = set()
        """Optimizers whose groups show that a scheduler was made for them, wherever it is."""
        self._knows_scheduler = context.watched.helpers.scheduler is not None
        self._averaged_calls = 0
        self._clips = 0
        """How often some gradient was clipped."""
        self._empty_clips = 0
        self._reset: set[str] = set()
        """Names of parameters that were initialised anew; a few are enough."""
        self._rated: set[int] = set()
        """Optimizers that have stepped, by id."""
        self._copies_of_weights = Copies()
        self._look_at_weights: Guarded = context.watched.guard.wrap("copies of weights", self._see_weights)
        self._looked = -1
        """The last step at the beginning of which copies of weights were looked at."""
        self._tables = Tables()
        self._see_rows: Guarded = context.watched.guard.wrap("tables of data", self._feed_tables)
        self._look_at_checkpoints: Guarded = context.watched.guard.wrap("checkpoints", self._note_what_is_left)
        self._look_at_tables: Guarded = context.watched.guard.wrap("tables of data", self._see_tables)
        self._table_step = self._table_looks = 0
        self._see_target: Guarded = context.watched.guard.wrap("tables of data", self._tables.see_target)

    # ------------------------------------------------------------------ the timeline

    @property
    def _now(self) -> int:
        """How many steps have ended."""
        return int(self.context.watched.packer.step)

    def _note(self, verb: str, about: str, *key: Any, line: str | None = None, **data: Plain) -> _Entry:
        """Note a call."""
        where = _line() if line is None else line
        place = (verb, about, where, *key)
        entry = self._entries.get(place)
        if entry is None:
            entry = _Entry(verb, about, where)
            if len(self._entries) < MAX_ENTRIES:
                self._entries[place] = entry
                self._is_new = True
        entry.count += 1
        entry.steps.append(self._now)
        if len(entry.steps) > MAX_STEPS:
            del entry.steps[_FIRST_CALLS]
        self._set(entry, **data)
        return entry

    def _set(self, entry: _Entry, **data: Plain) -> None:
        if any(entry.data.get(name, self) != value for name, value in data.items()):
            entry.data |= data
            self._is_new = True

    def on_step_end(self, end: StepEnd) -> None:
        """State what is new."""
        steps = self.context.steps
        is_round = steps & (steps - 1) == 0
        if steps == 1:
            self._look_at_tables()
        if is_round:
            self._look_at_parameters()
            self._look_for_second_names()
        if (is_round or self._is_new) and self._entries and self._stated < _MAX_STATEMENTS:
            self._state()

    def on_end(self) -> None:
        """State everything once more."""
        self._look_at_parameters()
        self._look_for_second_names()
        for name, other in self._fillers.items():
            self._note("second_name", name, line="", of=other)
        for each in list(self._passes.values()):
            self._end_pass(each)
        self._compare_preparations()
        for entry in [schedule.entry for schedule in self._schedulers if schedule.is_idle()]:
            self._note("scheduler.idle", entry.about, line=entry.line, kind=entry.data["kind"])
        known = {entry.about for entry in self._entries.values() if entry.verb.startswith("scheduler.")}
        for name in () if "" in known else self._scheduled - known:
            self._note("scheduler.idle", name, line="", kind="")
        self._look_at_weights(True)
        if self._entries:
            self._state()

    def _state(self) -> None:
        self._stated += 1
        self._is_new = False
        program = Facts(program=tuple(each.facts() for each in self._entries.values())).to_json()["program"]
        message = "what the program does between its steps"
        self.context.watched.packer.put_event(PROGRAM_EVENT, message, {"program": program})

    # ------------------------------------------------------------------ beginning

    def start(self) -> None:
        """Read what happened before from the objects and from the variables of the user's functions."""
        watched = self.context.watched
        for name, model in watched.models.items():
            self._models |= {id(model): name or "(model)", id(unwrap(model)): name or "(model)"}
        self._trainable = {id(each) for _, each, _ in named_parameters(watched.models) if each.requires_grad}
        self._names = {key: name for name, key in self.context.owners.values()}
        if watched.helpers.loader is not None:
            self.context.book.add(loader=loader_facts(watched.helpers.loader))
        for variables in _users_variables():
            self._look_at_variables(variables)

    def _note_rate(self, name: str, optimizer: Optimizer) -> None:
        rates = {group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), int | float)}
        given = optimizer.defaults.get("lr")
        if len(rates) == 1 and isinstance(given, int | float) and any(optimizer.state.values()):
            scheduled = any("initial_lr" in group for group in optimizer.param_groups)
            own = (each.scheduler() for each in self._schedulers)
            schedule = next((each for each in own if each is not None and each.optimizer is optimizer), None)
            fresh = schedule is not None and schedule.last_epoch == 0 and type(schedule) not in _GOING_ON
            begins = getattr(schedule, "_last_lr", None) if fresh else None
            self._note(
                "optimizer.found",
                name,
                line="",
                lr=rates.pop(),
                given=given,
                scheduled=scheduled,
                begins=begins[0] if begins else None,
            )

    def _look_at_variables(self, variables: dict[str, Any]) -> None:
        models = [unwrap(model) for model in self.context.watched.models.values()]
        known = {id(each.scheduler()) for each in self._schedulers}
        for _, value in within(variables):
            if isinstance(value, LRScheduler) and id(value) not in known:
                known.add(id(value))
                self._note_scheduler("scheduler.found", value, line="")
        frozen = [(path, value) for path, value in variables.items() if _is_frozen(value) and value not in models]
        frozen += [each for model in models for each in model.named_children() if _is_frozen(each[1])]
        for name, value in variables.items():
            if isinstance(value, dict):
                for key, given in _states(name, value):
                    prefix = next((found for model in models if (found := _unloaded_prefix(given, model))), None)
                    if prefix is None and not any(_is_like(given, model) for model in models):
                        found_in = ((path, _unloaded_prefix(given, each)) for path, each in frozen)
                        path, prefix = next((each for each in found_in if each[1] is not None), ("", None))
                        if prefix is not None:
                            self._note("checkpoint.found", key, path, line="", prefix=prefix, given=len(given), of=path)
                    elif prefix is not None:
                        self._note("checkpoint.found", key, line="", prefix=prefix, given=len(given))

    def listen(self) -> Iterator[Handle]:
        """Listen to the calls."""
        wrap = self.context.watched.guard.wrap
        name = type(self).__name__
        begin, end = wrap(name, self._begin), wrap(name, self._end)
        for each in _SCHEDULER_STEPS:
            yield each.listen(before=begin, end=end, after=wrap(name, self._scheduler_stepped))
        for each in _NEW_SCHEDULERS:
            yield each.listen(before=begin, end=end, after=wrap(name, self._scheduler_made))
        yield _LOAD_MODULE.listen(before=wrap(name, self._begin_load), after=wrap(name, self._loaded))
        yield _MODULE_STATE.listen(before=wrap(name, self._begin_state), after=wrap(name, self._state_taken))
        yield _OPTIMIZER_STATE.listen(after=wrap(name, self._optimizer_state_taken))
        yield _SAVE.listen(before=wrap(name, self._saved))
        for seeding in self._seedings:
            begin_seed, end_seed = partial(self._begin_seed, seeding), partial(self._seeded, seeding)
            yield seeding.function.listen(before=wrap(name, begin_seed), after=wrap(name, end_seed))
        yield _PASS.listen(after=wrap(name, self._pass_begun))
        yield LOADING.listen(before=wrap(name, self._batch_asked), after=wrap(name, self._batch_fetched))
        for each in _INITIALISING:
            yield each.listen(before=wrap(name, self._initialised))
        yield _AVERAGED_CALL.listen(before=wrap(name, self._averaged_called))
        yield _EVALUATING.listen(before=wrap(name, self._put_into_evaluation))
        yield after_step(wrap(name, self._optimizer_stepped), during="awake")

    # ------------------------------------------------------------------ optimizers and schedulers

    def on_step(self, step: Step) -> None:
        """Know a watched optimizer by its name."""
        self._names[id(step.optimizer)] = step.name
        self._rated.add(id(step.optimizer))

    def on_gradients(self, step: Step) -> None:
        """Look at the rate that an optimizer begins with, and whether one was written into a copy of its groups."""
        if id(step.optimizer) not in self._rated and not self.context.steps:
            self._note_rate(step.name, step.optimizer)
            self._look_at_checkpoints(step.name, step.optimizer)
            groups = getattr(step.optimizer, "param_groups", ())
            if any("initial_lr" in group for group in groups) and not any(step.optimizer.state.values()):
                self._scheduled.add(step.name)
        if self._copies:
            self._look_at_copies()

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        known = self._stepped.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._stepped = {key: ref for key, ref in self._stepped.items() if ref() is not None}
            self._stepped[id(optimizer)] = weakref.ref(optimizer)
        if self._now < _FIRST_CALLS and id(optimizer) in self._names:
            self._note("optimizer.step", self._names[id(optimizer)])

    def on_clip(self, clip: Clip) -> None:
        """Note a call that found nothing to clip, as with a generator of parameters that is used up."""
        clipped = list(clip.parameters)
        if any(each.grad is not None for each in clipped):
            self._clips += 1
        elif self._clips <= 1 and self._empty_clips < MAX_STEPS:  # a generator is used up by its first use
            self._empty_clips += 1
            self._note("clip.nothing", "", parameters=len(clipped))

    def _begin(self, args: Any, kwargs: Any) -> None:
        self._inside += 1

    def _end(self) -> None:
        self._inside -= 1

    def _scheduler_stepped(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if args:
            for each in self._schedulers:
                each.has_stepped |= each.scheduler() is args[0]
        if not self._inside and args:
            entry = self._note_scheduler("scheduler.step", args[0])
            if isinstance(args[0], lr_scheduler.ReduceLROnPlateau) and entry.count == 1:
                given = args[1] if len(args) > 1 else kwargs.get("metrics")
                self._set(entry, mode=str(args[0].mode), follows=_variable_of(given))

    def _scheduler_made(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self._inside and args:
            self._note_scheduler("scheduler.made", args[0])

    def _note_scheduler(self, verb: str, scheduler: LRScheduler, line: str | None = None) -> _Entry:
        optimizer = getattr(scheduler, "optimizer", None)
        known = self._stepped.get(id(optimizer))
        steps = (known is not None and known() is optimizer) or self._shares_groups(optimizer)
        key = () if verb == "scheduler.made" else (id(scheduler),)
        total = getattr(scheduler, "total_steps", None) or _calls_of_functions(scheduler)
        if verb == "scheduler.step" and id(optimizer) in self._names and not self._knows_scheduler:
            self._knows_scheduler = True  # its settings count its steps, and facts are stated whole
            self.context.book.add(scheduler=scheduler_facts(scheduler, self._names))
        entry = self._note(
            verb,
            self._names.get(id(optimizer), ""),
            *key,
            line=line,
            kind=type(scheduler).__name__,
            drives=steps,
            total=total if isinstance(total, int) else None,
        )
        entry.data.setdefault("counted", int(scheduler.last_epoch))
        if verb == "scheduler.step" and entry.count == 1:
            length = getattr(scheduler, "T_max", None)
            self._set(entry, length=length if isinstance(length, int) else None, epochs=_planned_epochs())
        if verb != "scheduler.step" and len(self._schedulers) < _MAX_HELD:
            heard = type(scheduler).step.__module__ == lr_scheduler.__name__
            self._schedulers.append(_Schedule(weakref.ref(scheduler), int(scheduler.last_epoch), entry, heard))
        return entry

    def _shares_groups(self, optimizer: Any) -> bool:
        """Return whether an optimizer is a wrapper around one that has stepped, whose groups it shares."""
        groups = {id(group) for group in getattr(optimizer, "param_groups", ())}
        alive = (each for ref in self._stepped.values() if (each := ref()) is not None)
        return any(groups & set(map(id, each.param_groups)) for each in alive)

    def _optimizer_state_taken(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        groups = result.get("param_groups") if isinstance(result, dict) else None
        if not groups or not isinstance(args[0], Optimizer) or len(self._copies) >= _COMPARED:
            return
        entry = self._note("optimizer.state_dict", self._names.get(id(args[0]), ""))
        self._copies.append(_Copy(weakref.ref(args[0]), groups, [group.get("lr") for group in groups], entry))

    def _look_at_copies(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            optimizer = copy.optimizer()
            if optimizer is None or len(optimizer.param_groups) != len(copy.groups):
                continue
            rates = [(group.get("lr"), old) for group, old in zip(copy.groups, copy.rates, strict=True)]
            live = [group.get("lr") for group in optimizer.param_groups]
            plain = all(isinstance(each, int | float) for each in (*copy.rates, *live, *(now for now, _ in rates)))
            if plain and any(now != old for now, old in rates) and live == copy.rates:
                written = int(copy.entry.data.get("written") or 0) + 1
                self._set(copy.entry, written=written, rate=rates[0][0], kept=live[0])

    # ------------------------------------------------------------------ checkpoints

    def _note_what_is_left(self, name: str, optimizer: Any) -> None:
        """Note what a checkpoint in a variable holds of an optimizer that begins without it."""
        if not isinstance(optimizer, Optimizer):
            return
        models = [unwrap(model) for model in self.context.watched.models.values()]
        schedulers = [each for one in self._schedulers if (each := one.scheduler()) is not None]
        for left in left_in_checkpoint(_users_variables(), models, optimizer, schedulers):
            self._note(
                "checkpoint.left", name, left.what, line="", what=left.what, path=left.path, counted=left.counted
            )

    def _begin_load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[1] if len(args) > 1 else kwargs.get("state_dict")
        self._loads_own = isinstance(given, Mapping) and _is_own_memory(given, args[0])

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        module, given = args[0], args[1] if len(args) > 1 else kwargs.get("state_dict")
        if not isinstance(given, Mapping):
            return
        unexpected = len(getattr(result, "unexpected_keys", ()))
        if not self.context.steps and len(given) > unexpected:
            self._entries = {key: each for key, each in self._entries.items() if each.verb != "checkpoint.found"}
        snapshot = self._snapshot_in(given)
        known = self._models.get(id(module), "")
        self._note(
            "load_state_dict",
            known,
            name=known or _variable_of(module),
            kind=type(module).__name__,
            given=len(given),
            matched=len(given) - unexpected,
            missing=len(getattr(result, "missing_keys", ())),
            own=self._loads_own,
            renamed=_renamed(given, dict(_own_tensors(module)), result) if unexpected else 0,
            taken=None if snapshot is None else snapshot.step,
            taken_at="" if snapshot is None else snapshot.entry.line,
        )

    def _begin_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a state that is handed to `state_dict`, which writes over it, where `load_state_dict` is meant."""
        into = args[1] if len(args) > 1 else kwargs.get("destination")
        if (
            isinstance(into, Mapping)
            and into
            and not kwargs.get("prefix")
            and len(args) < 3
            and isinstance(args[0], nn.Module)
        ):
            own = dict(args[0].named_parameters())
            if own and all(isinstance(into.get(name), Tensor) and into[name] is not each for name, each in own.items()):
                known = self._models.get(id(args[0]), "")
                self._note("state_dict.into", known, name=known or _variable_of(args[0]), given=len(into))

    def _state_taken(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if kwargs.get("destination") is not None or len(args) != 1 or id(args[0]) not in self._models:
            return
        tensor = _shared_tensor(result, args[0])
        if tensor is None:
            return
        entry = self._note("state_dict", self._models[id(args[0])])
        self._snapshots = [each for each in self._snapshots if each.tensor() is not None][-_MAX_HELD:]
        others = {each.step for each in self._snapshots if each.entry is entry and each.step != self._now}
        self._set(entry, held=max(len(others), int(entry.data.get("held") or 0)))
        self._snapshots.append(_Snapshot(weakref.ref(tensor), self._now, entry))

    def _saved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saved = args[0] if args else kwargs.get("obj")
        entry = self._note("torch.save", "")
        snapshot = self._snapshot_in(saved)
        # Taken once, before the loop, it may be meant to follow the weights.
        if snapshot is not None and snapshot.step < self._now and snapshot.entry.count > 1:
            self._set(entry, taken=snapshot.step, taken_at=snapshot.entry.line)

    def _snapshot_in(self, saved: Any) -> _Snapshot | None:
        """Return the state that was taken earlier and whose tensors are in what is saved or loaded."""
        if not self._snapshots:
            return None
        known = {id(tensor): each for each in self._snapshots if (tensor := each.tensor()) is not None}
        return next((known[id(tensor)] for tensor in _tensors(saved) if id(tensor) in known), None)

    # ------------------------------------------------------------------ seeds

    def _begin_seed(self, seeding: _Seeding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seeding.end()

    def _seeded(self, seeding: _Seeding, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, int):
            seeding.entry = self._note("seed", seeding.verb)
            seeding.given, seeding.fresh = given, seeding.mark()

    def on_pass(self, inputs: PassInputs) -> None:
        """Compare the random state of the first training pass after a seed with that after the seed before."""
        if (not self.context.steps or inputs.phase == "eval") and not is_capturing():
            self._see_rows(inputs)
        if not inputs.is_first:
            return
        steps = self.context.steps
        if steps != self._looked and (not steps & (steps - 1) or not (steps - 1) & (steps - 2)) and not is_capturing():
            self._looked = steps
            self._look_at_weights()
        for seeding in self._seedings:
            entry = seeding.entry
            if entry is not None and not seeding.trained:
                repeats = int(entry.data.get("repeats") or 0) + 1 if seeding.is_same(entry) else 0
                self._set(entry, repeats=repeats, seed=seeding.given)

    # ------------------------------------------------------------------ tables of data

    def on_loss(self, call: LossCall) -> None:
        """Keep the first targets, to know them again in the tables of the program."""
        if not self.context.steps and call.target is not None:
            self._see_target(call.target)

    def _feed_tables(self, inputs: PassInputs) -> None:
        """Keep some rows that a model is given; look at the tables of the program in the first few evaluations."""
        if self._tables.feed(inputs.phase, [tensor for _, tensor in inputs.given]) and inputs.phase == "eval":
            step = self.context.steps
            if step > 1 and step != self._table_step and self._table_looks < _TABLE_LOOKS:
                self._look_at_tables()

    def _see_tables(self) -> None:
        """Note what holds between the tables of the program."""
        self._table_step = self.context.steps
        self._table_looks += 1
        for relation in self._tables.look(_users_variables()):
            self._note(relation.verb, relation.about, line="", **relation.data)
        for code, variables in _users_functions():
            for name, other, attribute, number in changed_through_a_part(code, variables):
                line = f"{code.co_filename}:{number}"
                self._note("data.changed_through_a_part", name, line=line, other=other, attribute=attribute)

    # ------------------------------------------------------------------ data loaders

    def _pass_begun(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        loader = args[0]
        about = loader_facts(loader).settings
        key = tuple(about.get(name) for name in _OF_LOADER)
        entry = self._note("loader.pass", "", *key)
        for mark, each in list(self._passes.items()):
            # The iterator of a pass that is over may be gone, and the new one be in its place.
            if each.entry is entry or mark == id(result) or len(self._passes) >= _MAX_PASSES:
                self._end_pass(self._passes.pop(mark))
        if entry.count == 1:
            stated = {name: about.get(name) for name in _OF_LOADER}
            self._set(entry, **stated, hidden=_hidden_samples(loader.dataset), classes=_classes(loader.dataset))
            self._set(entry, named=_held_out_name())
            if len(self._prepared) < _MAX_PASSES:
                self._prepared[entry] = preparation(loader.dataset)
        self._passes[id(result)] = _Pass(entry, _order(loader.sampler))
        if self.context.watched.helpers.loader is None and entry.data.get("trained") == 1:
            self.context.book.add(loader=loader_facts(loader))

    def _compare_preparations(self) -> None:
        """Note data that is only evaluated and is prepared by other numbers than the data that is trained on."""
        for train, evaluated in permutations(self._prepared, 2):
            if train.data.get("trained") and not evaluated.data.get("trained"):
                apart = prepared_apart(self._prepared[train], self._prepared[evaluated])
                if apart is not None:
                    about = str(evaluated.data.get("dataset_kind") or "")
                    self._note(apart[0], about, line=evaluated.line, other=train.line, **apart[1])
                    return

    def _batch_asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that an iterator that has come to its end is asked for more."""
        found = self._passes.get(id(args[0]))
        if found is not None:
            found.asked += 1
            again = found.asked - found.batches - 2  # this one has no answer yet, and one came to the end
            if again >= 0:
                self._set(found.entry, asked_again=again + 1)

    def _batch_fetched(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = self._passes.get(id(args[0])) or self._pass_under_way(args[0])
        if found is not None:
            self._count_steps()
            found.batches += 1
            self._last_fetch = (found, self._now)

    def _pass_under_way(self, iterator: Any) -> _Pass | None:
        """Return a pass that began before the session, as the first one under `sonde run` does."""
        try:
            length = len(iterator)
        except TypeError:  # data without a length
            return None
        if len(self._passes) >= _MAX_PASSES:
            return None
        entry = self._note("loader.pass", "", "under way", length)
        self._set(entry, length=length)
        found = self._passes[id(iterator)] = _Pass(entry, batches=iterator._num_yielded - 1)
        return found

    def _count_steps(self) -> None:
        """Count the steps since the last batch for the pass that it came from: in an evaluation there are none."""
        if self._last_fetch is not None:
            of, step = self._last_fetch
            of.steps += self._now - step
            self._last_fetch = (of, self._now)

    def _end_pass(self, ended: _Pass) -> None:
        """Note how far a pass came, if the program trained in it."""
        self._count_steps()
        data = ended.entry.data
        if not ended.steps or not ended.batches:
            return
        if ended.order is not None and ended.steps >= _LEAST_STEPS:
            same = self._orders.get(ended.entry) == ended.order
            self._orders[ended.entry] = ended.order
            data["same_order"] = int(data.get("same_order") or 1) + 1 if same else 1
        known = [int(data[name] or 0) for name in ("least", "most") if name in data]
        counts = [*known, ended.batches]
        data |= {"trained": int(data.get("trained") or 0) + 1, "least": min(counts), "most": max(counts)}

    # ------------------------------------------------------------------ averages and parameters

    def _averaged_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an evaluation of averaged weights: how many averages they are of, and whose batch norm statistics.

        The model's own statistics do not belong to averaged weights.
        """
        average = args[0]
        if average.training or not self.context.steps:
            return
        entry = self._note("averaged.call", "")
        if average.n_averaged._version:  # it counts in place
            self._set(entry, filled=True)
        if self._averaged_calls >= _COMPARED:
            return
        self._averaged_calls += 1  # comparing may wait for a device, so only the first few evaluations are looked at
        self._set(entry, filled=bool(average.n_averaged))
        by_formula = any(getattr(average, name, None) is not None for name in ("avg_fn", "multi_avg_fn"))
        norms = _statistics(average)
        if by_formula or average.use_buffers or not norms or not entry.data["filled"]:
            return
        own = [_statistics(model) for model in self.context.watched.models.values()]
        copied = any(
            len(each) == len(norms) and all(torch.equal(a, b) for a, b in zip(each, norms, strict=True)) for each in own
        )
        self._set(entry, norms=len(norms), copied=copied)

    def _put_into_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(args[0]) in self._models:
            self._note("eval", self._models[id(args[0])])

    def _see_weights(self, last: bool = False) -> None:
        """Read what happens to copies of the weights; steps in a row show it, a few of which are enough."""
        found = self._copies_of_weights
        if last:
            found.read()
        else:
            found.look(self.context.steps, _users_variables(), self.context.owners)
        for path, copy in found.found.items():
            entry = self._entries.get(("copy", path, ""))
            if entry is not None or copy.changed or copy.rewritten or copy.still:
                entry = entry or self._note("copy", path, line="")
                self._set(entry, **copy.facts())

    def _initialised(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a parameter is initialised anew that an optimizer has stepped before."""
        tensor = args[0] if args else kwargs.get("tensor")
        name = self.context.book.names.get(id(tensor))
        owner = self.context.owners.get(id(tensor))
        if name is None or owner is None or not self.context.steps:
            return
        if name not in self._reset:
            if len(self._reset) >= _COMPARED:
                return
            self._reset.add(name)
        ref = self._stepped.get(owner[1])
        optimizer = None if ref is None else ref()
        if optimizer is not None:
            # An optimizer that is dropped next, for one of the next fold or cycle, has stepped for the last time.
            self._note("initialised", name, owner[1], optimizer=owner[0])

    def _look_at_parameters(self) -> None:
        """Note parameters that were replaced or unfrozen since the session began and that no optimizer holds."""
        names, models = self.context.book.names, self.context.watched.models
        trainable = {id(each) for model in models.values() for each in model.parameters() if each.requires_grad}
        if trainable <= self._trainable and trainable <= names.keys():
            return  # names take ten times as long
        found = list(named_parameters(models))
        new = [(name, each) for name, each, _ in found if each.requires_grad and id(each) not in names]
        thawed = [
            (name, each)
            for name, each, _ in found
            if each.requires_grad and id(each) in names and id(each) not in self._trainable
        ]
        if not new and not thawed:
            return
        optimizers = [each for ref in self._stepped.values() if (each := ref()) is not None]
        held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        for verb, parameters in (("parameters.replaced", new), ("parameters.unfrozen", thawed)):
            lost = [name for name, each in parameters if id(each) not in held]
            if lost:
                self._note(verb, lost[0], line="", lost=len(lost), names=", ".join(lost[:3]))

    def _look_for_second_names(self) -> None:
        """Note a variable that is named as another model would be, and is the one that is trained."""
        for variables in _users_variables():
            names = [name for name, value in variables.items() if id(value) in self._models or self._is_shallow(value)]
            for name in (each for each in names if any(word in each.lower().split("_") for word in _ROLES)):
                same = [other for other in names if other != name and self._is_shared(variables, name, other)]
                plain = [other for other in same if not any(word in other.lower().split("_") for word in _ROLES)]
                if not plain or ("second_name", name, "") in self._entries or name in self._fillers:
                    continue
                if self.context.steps <= 1 and any(word in name.lower().split("_") for word in _KEEPERS):
                    self._fillers[name] = plain[0]  # until the first copy is made, which may be epochs away
                else:
                    self._note("second_name", name, line="", of=plain[0])
            for name, other in list(self._fillers.items()):
                kept, trained = variables.get(name), variables.get(other)
                if (
                    isinstance(kept, nn.Module)
                    and isinstance(trained, nn.Module)
                    and not self._is_shared(variables, name, other)
                ):
                    del self._fillers[name]

    def _is_shallow(self, value: Any) -> bool:
        """Return whether a variable is a shallow copy of a watched model: another object with the same parameters."""
        if not isinstance(value, nn.Module) or id(value) in self._models:
            return False
        models = [each for each in self.context.watched.models.values() if type(each) is type(value)]
        return any(set(map(id, value.parameters())) == set(map(id, each.parameters())) != set() for each in models)

    @staticmethod
    def _is_shared(variables: dict[str, Any], one: str, other: str) -> bool:
        first, second = variables[one], variables[other]
        return first is second or next(first.parameters(), one) is next(second.parameters(), other)


def _variable_of(thing: Any) -> str:
    """Return the name of the variable, or of the attribute of one, that holds an object; nothing if there is none."""
    found = (name for variables in _users_variables() for name, value in within(variables) if value is thing)
    return next(found, "")


def _calls_of_functions(scheduler: LRScheduler) -> int | None:
    """Return how many calls the functions of a LambdaLR are made for: what they refer to by such a name."""
    for function in getattr(scheduler, "lr_lambdas", ()):
        named = dict(getattr(function, "keywords", {}))
        if isinstance(function, FunctionType):
            named |= {name: function.__globals__.get(name) for name in function.__code__.co_names}
            named |= _nonlocals(function)
        for name, value in named.items():
            if isinstance(value, int) and _CALLS.fullmatch(name.lower()):
                return value
    return None


def _planned_epochs() -> int | None:
    """Return the number of epochs that a variable or a setting of the program says it will train."""
    found = (
        value
        for variables in _users_variables()
        for path, value in within(variables)
        if isinstance(value, int) and _EPOCHS.fullmatch(re.split(r"\W+", path.strip("']"))[-1].lower())
    )
    return next((each for each in found if each > 1), None)


def _line() -> str:
    line = current_line()
    return "" if line is None else str(line)


def _address(tensor: Tensor) -> int:
    """Return where a tensor's values are; 0 if that is not known."""
    try:
        return int(tensor.data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _is_own_memory(given: Mapping[str, Any], module: nn.Module) -> bool:
    """Return whether a state is the very memory of the module that loads it."""
    pairs = [
        (given[name], own)
        for name, own in module.named_parameters()
        if isinstance(given.get(name), Tensor) and own.numel()
    ]
    return bool(pairs) and all(_address(one) == _address(own) != 0 for one, own in pairs[:_COMPARED])


def _shared_tensor(state: Any, module: nn.Module) -> Tensor | None:
    """Return a tensor of a state dict that is a view of a parameter, and not the parameter itself."""
    if not isinstance(state, Mapping):
        return None
    for name, own in module.named_parameters():
        tensor = state.get(name)
        if isinstance(tensor, Tensor) and tensor is not own and own.numel() and _address(tensor) == _address(own) != 0:
            return tensor
    return None


def _statistics(module: nn.Module) -> list[Tensor]:
    norms = (each for each in module.modules() if isinstance(each, _BatchNorm))
    return [each.running_mean for each in norms if each.running_mean is not None]


def _tensors(saved: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(saved, Tensor):
        yield saved
    elif depth and isinstance(saved, Mapping):
        for each in list(saved.values())[:1000]:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(saved, list | tuple):
        for each in saved[:1000]:
            yield from _tensors(each, depth - 1)


# ---------------------------------------------------------------------- what was there before


def _held_out_name() -> str:
    """Return a name of validation or test data in the user's line that is running, such as `test_loader`."""
    line = current_line()
    names = re.findall(r"[A-Za-z_]\w*", "" if line is None else line.text)
    return next((name for name in names if is_held_out(name)), "")


def _users_variables() -> Iterator[dict[str, Any]]:
    """Yield the variables of the user's functions that are running, innermost first."""
    return (variables for _, variables in _users_functions())


def _users_functions() -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code and the variables of the user's functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None and found < _MAX_SCOPES:
        if is_users(frame.f_code.co_filename) and not _inspects_itself(frame.f_code):
            found += 1
            variables: Mapping[str, Any] = frame.f_locals
            yield frame.f_code, dict(variables)
            # Python up to 3.12 keeps the copy that it makes for us, and all it refers to, as long as the function runs.
            if (
                isinstance(variables, dict)
                and sys.getrefcount(variables) <= _OWN_REFERENCES
                and frame.f_code.co_flags & CO_OPTIMIZED
            ):
                variables.clear()
        frame = frame.f_back


@lru_cache(maxsize=256)
def _inspects_itself(code: CodeType) -> bool:
    """Return whether a function looks at its own variables, or lets others do so."""
    return not _INSPECTING.isdisjoint(code.co_names) and any(
        each.argval in (_OF_FRAMES if each.opname.endswith(("_ATTR", "_METHOD")) else _INSPECTING)
        for each in dis.get_instructions(code)
    )


def _states(name: str, value: dict[Any, Any]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the dicts of tensors by name in a variable: a state dict, or a checkpoint that holds one."""
    for key, each in ((name, value), *((f"{name}[{key!r}]", inner) for key, inner in list(value.items())[:100])):
        if isinstance(each, dict):
            tensors = {k: v for k, v in list(each.items())[:10_000] if isinstance(k, str) and isinstance(v, Tensor)}
            if len(tensors) > 1:
                yield key, tensors


def _unloaded_prefix(given: Mapping[str, Tensor], module: nn.Module) -> str | None:
    """Return the prefix by which the names of a checkpoint differ from those of a model that has none of its values.

    A minus before it if the checkpoint lacks the prefix.
    """
    own = dict(_own_tensors(module))
    if not own or any(name in own for name in given):
        return None
    first = next(iter(given))
    more = [first.removesuffix(name) for name in own if first.endswith(f".{name}")]
    less = [name.removesuffix(first) for name in own if name.endswith(f".{first}")]
    for prefix in more:
        pairs = [(tensor, own.get(name.removeprefix(prefix))) for name, tensor in given.items()]
        if _fits_but_differs(pairs):
            return prefix
    for prefix in less:
        if _fits_but_differs([(tensor, own.get(prefix + name)) for name, tensor in given.items()]):
            return f"-{prefix}"
    return None


def _is_frozen(value: Any) -> bool:
    """Return whether a value is a network that does not learn: a teacher, or a network whose features are compared."""
    parameters = list(value.parameters())[:_MAX_HELD] if isinstance(value, nn.Module) else []
    return bool(parameters) and not any(each.requires_grad for each in parameters)


def _is_like(given: Mapping[str, Tensor], module: nn.Module) -> bool:
    """Return whether a state has the names and shapes of a model: it is one of that model at another time."""
    return all(name in given and given[name].shape == own.shape for name, own in module.named_parameters())


def _renamed(given: Mapping[str, Any], own: dict[str, Tensor], result: Any) -> int:
    """Return how many tensors a model did not take that fit ones it lacks, but for the first part of their names."""
    lacking = {name.partition(".")[2]: own[name].shape for name in getattr(result, "missing_keys", ()) if name in own}
    left = ((name.partition(".")[2], given[name]) for name in getattr(result, "unexpected_keys", ()))
    return sum("." in tail and lacking.get(tail) == getattr(each, "shape", ()) for tail, each in left)


def _fits_but_differs(pairs: list[tuple[Tensor, Tensor | None]]) -> bool:
    fitting = [(one, own) for one, own in pairs if own is not None and one.shape == own.shape]
    if len(fitting) < 2 or 2 * len(fitting) < len(pairs):
        return False
    with torch.no_grad():
        # Constants, such as the zeros of a fresh bias, are equal in any two models.
        compared = [(one, own) for one, own in fitting if one.is_floating_point() and one.device.type != "meta"]
        compared = [(one, own) for one, own in compared[: 4 * _COMPARED] if bool((one != one.flatten()[:1]).any())]
        same = (torch.equal(one.to("cpu"), own.to("cpu", one.dtype)) for one, own in compared[:_COMPARED])
        return bool(compared) and not any(same)


def _order(sampler: Any) -> tuple[int, int] | None:
    """Return what a DistributedSampler that shuffles seeds its order by: its seed, and what `set_epoch` has set."""
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return None  # a subclass that draws in another way may take its order from elsewhere
    return (int(sampler.seed), int(sampler.epoch)) if sampler.shuffle else None


def _nonlocals(function: FunctionType) -> dict[str, Any]:
    """Return the variables of an enclosing function that a function uses, as far as they have a value yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _classes(dataset: Any) -> str | None:
    """Return which number each class of a data set has, a line for each, as far as it says so as torchvision's do."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    own = getattr(dataset, "__dict__", {})  # a property may run code of the program's
    numbers, names = own.get("class_to_idx"), own.get("classes")
    if not isinstance(numbers, Mapping):
        numbers = {name: at for at, name in enumerate(names)} if isinstance(names, list | tuple) else {}
    known = sorted((str(name), number) for name, number in numbers.items() if isinstance(number, int))
    return "\n".join(f"{number} {name}" for name, number in known[:_MAX_CLASSES]) or None


def _hidden_samples(dataset: Any) -> int | None:
    """Return how many items a dataset holds in each of its lists, where its length counts the lists instead."""
    try:
        length = len(dataset)
        if length > _MAX_FIELDS:
            return None
        fields = [each for each in vars(dataset).values() if isinstance(each, list | tuple) and len(each) == length]
        sizes = [{len(item) for item in each} for each in fields]
    except TypeError:
        return None
    return next((min(each) for each in sizes if len(each) == 1 and min(each) > length > 0), None)
