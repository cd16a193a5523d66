"""Debugging hooks: build them, register them, and run them on a live model or by hand."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from sonde.core.arguments import whole_number
from sonde.debug.hook_types import HookAction, HookTrigger, Occasion, as_names
from sonde.debug.numbers import as_array
from sonde.debug.tensor_stats import compute_stats
from sonde.errors import OptionError, SondeError

logger = logging.getLogger("sonde")

Perform = Callable[[HookAction, Occasion], Any]


@dataclass(slots=True, kw_only=True)
class Hook:
    """A hook. Make one with `HookBuilder`."""

    name: str
    trigger: HookTrigger
    actions: tuple[HookAction, ...]
    layer_patterns: tuple[str, ...] = ()
    max_executions: int | None = None
    enabled: bool = True

    def matches(self, layer: str) -> bool:
        """Return whether the hook is for a layer: one of its patterns matches, or it has none."""
        return not self.layer_patterns or any(matches(pattern, layer) for pattern in self.layer_patterns)


@dataclass(slots=True)
class HookStatistics:
    """How often a hook has run so far, and with what result."""

    executions: int = 0
    failures: int = 0
    total_time: float = 0.0
    last_step: int | None = None
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HookResult:
    """The result of a hook that fired: what each action returned, or the error that stopped it."""

    hook_id: str
    hook_name: str
    layer: str
    step: int
    values: tuple[Any, ...] = ()
    error: str | None = None

    @property
    def success(self) -> bool:
        """Whether all actions went through."""
        return self.error is None


class HookBuilder:
    """Builds a hook step by step.

    Example:
        hook = HookBuilder("Layer Monitor").trigger(HookTrigger.EveryForward).action(HookAction.InspectTensor)
        hook = hook.layer_patterns(["attention.*"]).max_executions(100).build()

    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._trigger: HookTrigger | None = None
        self._actions: list[HookAction] = []
        self._patterns: tuple[str, ...] = ()
        self._max: int | None = None
        self._enabled = True

    def trigger(self, trigger: HookTrigger) -> Self:
        """Set when it fires."""
        if not isinstance(trigger, HookTrigger):
            raise OptionError(f"trigger(...) takes a trigger such as HookTrigger.EveryNSteps(10); got {trigger!r}.")
        self._trigger = trigger
        return self

    def action(self, action: HookAction) -> Self:
        """Add an action."""
        if not isinstance(action, HookAction):
            raise OptionError(f"action(...) takes an action such as HookAction.InspectTensor; got {action!r}.")
        self._actions.append(action)
        return self

    def layer_patterns(self, patterns: Sequence[str] | str) -> Self:
        """Set for which layers it is.

        A pattern must match the whole name, as a glob or as a regular expression: `layer1` is that layer only,
        `attention.*` all names that begin so. `glob:` or `re:` before it allows only that reading.
        """
        self._patterns = as_names("layer_patterns", patterns)
        for pattern in self._patterns:
            matches(pattern, "")  # a malformed pattern raises now
        return self

    def max_executions(self, count: int) -> Self:
        """Set after how many executions it is off."""
        whole_number("max_executions", count)
        self._max = count
        return self

    def enabled(self, enabled: bool) -> Self:
        """Set whether it is on from the start."""
        self._enabled = enabled
        return self

    def build(self) -> Hook:
        """Return the hook.

        Raises:
            OptionError: It has no trigger or no action.

        """
        if self._trigger is None or not self._actions:
            missing = "trigger(...)" if self._trigger is None else "action(...)"
            raise OptionError(f"The hook {self._name!r} is not complete: call {missing} before build().")
        once = 1 if self._trigger.kind == "once" else None
        return Hook(
            name=self._name,
            trigger=self._trigger,
            actions=tuple(self._actions),
            layer_patterns=self._patterns,
            max_executions=self._max if self._max is not None else once,
            enabled=self._enabled,
        )


@dataclass(slots=True)
class _Entry:
    hook: Hook
    statistics: HookStatistics = field(default_factory=HookStatistics)

    def is_live(self) -> bool:
        limit = self.hook.max_executions
        return self.hook.enabled and (limit is None or self.statistics.executions < limit)


class HookManager:
    """Holds hooks and runs them.

    Args:
        perform: Carries out actions; a debug session gives its own.
        clock: Measures how long hooks take.

    """

    def __init__(self, perform: Perform | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._perform = perform or _cannot
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._numbers = itertools.count(1)
        self._callbacks: dict[str, Callable[[Occasion], Any]] = {}
        self.is_enabled = True
        self.step = 0
        self.version = 0
        """Changes whenever hooks are added, removed or switched."""
        self.on_change: Callable[[], None] | None = None
        """Called at each such change, so that a new hook is live from the next pass on."""

    # ------------------------------------------------------------------ keeping

    def register(self, hook: Hook | HookBuilder) -> str:
        """Add a hook, built or ready to be built; return its id."""
        hook = hook.build() if isinstance(hook, HookBuilder) else hook
        if not isinstance(hook, Hook):
            raise OptionError(f"register(hook) takes a hook made with HookBuilder(...).build(); got {hook!r:.80}.")
        number = f"hook-{next(self._numbers)}"
        self._entries[number] = _Entry(hook)
        self._change()
        return number

    def remove(self, hook_id: str) -> bool:
        """Remove a hook; return whether it existed."""
        there = self._entries.pop(hook_id, None) is not None
        self._change()
        return there

    def enable(self, hook_id: str, enabled: bool = True) -> None:
        """Switch a hook on or off.

        Raises:
            OptionError: There is no such hook.

        """
        if hook_id not in self._entries:
            raise OptionError(f"There is no hook {hook_id!r}; there are {', '.join(self._entries) or 'none'}.")
        self._entries[hook_id].hook.enabled = enabled
        self._change()

    def set_enabled(self, enabled: bool) -> None:
        """Switch all hooks on or off."""
        self.is_enabled = enabled
        self._change()

    def _change(self) -> None:
        self.version += 1
        if self.on_change is not None:
            self.on_change()

    def set_step(self, step: int) -> None:
        """Set the current step."""
        self.step = step

    def register_callback(self, name: str, callback: Callable[[Occasion], Any]) -> None:
        """Give a name to a function, for `HookAction.CustomCallback(name)`."""
        self._callbacks[name] = callback

    register_hook = register
    remove_hook = remove
    set_hook_enabled = enable

    @property
    def hooks(self) -> dict[str, Hook]:
        """All hooks by id."""
        return {number: entry.hook for number, entry in self._entries.items()}

    def live_hooks(self) -> list[Hook]:
        """Return the hooks that may still fire."""
        return [entry.hook for entry in self._entries.values() if entry.is_live()] if self.is_enabled else []

    def get_statistics(self) -> dict[str, HookStatistics]:
        """Return what every hook has done, by id."""
        return {number: entry.statistics for number, entry in self._entries.items()}

    # ------------------------------------------------------------------ running

    def execute_hooks(
        self,
        layer: str,
        data: Any,
        shape: Sequence[int] | None = None,
        is_forward: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[HookResult]:
        """Run all hooks that fire for a tensor of a layer.

        An action that fails is reported in its result, in the log and in the statistics, and the others go on. Only
        the actions that are there to interrupt (stop, and a break into the debugger) do.

        Args:
            layer: The layer's name.
            data: The tensor, or a flat list if `shape` is given.
            shape: The shape of a flat list.
            is_forward: Whether it is an output; else it is a gradient.
            metadata: More for conditions: `loss`, `gradient_norm`, `memory_mb`.

        """
        if not self.is_enabled:
            return []
        chosen = [(n, entry) for n, entry in self._entries.items() if entry.is_live() and entry.hook.matches(layer)]
        if not chosen:
            return []
        occasion = self._occasion(layer, data, shape, is_forward, metadata)
        results = (self._ask(number, entry, occasion) for number, entry in chosen)
        return [result for result in results if result is not None]

    def _occasion(
        self, layer: str, data: Any, shape: Sequence[int] | None, is_forward: bool, metadata: Mapping[str, Any] | None
    ) -> Occasion:
        values = data if shape is None else _shaped(as_array(data, f"data of {layer!r}"), tuple(shape), layer)
        return Occasion(
            layer=layer,
            values=values,
            is_forward=is_forward,
            step=self.step,
            shape=tuple(getattr(values, "shape", ())),
            metadata=metadata or {},
            statistics=functools.cache(lambda: asdict(compute_stats(as_array(values, layer)))),
        )

    def _ask(self, number: str, entry: _Entry, occasion: Occasion) -> HookResult | None:
        statistics, hook = entry.statistics, entry.hook
        began = self._clock()
        result = HookResult(hook_id=number, hook_name=hook.name, layer=occasion.layer, step=occasion.step)
        try:
            if not hook.trigger.fires(occasion):
                return None
            statistics.executions += 1
            statistics.last_step = occasion.step
            return replace(result, values=tuple(self._do(action, occasion) for action in hook.actions))
        except Interrupting:
            raise
        except Exception as error:  # noqa: BLE001 - a hook is the user's code, and its fault must not end a training
            statistics.failures += 1
            statistics.last_error = f"{type(error).__name__}: {error}"
            if statistics.failures == 1:
                what = f"the hook {hook.name!r} failed on {occasion.layer}."
                logger.warning("%s\n%s", what, traceback.format_exc().rstrip())
            return replace(result, error=statistics.last_error)
        finally:
            statistics.total_time += self._clock() - began

    def _do(self, action: HookAction, occasion: Occasion) -> Any:
        if action.kind != "custom_callback":
            return self._perform(action, occasion)
        callback = action.callback
        if isinstance(callback, str):
            if callback not in self._callbacks:
                known = ", ".join(self._callbacks) or "none"
                raise OptionError(f"No callback {callback!r} is registered; there are {known}. See register_callback.")
            callback = self._callbacks[callback]
        assert callback is not None
        return callback(occasion)


class Listeners:
    """Functions of the user that are called with alerts. One that fails is reported once, and training continues."""

    def __init__(self) -> None:
        self._all: list[Callable[[dict[str, Any]], Any]] = []
        self._failed: set[int] = set()

    def add(self, listener: Callable[[dict[str, Any]], Any]) -> None:
        """Add a function."""
        if not callable(listener):
            raise OptionError(f"on_alert(...) takes a function of an alert; got {listener!r:.80}.")
        self._all.append(listener)

    def call(self, alert: dict[str, Any]) -> None:
        """Call all with an alert. Only `TrainingStopped`, by which a listener may end the training, is let through."""
        for listener in self._all:
            try:
                listener(alert)
            except Interrupting:
                raise
            except Exception:  # noqa: BLE001 - it is the user's code, and its fault must not end a training
                if id(listener) not in self._failed:
                    self._failed.add(id(listener))
                    logger.warning("a listener of alerts failed.\n%s", traceback.format_exc().rstrip())


class Interrupting(SondeError):
    """Raised by an action that interrupts the training; hooks do not catch it."""


class TrainingStopped(Interrupting):
    """Raised to stop the training. The `with` block of a debug session catches it."""


def matches(pattern: str, layer: str) -> bool:
    """Return whether a pattern matches a whole name, as a glob or as a regular expression.

    >>> matches("attention.*", "attention_layer_1"), matches("layer1", "layer10"), matches("re:l.*", "layer")
    (True, False, True)
    """
    if pattern.startswith("glob:"):
        return fnmatch.fnmatchcase(layer, pattern.removeprefix("glob:"))
    expression = pattern.removeprefix("re:")
    found = _compiled(expression, pattern.startswith("re:"))
    by_expression = found is not None and found.fullmatch(layer) is not None
    return by_expression or (not pattern.startswith("re:") and fnmatch.fnmatchcase(layer, pattern))


@functools.lru_cache(maxsize=1024)
def _compiled(expression: str, must_compile: bool) -> re.Pattern[str] | None:
    try:
        return re.compile(expression)
    except re.error as error:
        if must_compile:
            raise OptionError(f"The pattern 're:{expression}' is not a regular expression: {error}.") from error
        return None  # `*.weight` is a glob and nothing else


def _shaped(array: Any, shape: tuple[int, ...], layer: str) -> Any:
    if array.size != math.prod(shape):
        raise OptionError(f"{array.size} values of {layer!r} do not fill the shape {shape}.")
    return array.reshape(shape)


def _cannot(action: HookAction, occasion: Occasion) -> Any:
    raise OptionError(f"{action.kind} needs a debug session; this manager has none.")
