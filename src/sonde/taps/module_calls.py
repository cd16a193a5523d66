"""One pair of process-wide module hooks that serves all who listen to calls of modules.

Process-wide hooks leave nothing on the user's modules: a watched model can be deep-copied, pickled and compiled as if
Sonde were not there, and a copy of it is not watched by accident. Their price is that torch calls every module of the
process in a slower way as long as there is any. So there is one pair for all, and only while somebody listens; who has
nothing to hear for a while may rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sonde.handles import remove_all

Entry = TypeVar("Entry")


class _Pair:
    """The hooks, and who listens through them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listeners: tuple[ModuleCalls[Any], ...] = ()
        self._handles: list[RemovableHandle] = []

    def settle(self) -> None:
        """Put the hooks in place if anybody listens, else take them away."""
        wanted = any(each.heard for each in self.listeners)
        if wanted and not self._handles:
            self._handles = [
                torch_module.register_module_forward_pre_hook(self._before_forward),
                torch_module.register_module_forward_hook(self._after_forward, with_kwargs=True),
            ]
        elif not wanted and self._handles:
            remove_all(self._handles)

    # Under torch.compile these bodies are traced: the first test is constant there, so nothing of Sonde enters the
    # graph. They return None and so never replace an input or an output.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        key = id(module)
        for each in self.listeners:
            entry = each.heard.get(key)
            if entry is not None:
                each.before(entry, args)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        key = id(module)
        for each in self.listeners:
            entry = each.heard.get(key)
            if entry is not None:
                each.after(entry, args, kwargs, output)


_PAIR: Final = _Pair()


class ModuleCalls(Generic[Entry]):
    """Tells of the calls of some modules, from `attach` to `remove`, in the order in which listeners were attached.

    Args:
        entries: What to hand to `before` and `after`, by the id of the module.
        before: Takes an entry and the arguments of a call.
        after: Takes an entry, the arguments, the named arguments and the output of a call that returned.

    Both should be wrapped by a guard: what they raise, the user sees.

    """

    def __init__(
        self,
        entries: Mapping[int, Entry],
        before: Callable[[Entry, tuple[Any, ...]], None],
        after: Callable[[Entry, tuple[Any, ...], dict[str, Any], Any], None],
    ) -> None:
        self.before, self.after = before, after
        self.heard: dict[int, Entry] = {}
        """The entries it listens to now."""
        self._entries = dict(entries)

    def attach(self) -> None:
        """Begin to listen."""
        with _PAIR.lock:
            self.heard = self._entries
            _PAIR.listeners = (*_PAIR.listeners, self)
            _PAIR.settle()

    def rest(self) -> None:
        """Hear nothing until `wake`; if all rest, modules are called as if Sonde were not there."""
        if self.heard:
            with _PAIR.lock:
                self.heard = {}
                _PAIR.settle()

    def wake(self) -> None:
        """Listen again."""
        if self.heard is not self._entries:
            with _PAIR.lock:
                self.heard = self._entries
                _PAIR.settle()

    def remove(self) -> None:
        """Stop listening and forget the modules."""
        with _PAIR.lock:
            self.heard = self._entries = {}
            _PAIR.listeners = tuple(each for each in _PAIR.listeners if each is not self)
            _PAIR.settle()
