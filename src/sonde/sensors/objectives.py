"""Sensors for what is minimised: the number that is differentiated, and targets that move with the model."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, Final

from torch import Tensor

from sonde.core.signals import LOOP, ROOT
from sonde.hooks.autograd_graph import children_of, name_of, walk
from sonde.schedule import at, every, first
from sonde.sensors.graph import VIEWS, loss_part
from sonde.sensors.sensor import Backward, Graph, Sensor
from sonde.sensors.tensors import is_plain

_REGRESSIONS: Final = {
    "MseLossBackward0": "mse_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
    "SubBackward0": "difference",
}
_DIFFERENCE_OF: Final = ("PowBackward0", "AbsBackward0", "MulBackward0")
_MAX_CHAIN: Final = 12
_LEAF: Final = "torch::autograd::AccumulateGrad"
_SHOWS: Final = (*VIEWS, "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SelectBackward0")


class Roots(Sensor):
    """The number that `backward()` was called on; unknown under a gradient scaler. Counts steps."""

    produces = (ROOT,)
    when = first(8) | every(7)
    cost = "one number per backward pass"

    def on_backward(self, backward: Backward) -> None:
        """Write the number."""
        context, roots = self.context, backward.roots
        if backward.is_scaled or len(roots) != 1 or not is_plain(roots[0]) or roots[0].numel() != 1:
            return
        if self.when(context.steps) and context.watched.is_due("train"):
            self.signals.see(LOOP, ROOT, roots[0].detach())


class MovingTargets(Sensor):
    """A target made of data and of what the model itself says, with a gradient through both."""

    produces = ("facts.bootstrapped",)
    when = at(0)
    cost = "a walk over the loss's part of the graph of the first backward pass"

    def on_graph(self, graph: Graph) -> None:
        """Find it."""
        self.context.book.add(bootstrapped=read_bootstrap(graph.root, self.context.owners))


def read_bootstrap(root: Tensor, trained: Container[int] | None = None) -> str:
    """Return the kind of a loss whose target is data plus a multiple of what a model says, with its gradient.

    A gradient that reaches only weights that no optimizer holds, as those of a target network, changes nothing: with
    `trained` (the ids of parameters) the target must depend on one of them.
    """
    for node in loss_part(root):
        for inner in _compared(node):
            children = children_of(inner)
            if len(children) < 2 or None in children[:2]:
                continue
            targets = filter(_is_data_and_model, children[:2])
            if any(not trained or _reaches(target, trained) for target in targets):
                return _REGRESSIONS[name_of(inner)]
    return ""


def _reaches(node: Any, trained: Container[int]) -> bool:
    """Return whether a gradient goes from a node to one of these parameters."""
    return any(id(getattr(each, "variable", None)) in trained for each in walk(node) if name_of(each) == _LEAF)


def _compared(node: Any) -> Iterator[Any]:
    """Yield the node in which output and target meet: a loss of torch, or a difference that is squared by hand."""
    if name_of(node) in _REGRESSIONS and name_of(node) != "SubBackward0":
        yield node
    elif name_of(node) in _DIFFERENCE_OF:
        yield from (child for child in children_of(node)[:1] if name_of(child) == "SubBackward0")


def _is_data_and_model(node: Any) -> bool:
    """Return whether something is the sum of what needs no gradient and of a product that does: `r + gamma * v`."""
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
