"""Search the source of the user's program: which line called an operation, which lines add to a variable."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from sonde.hooks.user_line import Line, is_users

MAX_DEPTH: Final = 3

# Names under which programs call an operation, where they differ from the operation's own.
_ALIASES: Final = {
    "div": {"true_divide", "divide"},
    "mul": {"multiply"},
    "sub": {"subtract"},
    "log_softmax": {"cross_entropy"},
    "nll_loss": {"cross_entropy"},
    "linalg_vector_norm": {"norm", "vector_norm", "normalize"},
    "norm": {"normalize"},
    "binary_cross_entropy_with_logits": {"binary_cross_entropy_with_logits"},
}
# Methods of lists, deques, sets and dicts that make them longer.
_FEEDING: Final = {"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"}
_BINARY: Final = {"div": ast.Div, "mul": ast.Mult, "sub": ast.Sub, "add": ast.Add, "pow": ast.Pow, "mm": ast.MatMult}


@dataclass(frozen=True, slots=True)
class Place:
    """Source to search: a function's code, what its names mean, and which of its lines count."""

    code: CodeType
    names: dict[str, Any]
    first: int
    last: int


def find_call(
    frame: FrameType, model_called_at: Line | None, operation: str, number: int, backward_line: int | None = None
) -> tuple[Line, ...]:
    """Return the lines that may have called an operation since the model was called, the likeliest first.

    `number` is which call of this operation it was, counted from 0. The search ends at `backward_line`, which
    is where the frame is by default.
    """
    last = frame.f_lineno if backward_line is None else backward_line
    place = _between(frame, model_called_at, last)
    found = _search(place, operation, MAX_DEPTH)
    if found:
        return tuple(dict.fromkeys([found[min(number, len(found) - 1)], *found]))
    fallback = _assigned(place, last)
    return (fallback,) if fallback is not None else ()


def _between(frame: FrameType, called_at: Line | None, last: int) -> Place:
    code = frame.f_code
    same = called_at is not None and (called_at.file, called_at.function) == (code.co_filename, code.co_name)
    first = called_at.number if same and called_at is not None else code.co_firstlineno
    return Place(code, {**frame.f_globals, **frame.f_locals}, min(first, last), last)


def _search(place: Place, operation: str, depth: int) -> list[Line]:
    nodes = _nodes(place)
    found = [node for node in nodes if _calls(node, operation) and not _is_foreign(node, place)]
    if found or depth == 0:
        found.sort(key=_end)
        return [_line(place, node) for node in found]
    for node in nodes:
        inner = _called_code(node, place) if isinstance(node, ast.Call) else None
        if inner is not None and is_users(inner.code.co_filename) and inner.code is not place.code:
            lines = _search(inner, operation, depth - 1)
            if lines:
                return lines
    return []


def _nodes(place: Place) -> list[Any]:
    try:
        # Of the code of a whole file, inspect returns the first statement only.
        if place.code.co_name == "<module>":
            lines, start = linecache.getlines(place.code.co_filename), 1
        else:
            lines, start = inspect.getsourcelines(place.code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return []
    start = max(start, 1)
    ast.increment_lineno(tree, start - 1)
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.stmt) and place.first <= node.lineno <= place.last
    ]


def _calls(node: ast.AST, operation: str) -> bool:
    if isinstance(node, ast.Call):
        name = _name(node.func).strip("_")
        return name.removesuffix("_") in {operation.strip("_"), *_ALIASES.get(operation, ())}
    if isinstance(node, ast.BinOp | ast.AugAssign) and operation in _BINARY:
        return isinstance(node.op, _BINARY[operation])
    return operation == "neg" and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_foreign(node: ast.AST, place: Place) -> bool:
    """Return whether a method of an object is called that is neither a tensor nor a namespace, as `session.log`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = _resolve(node.func.value, place.names)
    return owner is not None and not isinstance(owner, Tensor | ModuleType | type)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        if function.attr == "apply" and isinstance(function.value, ast.Name):
            return function.value.id  # a custom autograd function
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _called_code(node: ast.Call, place: Place) -> Place | None:
    value = _resolve(node.func, place.names)
    if isinstance(value, nn.Module):
        value = inspect.getattr_static(type(value), "forward", None)
    if isinstance(value, MethodType):
        value = value.__func__
    if not isinstance(value, FunctionType):
        return None
    code = value.__code__
    return Place(code, dict(value.__globals__), code.co_firstlineno, code.co_firstlineno + 10_000)


def _resolve(function: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a name, without running code of the program."""
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute):
        owner = _resolve(function.value, names)
        if owner is None:
            return None
        if isinstance(owner, nn.Module) and function.attr in owner._modules:
            return owner._modules[function.attr]
        return inspect.getattr_static(owner, function.attr, None)
    return None


def _assigned(place: Place, backward_line: int) -> Line | None:
    """Return the last statement that gave a value to what `backward` is called on."""
    names: set[str] = set()
    for node in _nodes(place):
        if isinstance(node, ast.Call) and node.lineno == backward_line and _name(node.func) == "backward":
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    statements = [
        node
        for node in _nodes(place)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and names & {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _is_stored(each)}
    ]
    if statements:
        return _line(place, max(statements, key=lambda node: node.lineno))
    return Line(place.code.co_filename, backward_line, place.code.co_name)


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _end(node: Any) -> tuple[int, int]:
    return (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _line(place: Place, node: Any) -> Line:
    return Line(place.code.co_filename, node.lineno, place.code.co_name)


_ARITHMETIC: Final = frozenset(
    {"std", "var", "log", "sqrt", "rsqrt", "pow", "div", "norm", "normalize", "softmax", "exp"}
)


def computed_at(frame: FrameType, tensor: Tensor | None, last: int | None = None) -> tuple[Line, frozenset[str]] | None:
    """Return the last line before `last` that computed a variable of the frame, and the functions called on it.

    None if the variable that holds the tensor is not known, or was only read, moved or sliced.
    """
    if tensor is None:
        return None
    names = {name for name, value in frame.f_locals.items() if isinstance(value, Tensor) and _is_same(value, tensor)}
    place = Place(frame.f_code, {}, frame.f_code.co_firstlineno, last or frame.f_lineno)
    statements = [
        node
        for node in _nodes(place)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and node.value is not None
        and names & {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _is_stored(each)}
    ]
    if not statements:
        return None
    made = max(statements, key=lambda node: node.lineno)
    calls = frozenset(_name(each.func) for each in ast.walk(made) if isinstance(each, ast.Call))
    operators = isinstance(made, ast.AugAssign) or any(isinstance(each, ast.BinOp) for each in ast.walk(made))
    return (_line(place, made), calls) if operators or calls & _ARITHMETIC else None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device and one.data_ptr() == other.data_ptr()


def feeding_lines(file: str, name: str, first: int = 1, last: int | None = None) -> list[Line]:
    """Return the lines between `first` and `last` that add to the variable or attribute `name`, in order."""
    found = {
        node.lineno
        for node in ast.walk(_parse(file))
        if isinstance(node, ast.expr | ast.stmt)
        and first <= node.lineno <= (last or node.lineno)
        and _feeds(node, name)
    }
    return [Line(file, line) for line in sorted(found)]


@functools.lru_cache(maxsize=32)
def _parse(file: str) -> ast.Module:
    # linecache also knows the cells of a notebook, which are in no file.
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _feeds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _FEEDING and _is(node.func.value, name)
    if isinstance(node, ast.AugAssign):
        return _is(node.target, name)
    if isinstance(node, ast.Assign):
        into = any(isinstance(target, ast.Subscript) and _is(target.value, name) for target in node.targets)
        again = any(_is(target, name) for target in node.targets)
        return into or (again and any(_is(part, name) for part in ast.walk(node.value)))
    return False


def _is(node: ast.AST, name: str) -> bool:
    """Return whether an expression is the variable or attribute, or inside it: `name`, `self.name`, `name[0]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
