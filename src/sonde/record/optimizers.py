"""Watch the optimizers that step the watched parameters, and find where a training iteration ends.

Process-wide hooks see the steps of every torch optimizer, so it does not matter which object the user passed in, if
any: the optimizer that really steps is found when it steps. Where one steps inside another one's `step`, the inner one
is watched. Optimizers that hold no watched parameter are ignored. Nothing is left on the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor
from torch.optim import Optimizer

from sonde.hooks.guard import Guard, Handle, backward_id, is_capturing, remove_all
from sonde.hooks.on_backward import after_backward
from sonde.hooks.on_step import has_closure, is_inside_step, on_step
from sonde.record.governor import PARAMETERS
from sonde.record.kinds import InBackward, parameters_of, scale_handed_over, see_through, skip_flag
from sonde.record.parameters import ParameterTable, WatchedParameter
from sonde.record.rhythm import Rhythm
from sonde.stats.protocol import Recorder

# What is worth a curve of its own if a parameter group has it.
HYPERPARAMETERS: Final = ("lr", "momentum", "betas", "weight_decay", "eps")
_MOST_RATES: Final = 16  # parameter groups whose learning rates are compared at steps that are not recorded


@dataclass(frozen=True, slots=True)
class Wants:
    """What is measured at an optimizer step."""

    parameters: bool
    gradients: bool
    updates: bool
    state: bool


_OF_ITS_OWN: Final = 2
"""Steps after which an optimizer can be replaced by one of the same parameters: before, they may take turns."""


@dataclass(slots=True, eq=False)
class WatchedOptimizer:
    """An optimizer with the entries it owns and how often it has stepped.

    It is held weakly: a program that creates a new optimizer in place of this one releases it.
    """

    reference: Callable[[], Any]
    name: str
    entries: list[WatchedParameter]
    size: int
    steps: int = 0
    before: int = 0
    """How many of them were taken by optimizers in whose place it is."""
    stepped: bool = False
    """Whether it has stepped since it is watched."""
    replaced: int = 0
    """How many optimizers that had stepped with the same parameters before have been dropped by the program."""
    recording: bool = False
    """Whether the observer takes part in the step."""
    rates: list[Any] = field(default_factory=list)
    """The learning rates of its groups at the last step that was only counted."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; None once the program has dropped it."""
        return self.reference()


class StepObserver(Protocol):
    """Looks at steps beyond parameters and gradients."""

    def before_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        """Look before an optimizer steps."""

    def after_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        """Look after an optimizer has stepped, or was held back."""

    def drop(self, name: str) -> None:
        """Handle an optimizer that turns out not to step its parameters."""


class Iterations(Protocol):
    """What is done with the training iterations that are found."""

    def begin_step(self) -> None:
        """Begin the next iteration if the last one is over."""

    def end_step(self, *, skipped: bool = False) -> None:
        """End the present iteration."""

    def continue_step(self) -> None:
        """Handle an optimizer step that does not end the iteration: another optimizer is expected to step."""

    def reopen_step(self) -> None:
        """Continue the iteration that ended last."""

    def skip_step(self) -> None:
        """Handle an optimizer step that a gradient scaler has skipped."""

    def is_held_back(self) -> bool:
        """Return whether the present optimizer step is held back."""

    def end_dozed_step(self) -> None:
        """End an iteration that is only counted, which no pass of a model may have begun."""

    def wake_up(self) -> None:
        """Look at the present iteration after all."""


@dataclass(slots=True)
class _Present:
    """The step that is being taken, from the first hook to the second."""

    watched: WatchedOptimizer
    optimizer: Any
    depth: int = 0
    """How often the optimizer's `step` has called itself, as `super().step()` does."""
    inner: list[Optimizer] = field(default_factory=list)
    """Other optimizers that have stepped within it."""


class OptimizerTap:
    """Measures parameters, gradients and updates around every step, and reports where iterations end.

    `mark` is called where the optimizer's own work begins and ends, so that it can be timed without Sonde's. `ours`
    holds the ids of all parameters of the watched models, measured or not.
    """

    def __init__(
        self,
        given: Sequence[Optimizer],
        wrappers: Iterable[Any],
        table: ParameterTable,
        recorder: Recorder,
        guard: Guard,
        *,
        ours: set[int],
        wants: Wants,
        level: Callable[[int], int],
        iterations: Iterations,
        mark: Callable[[str], None],
        steps_before: int = 0,
        observer: StepObserver | None = None,
    ) -> None:
        self.is_scaled = False
        """Whether a gradient scaler decides about steps."""
        self.stepped = 0
        self._ours = ours
        self._table = table
        self._recorder = recorder
        self._wants = wants
        self._level = level
        self._iterations = iterations
        self._mark = mark
        self._steps_before = steps_before
        self._observer = observer
        self._watched: dict[int, WatchedOptimizer] = {}
        self._displaced: dict[int, Callable[[], Any]] = {}
        """Optimizers that still exist, though another steps all of their parameters."""
        self._take_turns = False
        """Whether one of those has stepped again: several optimizers step the same parameters."""
        self._seen_through: dict[int, Any] = {id(each): _weak(each) for each in wrappers}
        self._names = 0
        self._orphans: list[WatchedParameter] = list(table)
        self._sites: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        """The learning rates that were put last."""
        self._present: _Present | None = None
        self._group: _Group | None = None
        self._all_skipped = True
        self._counts: dict[str, int] = {}
        self._seen_orphans: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Gradients and their versions, reported in this iteration though no known optimizer owned the parameters."""
        for optimizer in given:
            self._adopt(optimizer)
        self.rhythm = Rhythm(watched.name for watched in self._watched.values() if watched.size)
        self._guard = guard
        self._before = guard.wrap("before optimizer steps", self._begin)
        self._after = guard.wrap("after optimizer steps", self._end)
        self._handles: list[Handle] = []

    @property
    def counts(self) -> dict[str, int]:
        """How many steps each optimizer has taken, by its name in the run."""
        return self._counts | {watched.name: watched.steps for watched in self._watched.values() if watched.stepped}

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer is in the middle of its step, perhaps in a closure."""
        return self._present is not None

    def attach(self) -> None:
        """Begin to listen."""
        self._handles = on_step(self._before, self._after, during="awake")
        wrap = self._guard.wrap
        self._handles += on_step(
            wrap("before optimizer steps", self._begin_asleep),
            wrap("after optimizer steps", self._end_asleep),
            during="asleep",
        )

    def remove(self) -> None:
        """Stop listening and forget the optimizers."""
        remove_all(self._handles)
        self._counts = self.counts
        self._watched.clear()
        self._seen_through.clear()
        self._orphans, self._present, self._group = [], None, None

    def measured_gradients(self, optimizer: Optimizer) -> list[int] | None:
        """Return the sites of all gradients of an optimizer that is about to step; None if not all were reported."""
        present = self._present
        if present is None or present.optimizer is not optimizer:
            return None
        watched = present.watched
        if not (watched.recording and self._wants.gradients) or len(watched.entries) != watched.size:
            return None
        return [entry.gradient_site for entry in watched.entries if entry.parameter.grad is not None]

    def see_initial(self) -> None:
        """Report all parameters as they are before any step."""
        if self._wants.parameters:
            self._table.see_values(list(self._table))

    def see_orphans(self) -> None:
        """Report what no known optimizer owns: gradients if there are any, values that were written to."""
        if self._wants.gradients:
            self._table.see_gradients(self._orphans)
        if self._wants.parameters:
            self._table.see_values([entry for entry in self._orphans if entry.seen_version != entry.version])

    def _see_orphans_once(self) -> None:
        """Report what no known optimizer owns; one that turns out to own it does not report the gradients again."""
        self._orphans, all_of_them = [each for each in self._orphans if not self._is_seen(each)], self._orphans
        self.see_orphans()
        self._orphans = all_of_them
        for entry in all_of_them:
            if (grad := entry.parameter.grad) is not None:
                self._seen_orphans[id(entry)] = (weakref.ref(grad), grad._version)

    def _is_seen(self, entry: WatchedParameter) -> bool:
        seen, version = self._seen_orphans.get(id(entry), (None, 0))
        grad = entry.parameter.grad
        return seen is not None and grad is not None and seen() is grad and grad._version == version

    def see_own_gradients(self) -> None:
        """Report the gradients, in a loop without a torch optimizer."""
        if self._wants.gradients:
            self._table.see_gradients(list(self._table))

    def see_own_updates(self) -> None:
        """Report the parameters and how they have changed since the last time, in a loop without a torch optimizer."""
        entries = [entry for entry in self._table if entry.is_ready()]
        if self._wants.updates and all(entry.shadow_version >= 0 for entry in entries if entry.shadow is not None):
            self._table.see_changes(entries)
        elif self._wants.parameters:
            self._table.see_values(entries)
            self._table.refresh_shadows(entries)

    # ------------------------------------------------------------------ which optimizer steps

    def _find(self, optimizer: Optimizer) -> WatchedOptimizer | None:
        """Return what is watched of an optimizer that is about to step; None if it has no watched parameter."""
        key = id(optimizer)
        watched = self._watched.get(key)
        if watched is not None and watched.optimizer is optimizer:
            if not watched.stepped:  # another may have been taken for the one that steps some of its parameters
                watched.entries = self._table.of(parameters_of(optimizer))
            return watched if watched.entries or watched.stepped or not self._has_owner() else None
        if key in self._seen_through and self._seen_through[key]() is optimizer:
            return None
        parameters = parameters_of(optimizer)
        if all(id(parameter) not in self._ours for parameter in parameters):
            return None
        if self._wraps_known(optimizer):
            self._seen_through[key] = _weak(optimizer)
            return None
        return self._take_over(optimizer, parameters)

    def _wraps_known(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer only passes its steps on to others, which are watched."""
        found = see_through([optimizer])
        return bool(found.wrappers) and all(id(each) in self._watched for each in found.optimizers)

    def _has_owner(self) -> bool:
        """Return whether an optimizer that holds watched parameters has stepped."""
        return any(watched.stepped and watched.entries for watched in self._watched.values())

    def _adopt(self, optimizer: Any, name: str = "") -> WatchedOptimizer:
        parameters = parameters_of(optimizer)
        if not name:
            self._names += 1
            name = "optimizer" if self._names == 1 else f"optimizer{self._names}"
        watched = WatchedOptimizer(_weak(optimizer), name, self._table.of(parameters), len(parameters))
        watched.steps = watched.before = self._steps_before
        self._watched[id(optimizer)] = watched
        self._find_orphans()
        return watched

    def _find_orphans(self) -> None:
        owned = {id(entry.parameter) for known in self._watched.values() for entry in known.entries}
        self._orphans = self._table.without(owned)

    def _take_over(self, optimizer: Optimizer, parameters: list[Tensor]) -> WatchedOptimizer:
        """Watch an optimizer that was not known, in place of one that does not step these parameters."""
        own = set(map(id, parameters))
        displaced = self._displaced.pop(id(optimizer), None)
        if displaced is not None and displaced() is optimizer:
            self._take_turns = True
            for known in self._watched.values():
                known.replaced -= known.replaced > 0 and {id(entry.parameter) for entry in known.entries} == own
            return self._adopt(optimizer)
        for key, known in list(self._watched.items()):
            theirs = {id(entry.parameter) for entry in known.entries}
            is_gone = known.optimizer is None
            if known.stepped and not is_gone:
                # Sonde holds those that it was given, and what the program has dropped may wait to be collected.
                if theirs == own and known.steps - known.before >= _OF_ITS_OWN and not self._take_turns:
                    self._displaced[key] = known.reference
                    return self._replace(key, known, optimizer)
                continue  # both step these parameters
            if theirs <= own and (theirs or is_gone or not known.stepped):
                return self._replace(key, known, optimizer)
            if not known.stepped and theirs & own:
                self._narrow(key, known, own)
        return self._adopt(optimizer)

    def _replace(self, key: int, known: WatchedOptimizer, optimizer: Optimizer) -> WatchedOptimizer:
        del self._watched[key]
        watched = self._adopt(optimizer, known.name)
        watched.replaced = known.replaced + known.stepped
        watched.steps = watched.before = known.steps
        return watched

    def _narrow(self, key: int, known: WatchedOptimizer, taken: set[int]) -> None:
        """Take parameters from an optimizer that was passed in but does not step them."""
        known.entries = [entry for entry in known.entries if id(entry.parameter) not in taken]
        if not known.entries:
            del self._watched[key]
            self.rhythm.forget(known.name)
            if self._observer is not None:
                self._observer.drop(known.name)

    def _see_through(self, present: _Present) -> None:
        """Watch the optimizers that step inside another one's step instead of that one, from the next step on."""
        inner = {id(parameter) for each in present.inner for parameter in parameters_of(each)}
        outer = present.watched
        if not outer.entries or not inner.issuperset(id(entry.parameter) for entry in outer.entries):
            return
        del self._watched[id(present.optimizer)]
        self._seen_through[id(present.optimizer)] = _weak(present.optimizer)
        self.rhythm.forget(outer.name)
        if len(present.inner) > 1 and self._observer is not None:
            self._observer.drop(outer.name)
        for each in present.inner:
            self._adopt(each, outer.name if each is present.inner[0] else "").steps = outer.steps

    # ------------------------------------------------------------------ steps

    def open_step(self, watched: WatchedOptimizer) -> None:
        """Begin the next iteration if the optimizer that is about to step has stepped in the present one."""
        if self.rhythm.repeats(watched.name):
            self.end_iteration()
        elif self.rhythm.is_late(watched.name):
            self.rhythm.rejoin()
            self._iterations.reopen_step()
        if not self.rhythm.has_stepped:
            self._seen_orphans.clear()
        self._iterations.begin_step()

    def end_iteration(self) -> None:
        """End the present iteration, if an optimizer has stepped in it."""
        self.settle()
        if self.rhythm.has_stepped:
            self.rhythm.end()
            self._iterations.end_step(skipped=self._all_skipped)
            self._all_skipped = True

    def _note(self, watched: WatchedOptimizer, *, skipped: bool = False) -> None:
        watched.stepped = True
        self.stepped += not skipped
        self._all_skipped &= skipped or self._iterations.is_held_back()
        if self.rhythm.note(watched.name):
            self.end_iteration()
        else:
            self._iterations.continue_step()

    def owns(self, optimizer: Any) -> bool:
        """Return whether an optimizer that is about to step holds watched parameters."""
        return self._find(optimizer) is not None

    def open_scaled(self, optimizer: Any) -> None:
        """Begin a step that a gradient scaler may hold back."""
        self.is_scaled = True
        self._iterations.wake_up()
        watched = self._find(optimizer)
        if watched is None:
            self._iterations.begin_step()
        else:
            self.open_step(watched)

    def see_skipped(self, optimizer: Optimizer) -> None:
        """Report the gradients of a step that a gradient scaler held back."""
        watched = self._find(optimizer)
        if watched is None:
            return
        if self._wants.gradients:
            self._table.see_gradients(watched.entries)
        if self._observer is not None:
            due = self._level(watched.steps + 1) >= PARAMETERS
            self._observer.before_step(watched, False, due)
            self._observer.after_step(watched, False, due)
        self._iterations.skip_step()
        self._note(watched, skipped=True)

    @property
    def is_simple(self) -> bool:
        """Whether one optimizer steps once in every iteration, which ends with it, and no gradient scaler is in use."""
        is_by_torch = self._group is None and not self.is_scaled and not self.rhythm.by_hand
        return is_by_torch and len(self._watched) == 1 and bool(self.stepped)

    def _begin_asleep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Wake up if a step that is only counted is not the usual one; it then begins as any other."""
        is_usual = id(optimizer) in self._watched and not has_closure(args, kwargs)
        if not is_usual and not self._is_other(optimizer):
            self._iterations.wake_up()

    def _end_asleep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watched.get(id(optimizer))
        if watched is not None:
            watched.steps += 1
            self.stepped += 1
            self._iterations.end_dozed_step()
            if not _are_same(optimizer.param_groups, watched.rates):
                watched.rates = [group.get("lr") for group in optimizer.param_groups]
                self._put_changed_rates(watched)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        present = self._present
        if present is not None:
            if is_inside_step(present.optimizer):
                self._begin_inside(present, optimizer)
                return
            self._present = None  # its step has raised
        if is_capturing():
            self._table.distrusts_versions = True  # replays of this step will not be counted
            return
        if backward_id() != -1 and self._begin_in_backward(optimizer):
            return
        watched = self._find(optimizer)
        if watched is not None:
            self.settle()
            self._present = _Present(watched, optimizer)
            self.open_step(watched)
            self._begin_step(watched, closure=has_closure(args, kwargs))

    def _begin_inside(self, present: _Present, optimizer: Optimizer) -> None:
        if optimizer is present.optimizer:
            present.depth += 1
        elif any(id(parameter) in self._ours for parameter in parameters_of(optimizer)):
            present.inner.append(optimizer)

    def _begin_step(self, watched: WatchedOptimizer, *, closure: bool) -> None:
        watched.steps += 1
        watched.recording = self._level(watched.steps) >= PARAMETERS
        if watched.recording:
            self._mark("")
            self._follow_new_groups(watched)
        if self._observer is not None:
            self._observer.before_step(watched, closure, watched.recording)
        if not watched.recording:
            self._put_changed_rates(watched)
            return
        # With a closure the forward and backward happen inside the step: what `grad` holds now is of the last step.
        if self._wants.gradients and not closure:
            self._see_gradients(watched)
        if self._wants.updates:
            self._table.refresh_shadows(watched.entries)
        self._put_hyperparameters(watched)
        self._mark("optimizer")

    def _is_other(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has nothing to do with the watched models."""
        return not any(id(parameter) in self._ours for parameter in parameters_of(optimizer))

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._group is not None and self._group.end(optimizer):
            self._see_parameters(self._group.watched, self._table.of(parameters_of(optimizer)), optimizer.state)
            return
        present = self._present
        if present is None or present.optimizer is not optimizer:
            return
        if present.depth:
            present.depth -= 1
            return
        self._present, watched = None, present.watched
        closure = has_closure(args, kwargs)
        if watched.recording:
            self._mark("")
            if self._wants.gradients and closure:
                self._see_gradients(watched)
            self._see_parameters(watched, watched.entries, optimizer.state)
            self._see_orphans_once()
        if self._observer is not None:
            self._observer.after_step(watched, closure, watched.recording)
        if present.inner:
            self._see_through(present)
        self._note(watched)

    # ------------------------------------------------------------------ steps inside the backward pass

    def _begin_in_backward(self, optimizer: Optimizer) -> bool:
        """Begin the step of an optimizer that steps inside the backward pass; return whether it is watched."""
        entries = self._table.of(parameters_of(optimizer))
        if not entries:
            return False
        group = self._group
        if group is None:
            group = self._group = self._make_group(optimizer)
        watched = group.watched
        if group.facade.add(optimizer):
            self._take_members(group)
        if id(optimizer) in group.done:
            self._end_group(group)
        if not group.done:
            self.open_step(watched)
            watched.steps += 1
            watched.recording = self._level(watched.steps) >= PARAMETERS
        group.begin(optimizer)
        if watched.recording and self._wants.gradients:
            self._table.see_gradients(entries)
        if watched.recording and self._wants.updates:
            self._table.refresh_shadows(entries)
        return True

    def _make_group(self, optimizer: Optimizer) -> _Group:
        self._handles.append(after_backward(self._guard.wrap("after backward passes", self.settle)))
        facade = InBackward()
        unused = next((known for known in self._watched.values() if not known.stepped), None)
        name = unused.name if unused is not None else ""
        if unused is not None:
            self._watched = {key: known for key, known in self._watched.items() if known is not unused}
        return _Group(facade, self._adopt(facade, name))

    def _take_members(self, group: _Group) -> None:
        """Give the group the parameters of its members, and take them from optimizers that do not step."""
        parameters = parameters_of(group.facade)
        group.watched.entries, group.watched.size = self._table.of(parameters), len(parameters)
        for key, known in list(self._watched.items()):
            if not known.stepped and known is not group.watched:
                self._narrow(key, known, set(map(id, parameters)))
        self._find_orphans()

    def settle(self) -> None:
        """End the step of optimizers that step inside the backward pass, if that pass is over."""
        if self._group is not None and self._group.done and backward_id() == -1:
            self._end_group(self._group)

    def _end_group(self, group: _Group) -> None:
        group.done.clear()
        watched = group.watched
        if watched.recording:
            self._put_hyperparameters(watched)
            self.see_orphans()
        if self._observer is not None:
            self._observer.after_step(watched, False, self._level(watched.steps) >= PARAMETERS)
        self._note(watched)

    # ------------------------------------------------------------------ what is measured

    def _see_gradients(self, watched: WatchedOptimizer) -> None:
        entries = watched.entries
        if self._seen_orphans:
            entries = [entry for entry in entries if not self._is_seen(entry)]
        self._table.see_gradients(entries)
        # A fused optimizer under a gradient scaler gets scaled gradients and unscales them itself, on the device.
        scale = scale_handed_over(watched.optimizer)
        if isinstance(scale, Tensor):
            site = self._site(f"{watched.name}.grad_scale")
            self._recorder.see(site, scale)
            self._recorder.unscale([entry.gradient_site for entry in watched.entries if entry.gradient_site >= 0], site)
        found_inf = skip_flag(watched.optimizer)
        if isinstance(found_inf, Tensor):
            site = self._site(f"{watched.name}.found_inf")
            self._recorder.see(site, found_inf)
            self._recorder.mark_skipped_if(site)

    def _see_parameters(self, watched: WatchedOptimizer, entries: list[WatchedParameter], state: Any) -> None:
        if not watched.recording:
            return
        if self._wants.updates:
            self._table.see_changes(entries)
        elif self._wants.parameters:
            self._table.see_values(entries)
        if self._wants.state:
            self._table.see_state(entries, state)

    def _follow_new_groups(self, watched: WatchedOptimizer) -> None:
        parameters = parameters_of(watched.optimizer)
        if len(parameters) != watched.size:
            watched.entries, watched.size = self._table.of(parameters), len(parameters)

    def _put_hyperparameters(self, watched: WatchedOptimizer) -> None:
        for index, group in enumerate(watched.optimizer.param_groups):
            for key in HYPERPARAMETERS:
                if key in group:
                    self._put_number(f"{watched.name}.group{index}.{key}", group[key])

    def _put_changed_rates(self, watched: WatchedOptimizer) -> None:
        """Put learning rates that have changed: one that is wrong for a single step must not be missed."""
        for index, group in enumerate(watched.optimizer.param_groups[:_MOST_RATES]):
            rate, name = group.get("lr"), f"{watched.name}.group{index}.lr"
            if isinstance(rate, float) and self._rates.get(name) not in (None, rate):
                self._put_number(name, rate)

    def _put_number(self, name: str, value: Any) -> None:
        if isinstance(value, tuple | list):
            for index, item in enumerate(value):
                self._put_number(f"{name}{index}", item)
        elif isinstance(value, Tensor):
            self._recorder.see(self._site(name), value)
        elif isinstance(value, int | float):
            self._recorder.put(self._site(name), float(value))
            if name.endswith(".lr"):
                self._rates[name] = float(value)

    def _site(self, name: str) -> int:
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = self._recorder.site(name, "scalar")
        return site


class _Group:
    """Optimizers that step inside the backward pass, and which of them have stepped in the present one."""

    def __init__(self, facade: InBackward, watched: WatchedOptimizer) -> None:
        self.facade = facade
        self.watched = watched
        self.done: set[int] = set()
        self._stepping: int | None = None

    def begin(self, member: Optimizer) -> None:
        """Note that a member begins to step."""
        self._stepping = id(member)
        self.done.add(self._stepping)

    def end(self, optimizer: Optimizer) -> bool:
        """Return whether this is the end of the step of a member."""
        is_member = self._stepping == id(optimizer)
        if is_member:
            self._stepping = None
        return is_member


def _are_same(groups: list[dict[str, Any]], rates: list[Any]) -> bool:
    """Return whether these are the learning rates of parameter groups."""
    if len(groups) != len(rates):
        return False
    for group, rate in zip(groups, rates, strict=True):  # noqa: SIM110 - in every step, where steps are short
        if group.get("lr") is not rate:
            return False
    return True


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a class with slots
        return lambda: thing
