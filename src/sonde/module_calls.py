"""One pair of process-wide module hooks that serves all who listen to calls of modules.

Process-wide hooks leave nothing on the user's modules: a watched model can be deep-copied, pickled and compiled as if
Sonde were not there, and a copy of it is not watched by accident. Their price is that torch calls every module of the
process in a slower way as long as there is any. So there is one pair for all, and only while somebody listens; who has
nothing to hear for a while may rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sonde.handles import remove_all

Entry = TypeVar("Entry")
_NOTHING: Final = object()


_is_compiling: Final = torch.compiler.is_compiling
_Heard = dict[int, tuple[tuple["ModuleCalls[Any]", Any], ...]]
"""By the id of a module: who listens to it, each with its entry."""


class _Pair:
    """The hooks, and who listens through them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._listeners: tuple[ModuleCalls[Any], ...] = ()
        self._everywhere: tuple[ModuleCalls[Any], ...] = ()
        self._begun: _Heard = {}
        self._heard: _Heard = {}
        self._heard_by: dict[tuple[tuple[ModuleCalls[Any], bool], ...], tuple[_Heard, _Heard]] = {}
        self._handles: list[RemovableHandle] = []

    def add(self, listener: ModuleCalls[Any]) -> None:
        """Let another one listen."""
        if listener.hears_all:
            self._everywhere = (*self._everywhere, listener)
        else:
            self._listeners = (*self._listeners, listener)
        self.settle()

    def drop(self, listener: ModuleCalls[Any]) -> None:
        """Let one listen no more."""
        self._everywhere = tuple(each for each in self._everywhere if each is not listener)
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        self._heard_by.clear()
        self.settle()

    def settle(self) -> None:
        """Put the hooks in place if anybody listens, else take them away."""
        awake = tuple((each, each.is_narrow) for each in self._listeners if each.is_awake)
        if awake not in self._heard_by:  # states come and go with passes and steps
            begun = _put_together((each, each.always if narrow else each.entries) for each, narrow in awake)
            self._heard_by[awake] = (begun, _put_together((each, each.entries) for each, _ in awake))
        self._begun, self._heard = self._heard_by[awake]
        wanted = bool(self._everywhere or self._heard)
        if wanted and not self._handles:
            self._handles = [
                torch_module.register_module_forward_pre_hook(self._before_forward),
                torch_module.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            ]
        elif not wanted and self._handles:
            remove_all(self._handles)

    def renew_lock(self) -> None:
        """Forget who held the lock: in a forked child that thread does not exist."""
        self.lock = threading.RLock()

    # Under torch.compile these bodies are traced: the first test is constant there, so nothing of Sonde enters the
    # graph. They return None and so never replace an input or an output.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if _is_compiling():
            return
        for each, entry in self._begun.get(id(module), ()):
            each.before(entry, args)
        for each in self._everywhere:
            each.before(module, args)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _NOTHING) -> None:
        if _is_compiling():
            return
        if output is _NOTHING:  # after a forward that raised, torch leaves the named arguments out
            self._after_raising(module)
            return
        for each, entry in self._heard.get(id(module), ()):
            each.after(entry, args, kwargs, output)
        for each in self._everywhere:
            each.after(module, args, kwargs, output)

    def _after_raising(self, module: nn.Module) -> None:
        everywhere = tuple((each, module) for each in self._everywhere)
        for each, entry in (*self._heard.get(id(module), ()), *everywhere):
            if each.raised is not None:
                each.raised(entry)


def _put_together(listeners: Iterable[tuple[ModuleCalls[Any], dict[int, Any]]]) -> _Heard:
    """Return who listens to which module, so that a call takes one look-up for all."""
    heard: _Heard = {}
    for each, entries in listeners:
        for key, entry in entries.items():
            heard[key] = (*heard.get(key, ()), (each, entry))
    return heard


_PAIR: Final = _Pair()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PAIR.renew_lock)


class ModuleCalls(Generic[Entry]):
    """Tells of the calls of some modules, or of all, from `attach` to `remove`.

    Who listens to some modules hears of a call before those who listen to all; otherwise it goes by who came first.

    Args:
        entries: What to hand to `before`, `after` and `raised`, by the id of the module. None listens to every module
            of the process, and hands over the module itself.
        before: Takes an entry and the arguments of a call.
        after: Takes an entry, the arguments, the named arguments and the output of a call that returned.
        always: Keys of modules of whose calls `before` is told also between `narrow` and `widen`.
        raised: Takes the entry of a call that raised an `Exception`. Torch is going through its hooks then: nobody may
            begin or cease to listen in it. Of calls that ended by another exception (Ctrl-C) nobody is told.

    All should be wrapped by a guard: what they raise, the user sees.

    """

    def __init__(
        self,
        entries: Mapping[int, Entry] | None,
        before: Callable[[Entry, tuple[Any, ...]], None],
        after: Callable[[Entry, tuple[Any, ...], dict[str, Any], Any], None],
        raised: Callable[[Entry], None] | None = None,
        always: Collection[int] = (),
    ) -> None:
        self.before, self.after, self.raised = before, after, raised
        self.hears_all = entries is None
        self.entries: dict[int, Entry] = dict(entries or {})
        self.always = {key: entry for key, entry in self.entries.items() if key in always}
        self.is_awake = False
        self.is_narrow = False

    def attach(self) -> None:
        """Begin to listen."""
        with _PAIR.lock:
            self.is_awake = True
            _PAIR.add(self)

    def rest(self) -> None:
        """Hear nothing until `wake`; if all rest, modules are called as if Sonde were not there.

        Only for those who listen to some modules.
        """
        self._turn(awake=False)

    def wake(self) -> None:
        """Listen again."""
        self._turn(awake=True)

    def narrow(self) -> None:
        """Hear of the beginnings of calls only at the modules in `always`, in all threads, until `widen`."""
        self._bound(narrow=True)

    def widen(self) -> None:
        """Hear of all beginnings again."""
        self._bound(narrow=False)

    def remove(self) -> None:
        """Stop listening and forget the modules."""
        with _PAIR.lock:
            self.is_awake = False
            self.entries = self.always = {}
            _PAIR.drop(self)

    def _turn(self, *, awake: bool) -> None:
        if self.is_awake is not awake and self.entries:
            with _PAIR.lock:
                self.is_awake = awake
                _PAIR.settle()

    def _bound(self, *, narrow: bool) -> None:
        if self.is_narrow is not narrow and self.entries:
            with _PAIR.lock:
                self.is_narrow = narrow
                _PAIR.settle()
