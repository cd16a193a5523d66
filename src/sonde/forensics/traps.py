"""Remember operations of a loss's graph whose derivative can be infinite, until the step ends.

A backward pass frees the graph behind it. When a non-finite gradient shows that something in the loss's own code went
wrong, the graph is gone; so the few nodes that can be the origin are noted before, with the small tensors they hold.
Until the step ends these tensors stay alive, up to 16 MB of storage for all backward passes together, the last one
first. What a hook of the program's would have to unpack (a checkpoint, an offload) is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sonde.forensics.loss_graph import nodes_since, operation_name
from sonde.forensics.values import storage_of
from sonde.hooks.autograd_graph import saved_by, sequence_of
from sonde.hooks.user_line import Line, current_line

MAX_NODES: Final = 64
# Backward passes of one step whose losses are remembered.
MAX_TAILS: Final = 8
# What one tensor may weigh, and all of a step together.
MAX_TENSOR_BYTES: Final = 4 << 20
MAX_BYTES: Final = 16 << 20


def _at_zero(name: str) -> Callable[[dict[str, Any]], Tensor]:
    return lambda saved: saved[name] == 0


def _low_power(saved: dict[str, Any]) -> Tensor:
    exponent = saved["exponent"]
    below_one = exponent < 1
    zero: Tensor = (saved["self"] == 0) & below_one
    return zero


def _constant(saved: dict[str, Any]) -> Tensor:
    result = saved["result"]
    flat: Tensor = (result == 0) | ~torch.isfinite(result)
    return flat


def _edge(saved: dict[str, Any]) -> Tensor:
    edge: Tensor = saved["self"].abs() == 1
    return edge


def _both_zero(saved: dict[str, Any]) -> Tensor:
    zero: Tensor = (saved["self"] == 0) & (saved["other"] == 0)
    return zero


# By operation: what it keeps that must be looked at, and where its derivative is infinite or undefined.
_CHECKS: Final[dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Tensor]]]] = {
    "sqrt": (("result",), _at_zero("result")),
    "rsqrt": (("result",), lambda saved: torch.isinf(saved["result"])),
    "reciprocal": (("result",), lambda saved: torch.isinf(saved["result"])),
    "log": (("self",), _at_zero("self")),
    "log2": (("self",), _at_zero("self")),
    "log10": (("self",), _at_zero("self")),
    "div": (("other",), _at_zero("other")),
    "pow": (("self", "exponent"), _low_power),
    "norm": (("result",), _at_zero("result")),
    "linalg_vector_norm": (("result",), _at_zero("result")),
    "std": (("result",), _constant),
    "acos": (("self",), _edge),
    "asin": (("self",), _edge),
    "atan2": (("self", "other"), _both_zero),
    "exp": (("result",), lambda saved: torch.isinf(saved["result"])),
}


@dataclass(frozen=True, slots=True, eq=False)
class Trap:
    """An operation in the loss's code whose derivative is infinite at some of its inputs."""

    node: str
    name: str
    number: int
    """Which of the calls of this operation it was, counted from 0."""
    saved: dict[str, Any]
    mask: Tensor


@dataclass(slots=True, eq=False)
class _Noted:
    node: str
    name: str
    sequence: int
    saved: dict[str, Any]


class LossTail:
    """The operations of the loss's code that were noted before one backward pass."""

    def __init__(self, roots: tuple[Tensor, ...], sequence: int) -> None:
        self.line: Line | None = current_line()
        self.losses = [root.detach() for root in roots if root.numel() == 1]
        self.sequence = sequence
        self.customs: list[str] = []
        """Custom autograd functions in the loss's code, by class."""
        self.storages: dict[int, int] = {}
        """What is kept alive, in bytes by storage."""
        self._noted: list[_Noted] = []
        for node in nodes_since(roots, sequence, MAX_NODES):
            self._note(node)

    def traps(self) -> list[Trap]:
        """Return those whose derivative is infinite, in the order in which they ran backward."""
        found = []
        for noted in sorted(self._noted, key=lambda each: -each.sequence):
            check = _CHECKS[noted.name][1]
            mask = check(noted.saved)
            if bool(mask.any()):
                same = sorted(each.sequence for each in self._noted if each.name == noted.name)
                found.append(Trap(noted.node, noted.name, same.index(noted.sequence), noted.saved, mask))
        return found

    def _note(self, node: Any) -> None:
        name = _name(type(node), node)
        if name in _CHECKS:
            saved = {each: _plain(_saved(node, each)) for each in _CHECKS[name][0]}
            if all(value is not None for value in saved.values()) and self._has_room(saved.values()):
                self._noted.append(_Noted(node.name(), name, sequence_of(node), saved))
        elif hasattr(node, "_forward_cls"):
            self.customs.append(name)

    def _has_room(self, values: Iterable[Any]) -> bool:
        """Return whether these tensors are small enough to be kept, and count them if so."""
        storages = dict(storage_of(value) for value in values if isinstance(value, Tensor))
        together = self.storages | storages
        if any(size > MAX_TENSOR_BYTES for size in storages.values()) or sum(together.values()) > MAX_BYTES:
            return False
        self.storages = together
        return True


class LossTails:
    """The tails of the present step, within one bound for all."""

    def __init__(self) -> None:
        self._tails: list[LossTail] = []

    def add(self, roots: tuple[Tensor, ...], sequence: int) -> None:
        """Note a loss's operations before its backward pass."""
        tails = [*self._tails[-(MAX_TAILS - 1) :], LossTail(roots, sequence)]
        while len(tails) > 1 and _held_by(tails) > MAX_BYTES:
            del tails[0]
        self._tails = tails

    def of_pass(self, sequence: int) -> LossTail | None:
        """Return the tail of the pass that ended at this number, or else the last one."""
        last = self._tails[-1] if self._tails else None
        return next((each for each in self._tails if each.sequence == sequence), last)

    def clear(self) -> None:
        """Release everything."""
        self._tails = []


def _held_by(tails: list[LossTail]) -> int:
    storages: dict[int, int] = {}
    for tail in tails:
        storages |= tail.storages
    return sum(storages.values())


_names: dict[type, str] = {}


def _name(kind: type, node: Any) -> str:
    name = _names.get(kind)
    if name is None:
        name = operation_name(node.name())
        if len(_names) < 10_000:
            _names[kind] = name
    return name


def _saved(node: Any, name: str) -> Any:
    try:
        return saved_by(node, name)
    except RuntimeError:  # written over, or freed by another backward; this one may never come to it
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        try:
            return value.detach()
        except RuntimeError:  # torch keeps a number as a tensor, but hands the number itself to dispatch modes
            with _disable_current_modes():
                return value.detach().clone()  # an ordinary tensor
    return value if isinstance(value, int | float) and not math.isnan(value) else None
