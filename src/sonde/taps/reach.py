"""Which backward passes have reached the parameters of which optimizer.

Heard through a hook at every parameter that is a method of C: it costs no call of Python, however large the model is.
It only remembers that something came; when a pass is over is told by whoever comes next (`settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

_register: Callable[[Tensor, Callable[[Tensor], None]], RemovableHandle] = Tensor.register_post_accumulate_grad_hook


class _Group:
    """Parameters with one owner, and how many backward passes have reached any of them."""

    def __init__(self) -> None:
        self.heard: deque[Any] = deque(maxlen=1)
        self.passes = 0


class Reach:
    """Counts backward passes by whom they reach. Parameters without an owner belong to the owner ""."""

    def __init__(self) -> None:
        self.passes = 0
        """How many backward passes have reached any parameter, as far as settled."""
        self._groups: dict[str, _Group] = {}
        self._handles: dict[int, RemovableHandle] = {}

    def listen(self, owner: str, parameters: Iterable[Tensor]) -> None:
        """Count what reaches these parameters for `owner`, and for nobody else any more."""
        group = self._groups.setdefault(owner, _Group())
        for parameter in parameters:
            if parameter.requires_grad:
                self._forget(id(parameter))
                self._handles[id(parameter)] = _register(parameter, group.heard.append)

    def claim(self, owner: str, parameters: Iterable[Tensor]) -> None:
        """Hand parameters that are listened to over to a new owner, with what was heard of nobody's so far."""
        if owner not in self._groups:
            self.settle()
            self._groups[owner] = _Group()
            self._groups[owner].passes = self.passes_of("")
        self.listen(owner, [each for each in parameters if id(each) in self._handles])

    def settle(self) -> None:
        """Take what was heard since the last time as one pass; called where no backward pass is running."""
        reached = False
        for group in self._groups.values():
            if group.heard:
                group.heard.clear()
                group.passes += 1
                reached = True
        self.passes += reached

    def passes_of(self, owner: str) -> int:
        """Return how many passes have reached the parameters of an owner, as far as settled."""
        group = self._groups.get(owner)
        return 0 if group is None else group.passes

    def remove(self) -> None:
        """Stop listening and forget the parameters."""
        for key in list(self._handles):
            self._forget(key)
        for group in self._groups.values():
            group.heard.clear()

    def _forget(self, key: int) -> None:
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.remove()
