"""Find the first bad operation in the code between the model's output and `backward()`, from the graph it left.

That code is the program's own and cannot be called again. But just before a backward pass the graph of the loss is
whole: its nodes show which operations ran, in which order, and hold most of what they were given. What they do not hold
is computed from them anew, operation by operation.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from sonde.forensics.keeper import KeptPass
from sonde.forensics.origin import Origin, of_values
from sonde.forensics.reasons import BAD_NUMBER
from sonde.forensics.trace import Given, Operation, find_root, set_roots
from sonde.forensics.values import NAN, badness
from sonde.hooks.autograd_graph import children_of, saved_by, sequence_of, signed

MAX_NODES: Final = 4096
# Operations that never make anything non-finite out of moderate numbers: if one does, an operand it does not keep did.
_LINEAR: Final = frozenset({"add", "sub", "rsub", "mul", "neg"})
_LARGE: Final = 1e18
# Where a node is not named after its operation.
_OPERATIONS: Final = {
    "log_softmax": "_log_softmax",
    "softmax": "_softmax",
    "nll_loss": "nll_loss_forward",
    "nll_loss2_d": "nll_loss2d_forward",
    "mkldnn_linear": "linear",
}


@dataclass(slots=True, eq=False)
class GraphNode:
    """One node of the loss's graph, with what it holds."""

    node: Any
    sequence: int
    name: str
    """The operation, `log`; for a custom autograd function, its class."""
    saved: dict[str, Any] = field(default_factory=dict)
    value: Tensor | None = None
    inputs: list[tuple[str, Tensor | None, GraphNode | None]] = field(default_factory=list)
    made: Operation | None = None


def graph_of(roots: Iterable[Tensor], sequence: int) -> list[GraphNode]:
    """Return the nodes from `sequence` on that lead to `roots`, in the order in which they ran."""
    nodes = nodes_since(roots, sequence, MAX_NODES)
    found = [GraphNode(node, sequence_of(node), operation_name(node.name())) for node in nodes]
    return sorted(found, key=lambda each: each.sequence)


def nodes_since(roots: Iterable[Tensor], sequence: int, most: int) -> Iterator[Any]:
    """Yield up to `most` of the nodes from `sequence` on that lead to `roots`. Leaves are left out."""
    seen: set[Any] = set()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node in seen or is_leaf(node) or sequence_of(node) < sequence:
            continue
        seen.add(node)
        yield node
        waiting += [child for child in children_of(node) if child is not None]


def is_leaf(node: Any) -> bool:
    """Return whether a node accumulates the gradient of a leaf, such as a parameter."""
    return hasattr(node, "variable")


def operation_name(name: str) -> str:
    """Return the operation that a node differentiates.

    >>> operation_name("LogSoftmaxBackward0"), operation_name("SwishBackward")
    ('log_softmax', 'Swish')
    """
    if not name[-1:].isdigit():
        return name.removesuffix("Backward")
    plain = re.sub(r"Backward\d+$", "", name)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", plain).lower()


def find_loss_origin(
    roots: tuple[Tensor, ...], kept: KeptPass | None, outputs: list[Tensor]
) -> tuple[Origin, GraphNode] | None:
    """Return where the loss became non-finite and the node that did it, or None if that is unknown.

    `outputs` are the model's outputs, whose graph is not entered.
    """
    graph = graph_of(roots, kept.sequence if kept is not None else 0)
    known = {each.grad_fn: each for each in outputs if each.grad_fn is not None}
    with torch.no_grad():
        for each in graph:
            each.saved = saved_values(each.node)
        if any(hasattr(value, "to_local") for each in graph for value in each.saved.values()):
            return None  # spread over processes: to compute with it would wait for the others
        _compute(graph, known, roots)
        for each in graph:
            _note(each)
    end = next((each for each in reversed(graph) if each.node in {root.grad_fn for root in roots}), None)
    if end is None or end.made is None:
        return None
    source = find_root(end.made).source
    batch_size = kept.batch_size if kept is not None else None
    by_source = {id(each.made): each for each in graph if each.made is not None}
    if isinstance(source, Given):
        if any(source.tensor is output for output in outputs):
            return None  # the model's output, which something changed in place behind the back of the graph
        user = next(each for each in graph if any(tensor is source.tensor for _, tensor, _ in each.inputs))
        if source.tensor.dim():
            about = of_values(source.tensor, source.badness, [], batch_size)
            return replace(about, stage="data", tensor=source.name, op=_op(user)), user
        assert user.made is not None
        source = user.made  # a factor or a term such as a weight of the loss, not a part of the batch
        source.scalars = source.scalars | {BAD_NUMBER: "NaN" if source.badness & NAN else "infinite"}
    node = by_source[id(source)]
    unknown = (made_by for _, tensor, made_by in node.inputs if tensor is None)
    if any(made_by is not None and made_by.made is None for made_by in unknown):
        return None  # its input cannot be known, and it may only pass it on
    about = of_values(source.output, source.badness, source.inputs, batch_size)
    is_given = _is_given(node)
    is_data = is_given and source.output is not None and source.output.dim() > 0
    if is_given and not is_data:
        source.scalars = source.scalars | {BAD_NUMBER: "NaN" if source.badness & NAN else "infinite"}
    found = replace(about, stage="data" if is_data else "loss", tensor="target" if is_data else "")
    return replace(found, op=source.op, call=node.name, scalars=source.scalars), node


def _op(each: GraphNode) -> str:
    return f"aten.{_OPERATIONS.get(each.name, each.name)}" if hasattr(torch.ops.aten, each.name) else each.name


def _is_given(each: GraphNode) -> bool:
    """Return whether an operand that the graph does not hold must have been bad: the others are finite and moderate."""
    if each.name not in _LINEAR or not any(tensor is None for _, tensor, _ in each.inputs):
        return False
    return all(tensor is None or float(tensor.abs().max()) < _LARGE for _, tensor, _ in each.inputs if _full(tensor))


def _full(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def _note(each: GraphNode) -> None:
    """Note a result that is not finite. One that is not known passes on what is bad about its operands."""
    passed = [_passed_on(tensor, source) for _, tensor, source in each.inputs]
    bad = badness(each.value) if each.value is not None else functools.reduce(operator.or_, passed, 0)
    if not bad:
        return
    made = Operation(index=each.sequence, op=_op(each), badness=bad, module="", call=None, line=None, stage="forward")
    made.output = each.value
    made.inputs = [(name, tensor) for name, tensor, _ in each.inputs if tensor is not None]
    made.scalars = {name: value for name, value in each.saved.items() if isinstance(value, bool | int | float)}
    for (name, tensor, source), bad_input in zip(each.inputs, passed, strict=True):
        if not bad_input:
            continue
        parent = source.made if source is not None else None
        if parent is None and tensor is not None:
            made.parents.append((Given("input", name, tensor, bad_input), bad_input))
        elif parent is not None:
            made.parents.append((parent, bad_input))
    set_roots(made)
    each.made = made


def _passed_on(tensor: Tensor | None, source: GraphNode | None) -> int:
    """Return what is bad about an operand; where it is not known, what is bad about the operation that made it."""
    if tensor is not None:
        return badness(tensor)
    return 0 if source is None or source.made is None else source.made.badness


# ---------------------------------------------------------------------- values


def _compute(graph: list[GraphNode], known: dict[Any, Tensor], roots: tuple[Tensor, ...]) -> None:
    by_node = {each.node: each for each in graph}
    # What a later operation kept of its inputs is the result of an earlier one, exactly as it was.
    for each in graph:
        for name, following in zip(_tensor_names(each), children_of(each.node), strict=False):
            value = each.saved.get(name)
            if following in by_node and isinstance(value, Tensor):
                by_node[following].value = value
    for root in roots:
        if root.grad_fn in by_node:
            by_node[root.grad_fn].value = root.detach()
    for each in graph:
        _bind(each, by_node, known)
        if each.value is None:
            each.value = _result(each)


def saved_values(node: Any) -> dict[str, Any]:
    """Return what an autograd node holds, by the names of the operation's arguments.

    What a hook of the program's would have to unpack is left out: a loss is checkpointed in chunks because its whole
    does not fit into memory.
    """
    values = {}
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            name = attribute.removeprefix("_saved_")
            try:
                values[name] = signed(saved_by(node, name))
            except RuntimeError:  # it has been freed, or changed since
                continue
    return values


def _bind(each: GraphNode, by_node: dict[Any, GraphNode], known: dict[Any, Tensor]) -> None:
    names = _tensor_names(each)
    for index, following in enumerate(children_of(each.node)):
        name = names[index] if index < len(names) else f"input{index}"
        source = by_node.get(following)
        value = each.saved.get(name)
        if not isinstance(value, Tensor):
            value = _value_of(following, source, known)
        each.inputs.append((name, value, source))
    bound = {name for name, _, _ in each.inputs}
    for name in names:
        value = each.saved.get(name)
        if name not in bound and isinstance(value, Tensor):
            each.inputs.append((name, value, None))


def _value_of(following: Any, source: GraphNode | None, known: dict[Any, Tensor]) -> Tensor | None:
    if source is not None:
        return source.value
    if following is None:
        return None
    variable = getattr(following, "variable", None)
    return variable if isinstance(variable, Tensor) else known.get(following)


def _result(each: GraphNode) -> Tensor | None:
    for name in ("result", "output"):
        if isinstance(each.saved.get(name), Tensor):
            value: Tensor = each.saved[name]
            return value
    for overload in _overloads(each.name):
        arguments = _arguments(overload, each)
        if arguments is None:
            continue
        try:
            result = overload(**arguments)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            continue
        result = result[0] if isinstance(result, tuple) else result
        return result if isinstance(result, Tensor) else None
    return None


def _arguments(overload: Any, each: GraphNode) -> dict[str, Any] | None:
    tensors = {name: value for name, value, _ in each.inputs}
    arguments = {}
    for argument in overload._schema.arguments:
        name = argument.name
        value = tensors.get(name, each.saved.get(name))
        if value is None and argument.has_default_value():
            value = argument.default_value
        if value is None and not str(argument.type).startswith("Optional"):
            return None
        arguments[name] = value
    return arguments


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, _OPERATIONS.get(name, name), None)
    if packet is None:
        return []
    overloads = [getattr(packet, each) for each in packet.overloads()]
    return [each for each in overloads if not each._schema.is_mutable and "out" not in each._overloadname]


def _tensor_names(each: GraphNode) -> list[str]:
    overloads = _overloads(each.name)
    if not overloads:
        return []
    most = max(overloads, key=lambda overload: len(_tensor_arguments(overload)))
    return _tensor_arguments(most)


def _tensor_arguments(overload: Any) -> list[str]:
    return [argument.name for argument in overload._schema.arguments if "Tensor" in str(argument.type)]
