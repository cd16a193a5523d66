"""Read a loss that was written out by hand from the graph that its backward pass will run through.

`((model(x) - y) ** 2).mean()` calls no loss function. But the graph says that a mean was taken of squares of a
difference, and what backward needs is saved in it: the labels that were picked, the probabilities whose logarithm was
taken. Only the few nodes between the root and the model's output are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from sonde.core.facts import Plain
from sonde.hooks.autograd_graph import children_of, name_of, saved_by, sequence_of, shape_of, signed
from sonde.hooks.guard import unobserved
from sonde.sensors.tensors import is_plain, is_real, is_whole

BY_HAND: Final = "by_hand"
"""The setting that marks a loss which was read from the graph."""
MAX_NODES: Final = 24
# Operations that change the shape, or leave something out. Where values are wanted, their number must be the same.
_VIEWS: Final = (
    "AliasBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
)
_WHOLE: Final = {"MeanBackward0": "mean", "SumBackward0": "sum"}
_ALONG: Final = {"MeanBackward1": "mean", "SumBackward1": "sum"}
_PICKS: Final = ("IndexBackward0", "GatherBackward0")
_DIFFERENCES: Final = ("SubBackward0", "RsubBackward1", "RsubBackward0")


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """What a model returned in a training pass: which node made it, and its values."""

    node: int
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> ModelOutput | None:
        """Return it for a tensor that can be differentiated. It keeps the values, but not the graph."""
        node = tensor.grad_fn
        return None if node is None else cls(sequence_of(node), tensor.detach())


@dataclass(frozen=True, slots=True, eq=False)
class WrittenLoss:
    """A loss as the graph tells it."""

    kind: str
    values: Tensor
    target: Tensor | None = None
    settings: dict[str, Plain] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Term:
    """A part of the loss: what was reduced to one number, and how."""

    node: Any
    reduction: str
    """`mean`, `sum`, or how else numbers became one: `divided`, `batchmean`."""
    weighted: bool = False
    sign: int = 1
    """1, or -1 if it is subtracted; 0 if a factor hides it."""


def read_loss(root: Tensor, outputs: Sequence[ModelOutput]) -> WrittenLoss | None:
    """Return the loss that a scalar was computed by, if it is one of the usual ones; None if that is unknown."""
    try:
        terms = _terms(root.grad_fn)
        found = _log_partition(terms) or next((loss for term in terms if (loss := _core(term, outputs))), None)
        if found is None:
            return None
        several = len(terms) > 1 and "pieces" not in found.settings
        settings = {**found.settings, BY_HAND: True, "weighted": bool(found.settings.get("weighted"))}
        settings |= {"reduction": "part"} if several else {}
        return WrittenLoss(found.kind, found.values, found.target, settings, found.shapes)
    except RuntimeError:  # a saved tensor was written to since, or belongs to a graph that is gone
        return None


def read_reduction(root: Tensor) -> str | None:
    """Return how the numbers of a loss became one, if it was by a plain mean or sum."""
    terms = _terms(root.grad_fn)
    if len(terms) != 1 or terms[0].weighted or terms[0].reduction not in ("mean", "sum"):
        return None
    return terms[0].reduction


def raises_likelihood(root: Tensor) -> bool:
    """Return whether what is made small is the plain mean or sum of log-probabilities: a minus is missing.

    Log-probabilities times numbers of their own are what rewards are learnt by, and may have either sign.
    """
    terms = _terms(root.grad_fn)
    if len(terms) != 1 or terms[0].weighted or terms[0].sign <= 0:
        return False
    node = terms[0].node
    for _ in range(MAX_NODES):
        if name_of(node) not in (*_VIEWS, *_PICKS, "DiagonalBackward0"):
            break
        node = _children(node)[0]
    return name_of(node) == "LogSoftmaxBackward0"


# ---------------------------------------------------------------------- from the root to what is reduced


def _terms(root: Any) -> list[_Term]:
    """Return the terms that a loss is the sum of."""
    found: list[_Term] = []
    waiting = [(root, 1, False)]
    for _ in range(MAX_NODES):
        if not waiting:
            break
        node, sign, divided = waiting.pop(0)
        name = name_of(node)
        children = _children(node)
        if name in _WHOLE or (name in _ALONG and _size(node) == 1):
            found.append(_reduced(node, sign, divided))
        elif name == "NegBackward0" or name in _VIEWS:
            waiting.append((children[0], -sign if name == "NegBackward0" else sign, divided))
        elif name in ("DivBackward0", "MulBackward0") and len(children) == 1:
            waiting.append((children[0], sign * _sign_of(saved_by(node, "other")), True))
        elif name in ("AddBackward0", "SubBackward0"):
            waiting += [
                (child, sign * (-1 if name[0] == "S" and at else 1), divided) for at, child in enumerate(children)
            ]
    return found


def _reduced(node: Any, sign: int, divided: bool) -> _Term:
    """Return the term below a mean or sum of everything."""
    reduction = _WHOLE.get(name_of(node)) or _ALONG[name_of(node)]
    below, weighted = _children(node)[0], False
    for _ in range(MAX_NODES):
        name, children = name_of(below), _children(below)
        if name in _ALONG:
            inner = _ALONG[name]
            reduction = reduction if inner == reduction else "batchmean"
        elif name == "NegBackward0":
            sign = -sign
        elif (
            name == "MulBackward0"
            and len(children) == 1
            and _size(children[0]) == _size(below)
            and not _is_log(children[0])
        ):
            weighted = weighted or not _is_number(saved_by(below, "other"))
        elif name not in _VIEWS:
            break
        below = children[0]
    return _Term(below, "divided" if divided else reduction, weighted, sign)


# ---------------------------------------------------------------------- what the losses are


def _core(term: _Term, outputs: Sequence[ModelOutput]) -> WrittenLoss | None:
    """Return the loss whose elements a term adds up."""
    # Log-probabilities times other numbers are a policy-gradient loss, not a loss of labels.
    if term.weighted and term.reduction != "divided":
        return None
    name = name_of(term.node)
    if name == "PowBackward0" and saved_by(term.node, "exponent") == 2:
        return _difference("mse_loss", term, _children(term.node)[0], outputs)
    if name == "MulBackward0" and _is_square(term.node):
        return _difference("mse_loss", term, _children(term.node)[0], outputs)
    if name == "AbsBackward0":
        return _difference("l1_loss", term, _children(term.node)[0], outputs)
    if term.sign > 0:
        return None  # likelihoods are made large, so a loss has them with a minus
    if name in _PICKS:
        return _picked(term, outputs)
    if name == "MulBackward0":
        return _dotted(term, outputs)
    return _binary(term) if name == "AddBackward0" else None


def _difference(kind: str, term: _Term, node: Any, outputs: Sequence[ModelOutput]) -> WrittenLoss | None:
    """Read what an output is subtracted from, or what is subtracted from it."""
    node = _unview(node)
    children = _children(node)
    if name_of(node) not in _DIFFERENCES or len(children) != 1:
        return None
    shape, operand = shape_of(node), shape_of(children[0])
    values = _values_of(children[0], outputs)
    if values is None or shape is None or operand is None:
        return None
    shapes = operand, _missing_shape(operand, shape)
    return WrittenLoss(kind, values, _target_of(term.node, node, values), {"reduction": term.reduction}, shapes)


def _missing_shape(operand: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what an operand was compared with, as far as the result tells.

    A column of N that became N by N was compared with a row.
    """
    count = max(operand, default=1)
    blown_up = operand in ((count, 1), (count,)) and whole == (count, count) and count > 1
    if not blown_up:
        return whole if _count(operand) == _count(whole) else operand
    return (count,) if operand == (count, 1) else (count, 1)


def _target_of(core: Any, difference: Any, values: Tensor) -> Tensor | None:
    """Return the target, from the difference that was saved; None if that is not of the output's own shape."""
    saved = saved_by(core, "self")
    if not isinstance(saved, Tensor) or saved.shape != values.shape or saved.device != values.device:
        return None
    turned = name_of(difference).startswith("Rsub") or children_of(difference)[0] is None
    return values + saved.detach() if turned else values - saved.detach()


def _picked(term: _Term, outputs: Sequence[ModelOutput]) -> WrittenLoss | None:
    """Read the numbers of the right classes, picked from log-probabilities."""
    labels = _labels(term.node)
    node = _unview(_children(term.node)[0])
    return None if labels is None else _likelihood(node, labels, term, outputs)


def _labels(node: Any) -> Tensor | None:
    if name_of(node) == "GatherBackward0":
        index = saved_by(node, "index")
        is_label = isinstance(index, Tensor) and is_whole(index) and index.dim() >= 2 and index.shape[-1] == 1
        return index.flatten() if is_label and isinstance(index, Tensor) else None
    indices = saved_by(node, "indices")
    if not isinstance(indices, list | tuple) or len(indices) != 2:
        return None
    labels = indices[1]
    return labels if isinstance(labels, Tensor) and is_whole(labels) and labels.dim() == 1 else None


def _dotted(term: _Term, outputs: Sequence[ModelOutput]) -> WrittenLoss | None:
    """Read log-probabilities times a distribution over the classes."""
    children = _children(term.node)
    weights = _other_factor(term.node)
    shape = shape_of(term.node)
    if len(children) != 1 or weights is None or shape is None or len(shape) != 2 or tuple(weights.shape) != shape:
        return None
    return _likelihood(_unview(children[0]), weights.detach().argmax(1), term, outputs)


def _likelihood(node: Any, labels: Tensor, term: _Term, outputs: Sequence[ModelOutput]) -> WrittenLoss | None:
    """Return the loss of labels by what their log-probabilities were made of."""
    # Adding up over classes and averaging over samples is the mean of samples.
    settings: dict[str, Plain] = {"reduction": "mean" if term.reduction == "batchmean" else term.reduction}
    name = name_of(node)
    if name == "LogSoftmaxBackward0":
        result = saved_by(node, "result")
        if not is_real(result):
            return None
        is_output = any(sequence_of(node) == output.node for output in outputs)
        over_classes = signed(saved_by(node, "dim")) in (-1, result.dim() - 1)
        logits = _logits(node, result, outputs) if over_classes and not is_output else None
        kind, values = ("nll_loss", result) if logits is None else ("cross_entropy", logits)
    elif name == "LogBackward0":
        probabilities = saved_by(node, "self")
        if not is_real(probabilities):
            return None
        kind, values = "nll_loss", probabilities.detach().log()
    else:
        found = next((output.values for output in outputs if output.node == sequence_of(node)), None)
        if found is None:
            return None
        kind, values = "nll_loss", found
    rows = values.reshape(-1, values.shape[-1])
    fits = values.dim() >= 2 and len(rows) == labels.numel() and rows.shape[1] > 1
    return WrittenLoss(kind, rows, labels.reshape(-1), settings) if fits else None


def _logits(node: Any, result: Tensor, outputs: Sequence[ModelOutput]) -> Tensor | None:
    """Return what a log-softmax was given."""
    child = _unview(_children(node)[0])
    if name_of(child) == "SoftmaxBackward0":
        saved = saved_by(child, "result")
        return saved if is_real(saved) and saved.numel() == result.numel() else None
    known = (output.values for output in outputs if output.node == sequence_of(child))
    values = next((values for values in known if values.numel() == result.numel()), None)
    return None if values is None else values.reshape(result.shape)


def _binary(term: _Term) -> WrittenLoss | None:
    """Read `y * log(p) + (1 - y) * log(1 - p)`."""
    logs: dict[bool, Any] = {}
    targets: dict[bool, Tensor | None] = {}
    for factor in _children(term.node):
        children = _children(factor)
        if name_of(factor) != "MulBackward0" or len(children) != 1 or name_of(children[0]) != "LogBackward0":
            return None
        is_turned = any(name_of(each).startswith("Rsub") for each in _some_below(children[0]))
        logs[is_turned], targets[is_turned] = children[0], _other_factor(factor)
    if len(logs) != 2:
        return None
    values = saved_by(logs[False], "self")
    settings: dict[str, Plain] = {"reduction": term.reduction}
    return WrittenLoss("binary_cross_entropy", values, targets[False], settings) if is_real(values) else None


def _log_partition(terms: Sequence[_Term]) -> WrittenLoss | None:
    """Read `logsumexp(logits) - logits[labels]`, whether means are taken before or after subtracting."""
    if len(terms) == 1 and name_of(terms[0].node) == "SubBackward0":
        pieces = [(_unview(child), terms[0].reduction) for child in _children(terms[0].node)]
    else:
        pieces = [(term.node, term.reduction) for term in terms]
    if len(pieces) != 2 or name_of(pieces[0][0]) != "LogsumexpBackward0" or name_of(pieces[1][0]) not in _PICKS:
        return None
    logits, labels = saved_by(pieces[0][0], "self"), _labels(pieces[1][0])
    if not is_real(logits) or labels is None or logits.dim() != 2 or len(logits) != len(labels):
        return None
    return WrittenLoss("cross_entropy", logits, labels, {"reduction": pieces[0][1], "pieces": 2})


# ---------------------------------------------------------------------- nodes


def _children(node: Any) -> list[Any]:
    return [child for child in children_of(node) if child is not None]


def _some_below(node: Any) -> Iterator[Any]:
    """Yield the next few nodes of a chain, as `log(1 - p + eps)` has."""
    for _ in range(3):
        children = _children(node)
        if len(children) != 1:
            return
        node = children[0]
        yield node


def _unview(node: Any) -> Any:
    for _ in range(MAX_NODES):
        if name_of(node) not in _VIEWS:
            break
        node = _children(node)[0]
    return node


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _size(node: Any) -> int:
    shape = shape_of(node)
    return -1 if shape is None else _count(shape)


def _sign_of(factor: Any) -> int:
    """Return the sign of a number that a loss is multiplied or divided by; 0 if it lies on a device or is none."""
    is_known = isinstance(factor, int | float) or (
        isinstance(factor, Tensor) and factor.dim() == 0 and factor.device.type == "cpu"
    )
    if not is_known:
        return 0
    with unobserved():  # a tape is handed the plain number that such a tensor may wrap
        return 1 if factor > 0 else -1


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _is_log(node: Any) -> bool:
    return name_of(_unview(node)) in ("LogBackward0", "LogSoftmaxBackward0")


def _is_square(node: Any) -> bool:
    children = _children(node)
    return len(children) == 2 and len({*map(sequence_of, children)}) == 1 and name_of(children[0]) in _DIFFERENCES


def _other_factor(node: Any) -> Tensor | None:
    """Return the factor that is not differentiated."""
    factors = [saved_by(node, name) for name in ("self", "other")]
    plain = [each for each in factors if isinstance(each, Tensor) and is_plain(each) and not each.requires_grad]
    return plain[0] if len(plain) == 1 else None


def _values_of(node: Any, outputs: Sequence[ModelOutput]) -> Tensor | None:
    """Return the values of a model's output, if a node made it or a view of it."""
    shape, below = shape_of(node), _unview(node)
    found = next((output.values for output in outputs if output.node == sequence_of(below)), None)
    if found is None or shape is None or found.numel() != _count(shape):
        return None
    return found.reshape(shape)
