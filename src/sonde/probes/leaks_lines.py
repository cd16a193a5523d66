"""Which lines of a program put things into a variable, read from its source."""

from __future__ import annotations

import ast
import functools
import linecache
from dataclasses import dataclass
from typing import Final

# Methods of lists, deques, sets and dicts that make them longer.
_FEEDING: Final = {"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A statement of the user's."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def feeding_lines(file: str, name: str, first: int = 1, last: int | None = None) -> list[SourceLine]:
    """Return the lines between `first` and `last` that add to the variable or attribute `name`, in order."""
    found = {
        node.lineno
        for node in ast.walk(_parse(file))
        if isinstance(node, ast.expr | ast.stmt)
        and first <= node.lineno <= (last or node.lineno)
        and _feeds(node, name)
    }
    return [SourceLine(file, line, linecache.getline(file, line).strip()) for line in sorted(found)]


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
    """Say whether an expression is the variable or attribute, or inside it: `name`, `self.name`, `name[0]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
