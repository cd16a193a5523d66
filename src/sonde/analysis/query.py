"""A small language that picks samples: `loss > 0.5 and accuracy == 0 and label in (3, 5)`.

It is read with Python's parser and evaluated over whole columns by a few kinds of nodes; there is no attribute, no
variable and no call beyond the functions of `query_tree`, so an expression from a stranger can do nothing but pick.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.query_tree import ARITHMETIC, ORDER, nearest, read_tree, refuse
from sonde.errors import OptionError


@dataclass(frozen=True, slots=True)
class Columns:
    """What an expression may name: columns of equal length, and for metrics which way is better."""

    values: Mapping[str, NDArray[Any]]
    """Numbers (float64, NaN where unknown), or objects for ids and labels that may be texts (None where unknown)."""
    directions: Mapping[str, int]
    size: int


@dataclass(frozen=True, slots=True)
class Query:
    """An expression that was read."""

    text: str
    names: frozenset[str]
    """The columns that it names."""
    _tree: ast.expr

    def select(self, columns: Columns) -> NDArray[np.bool_]:
        """Say for each row whether it is picked.

        A comparison with something unknown, or with NaN, is false; `isnan` finds those.

        Raises:
            OptionError: It names a column that is not there, or compares what cannot be compared.

        """
        found = _Computation(self.text, columns).value(self._tree)
        if not (isinstance(found, np.ndarray) and found.dtype == bool) and not isinstance(found, bool):
            raise OptionError(f"{self.text!r:.120} is no condition. Compare it with something, as in loss > 0.5.")
        return np.broadcast_to(np.asarray(found, bool), (columns.size,)).copy()


def parse(text: str) -> Query:
    """Read an expression.

    Raises:
        OptionError: It cannot be read; the message says where and why.

    >>> sorted(parse("loss > 0.5 and label in (3, 5)").names)
    ['label', 'loss']

    """
    tree, names = read_tree(text)
    return Query(text.strip(), names, tree)


class _Computation:
    """Computes a tree over columns. What it returns is an array, or one constant for all rows."""

    def __init__(self, text: str, columns: Columns) -> None:
        self._text, self._columns = text, columns

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                return self._column(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
                return self._column(f"{name}[{index}]")
            case ast.Call(func=ast.Name(id=name), args=[given]):
                return self._call(name, given)
            case ast.BoolOp(op=op, values=parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return self._join(join, parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return np.logical_not(self._condition(operand))
            case ast.UnaryOp(op=op, operand=operand):
                number = self._numbers(self.value(operand))
                return -number if isinstance(op, ast.USub) else number
            case ast.BinOp(left=left, op=op, right=right):
                with np.errstate(all="ignore"):
                    return ARITHMETIC[type(op)](self._numbers(self.value(left)), self._numbers(self.value(right)))
            case ast.Compare():
                return self._compare(node)
        raise refuse(node, self._text, "a list where a value belongs")

    def _column(self, name: str) -> NDArray[Any]:
        found = self._columns.values.get(name)
        if found is None:
            known = self._columns.values
            raise OptionError(f"There is no column {name}{nearest(name, known)}; there is: {', '.join(known)}.")
        return found

    def _call(self, name: str, given: ast.expr) -> Any:
        if name == "score" and isinstance(given, ast.Constant):
            return self._column(str(given.value))
        numbers = np.broadcast_to(self._numbers(self.value(given)), (self._columns.size,))
        if name == "abs":
            return np.abs(numbers)
        if name == "isnan":
            return np.isnan(numbers)
        if name == "rank":
            return _rank(numbers, self._columns.directions.get(_name(given), 1))
        return percentiles(numbers)

    def _join(self, join: Callable[[Any, Any], Any], parts: list[ast.expr]) -> Any:
        joined = self._condition(parts[0])
        for part in parts[1:]:
            joined = join(joined, self._condition(part))
        return joined

    def _condition(self, node: ast.expr) -> Any:
        found = self.value(node)
        if isinstance(found, bool) or (isinstance(found, np.ndarray) and found.dtype == bool):
            return np.asarray(found, bool)
        raise OptionError(f"{ast.unparse(node)!r:.80} is no condition. Compare it with something, as in loss > 0.5.")

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, str):
            raise OptionError(f"{value!r:.60} is a text; a number is needed in {self._text!r:.120}.")
        if isinstance(value, np.ndarray) and value.dtype == object:
            return _as_numbers(value, self._text)
        return np.asarray(value, np.float64)

    def _compare(self, node: ast.Compare) -> Any:
        result: Any = np.True_
        left = self.value(node.left)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(comparator, ast.Tuple | ast.List):
                outcome = self._among(left, [self.value(each) for each in comparator.elts], isinstance(op, ast.NotIn))
                right: Any = left
            else:
                right = self.value(comparator)
                outcome = self._pair(left, op, right)
            result = np.logical_and(result, outcome)
            left = right
        return np.asarray(result, bool)

    def _among(self, left: Any, items: list[Any], negated: bool) -> Any:
        found: Any = np.zeros(np.shape(left), bool)
        for item in items:
            found = found | _equal(left, item)
        return _known(left) & ~found if negated else found

    def _pair(self, left: Any, op: ast.cmpop, right: Any) -> Any:
        if isinstance(op, ast.Eq):
            return _equal(left, right)
        if isinstance(op, ast.NotEq):
            return _known(left) & _known(right) & ~_equal(left, right)
        with np.errstate(invalid="ignore"):
            return ORDER[type(op)](self._numbers(left), self._numbers(right))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return ast.unparse(node)


def _as_numbers(values: NDArray[Any], text: str) -> NDArray[np.float64]:
    if any(isinstance(each, str) for each in values):
        raise OptionError(f"A column in {text!r:.120} holds texts; compare it with ==, != or in.")
    return np.array([math.nan if each is None else float(each) for each in values], np.float64)


def _known(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return np.array([each is not None and each == each for each in value], bool)  # NaN differs from itself
        return ~np.isnan(value) if value.dtype.kind == "f" else np.ones(value.shape, bool)
    return np.bool_(not (isinstance(value, float) and math.isnan(value)))


def _is_mixed(side: Any) -> bool:
    return isinstance(side, np.ndarray) and side.dtype == object


def _equal(left: Any, right: Any) -> Any:
    """Compare element by element; a text equals no number, and nothing equals what is unknown."""
    if not any(isinstance(side, str) or _is_mixed(side) for side in (left, right)):
        with np.errstate(invalid="ignore"):
            return np.equal(np.asarray(left, np.float64), np.asarray(right, np.float64))
    left, right = np.broadcast_arrays(np.asarray(left, object), np.asarray(right, object))
    same = [a is not None and b is not None and bool(a == b) for a, b in zip(left.flat, right.flat, strict=True)]
    return np.array(same, bool).reshape(left.shape)


def percentiles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how many percent of the values are lower than each; NaN for NaN.

    >>> percentiles(np.array([3.0, 1.0, 1.0, 2.0])).tolist()
    [75.0, 0.0, 0.0, 50.0]
    """
    known = np.sort(values[~np.isnan(values)])
    lower = np.searchsorted(known, values, side="left") / max(len(known), 1) * 100
    return np.where(np.isnan(values), np.nan, lower)


def _rank(values: NDArray[np.float64], direction: int) -> NDArray[np.float64]:
    """Return 1 for the worst; NaN is worse than any number, and equals share the lower number."""
    turned = np.where(np.isnan(values), np.inf, -direction * values)
    return np.asarray(1.0 + np.searchsorted(np.sort(-turned), -turned, side="left"), np.float64)
