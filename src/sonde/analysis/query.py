"""A small language that picks samples: `loss > 0.5 and accuracy == 0 and label in (3, 5)`.

It is read with Python's parser and evaluated over whole columns by a few kinds of nodes; there is no attribute, no
variable and no call beyond the functions of `query_tree`, so an expression from a stranger can do nothing but pick.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import OptionError

# --------------------------------------------------------------------------------
# Reading an expression that picks samples: with Python's parser, and then nothing is let through that is not known.


MOST_SIGNS: Final = 2000
_MOST_DEPTH: Final = 60

ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
}
ORDER: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_HINTS: Final[dict[type[ast.AST], str]] = {
    ast.Attribute: "a dot",
    ast.BitAnd: "&; write 'and'",
    ast.BitOr: "|; write 'or'",
    ast.Invert: "~; write 'not'",
    ast.Is: "'is'; write ==",
    ast.IsNot: "'is not'; write !=",
    ast.Lambda: "a function of your own",
    ast.Pow: "a power",
}

FUNCTIONS: Final = {
    "percentile": "percentile(loss) >= 95: how many percent of the samples score lower",
    "rank": "rank(loss) <= 20: 1 is the worst",
    "isnan": "isnan(loss)",
    "abs": "abs(loss - 1) < 0.1",
    "score": "score('val/loss') > 1: a metric whose name is not a plain word",
}


def read_tree(text: str) -> tuple[ast.expr, frozenset[str]]:
    """Return the tree of an expression and the columns that it names.

    Raises:
        OptionError: It cannot be read; the message says where and why.

    """
    if not text.strip():
        raise OptionError("The expression is empty. Write one like: loss > 0.5 and accuracy == 0")
    if len(text) > MOST_SIGNS:
        raise OptionError(f"The expression has {len(text):,} signs; at most {MOST_SIGNS:,} are read.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as SyntaxWarning: only errors matter here
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise OptionError(f"{text!r:.120} cannot be read{_place(error)}. {_advice(text)}") from None
    names: set[str] = set()
    _check(tree, text, names, 0)
    return tree, frozenset(names)


def _place(error: BaseException) -> str:
    offset = getattr(error, "offset", None)
    return f" at sign {offset}" if offset else ""


def _advice(text: str) -> str:
    bare = text.replace("==", "").replace("<=", "").replace(">=", "").replace("!=", "")
    if "=" in bare:
        return "To compare, write == instead of =."
    if "&&" in text or "||" in text:
        return "Write 'and', 'or' and 'not'."
    return "Write one like: loss > 0.5 and accuracy == 0 and label in (3, 5)"


def refuse(node: ast.AST, text: str, what: str) -> OptionError:
    """Return the error that names a part of an expression which means nothing."""
    at = getattr(node, "col_offset", None)
    where = f" (sign {at + 1})" if at is not None else ""
    return OptionError(f"{text!r:.120} holds {what}{where}, which means nothing here.")


def _check(node: ast.AST, text: str, names: set[str], depth: int) -> None:
    """Walk over all nodes and refuse whatever is not known."""
    if depth > _MOST_DEPTH:
        raise OptionError("The expression is nested too deeply.")
    match node:
        case ast.Constant():
            _check_constant(node, text)
        case ast.Name(id=name):
            names.add(name)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
            names.add(f"{name}[{index}]")
        case ast.Call():
            _check_call(node, text, names, depth)
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.BinOp() | ast.Tuple() | ast.List():
            _check_operator(node, text)
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    _check(each, text, names, depth + 1)
        case _:
            raise refuse(node, text, _HINTS.get(type(node), f"a {type(node).__name__.lower()}"))


def _check_constant(node: ast.Constant, text: str) -> None:
    if not isinstance(node.value, bool | int | float | str):
        raise refuse(node, text, f"{node.value!r:.40}")
    if isinstance(node.value, int) and abs(node.value) > 2**63:
        raise refuse(node, text, "a number that is too large")


def _check_call(node: ast.Call, text: str, names: set[str], depth: int) -> None:
    if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
        called = node.func.id if isinstance(node.func, ast.Name) else "something"
        raise OptionError(f"There is no function {called}{nearest(called, FUNCTIONS)}; use {', '.join(FUNCTIONS)}.")
    if len(node.args) != 1 or node.keywords:
        raise OptionError(f"{node.func.id} takes one column, as in {FUNCTIONS[node.func.id]}.")
    given = node.args[0]
    if node.func.id == "score":
        if not (isinstance(given, ast.Constant) and isinstance(given.value, str)):
            raise OptionError("score takes the name of a metric in quotes, as in score('val/loss').")
        names.add(given.value)
        return
    _check(given, text, names, depth + 1)


def _check_compare(node: ast.Compare, text: str) -> None:
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List):
                raise refuse(right, text, "an 'in' without a list such as (3, 5)")
        elif type(op) not in ORDER and not isinstance(op, ast.Eq | ast.NotEq):
            raise refuse(node, text, _HINTS.get(type(op), "an unknown comparison"))


def _check_operator(node: ast.AST, text: str) -> None:
    if isinstance(node, ast.Compare):
        _check_compare(node, text)
    if isinstance(node, ast.BinOp) and type(node.op) not in ARITHMETIC:
        raise refuse(node, text, _HINTS.get(type(node.op), f"the operator {type(node.op).__name__}"))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        raise refuse(node, text, _HINTS[ast.Invert])


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """Return the names that are most like a wrong one, in brackets."""
    near = get_close_matches(name, list(known), n=2)
    return f" (nearest: {', '.join(near)})" if near else ""


# --------------------------------------------------------------------------------


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
        """Return, for each row, whether it is selected.

        A comparison with something unknown, or with NaN, is false; `isnan` finds those.

        Raises:
            OptionError: It names a column that is not there, or compares what cannot be compared.

        """
        found = _Computation(self.text, columns).value(self._tree)
        if not (isinstance(found, np.ndarray) and found.dtype == bool) and not isinstance(found, bool):
            raise OptionError(f"{self.text!r:.120} is not a condition. Compare it with something, as in loss > 0.5.")
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
        raise OptionError(f"{ast.unparse(node)!r:.80} is not a condition. Compare it with something, as in loss > 0.5.")

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
