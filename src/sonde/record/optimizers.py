"""Find steps: one call of an optimizer's `step` that really steps is one step of the run.

Process-wide optimizer hooks serve optimizers that were handed in and, where none was, any optimizer that turns out to
own a watched parameter. Nothing is left on the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor
from torch.optim import Optimizer

from sonde.hooks.guard import Guard, Handle, is_capturing, remove_all
from sonde.hooks.on_step import has_closure, on_step
from sonde.record.governor import EVERYTHING, PARAMETERS
from sonde.record.kinds import scale_handed_over, skip_flag
from sonde.record.parameters import ParameterTable, WatchedParameter
from sonde.stats.protocol import Recorder

# What is worth a curve of its own if a parameter group has it.
HYPERPARAMETERS: Final = ("lr", "momentum", "betas", "weight_decay", "eps")


@dataclass(frozen=True, slots=True)
class Wants:
    """What is measured at an optimizer step."""

    parameters: bool
    gradients: bool
    updates: bool
    state: bool


@dataclass(slots=True, eq=False)
class WatchedOptimizer:
    """An optimizer with the entries it owns and how often it has stepped."""

    optimizer: Optimizer
    name: str
    entries: list[WatchedParameter]
    size: int
    steps: int = 0
    recording: bool = False
    observed: bool = False
    """Whether the observer takes part in the step."""
    in_step: bool = False


class StepObserver(Protocol):
    """Looks at steps beyond parameters and gradients."""

    def before_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        """Look before an optimizer steps."""

    def after_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        """Look after an optimizer has stepped, or was held back."""


class OptimizerTap:
    """Measures parameters, gradients and updates around every step, then says that the step has ended.

    `mark` is called where the optimizer's own work begins and ends, so that it can be timed without Sonde's.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        table: ParameterTable,
        recorder: Recorder,
        guard: Guard,
        *,
        wants: Wants,
        level: Callable[[int], int],
        before_step: Callable[[], None],
        after_step: Callable[[], None],
        mark: Callable[[str], None],
        steps_before: int = 0,
        observer: StepObserver | None = None,
    ) -> None:
        self.stepped = 0
        self._discover = not optimizers
        self._table = table
        self._recorder = recorder
        self._wants = wants
        self._level = level
        self._before_step = before_step
        self._after_step = after_step
        self._mark = mark
        self._steps_before = steps_before
        self._observer = observer
        self._watched: dict[int, WatchedOptimizer] = {}
        self._orphans: list[WatchedParameter] = list(table)
        self._sites: dict[str, int] = {}
        for optimizer in optimizers:
            self._adopt(optimizer)
        self._before = guard.wrap("before optimizer steps", self._begin)
        self._after = guard.wrap("after optimizer steps", self._end)
        self._handles: list[Handle] = []

    @property
    def number(self) -> int:
        """How many optimizers step in a round of the loop, as far as is known; at least 1."""
        return max(1, len(self._watched))

    def attach(self) -> None:
        """Begin to listen."""
        self._handles = on_step(self._before, self._after)

    def remove(self) -> None:
        """Stop listening and forget the optimizers."""
        remove_all(self._handles)
        self._watched.clear()
        self._orphans = []

    def measured_gradients(self, optimizer: Optimizer) -> list[int] | None:
        """Return the sites of all gradients of an optimizer that is about to step; None if not all were reported."""
        watched = self._watched.get(id(optimizer))
        if watched is None or not (watched.in_step and watched.recording and self._wants.gradients):
            return None
        if len(watched.entries) != watched.size:
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
            self._table.see_values([entry for entry in self._orphans if entry.seen_version != entry.parameter._version])

    def see_skipped(self, optimizer: Optimizer) -> None:
        """Report the gradients of a step that a gradient scaler held back."""
        watched = self._watched.get(id(optimizer)) or self._adopt_if_ours(optimizer)
        if watched is not None and self._wants.gradients:
            self._table.see_gradients(watched.entries)
        if watched is not None and self._observer is not None:
            due = self._level(watched.steps + 1) >= EVERYTHING
            self._observer.before_step(watched, False, due)
            self._observer.after_step(watched, False, due)

    def _adopt(self, optimizer: Optimizer) -> WatchedOptimizer:
        parameters = _parameters(optimizer)
        name = "optimizer" if not self._watched else f"optimizer{len(self._watched) + 1}"
        watched = WatchedOptimizer(optimizer, name, self._table.of(parameters), len(parameters))
        watched.steps = self._steps_before
        self._watched[id(optimizer)] = watched
        owned = {id(entry.parameter) for known in self._watched.values() for entry in known.entries}
        self._orphans = self._table.without(owned)
        return watched

    def _adopt_if_ours(self, optimizer: Optimizer) -> WatchedOptimizer | None:
        ours = self._discover and self._table.of(_parameters(optimizer))
        return self._adopt(optimizer) if ours else None

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watched.get(id(optimizer)) or self._adopt_if_ours(optimizer)
        if watched is None:
            return
        if is_capturing():
            self._table.distrusts_versions = True  # replays of this step will not be counted
            return
        self._before_step()
        watched.in_step = True
        watched.steps += 1
        level = self._level(watched.steps)
        watched.recording, watched.observed = level >= PARAMETERS, level >= EVERYTHING
        if watched.recording:
            self._mark("")
            self._follow_new_groups(watched)
        closure = has_closure(args, kwargs)
        if self._observer is not None:
            self._observer.before_step(watched, closure, watched.observed)
        if not watched.recording:
            return
        # With a closure the forward and backward happen inside the step: what `grad` holds now is of the last step.
        if self._wants.gradients and not closure:
            self._see_gradients(watched)
        if self._wants.updates:
            self._table.refresh_shadows(watched.entries)
        self._put_hyperparameters(watched)
        self._mark("optimizer")

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watched.get(id(optimizer))
        if watched is None or not watched.in_step:
            return
        watched.in_step = False
        self.stepped += 1
        closure = has_closure(args, kwargs)
        if watched.recording:
            self._mark("")
            if self._wants.gradients and closure:
                self._see_gradients(watched)
            self._see_parameters(watched)
            self.see_orphans()
        if self._observer is not None:
            self._observer.after_step(watched, closure, watched.observed)
        self._after_step()

    def _see_gradients(self, watched: WatchedOptimizer) -> None:
        self._table.see_gradients(watched.entries)
        # A fused optimizer under a gradient scaler is handed scaled gradients and unscales them itself, on the device.
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

    def _see_parameters(self, watched: WatchedOptimizer) -> None:
        if self._wants.updates:
            self._table.see_changes(watched.entries)
        elif self._wants.parameters:
            self._table.see_values(watched.entries)
        if self._wants.state:
            self._table.see_state(watched.entries, watched.optimizer.state)

    def _follow_new_groups(self, watched: WatchedOptimizer) -> None:
        parameters = _parameters(watched.optimizer)
        if len(parameters) != watched.size:
            watched.entries, watched.size = self._table.of(parameters), len(parameters)

    def _put_hyperparameters(self, watched: WatchedOptimizer) -> None:
        for index, group in enumerate(watched.optimizer.param_groups):
            for key in HYPERPARAMETERS:
                if key in group:
                    self._put_number(f"{watched.name}.group{index}.{key}", group[key])

    def _put_number(self, name: str, value: Any) -> None:
        if isinstance(value, tuple | list):
            for index, item in enumerate(value):
                self._put_number(f"{name}{index}", item)
        elif isinstance(value, Tensor):
            self._recorder.see(self._site(name), value)
        elif isinstance(value, int | float):
            self._recorder.put(self._site(name), float(value))

    def _site(self, name: str) -> int:
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = self._recorder.site(name, "scalar")
        return site


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
