"""Which dimension each softmax runs over, and which one is summed over when its result is used.

Both stand in the graph of the first backward pass: a softmax saves its dimension, and a product of matrices, a weighted
sum or a likelihood says along which dimension the weights are used. The graph is walked once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

from torch import Tensor

from sonde.facts import SoftmaxFacts
from sonde.hooks.autograd_graph import children_of, name_of, saved_by, sequence_of, shape_of, signed, walk

MAX_FOUND: Final = 16
_MAX_CHAIN: Final = 10
_SOFTMAXES: Final = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_PRODUCTS: Final = ("BmmBackward0", "MmBackward0")
_LIKELIHOODS: Final = ("NllLossBackward0", "NllLoss2DBackward0")
# Operations that leave every dimension where it is.
_SAME: Final = (
    "CloneBackward0",
    "DivBackward0",
    "DropoutBackward0",
    "ExpandBackward0",
    "MaskedFillBackward0",
    "MulBackward0",
    "NativeDropoutBackward0",
    "ToCopyBackward0",
)
_VIEWS: Final = ("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0")
_MOVES: Final = ("PermuteBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0")


def read_softmaxes(root: Tensor, module_of: Callable[[int], str]) -> list[SoftmaxFacts]:
    """Return the softmaxes whose use can be told. `module_of` names the module that made a node, by its number."""
    found: list[SoftmaxFacts] = []
    for node in walk(root.grad_fn):
        for used, below, over in _uses(node):
            chain = _chain(below)
            facts = None if chain is None else _facts(chain, used, over, module_of)
            if facts is not None and facts not in found:
                found.append(facts)
        if len(found) >= MAX_FOUND:
            break
    return found


def _uses(node: Any) -> list[tuple[str, Any, int]]:
    """Return what a node uses along which dimension, counted from the end: as a likelihood, or as weights."""
    name, children = name_of(node), children_of(node)
    if name in _LIKELIHOODS:
        # Classes come second: (N, C) and, for pictures and sequences, (N, C, H, W).
        return [("likelihood", children[0], -1 if name == "NllLossBackward0" else -3)]
    if name in _PRODUCTS and len(children) == 2:
        return [("weights", children[0], -1), ("weights", children[1], -2)]
    return []


def _chain(node: Any) -> list[Any] | None:
    """Return the nodes from a use down to the softmax whose result is used, the softmax last; None if there is none."""
    chain: list[Any] = []
    for _ in range(_MAX_CHAIN):
        chain.append(node)
        name = name_of(node)
        if name in _SOFTMAXES:
            return chain
        children = [child for child in children_of(node) if child is not None]
        if len(children) != 1 or name not in (*_SAME, *_VIEWS, *_MOVES):
            return None
        node = children[0]
    return None


def _facts(chain: list[Any], used: str, over: int, module_of: Callable[[int], str]) -> SoftmaxFacts | None:
    softmax = chain[-1]
    shape, dim = shape_of(softmax), signed(saved_by(softmax, "dim"))
    if shape is None or not isinstance(dim, int):
        return None
    made = dim % len(shape)
    before = {index: index for index in range(len(shape))}
    for node, below in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        moved = _moved(node, shape_of(below), shape_of(node))
        if moved is None:
            return None
        before = {moved[now]: old for now, old in before.items() if now in moved}
    last = shape_of(chain[0])
    summed = None if last is None else before.get(over % len(last))
    if summed is None:
        return None
    logarithm = name_of(softmax) == "LogSoftmaxBackward0"
    module = module_of(sequence_of(softmax))
    return SoftmaxFacts(shape=shape, dim=made, summed=summed, used=used, logarithm=logarithm, module=module)


def _moved(node: Any, before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> dict[int, int] | None:
    """Return where a node put each dimension that it kept; None if that cannot be told."""
    if before is None or after is None:
        return None
    name = name_of(node)
    if name in _SAME:
        return {index: index for index in range(len(before))} if len(before) == len(after) else None
    if name in _VIEWS:
        return _kept(before, after)
    count = len(before)
    if name == "TBackward0":
        return {0: 1, 1: 0} if count == 2 else None
    if name == "TransposeBackward0":
        one, two = (signed(saved_by(node, each)) for each in ("dim0", "dim1"))
        return {index: index for index in range(count)} | {one % count: two % count, two % count: one % count}
    if name == "PermuteBackward0":
        dims = signed(saved_by(node, "dims"))
        return {int(old) % count: new for new, old in enumerate(dims)}
    at = signed(saved_by(node, "dim")) % len(max(before, after, key=len))
    step = len(after) - count
    return {index: index + step * (index >= at) for index in range(count) if step >= 0 or index != at}


def _kept(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int]:
    """Return the dimensions that a change of shape leaves whole.

    >>> _kept((4, 6, 8), (24, 8)), _kept((4, 2, 6, 6), (8, 6, 6))
    ({2: 1}, {2: 1, 3: 2})
    """
    ends = {(prod(after[:index]), size): index for index, size in enumerate(after) if size > 1}
    kept = {index: ends.get((prod(before[:index]), size)) for index, size in enumerate(before)}
    return {old: new for old, new in kept.items() if new is not None}
