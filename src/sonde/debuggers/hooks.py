"""Hooks on the layers that debuggers capture: present while capturing is on, with separate state for each thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import nn

from sonde.capture import copy_outputs
from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.isolation import Isolation
from sonde.debuggers.utils import get_layer_by_name
from sonde.hooks.guard import UNGUARDED, Handle, backward_id, remove_all
from sonde.hooks.names import unwrap
from sonde.hooks.on_call import on_module

# A layer that a pass calls more often than this (a cell in a long loop) is captured this often, and counted beyond it.
MAX_CALLS: Final = 1024


class _Pass(threading.local):
    """What one thread captured in its current forward pass, or in the last one."""

    def __init__(self) -> None:
        self.depth = 0
        self.quiet = 0
        self.captures: dict[str, list[Any]] = {}
        self.calls: dict[str, int] = {}
        # Scopes around the layers that are computing now, by debugger; the innermost call comes last.
        self.scopes: list[tuple[int, list[tuple[str, AbstractContextManager[Any]]]]] = []


class LayerHooks:
    """Calls forward debuggers for the layers they name, and keeps what they return until the datapoint is done."""

    def __init__(self, model: nn.Module, debuggers: dict[str, ForwardDebugger], isolation: Isolation) -> None:
        self._model = model
        self._debuggers = debuggers
        self._isolation = isolation
        self._pass = _Pass()
        self._handles: list[Handle] = []

    def attach(self) -> None:
        """Put hooks on the layers that exist; the caller reports those that do not."""
        if self._handles or not self._debuggers:
            return
        root = unwrap(self._model)
        wrap = UNGUARDED.wrap  # what a debugger does is guarded by itself, and may raise on purpose
        self._handles += on_module(root, before=wrap("debuggers", self._enter_model))
        for layer, debuggers in self._by_layer():
            self._hook(layer, debuggers)
        # Registered last, so that it runs after the debuggers of the model itself.
        self._handles += on_module(root, end=wrap("debuggers", self._leave_model))

    def remove(self) -> None:
        """Take all hooks off, and forget what this thread captured."""
        remove_all(self._handles)
        self.forget()

    def captures(self, name: str) -> list[Any]:
        """Return what this thread captured for a debugger, one entry a call."""
        return self._pass.captures.get(name, [])

    def num_calls(self, name: str) -> int:
        """Return how often this thread called the debugger's layer."""
        return self._pass.calls.get(name, 0)

    def forget(self) -> None:
        """Forget what this thread captured, before the next datapoint."""
        self._pass.captures, self._pass.calls = {}, {}

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Capture nothing in this thread meanwhile: a debugger may run the model again."""
        here = self._pass
        here.quiet += 1
        try:
            yield
        finally:
            here.quiet -= 1

    # ------------------------------------------------------------------ hooks; none of them returns a value

    def _by_layer(self) -> list[tuple[nn.Module, dict[str, ForwardDebugger]]]:
        layers: dict[int, tuple[nn.Module, dict[str, ForwardDebugger]]] = {}
        for name, debugger in self._debuggers.items():
            layer = get_layer_by_name(self._model, debugger.layer_name)
            if layer is not None:
                layers.setdefault(id(layer), (layer, {}))[1][name] = debugger
        return list(layers.values())

    def _hook(self, layer: nn.Module, debuggers: dict[str, ForwardDebugger]) -> None:
        watching = {name: debugger for name, debugger in debuggers.items() if _has_scope(debugger)}

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_seeing():
                self._open_scopes(watching, module, args, kwargs)

        def close(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_seeing():
                self._close_scopes(module)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._is_seeing():
                for name, debugger in debuggers.items():
                    run = functools.partial(self._capture, name, debugger, module, args, output)
                    self._isolation.run(name, run)

        wrap = UNGUARDED.wrap
        if watching:  # scopes must also end when the layer raises
            self._handles += on_module(layer, before=wrap("debuggers", before), end=wrap("debuggers", close))
        self._handles += on_module(layer, after=wrap("debuggers", after))

    def _is_seeing(self) -> bool:
        # A forward inside a backward is a checkpoint being recomputed, which was seen already.
        return not self._pass.quiet and backward_id() == -1

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_seeing():
            return
        here = self._pass
        if here.depth == 0:
            self.forget()
            self._isolation.finish()  # a pass that was not followed by a datapoint
            for debugger in self._debuggers.values():
                debugger._of_thread.by_hand = False
        here.depth += 1

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_seeing():
            self._pass.depth = max(0, self._pass.depth - 1)

    def _capture(self, name: str, debugger: ForwardDebugger, module: nn.Module, args: Any, output: Any) -> None:
        here = self._pass
        here.calls[name] = here.calls.get(name, 0) + 1
        kept = here.captures.setdefault(name, [])
        if len(kept) == MAX_CALLS:
            return
        debugger.forward_hook_fn(module, args, output)
        slot = debugger._of_thread
        slot.by_hand = False
        if type(debugger).forward_hook_fn is not ForwardDebugger.forward_hook_fn:
            slot.value = copy_outputs(slot.value)  # this one is the user's own, and may not have copied
        kept.append(slot.value)

    def _open_scopes(
        self,
        watching: dict[str, ForwardDebugger],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        opened: list[tuple[str, AbstractContextManager[Any]]] = []
        self._pass.scopes.append((id(module), opened))
        for name, debugger in watching.items():

            def enter(name: str = name, debugger: ForwardDebugger = debugger) -> None:
                scope = debugger.around_forward(module, args, kwargs)
                if scope is not None:
                    scope.__enter__()
                    opened.append((name, scope))

            self._isolation.run(name, enter)

    def _close_scopes(self, module: nn.Module) -> None:
        scopes = self._pass.scopes
        if scopes and scopes[-1][0] == id(module):
            for name, scope in reversed(scopes.pop()[1]):
                self._isolation.run(name, functools.partial(_leave, scope))


def _leave(scope: AbstractContextManager[Any]) -> None:
    scope.__exit__(None, None, None)


def _has_scope(debugger: ForwardDebugger) -> bool:
    return type(debugger).around_forward is not ForwardDebugger.around_forward
