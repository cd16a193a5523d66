"""Listen to calls of modules, through one pair of process-wide hooks that all listeners share.

Process-wide hooks leave nothing on the user's modules: a watched model can be deep-copied, pickled and compiled as if
Sonde were not there, and a copy of it is not watched by accident. Their price is that torch calls every module of the
process in a slower way as long as there is any. So there is one pair for all listeners, and only while there are any;
idle listeners can be paused. Hooks on a single module are for what needs the named arguments before a call.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sonde.core.forks import after_fork_in_child
from sonde.hooks.guard import (
    Guard,
    Guarded,
    Handle,
    attach_to_guards,
    backward_id,
    detach_from_guards,
    guard_of,
    is_capturing,
    is_compiling,
    keep,
    unless_compiling,
)
from sonde.hooks.names import unwrap

Entry = TypeVar("Entry")
_NOTHING: Final = object()
_MARKS: Final = ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called")
_ByModule = dict[int, tuple[tuple["ModuleCalls[Any] | _Asleep", Any], ...]]
"""By the id of a module: its listeners, each with its entry."""


class _Asleep:
    """What is called of a listener that dozes."""

    take = raised = None

    def __init__(self, before: Guarded) -> None:
        self.before = self.after = before


class _Switch:
    """Turns a process-wide hook off and on again, quickly: that happens in every step.

    Torch keeps marks of hooks that take keyword arguments or are always called in dictionaries of their own. A mark
    that stayed would make it call every module in the slower way.
    """

    def __init__(self, handle: RemovableHandle) -> None:
        marks = [getattr(torch_module, name, {}) for name in _MARKS]
        places = [handle.hooks_dict_ref(), *marks]
        self._entries = [(place, place[handle.id]) for place in places if place is not None and handle.id in place]
        self._id = handle.id
        self._is_on = True

    def turn(self, *, on: bool) -> None:
        """Put the hook where torch looks for it, or take it away."""
        if on is self._is_on:
            return
        self._is_on = on
        for place, entry in self._entries:
            if on:
                place[self._id] = entry
            else:
                place.pop(self._id, None)


class _QuietOfCompile:
    """Keeps torch from warning that a compiled model is called while there are hooks on all modules.

    The hooks here ignore calls that are made twice. Where warnings are errors (`python -W error`), the warning would
    end a program that trains without them.
    """

    def __init__(self) -> None:
        text = "Using `torch.compile(module)` when there are global hooks"
        self._filter = ("ignore", re.compile(re.escape(text)), UserWarning, None, 0)

    def begin(self) -> None:
        """Ignore it, unless the program has such hooks of its own."""
        if not getattr(torch_module, "_has_any_global_hook", bool)():
            cast(list[Any], warnings.filters).insert(0, self._filter)

    def end(self) -> None:
        """Warn again."""
        with contextlib.suppress(ValueError):
            cast(list[Any], warnings.filters).remove(self._filter)


_QUIET: Final = _QuietOfCompile()


class _Pair:
    """The two hooks and their listeners."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._listeners: tuple[ModuleCalls[Any], ...] = ()
        self._everywhere: tuple[ModuleCalls[Any], ...] = ()
        self._begun: _ByModule = {}
        self._ended: _ByModule = {}
        self._tables: dict[tuple[tuple[ModuleCalls[Any], bool, bool], ...], tuple[_ByModule, _ByModule]] = {}
        self.switches: list[_Switch] = []
        """Those of the hooks for the beginnings and the ends of calls."""
        self.dozes_alone: ModuleCalls[Any] | None = None
        """The only listener, if it dozes."""

    def add(self, listener: ModuleCalls[Any]) -> None:
        """Add a listener."""
        if not (self._everywhere or self._listeners):
            _QUIET.begin()
        if listener.is_everywhere:
            self._everywhere = (*self._everywhere, listener)
        else:
            self._listeners = (*self._listeners, listener)
        self.settle()

    def drop(self, listener: ModuleCalls[Any]) -> None:
        """Remove a listener."""
        self._everywhere = tuple(each for each in self._everywhere if each is not listener)
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        self._tables.clear()
        self.settle()
        if not (self._everywhere or self._listeners):
            _QUIET.end()

    def settle(self) -> None:
        """Register the hooks if anyone listens, else remove them."""
        awake = tuple((each, each.is_narrow, each.is_dozing) for each in self._listeners if each.is_awake)
        if awake not in self._tables:  # states come and go with passes and steps
            begun = _put_together(
                (each.asleep if doze else each, each.always if narrow or doze else each.entries)
                for each, narrow, doze in awake
            )
            self._tables[awake] = (
                begun,
                _put_together((each, {} if doze else each.entries) for each, _, doze in awake),
            )
        self._begun, self._ended = self._tables[awake]
        wanted = (bool(self._everywhere or self._begun or self._ended), bool(self._everywhere or self._ended))
        self.dozes_alone = awake[0][0] if len(awake) == 1 and awake[0][2] and not self._everywhere else None
        if any(wanted) and not self.switches:
            self.switches = [
                _Switch(torch_module.register_module_forward_pre_hook(self._before_forward)),
                _Switch(
                    torch_module.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
                ),
            ]
        for switch, on in zip(self.switches, wanted, strict=False):
            switch.turn(on=on)

    def renew_lock(self) -> None:
        """Forget which thread holds the lock: in a forked child that thread does not exist."""
        self.lock = threading.RLock()

    # Under torch.compile these bodies are traced: the first test is constant there, so nothing of Sonde enters the
    # graph. They return None and so never replace an input or an output.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            return
        for each, entry in self._begun.get(id(module), ()):
            each.before(entry, args)
        for each in self._everywhere:
            each.before(module, args)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _NOTHING) -> None:
        if is_compiling():
            return
        if output is _NOTHING:  # after a forward that raised, torch leaves the named arguments out
            self._after_raising(module)
            return
        for each, entry in self._ended.get(id(module), ()):
            if each.take is None or not each.take(module, output):
                each.after(entry, args, kwargs, output)
        for each in self._everywhere:
            each.after(module, args, kwargs, output)

    def _after_raising(self, module: nn.Module) -> None:
        everywhere = tuple((each, module) for each in self._everywhere)
        for each, entry in (*self._ended.get(id(module), ()), *everywhere):
            if each.raised is not None:
                each.raised(entry)


def _put_together(listeners: Iterable[tuple[ModuleCalls[Any] | _Asleep, dict[int, Any]]]) -> _ByModule:
    """Return the listeners of each module, so that a call takes one look-up for all."""
    found: _ByModule = {}
    for each, entries in listeners:
        for key, entry in entries.items():
            found[key] = (*found.get(key, ()), (each, entry))
    return found


_PAIR: Final = _Pair()
after_fork_in_child(_PAIR.renew_lock)


class ModuleCalls(Generic[Entry]):
    """Listens to the calls of some modules, or of all, from `attach` to `remove`.

    Listeners to some modules are called before listeners to all; otherwise in the order in which they attached.

    Args:
        entries: What to hand to `before`, `after` and `raised`, by the id of the module. None listens to every module
            of the process, and hands over the module itself.
        before: Takes an entry and the arguments of a call.
        after: Takes an entry, the arguments, the named arguments and the output of a call that returned.
        raised: Takes the entry of a call that raised an `Exception`. Torch is going through its hooks then: no listener
            may be attached or removed in it. Calls that ended by another exception (Ctrl-C) are not reported.
        always: Keys of modules whose calls are reported to `before` also between `narrow` and `widen`.
        asleep: Is called instead of `before` between `doze` and `wake`.
        take: Takes a module and the output of a call, before `after`, which is left out if it returns True. C code that
            never raises.

    """

    def __init__(
        self,
        entries: Mapping[int, Entry] | None,
        before: Guarded,
        after: Guarded,
        raised: Guarded | None = None,
        always: Collection[int] = (),
        asleep: Guarded | None = None,
        take: Callable[[nn.Module, Any], bool] | None = None,
    ) -> None:
        self.before, self.after, self.raised, self.take = before, after, raised, take
        self.asleep = _Asleep(asleep or before)
        self.is_everywhere = entries is None
        self.entries: dict[int, Entry] = dict(entries or {})
        self.always = {key: entry for key, entry in self.entries.items() if key in always}
        self.is_awake = False
        self.is_narrow = False
        self.is_dozing = False

    def attach(self) -> None:
        """Start listening."""
        attach_to_guards(self, (self.before, self.after, self.raised))
        with _PAIR.lock:
            self.is_awake = True
            _PAIR.add(self)

    def rest(self) -> None:
        """Pause until `wake`; if all listeners are paused, modules are called as if Sonde were not there.

        Only for listeners to some modules.
        """
        self._turn(awake=False)

    def wake(self) -> None:
        """Resume listening."""
        self._turn(awake=True)

    def doze(self) -> None:
        """Report only the beginnings of calls of the modules in `always`, until `wake`."""
        self._turn(awake=True, dozing=True)

    def nap(self, *, on: bool) -> None:
        """In a doze, report no more beginnings until it is called with False: a pass has begun.

        Then the hook for them is taken away, unless others listen.
        """
        with _PAIR.lock:
            if _PAIR.dozes_alone is self:
                _PAIR.switches[0].turn(on=not on)

    def narrow(self) -> None:
        """Report the beginnings of calls only at the modules in `always`, in all threads, until `widen`."""
        self._bound(narrow=True)

    def widen(self) -> None:
        """Report all beginnings again."""
        self._bound(narrow=False)

    def remove(self) -> None:
        """Stop listening and forget the modules."""
        with _PAIR.lock:
            self.is_awake = False
            self.entries = self.always = {}
            _PAIR.drop(self)
        detach_from_guards(self, (self.before, self.after, self.raised))

    def _turn(self, *, awake: bool, dozing: bool = False) -> None:
        if (self.is_awake, self.is_dozing) != (awake, dozing) and self.entries:
            with _PAIR.lock:
                self.is_awake, self.is_dozing = awake, dozing
                _PAIR.settle()

    def _bound(self, *, narrow: bool) -> None:
        if self.is_narrow is not narrow and self.entries:
            with _PAIR.lock:
                self.is_narrow = narrow
                _PAIR.settle()


class PassListener(Protocol):
    """Takes the passes of whole models."""

    def begin_pass(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Handle the beginning of a training pass."""

    def end_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Handle the end of a training pass."""


class _Here(threading.local):
    """The model whose training pass this thread is in."""

    model: nn.Module | None = None


class RootPasses:
    """Reports the training passes of these models to a listener, recorded or not.

    A model inside another one's pass is left out. When a pass begins that `is_wanted` refuses, nothing is reported
    until `wake`.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        listener: PassListener,
        guard: Guard,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._listener = listener
        self._is_wanted = is_wanted
        self._here = _Here()
        entries = {id(root): root for root in (unwrap(model, also_compiled=False) for model in models)}
        enter, leave, raised = (guard.wrap("keeping passes", each) for each in (self._enter, self._leave, self._raised))
        self._calls = ModuleCalls(entries, enter, leave, raised)

    def attach(self) -> None:
        """Start listening."""
        self._calls.attach()

    def wake(self) -> None:
        """Resume reporting."""
        self._calls.wake()

    def _enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_wanted():
            self._calls.rest()
            return
        # A forward that was interrupted leaves its model behind; its own next call shows that it is over.
        if _is_training() and self._here.model in (None, model):
            self._here.model = model
            self._listener.begin_pass(model, args)

    def _leave(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._here.model is model and backward_id() == -1:
            self._here.model = None
            self._listener.end_pass(model, args, kwargs, output)

    def _raised(self, model: nn.Module) -> None:
        if self._here.model is model:
            self._here.model = None

    def remove(self) -> None:
        """Stop listening and forget the models."""
        self._calls.remove()


def _is_training() -> bool:
    return torch.is_grad_enabled() and backward_id() == -1 and not is_capturing()


def on_module(
    module: nn.Module,
    *,
    before: Guarded | None = None,
    after: Guarded | None = None,
    end: Guarded | None = None,
) -> list[Handle]:
    """Put hooks on one module.

    Args:
        module: Where to put them.
        before: Takes the module, the arguments and the named arguments of a call.
        after: Takes the module, the arguments and the output of a call that returned.
        end: Takes the same, and None for the output of a call that raised; called before `after`.

    """
    handles: list[Handle] = []
    if before is not None:
        handles.append(
            keep(guard_of(before), module.register_forward_pre_hook(unless_compiling(before), with_kwargs=True))
        )
    if end is not None:
        handles.append(keep(guard_of(end), module.register_forward_hook(unless_compiling(end), always_call=True)))
    if after is not None:
        handles.append(keep(guard_of(after), module.register_forward_hook(unless_compiling(after))))
    return handles


@contextlib.contextmanager
def replace_output(module: nn.Module, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the output of a module by `replace(output)`, in this thread, while the block runs.

    Only for computations that Sonde runs itself.
    """
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return replace(output) if threading.get_ident() == thread else None

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
