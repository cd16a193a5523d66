"""Build objects from descriptions: `{"class": C, "args": {...}}` becomes `C(**args)`."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final

import numpy as np

from sonde.errors import OptionError

_KEYS: Final = {"class", "args"}
# Other subclasses of dict are settings objects of other libraries: they are passed on unchanged.
_WALKED_DICTS: Final = (dict, OrderedDict, defaultdict)


def build_from_config(config: Any, recursive: bool = True, **kwargs: Any) -> Any:
    """Build the object that `config` describes.

    A dict whose keys are exactly `class` and `args` describes an object. Such dicts inside dicts, lists and tuples are
    built first, from the inside out. Everything else is returned unchanged, so an object can be given wherever a
    description can. The config is never changed: objects get containers of their own, while modules,
    parameters, datasets and other objects in it are shared.

    Args:
        config: A description, something that contains descriptions, or anything else.
        recursive: Whether nested descriptions are built too; if not, `args` are passed on as they are.
        **kwargs: Arguments of the outermost object; they override its `args`.

    Raises:
        OptionError: `class` is neither callable nor the import path of something that is, or does not take its `args`.

    """
    if not is_description(config):
        return build_from_config_inside(config) if recursive else _own(config)
    make = find_class(config["class"])
    inside = build_from_config_inside if recursive else _own
    args = {name: inside(value) for name, value in config["args"].items() if name not in kwargs}
    _check_arguments(make, args | kwargs)
    return make(**args, **kwargs)


def _check_arguments(make: Callable[..., Any], args: dict[str, Any]) -> None:
    """Raise if arguments do not fit, naming close matches, before the object is built."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some classes written in C have no signature
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        strange = [name for name in args if name not in signature.parameters]
        near = get_close_matches(strange[0], signature.parameters, n=3) if strange else []
        hint = f" (nearest: {', '.join(near)})" if near else ""
        # A misspelt name is also a missing argument; report the misspelt one.
        problem = f"it takes no argument {strange[0]!r}{hint}" if strange else str(error)
        raise OptionError(f"{name_of(make)} cannot be built from its config: {problem}.") from error


def build_from_config_inside(value: Any) -> Any:
    """Build every description found in containers, and return everything else unchanged."""
    if is_description(value):
        return build_from_config(value)
    return _rebuild(value, build_from_config_inside)


def is_description(value: Any) -> bool:
    """Return whether a value describes an object to be built."""
    if type(value) not in _WALKED_DICTS or set(value) != _KEYS:
        return False
    if not isinstance(value["args"], dict):
        raise OptionError(
            f"'args' of {name_of(value['class'])} takes a dict of arguments; got {type(value['args']).__name__}."
        )
    return True


def find_class(target: Any) -> Callable[..., Any]:
    """Return the class or function of a `class` entry, importing it if the entry is an import path.

    Raises:
        OptionError: It cannot be imported or called.

    """
    found = import_path(target) if isinstance(target, str) else target
    if not callable(found):
        raise OptionError(f"'class' takes a class, a function or an import path; got {found!r:.80}.")
    return found  # type: ignore[no-any-return] # callable() does not tell mypy what it takes


def import_path(path: str) -> Any:
    """Import `package.module.Name`.

    Raises:
        OptionError: It cannot be imported; the message names the path, the part that failed and close matches.

    """
    module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise OptionError(f"{path!r} is not an import path; write it as package.module.Name.")
    owner = _import_owner(module_path, path)
    if hasattr(owner, name):
        return getattr(owner, name)
    near = get_close_matches(name, dir(owner), n=3)
    hint = f" (nearest: {', '.join(near)})" if near else ""
    raise OptionError(f"Cannot import {path!r}: {module_path} has no {name}{hint}.")


def _import_owner(module_path: str, path: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        # The owner may be a class inside a module. Another missing package is an error of its own.
        outer = module_path.rpartition(".")[0]
        if outer and error.name == module_path:
            return import_path(module_path)
        raise OptionError(f"Cannot import {path!r}: {error}.") from error
    except (ImportError, ValueError) as error:
        raise OptionError(f"Cannot import {path!r}: {error}.") from error


def name_of(target: Any) -> str:
    """Return the import path of a class or function, for messages and files."""
    if isinstance(target, str):
        return target
    named = hasattr(target, "__qualname__")
    return f"{target.__module__}.{target.__qualname__}" if named else type(target).__name__


def _own(value: Any) -> Any:
    """Return a value in which containers are copies and everything else is shared."""
    return _rebuild(value, _own)


def _rebuild(value: Any, each: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _WALKED_DICTS:
        rebuilt = value.copy()  # keeps the kind, and a defaultdict's factory
        rebuilt.update((key, each(item)) for key, item in value.items())
        return rebuilt
    if kind in (list, tuple):
        return kind(each(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(each(item) for item in value))
    if kind in (set, bytearray, np.ndarray):
        return copy.copy(value)
    return value
