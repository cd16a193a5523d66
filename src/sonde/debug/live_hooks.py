"""Runs hooks on a live model: only modules that a hook is for are touched, and only while one may still fire."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sonde.debug.hooks import Hook, HookManager
from sonde.handles import remove_all
from sonde.names import is_wrapper, named_modules

logger = logging.getLogger("sonde")


class LiveHooks:
    """Feeds a manager with the outputs of a model's modules and, where a hook wants them, with their gradients.

    Args:
        model: The model.
        manager: Whose hooks run.
        metadata: Gives what conditions may ask about besides the tensor.
        is_due: Says whether this step is sampled.

    """

    def __init__(
        self,
        model: nn.Module,
        manager: HookManager,
        metadata: Callable[[], Mapping[str, Any]],
        is_due: Callable[[], bool],
    ) -> None:
        self._model = model
        self._manager = manager
        self._metadata = metadata
        self._is_due = is_due
        self._handles: list[RemovableHandle] = []
        self._version = -1
        self._told: set[str] = set()

    def refresh(self) -> None:
        """Attach to what the hooks of now are for. Cheap if nothing changed."""
        if self._version == self._manager.version:
            return
        self.remove()
        self._version = self._manager.version
        hooks = self._manager.live_hooks()
        layers = {name: module for name, module, _ in named_modules({"": self._model}) if not is_wrapper(module)}
        for name, module in layers.items():
            matching = [hook for hook in hooks if hook.matches(name)]
            if matching:
                backward = any(hook.trigger.needs_backward for hook in matching)
                self._handles.append(module.register_forward_hook(self._hook(name, backward)))
        for hook in hooks:
            if hook.name not in self._told and not any(map(hook.matches, layers)):
                self._told.add(hook.name)
                self._tell_of_no_match(hook, list(layers))

    def _tell_of_no_match(self, hook: Hook, layers: list[str]) -> None:
        """Say that a hook has no layer to run at: a slip in a pattern would otherwise be found after the training."""
        near = [name for pattern in hook.layer_patterns for name in get_close_matches(pattern, layers, n=2)]
        hint = f"nearest: {', '.join(near)}" if near else f"for example: {', '.join(layers[:4])}"
        logger.warning(
            "the hook %r matches no layer of %s (%s), so it runs only where execute_hooks is called by hand; %s.",
            hook.name,
            type(self._model).__name__,
            ", ".join(hook.layer_patterns),
            hint,
        )

    def remove(self) -> None:
        """Let go of the model."""
        remove_all(self._handles)
        self._version = -1

    def _hook(self, name: str, backward: bool) -> Callable[[nn.Module, Any, Any], None]:
        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._is_due():
                return
            tensor = first_tensor(output)
            if tensor is None:
                return
            self._manager.execute_hooks(name, tensor.detach(), metadata=self._metadata())
            if backward and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._see_gradient(name, gradient))  # type: ignore[no-untyped-call] # torch

        return after_forward

    def _see_gradient(self, name: str, gradient: Tensor) -> None:
        self._manager.execute_hooks(name, gradient.detach(), is_forward=False, metadata=self._metadata())


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor in an output: itself, or the first in a tuple, list, dict or output object."""
    if isinstance(output, Tensor):
        return output
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)
