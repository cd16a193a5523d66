"""See every backward pass of this process just before it runs, while the graph of the loss is still whole.

`Tensor.backward` calls `torch.autograd.backward` by attribute, so replacing that one attribute sees both. It is
replaced while somebody listens and put back when the last listener leaves. `torch.autograd.grad` is not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BeforeBackward = Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], None]
"""Takes the tensors a backward starts from, usually the loss, and the gradients it was handed for them, if any."""


class _Wrapper:
    """The one replacement of `torch.autograd.backward`, shared by all listeners."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listeners: tuple[BeforeBackward, ...] = ()
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def put_in_place(self) -> None:
        if self._ours is not None and torch.autograd.backward is not self._original:
            return  # someone had wrapped ours, so it had to stay in the chain; now it is of use again
        original = self._original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.listeners and not torch.compiler.is_compiling():
                roots = _as_tuple(tensors)
                gradients = _as_tuple(grad_tensors) if grad_tensors is not None else (None,) * len(roots)
                for before in self.listeners:
                    before(roots, gradients)
            return original(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = self._ours = backward

    def put_back(self) -> None:
        # If someone wrapped ours, the original would throw theirs away; without listeners ours only passes on.
        if torch.autograd.backward is self._ours and self._original is not None:
            torch.autograd.backward = self._original
            self._ours = None


_wrapper = _Wrapper()


class BackwardCalls:
    """Calls `before` ahead of every backward pass, from `attach` to `remove`.

    `before` runs in the thread that calls backward and should be wrapped by a guard: what it raises, the user sees.
    """

    def __init__(self, before: BeforeBackward) -> None:
        self._before = before

    def attach(self) -> None:
        """Begin to listen."""
        with _wrapper.lock:
            if not _wrapper.listeners:
                _wrapper.put_in_place()
            _wrapper.listeners = (*_wrapper.listeners, self._before)

    def remove(self) -> None:
        """Stop listening. Without having listened, this does nothing."""
        with _wrapper.lock:
            others = tuple(each for each in _wrapper.listeners if each is not self._before)
            if _wrapper.listeners and not others:
                _wrapper.put_back()
            _wrapper.listeners = others


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
