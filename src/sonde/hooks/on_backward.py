"""Listen to backward passes: before they run, as gradients reach tensors, and as they are accumulated."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sonde.hooks.guard import UNGUARDED, During, Guard, Guarded, Handle, guard_of, keep
from sonde.hooks.replace_function import BACKWARD
from sonde.hooks.unpack import MAX_PARTS, unpack

_on_accumulated: Callable[[Tensor, Callable[[Tensor], None]], RemovableHandle]
_on_accumulated = Tensor.register_post_accumulate_grad_hook
_on_gradient: Callable[[Tensor, Callable[[Tensor], Any]], RemovableHandle] = Tensor.register_hook
_MANY: Final = 1 << 60


def before_backward(callback: Guarded, during: During = "always") -> Handle:
    """Call this ahead of every backward pass of the process, in its thread, while the graph of the loss is whole.

    It takes the tensors that the pass starts from, usually the loss, and the gradients passed in for them, if any.
    """

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        roots, gradients = what_is_differentiated(args, kwargs)
        if roots:
            callback(roots, gradients)

    guard = guard_of(callback) or UNGUARDED
    return BACKWARD.listen(before=guard.catch(getattr(callback, "part", "backward passes"), read), during=during)


def what_is_differentiated(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the tensors that a backward pass starts from, and the gradients passed in, from the arguments of a call.

    Nothing if they cannot be told.
    """
    tensors = args[0] if args else kwargs.get("tensors")
    roots = (tensors,) if isinstance(tensors, Tensor) else _tensors(tensors)
    given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
    gradients = (given,) if isinstance(given, Tensor) else _tensors(given)
    return roots, gradients or (None,) * len(roots)


def after_backward(callback: Guarded) -> Handle:
    """Call this without arguments after every backward pass of the process, also one that raised."""
    return BACKWARD.listen(end=callback)


def on_gradient(tensor: Tensor, callback: Guarded, *given: Any) -> Handle:
    """Call this with `given` and the gradient when one reaches a tensor."""
    return _on_gradient(tensor, functools.partial(callback, *given) if given else callback)


def on_accumulated(parameter: Tensor, callback: Guarded) -> Handle:
    """Call this with the parameter after each accumulation into its gradient."""
    return keep(guard_of(callback), _on_accumulated(parameter, callback))


def replace_gradient(tensor: Tensor, gradient: Tensor) -> Handle:
    """Put a gradient in place of whatever reaches a tensor. Only for computations that Sonde repeats itself."""
    return _on_gradient(tensor, lambda _: gradient)


class OutputGraph:
    """The graph behind what a module returned: whether it still exists, and whether a gradient has come to it.

    The graph holds a hook, and this only a weak reference to it: what is watched is kept by the program alone.
    """

    def __init__(self, output: Any) -> None:
        self._calls = itertools.repeat(None, _MANY)
        found = unpack(output)
        made = [tensor for _, tensor in found if tensor.requires_grad and not tensor.is_leaf]
        self._is_unknown = not made or len(found) == MAX_PARTS
        self._hooks = [] if self._is_unknown else [self._listen(tensor) for tensor in made]

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has come."""
        return operator.length_hint(self._calls) < _MANY

    @property
    def exists(self) -> bool:
        """Whether a gradient may still reach parameters through it; True if that is unknown."""
        return self._is_unknown or any(hook() is not None for hook in self._hooks)

    def _listen(self, tensor: Tensor) -> weakref.ref[Any]:
        # Not guarded: `next(calls, gradient)` is C that cannot fail, keeps no gradient and returns None.
        note = functools.partial(next, self._calls)
        _on_gradient(tensor, note)
        return weakref.ref(note)


def _tensors(given: Any) -> tuple[Any, ...]:
    """Return a list of tensors as a tuple; nothing for anything else."""
    # A generator must be left to torch, since it can be used up only once.
    if not isinstance(given, list | tuple):
        return ()
    return tuple(given) if all(each is None or isinstance(each, Tensor) for each in given) else ()


class _Group:
    """Parameters with one owner, and how many backward passes have reached any of them."""

    def __init__(self) -> None:
        self.reached: deque[Any] = deque(maxlen=1)
        self.passes = 0


class Reach:
    """Counts backward passes by the optimizer whose parameters they reach.

    A C callback on each parameter notes passes without running Python, however large the model is. Parameters without
    an owner belong to the owner "". That a pass is over is known only when something follows it (`settle`).
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard
        self.passes = 0
        """How many backward passes have reached any parameter, as far as settled."""
        self._groups: dict[str, _Group] = {}
        self._handles: dict[int, Handle] = {}

    def listen(self, owner: str, parameters: Iterable[Tensor]) -> None:
        """Count what reaches these parameters for `owner`, and for no other owner any more."""
        group = self._groups.setdefault(owner, _Group())
        for parameter in parameters:
            if parameter.requires_grad:
                self._forget(id(parameter))
                # Not guarded: a method of C that cannot fail.
                handle = _on_accumulated(parameter, group.reached.append)
                self._handles[id(parameter)] = keep(self._guard, handle)

    def claim(self, owner: str, parameters: Iterable[Tensor]) -> None:
        """Give parameters that are listened to a new owner, including passes seen before the owner was known."""
        if owner not in self._groups:
            self.settle()
            self._groups[owner] = _Group()
            self._groups[owner].passes = self.passes_of("")
        self.listen(owner, [each for each in parameters if id(each) in self._handles])

    def settle(self) -> None:
        """Count the gradients since the last call as one pass; called where no backward pass is running."""
        reached = False
        for group in self._groups.values():
            if group.reached:
                group.reached.clear()
                group.passes += 1
                reached = True
        self.passes += reached

    def forget_passes(self) -> None:
        """Count nothing that came since the last time."""
        for group in self._groups.values():
            group.reached.clear()

    def passes_of(self, owner: str) -> int:
        """Return how many passes have reached the parameters of an owner, as far as settled."""
        group = self._groups.get(owner)
        return 0 if group is None else group.passes

    def remove(self) -> None:
        """Stop listening and forget the parameters."""
        for key in list(self._handles):
            self._forget(key)
        self.forget_passes()

    def _forget(self, key: int) -> None:
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.remove()
