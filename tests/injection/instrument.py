"""Compile Sonde so that any one of its functions can be made to fail, without changing a line of it.

Every function and lambda gets a check at its beginning and, unless it is a generator, one at its end. Both cost one
look-up and no stack frame while nothing is armed.
"""

from __future__ import annotations

import ast
import builtins
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

ENTRY, EXIT = "__sonde_entry__", "__sonde_exit__"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def install() -> None:
    """Instrument whatever is imported of Sonde from now on."""
    assert "sonde" not in sys.modules, "Sonde is imported already"
    arm()
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


def arm(entry: Any = None, end: Any = None) -> None:
    """Call `entry` with a function's name at its beginning, and `end` at its end; None calls nothing."""
    setattr(builtins, ENTRY, entry)
    setattr(builtins, EXIT, end)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "sonde":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        """Compile from source always: the cache holds what is not instrumented."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        """Put the checks in."""
        tree = ast.parse(data, path)
        module = self.name.removeprefix("sonde.")
        tree = ast.fix_missing_locations(_Checks(module).visit(tree))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class _Checks(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._names = [module]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, node.name)

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        self._inside(node, node.name)
        name = ".".join([*self._names, node.name]) + f":{node.lineno}"
        has_doc = ast.get_docstring(node, clean=False) is not None
        doc, body = node.body[:has_doc], node.body[has_doc:]
        if body and not _yields(node):
            tried = ast.Try(body=body, handlers=[], orelse=[], finalbody=[_check(EXIT, name, body[0])])
            body = [ast.copy_location(tried, body[0])]
        node.body = [*doc, _check(ENTRY, name, node.body[0]), *body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._inside(node, "<lambda>")
        name = ".".join([*self._names, "<lambda>"]) + f":{node.lineno}"
        both = ast.Tuple([_check(ENTRY, name, node.body).value, node.body], ast.Load())
        node.body = ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node.body)
        return node

    def _inside(self, node: ast.AST, name: str) -> ast.AST:
        self._names.append(name)
        self.generic_visit(node)
        self._names.pop()
        return node


def _check(which: str, name: str, place: ast.AST) -> Any:
    """Return `which is not None and which(name)`, at the place of a node."""
    check = ast.parse(f"{which} is not None and {which}({name!r})").body[0]
    for node in ast.walk(check):
        ast.copy_location(node, place)
    return check


def _yields(function: ast.AST) -> bool:
    waiting: list[ast.AST] = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))
    return False
