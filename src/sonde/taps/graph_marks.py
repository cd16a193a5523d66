"""What the graph of the first backward pass says about shapes that were not meant: read once, without any values.

A view that gives a tensor the same sizes in another order has not moved axes but cut samples up. A column of the loss
that met a row of data was blown up to all pairs. A target with a gradient, made of data and of what the model itself
says, is pulled towards the model as much as the model towards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor
from torch.nn import Parameter

from sonde.facts import ColumnFacts, ReshapeFacts
from sonde.hooks.autograd_graph import children_of, name_of, sequence_of, shape_of, walk

MAX_FOUND: Final = 4
_VIEWS: Final = ("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0")
_SHOWS: Final = (*_VIEWS, "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SelectBackward0")
# Where the loss ends and the model begins.
_LAYERS: Final = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0")
_PAIRED: Final = {"AddBackward0": "add", "DivBackward0": "div", "MulBackward0": "mul", "SubBackward0": "sub"}
# Operations that leave a column a column without having made it one.
_ELEMENTWISE: Final = (
    *("AbsBackward0", "AddBackward0", "ClampBackward1", "ClampMinBackward0", "DivBackward0", "ExpBackward0"),
    *("HuberLossBackward0", "LogBackward0", "LogSigmoidBackward0", "MseLossBackward0", "MulBackward0", "NegBackward0"),
    *("PowBackward0", "ReluBackward0", "RsubBackward1", "SigmoidBackward0", "SmoothL1LossBackward0", "SubBackward0"),
    *("SoftplusBackward0", "TanhBackward0", "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"),
)
_REGRESSIONS: Final = {
    "MseLossBackward0": "mse_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
    "SubBackward0": "difference",
}
_DIFFERENCE_OF: Final = ("PowBackward0", "AbsBackward0", "MulBackward0")
_MAX_CHAIN: Final = 12
_LEAF: Final = "torch::autograd::AccumulateGrad"


def read_reshapes(root: Tensor, module_of: Callable[[int], str]) -> list[ReshapeFacts]:
    """Return views that exchange the sizes of the first axis and another. `module_of` names what made a node."""
    found: list[ReshapeFacts] = []
    for node in walk(root.grad_fn):
        if name_of(node) in _VIEWS and len(found) < MAX_FOUND:
            before, after = shape_of(children_of(node)[0]), shape_of(node)
            if before is not None and after is not None and _is_swap(before, after):
                found.append(ReshapeFacts(before=before, after=after, module=module_of(sequence_of(node))))
    return found


def _is_swap(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Say whether the first size and another one have changed places.

    Attention joins batch and heads behind the first axis, which may look like a swap of two others by chance.

    >>> _is_swap((16, 32, 24), (32, 16, 24)), _is_swap((16, 1), (1, 16)), _is_swap((16, 8, 32), (16, 32, 8))
    (True, False, False)
    """
    if len(before) != len(after) or before == after or min(before) < 2:
        return False
    moved = [at for at in range(len(before)) if before[at] != after[at]]
    return len(moved) == 2 and moved[0] == 0 and before[0] == after[moved[1]] and before[moved[1]] == after[0]


def read_columns(root: Tensor) -> list[ColumnFacts]:
    """Return where a column that a layer made met a row of data within the loss."""
    found: list[ColumnFacts] = []
    for node in _loss_of(root):
        children = [child for child in children_of(node) if child is not None]
        if name_of(node) not in _PAIRED or len(children) != 1 or len(found) >= MAX_FOUND:
            continue
        column, result = shape_of(children[0]), shape_of(node)
        if column is None or len(column) != 2 or column[0] < 2:
            continue
        if column[1] == 1 and result == (column[0], column[0]) and _comes_from_a_layer(children[0], column):
            found.append(ColumnFacts(operation=_PAIRED[name_of(node)], column=column, result=result))
    return found


def _comes_from_a_layer(node: Any, column: tuple[int, ...]) -> bool:
    """Say whether a column is one because a layer has one output, not because somebody made it one on purpose."""
    for _ in range(_MAX_CHAIN):
        if name_of(node) in _LAYERS:
            return True
        children = [child for child in children_of(node) if child is not None]
        if name_of(node) not in _ELEMENTWISE or len(children) != 1 or shape_of(children[0]) != column:
            return False
        node = children[0]
    return False


def read_bootstrap(root: Tensor) -> str:
    """Return the kind of a loss whose target is data plus a multiple of what a model says, with its gradient."""
    for node in _loss_of(root):
        for inner in _compared(node):
            children = children_of(inner)
            if len(children) >= 2 and None not in children[:2] and any(map(_is_data_and_model, children[:2])):
                return _REGRESSIONS[name_of(inner)]
    return ""


def reaches_others(root: Tensor) -> bool:
    """Say whether the backward pass stores a gradient in something that is no parameter, such as an input."""
    leaves = (getattr(node, "variable", None) for node in walk(root.grad_fn) if name_of(node) == _LEAF)
    return any(isinstance(leaf, Tensor) and not isinstance(leaf, Parameter) for leaf in leaves)


def _compared(node: Any) -> Iterator[Any]:
    """Yield the node in which output and target meet: a loss of torch, or a difference that is squared by hand."""
    if name_of(node) in _REGRESSIONS and name_of(node) != "SubBackward0":
        yield node
    elif name_of(node) in _DIFFERENCE_OF:
        yield from (child for child in children_of(node)[:1] if name_of(child) == "SubBackward0")


def _is_data_and_model(node: Any) -> bool:
    """Say whether something is the sum of what needs no gradient and of a product that does: `r + gamma * v`."""
    node = _shown(node)
    if name_of(node) != "AddBackward0" or len(children_of(node)) != 2:
        return False
    given = [child for child in children_of(node) if child is not None]
    return len(given) == 1 and name_of(_shown(given[0])) == "MulBackward0"


def _shown(node: Any) -> Any:
    """Look through views."""
    for _ in range(_MAX_CHAIN):
        if name_of(node) not in _SHOWS:
            break
        node = children_of(node)[0]
    return node


def _loss_of(root: Tensor) -> Iterator[Any]:
    """Yield the nodes between the number that is differentiated and the last layers."""
    return walk(root.grad_fn, until=_LAYERS)
