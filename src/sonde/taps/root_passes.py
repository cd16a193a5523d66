"""See what whole models are called with and what they return, in training passes only.

Unlike `ModuleTap` this looks at the models themselves and at nothing inside them, in every training pass, whether or
not the step is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from sonde.guard import Guard
from sonde.module_calls import ModuleCalls
from sonde.names import is_wrapper
from sonde.signals import is_capturing

_in_backward = torch._C._current_graph_task_id


class PassListener(Protocol):
    """Takes the passes of whole models."""

    def begin_pass(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Take the beginning of a training pass."""

    def end_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take the end of a training pass."""


class _Here(threading.local):
    """The model whose pass this thread is in."""

    model: nn.Module | None = None


class RootPasses:
    """Tells a listener of the training passes of these models. A model inside another one's pass is left out."""

    def __init__(self, models: Iterable[nn.Module], listener: PassListener, guard: Guard) -> None:
        self._begin = guard.wrap("keeping passes", listener.begin_pass)
        self._end = guard.wrap("keeping passes", listener.end_pass)
        self._here = _Here()
        entries = {id(root): root for root in map(_called_model, models)}
        self._calls = ModuleCalls(entries, self._enter, self._leave, self._raised)

    def attach(self) -> None:
        """Begin to listen."""
        self._calls.attach()

    def _enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        # A forward that was interrupted leaves its model behind; its own next call shows that it is over.
        if _is_training() and self._here.model in (None, model):
            self._here.model = model
            self._begin(model, args)

    def _leave(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._here.model is model and _in_backward() == -1:
            self._here.model = None
            self._end(model, args, kwargs, output)

    def _raised(self, model: nn.Module) -> None:
        if self._here.model is model:
            self._here.model = None

    def remove(self) -> None:
        """Stop listening and forget the models."""
        self._calls.remove()


def _called_model(model: nn.Module) -> nn.Module:
    """Return what to listen at: inside wrappers that talk to other processes, but outside compiled code."""
    while is_wrapper(model) and type(model).__name__ != "OptimizedModule":
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    return model


def _is_training() -> bool:
    return torch.is_grad_enabled() and _in_backward() == -1 and not is_capturing()
