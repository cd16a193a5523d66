"""How a data set prepares its samples: the numbers that it scales them by, and the numbers that it gives to names.

Both are read from the attributes of the data set and of its transforms, and compared between data that is trained on
and data that is only evaluated.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from types import CodeType
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from sonde.core.facts import Plain

_DEPTH: Final = 4
_MAX_SEEN: Final = 256
_MAX_NUMBERS: Final = 1024
_MAX_NAMES: Final = 20_000
_LEAST_NAMES: Final = 3
_APART: Final = 0.1
"""Difference that matters: of middles in deviations, of deviations and ranges as a share."""
_MIDDLE: Final = re.compile(r"_?(mean|mu|center|median|data_min|min|minimum)s?_?")
_WIDTH: Final = re.compile(r"_?(std|sigma|scale|deviation|data_range|range|data_max|max|maximum)s?_?")
_NOT_ENTERED: Final = ("torch", "numpy", "builtins", "pandas", "sonde", "pathlib", "logging")

Preparation = dict[str, Any]
"""By the way to an attribute, through names and classes: numbers, or a dict of names."""


def preparation(dataset: Any) -> Preparation:
    """Return what a data set scales its samples by, and how it numbers names. No code of the program's runs."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found: Preparation = {}
    for path, name, value in _attributes(dataset):
        if _MIDDLE.fullmatch(name) or _WIDTH.fullmatch(name):
            numbers = _numbers(value)
            if numbers is not None:
                found[path] = numbers
        elif isinstance(value, Mapping) and _LEAST_NAMES <= len(value) <= _MAX_NAMES and name != "class_to_idx":
            book = dict(value)
            if all(type(key) is str and type(each) is int for key, each in book.items()):
                found[path] = book
    return found


def changed_through_a_part(code: CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """Yield what a function writes to the whole data set by way of one part of it, though another part shares it.

    Yields the names of both parts, the attribute and the line: `val.dataset.transform = None` after a split.
    """
    parts = {name: each for name, each in variables.items() if isinstance(each, Subset)}
    if len(parts) < 2:
        return
    before: list[dis.Instruction] = []
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        if step.positions is not None and step.positions.lineno is not None:
            line = step.positions.lineno
        if step.opname == "STORE_ATTR" and len(before) > 1 and before[-1].argval == "dataset":
            name = before[-2].argval
            own = parts.get(name) if isinstance(name, str) else None
            others = [] if own is None else [key for key, each in parts.items() if each.dataset is own.dataset]
            others = [key for key in others if parts[key] is not own]
            if others:
                yield name, others[0], str(step.argval), line
        before.append(step)


def _attributes(thing: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of an object, of those of its own that are no library's, and of what lies in lists."""
    level, seen = [("", thing)], 0
    for _ in range(_DEPTH):
        below = []
        for path, each in level:
            if isinstance(each, list | tuple):
                below += [(f"{path}/{type(one).__name__}", one) for one in each[:16] if not _is_plain(one)]
                continue
            own = getattr(each, "__dict__", None)
            package = str(getattr(type(each), "__module__", "")).partition(".")[0]
            if not isinstance(own, dict) or isinstance(each, type) or (package in _NOT_ENTERED and path):
                continue
            for name, value in islice(own.items(), 32):
                seen += 1
                if seen > _MAX_SEEN:
                    return
                yield f"{path}.{name}", name, value
                if not _is_plain(value):
                    below.append((f"{path}.{name}", value))
        level = below


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | bytes | Tensor | np.ndarray | None | dict)


def _numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() > _MAX_NUMBERS or value.is_complex():
            return None
        value = value.detach().double().numpy()
    if not isinstance(value, float | int | list | tuple | np.ndarray | np.floating) or isinstance(value, bool):
        return None
    try:
        numbers = np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
    return numbers if 0 < numbers.size <= _MAX_NUMBERS and np.isfinite(numbers).all() else None


def prepared_apart(train: Preparation, evaluated: Preparation) -> tuple[str, dict[str, Plain]] | None:
    """Return by which of their numbers two data sets prepare samples differently; None if they do not.

    >>> prepared_apart({".mean": np.array([1.0]), ".std": np.array([2.0])}, {".mean": np.array([1.1])})
    >>> prepared_apart({".mean": np.array([1.0]), ".std": np.array([2.0])}, {".mean": np.array([3.0])})[0]
    'data.prepared_apart'
    """
    for path in train.keys() & evaluated.keys():
        one, two = train[path], evaluated[path]
        if isinstance(one, dict) != isinstance(two, dict):
            continue
        if isinstance(one, dict):
            shared = one.keys() & two.keys()
            other = sorted(name for name in shared if one[name] != two[name])
            if other and len(shared) >= _LEAST_NAMES and 2 * len(shared) >= min(len(one), len(two)):
                name = other[0]
                counts = {"names": len(shared), "differ": len(other), "number": two[name], "in_training": one[name]}
                return "data.numbered_apart", {"name": name[:60], "attribute": path.strip("."), **counts}
        elif one.shape == two.shape and _matters(path, one, two, train):
            at = int(np.abs(one - two).argmax())
            numbers = {"number": float(two[at]), "in_training": float(one[at])}
            return "data.prepared_apart", {"attribute": path.strip("."), **numbers}
    return None


def _matters(path: str, one: Any, two: Any, train: Preparation) -> bool:
    place, _, name = path.rpartition(".")
    if _WIDTH.fullmatch(name):
        return bool((np.abs(one - two) > _APART * np.abs(one)).any())
    parts = {each: each.rpartition(".") for each in train}
    beside = [train[each] for each, (where, _, own) in parts.items() if where == place and _WIDTH.fullmatch(own)]
    widths = [each for each in beside if not isinstance(each, dict) and each.shape == one.shape]
    return bool(widths) and bool((np.abs(one - two) > _APART * np.abs(widths[0])).any())
