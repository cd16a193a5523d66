"""Apply an operation to every tensor of a nested value."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from sonde.errors import OptionError

# Objects that are shared: copying them or writing into them would do harm.
_LEFT_ALONE: Final = (
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)


def apply_tensor_op(
    func: Callable[[Tensor], Any] | None = None,
    method: str | None = None,
    method_kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: Any,
) -> Any:
    """Return `inputs` with an operation applied to every tensor in it.

    Goes through tuples, lists, dicts and objects with attributes, and keeps their types: named tuples, subclasses of
    dict, dataclasses (also frozen ones and those with slots). Shared and self-referencing values stay shared.
    Modules, classes, functions and everything else that is not a tensor are left unchanged, and so is `inputs`.

    Args:
        func: Takes a tensor. Give this or `method`.
        method: The name of a method of tensors, such as `"cpu"`.
        method_kwargs: Arguments of that method.
        inputs: A tensor, or anything that contains tensors.

    Raises:
        OptionError: Neither or both of `func` and `method` were given.

    """
    if (func is None) == (method is None):
        raise OptionError("apply_tensor_op takes exactly one of func= and method=.")
    if func is None:
        arguments = dict(method_kwargs or {})

        def call_method(tensor: Tensor) -> Any:
            return getattr(tensor, str(method))(**arguments)

        func = call_method
    elif method_kwargs:
        raise OptionError("method_kwargs goes with method=, not with func=.")
    return _Walk(func).visit(inputs)


class _Walk:
    """A walk through a value. It remembers what it has visited, so that cycles end and shared parts stay shared."""

    def __init__(self, func: Callable[[Tensor], Any]) -> None:
        self._func = func
        # The originals are kept beside the results: while they live, no other object can have the same id.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def visit(self, value: Any) -> Any:
        known = self._seen.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, Tensor):
            return self._keep(value, self._func(value))
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, tuple):
            return self._keep(value, self._tuple(value))
        if isinstance(value, dict):
            return self._dict(value)
        return self._object(value)

    def _keep(self, value: Any, result: Any) -> Any:
        self._seen[id(value)] = (value, result)
        return result

    def _list(self, value: list[Any]) -> Any:
        result = self._keep(value, copy.copy(value))
        for index, item in enumerate(value):
            result[index] = self.visit(item)
        return result

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        items = [self.visit(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if type(value) is tuple else type(value)(items)

    def _dict(self, value: dict[Any, Any]) -> Any:
        result = self._keep(value, copy.copy(value))
        for key, item in value.items():
            result[key] = self.visit(item)
        return result

    def _object(self, value: Any) -> Any:
        names = list(_attributes(value))
        if not names:
            return value
        result = self._keep(value, copy.copy(value))
        if result is value:
            return value  # it refuses to be copied: an enum member, a singleton
        for name in names:
            # Bypasses __setattr__, so that a frozen copy can be filled; nothing else refers to the copy yet.
            object.__setattr__(result, name, self.visit(getattr(value, name)))
        return result


def _attributes(value: Any) -> Iterator[str]:
    if isinstance(value, _LEFT_ALONE):
        return
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names.update(dict.fromkeys(field.name for field in dataclasses.fields(value)))
    yield from (name for name in names if hasattr(value, name))
