"""Reading the nodes of an autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

next_sequence: Final[Callable[[], int]] = vars(torch.autograd)["_get_sequence_nr"]
"""Returns the number that the next autograd node of this thread will have; they count operations in order."""


def sequence_of(node: Any) -> int:
    """Return a node's number, which no other of this thread has."""
    return int(node._sequence_nr())


def children_of(node: Any) -> list[Any]:
    """Return the nodes that made what a node was given, None where it takes no gradient."""
    return [] if node is None else [child for child, _ in node.next_functions]


def signed(value: Any) -> Any:
    """Return a whole number as it was given, in a tuple too.

    Torch hands out some as if they had no sign: an `ignore_index` of -100, a dimension of -1.
    """
    if isinstance(value, int) and value >= 1 << 63:
        return value - (1 << 64)
    return [signed(item) for item in value] if isinstance(value, tuple) else value
