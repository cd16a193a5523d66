"""Read the nodes of an autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import torch

next_sequence: Final[Callable[[], int]] = vars(torch.autograd)["_get_sequence_nr"]
"""Returns the number that the next autograd node of this thread will have; they count operations in order."""

_SHOWN_OTHERWISE: Final = (
    *("alias", "clone", "permute", "reshapealias", "select", "slice", "squeeze", "t", "tocopy", "transpose"),
    *("unsafeview", "unsqueeze", "view"),
)
LEAF: Final = "torch::autograd::AccumulateGrad"
_MAX_LOOKS: Final = 10
_MADE_LOCAL: Final = "_ToTorchTensorBackward"
_MAX_NODES_BEHIND: Final = 2_000
MAX_NODES: Final = 20_000
"""Nodes of a graph that are walked; no usual program has as many."""


def sequence_of(node: Any) -> int:
    """Return a node's number, which no other of this thread has."""
    return int(node._sequence_nr())


def children_of(node: Any) -> list[Any]:
    """Return the nodes that made what a node was given, None where it takes no gradient."""
    return [] if node is None else [child for child, _ in node.next_functions]


def walk(root: Any, until: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield every node of a graph once; what made nodes of the names `until` is left out."""
    waiting, known = [root], {root}
    while waiting and len(known) < MAX_NODES:
        node = waiting.pop()
        yield node
        for child in children_of(node) if name_of(node) not in until else ():
            if child is not None and child not in known:
                known.add(child)
                waiting.append(child)


def first_nodes(root: Any, most: int) -> list[Any]:
    """Return the nodes nearest to the root of a graph that the graph owns, so not those of parameters."""
    found: list[Any] = []
    waiting = deque([root])
    known = {root}
    while waiting and len(found) < most:
        node = waiting.popleft()
        if node is None or name_of(node) == LEAF:
            continue
        found.append(node)
        children = [child for child in children_of(node) if child not in known]
        known.update(children)
        waiting.extend(children)
    return found


def layouts_behind(tensor: torch.Tensor) -> list[Any]:
    """Return the layout (`DTensorSpec`) of a DTensor; of a plain tensor, those of the DTensors it was computed from.

    Only the nearest count: where a DTensor was made local, its layout is known, whatever it came from.
    """
    own = getattr(tensor, "_spec", None)
    if own is not None or tensor.grad_fn is None:
        return [] if own is None else [own]
    nodes = islice(walk(tensor.grad_fn, until=(_MADE_LOCAL,)), _MAX_NODES_BEHIND)
    return [node.dtensor_spec for node in nodes if name_of(node) == _MADE_LOCAL]


def signed(value: Any) -> Any:
    """Return a whole number as it was given, in a tuple too.

    Torch hands out some as if they had no sign: an `ignore_index` of -100, a dimension of -1.
    """
    if isinstance(value, int) and value >= 1 << 63:
        return value - (1 << 64)
    return [signed(item) for item in value] if isinstance(value, tuple) else value


def name_of(node: Any) -> str:
    """Return what a node undoes, such as `SoftmaxBackward0`; nothing for None."""
    return "" if node is None else str(node.name())


def maker_of(tensor: torch.Tensor) -> str:
    """Return the operation that computed a tensor, such as `sigmoid` or `addmm`; nothing for one without a graph.

    What only shows the same numbers in another shape or dtype is looked through.
    """
    node: Any = tensor.grad_fn
    for _ in range(_MAX_LOOKS):
        operation = name_of(node).removesuffix("0").removesuffix("1").removesuffix("Backward").lower()
        if operation not in _SHOWN_OTHERWISE:
            return operation
        node = next(iter(children_of(node)), None)
    return ""


def is_softmax(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds what a softmax returned, perhaps with dropout, in another shape or dtype."""
    node: Any = tensor.grad_fn
    for _ in range(_MAX_LOOKS):
        if name_of(node).endswith("SoftmaxBackward0"):
            return "Log" not in name_of(node)
        node = next(iter(children_of(node)), None)
    return False


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of what a node made."""
    known: Sequence[Any] = getattr(node, "_input_metadata", ())
    return tuple(int(size) for size in known[0].shape) if len(known) == 1 else None


def saved_by(node: Any, name: str) -> Any:
    """Return what a node saved. What would run someone's hook to be unpacked is left alone."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    several = raw if isinstance(raw, list | tuple) else (raw,)
    if any(getattr(each, "unpack_hook", None) is not None for each in several):
        return None
    return getattr(node, f"_saved_{name}", None)
