"""Read the graph of the first backward pass: which module made a node, and where the loss ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final

from torch import Tensor

from sonde.hooks.autograd_graph import next_sequence, walk

VIEWS: Final = ("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0")
# Where the loss ends and the model begins.
LAYERS: Final = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0")


def loss_part(root: Tensor) -> Iterator[Any]:
    """Yield the nodes between the number that is differentiated and the last layers."""
    return walk(root.grad_fn, until=LAYERS)


class Spans:
    """Which autograd nodes each leaf module has made, by their numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, str]] = []

    def enter(self) -> None:
        """Note that a leaf module begins."""
        del self._starts[len(self._spans) :]  # one that raised has not left
        self._starts.append(next_sequence())

    def leave(self, name: str) -> None:
        """Note that a leaf module has ended."""
        if len(self._starts) > len(self._spans):
            self._spans.append((next_sequence(), name))

    def module_of(self, sequence: int) -> str:
        """Return the leaf module that made a node, else the module around those before and after it."""
        at = bisect_right(self._starts, sequence) - 1
        if 0 <= at < len(self._spans) and sequence < self._spans[at][0]:
            return self._spans[at][1]
        around = [self._spans[index][1].split(".")[:-1] for index in (at, at + 1) if 0 <= index < len(self._spans)]
        same = takewhile(lambda parts: len(set(parts)) == 1, zip(*around, strict=False))
        return ".".join(parts[0] for parts in same)
