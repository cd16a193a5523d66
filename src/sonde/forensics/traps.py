"""What is remembered of a loss's graph until the step ends: operations whose derivative can be infinite.

A backward pass frees the graph behind it. When a non-finite gradient shows that something in the loss's own code went
wrong, the graph is gone; so the few nodes that can be the origin are noted before, with the small tensors they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sonde.forensics.loss_graph import nodes_since, operation_name
from sonde.source import Line, current_line
from sonde.taps.nodes import sequence_of

MAX_NODES: Final = 64
MAX_BYTES: Final = 4 << 20


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
    """An operation of the loss's code whose derivative is infinite at some of the values it met."""

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
            saved = {each: _small(getattr(node, f"_saved_{each}", None)) for each in _CHECKS[name][0]}
            if all(value is not None for value in saved.values()):
                self._noted.append(_Noted(node.name(), name, sequence_of(node), saved))
        elif hasattr(node, "_forward_cls"):
            self.customs.append(name)


_names: dict[type, str] = {}


def _name(kind: type, node: Any) -> str:
    name = _names.get(kind)
    if name is None:
        name = operation_name(node.name())
        if len(_names) < 10_000:
            _names[kind] = name
    return name


def _small(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.numel() * value.element_size() <= MAX_BYTES else None
    return value if isinstance(value, int | float) and not math.isnan(value) else None
