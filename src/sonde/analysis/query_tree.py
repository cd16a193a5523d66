"""Reading an expression that picks samples: with Python's parser, and then nothing is let through that is not known."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final

import numpy as np

from sonde.errors import OptionError

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
    "score": "score('val/loss') > 1: a metric whose name is no plain word",
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
            warnings.simplefilter("ignore")  # Python's remarks on style are none of our business
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
