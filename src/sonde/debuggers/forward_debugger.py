"""Debuggers that look at the output of one layer while the model computes."""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from sonde.capture import copy_outputs
from sonde.debuggers.base_debugger import BaseDebugger
from sonde.errors import OptionError


class _Slot(threading.local):
    """The latest capture of one thread, so that threads that evaluate side by side do not see each other's."""

    value: Any = None
    by_hand = False


class ForwardDebugger(BaseDebugger):
    """A debugger of one layer's output. Subclasses implement `process_forward`.

    What that returns is copied at once, so nothing that the model does later changes it. `SequentialDebugger` calls it
    through hooks that exist only while capturing is on; `forward_hook_fn` can also be registered by hand.
    """

    layer_name: str

    def __init__(self, layer_name: str) -> None:
        given: Any = layer_name
        if not isinstance(given, str):
            raise OptionError(f"layer_name takes a name such as 'backbone.layer4'; got {given!r:.80}.")
        self.layer_name = layer_name

    @property
    def last_capture(self) -> Any:
        """What this thread captured last; None before the first time."""
        return self._of_thread.value

    @last_capture.setter
    def last_capture(self, value: Any) -> None:
        slot = self._of_thread
        slot.value, slot.by_hand = value, True

    def forward_hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:
        """Take the output of the layer; a forward hook, which replaces nothing."""
        with torch.no_grad():
            self.last_capture = copy_outputs(self.process_forward(module, input, output))

    @abstractmethod
    def process_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        """Return what to keep of one call of the layer."""

    def around_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """Return a scope to be open while the layer computes; None for none.

        For debuggers that must see what happens inside the layer, or what it was called with by name.
        """
        return None

    def __call__(self, datapoint: dict[str, Any], model: nn.Module) -> Any:
        """Return what was captured."""
        return self.last_capture

    @property
    def _of_thread(self) -> _Slot:
        # Made here, since a subclass may not call this class's `__init__`; setdefault is safe between threads.
        slot: _Slot = self.__dict__.get("_slot") or self.__dict__.setdefault("_slot", _Slot())
        return slot

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the slot: captures belong to threads of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_slot"}
