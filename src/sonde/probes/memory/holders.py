"""Find what keeps objects alive: the container, the variable, the autograd graph and the line."""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor

from sonde.hooks.source_search import feeding_lines
from sonde.hooks.user_line import Line, is_users

# --------------------------------------------------------------------------------
# Who keeps objects alive: the container that holds them, and the variable or attribute it is known by.


_DEPTH: Final = 4
_MOST: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A container and its name."""

    container: str
    """Its type: `list`, `dict`, ..."""
    name: str
    """The variable or attribute: `losses`, `History.values`."""
    scope: str
    """Where the name lives: a function, a module, a class."""
    lines: tuple[Line, ...]
    """The lines that put something into it."""
    bounded: bool
    """It cannot grow without bound: a deque with `maxlen`."""


def user_frames() -> list[FrameType]:
    """Return the frames of all threads that run the user's code, innermost first."""
    found = []
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if is_users(at.f_code.co_filename):
                found.append(at)
            at = at.f_back
    return found


def find_holder(objects: Sequence[Any]) -> Holder | None:
    """Return the container that holds most of these objects, also through others; None if none is found."""
    items = list(objects)
    mine = {id(objects), id(items)}
    if len(items) == 1:
        found = next(_names(items[0], mine, _DEPTH), None)
        return found and Holder(
            container="variable", name=found[0], scope=found[1], lines=tuple(found[2]), bounded=False
        )
    for _ in range(_DEPTH):
        referrers = [each for each in gc.get_referrers(*items) if id(each) not in mine and not _is_ours(each)]
        mine.add(id(referrers))
        counted = [(each, _count(each, items)) for each in referrers]
        mine |= {id(counted), *(id(pair) for pair in counted)}
        best = max(counted, key=lambda pair: pair[1], default=None)
        if best is not None and best[1] >= max(2, len(items) // 2):
            return _name(best[0], mine)
        items = [each for each, count in counted if count][:_MOST]
        mine.add(id(items))
        if not items:
            return None
    return None


def _is_ours(each: Any) -> bool:
    return isinstance(each, FrameType | ModuleType)


def _parts(each: Any) -> Iterable[Any]:
    """Return what an object holds, without running any of its code."""
    if isinstance(each, dict):
        return list(each.values())
    if isinstance(each, list | tuple | set | frozenset | deque):
        return list(each)
    if isinstance(each, CellType):
        return gc.get_referents(each)
    attributes = getattr(each, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else ()


def _count(each: Any, items: list[Any]) -> int:
    wanted = {id(item) for item in items}
    return len({id(part) for part in _parts(each)} & wanted)


def _name(container: Any, mine: set[int]) -> Holder:
    bounded = isinstance(container, deque) and container.maxlen is not None
    kind = type(container).__name__
    for name, scope, lines in _names(container, mine, _DEPTH):
        return Holder(container=kind, name=name, scope=scope, lines=tuple(lines), bounded=bounded)
    return Holder(container=kind, name="", scope="", lines=(), bounded=bounded)


def _names(container: Any, mine: set[int], depth: int) -> Iterator[tuple[str, str, list[Line]]]:
    yield from _names_in_frames(container)
    owners = [each for each in gc.get_referrers(container) if id(each) not in mine]
    mine = mine | {id(owners)}
    for owner in owners:
        yield from _names_in_owner(owner, container)
    if depth:
        for owner in owners:
            if isinstance(owner, list | tuple | dict | deque | CellType):
                yield from _names(owner, mine, depth - 1)


def _names_in_frames(container: Any) -> Iterator[tuple[str, str, list[Line]]]:
    for frame in user_frames():
        code = frame.f_code
        for name, value in list(frame.f_locals.items()):
            if value is container:
                last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
                lines = feeding_lines(code.co_filename, name, code.co_firstlineno, _end(frame, last))
                yield name, f"{code.co_name}()", lines or feeding_lines(code.co_filename, name)


def _end(frame: FrameType, last: int) -> int:
    """Return the last line of a frame's code, with the functions inside it, which its own lines do not count."""
    inner = [const for const in frame.f_code.co_consts if isinstance(const, CodeType)]
    return max([last, *(line for const in inner for _, _, line in const.co_lines() if line)])


def _names_in_owner(owner: Any, container: Any) -> Iterator[tuple[str, str, list[Line]]]:
    if isinstance(owner, dict):
        module = sys.modules.get(owner.get("__name__", "")) if isinstance(owner.get("__name__"), str) else None
        if module is not None and vars(module) is owner:
            file = getattr(module, "__file__", None) or ""
            for name, value in list(owner.items()):
                if value is container:
                    yield name, f"module {module.__name__}", feeding_lines(file, name)
    elif isinstance(owner, FunctionType):
        yield from _names_in_function(owner, container)
    else:
        attributes = getattr(owner, "__dict__", None)
        for name, value in list(attributes.items()) if isinstance(attributes, dict) else ():
            if value is container:
                yield f"{type(owner).__name__}.{name}", type(owner).__qualname__, _attribute_lines(owner, name)


def _names_in_function(function: FunctionType, container: Any) -> Iterator[tuple[str, str, list[Line]]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell is container or container in gc.get_referents(cell):
            yield name, f"{function.__qualname__}()", feeding_lines(function.__code__.co_filename, name)


def _attribute_lines(owner: Any, name: str) -> list[Line]:
    module = sys.modules.get(type(owner).__module__)
    files = [getattr(module, "__file__", None) or "", *(frame.f_code.co_filename for frame in user_frames())]
    for file in dict.fromkeys(files):
        lines = feeding_lines(file, name) if file and is_users(file) else []
        if lines:
            return lines
    return []


# --------------------------------------------------------------------------------
# Variables whose autograd graph reaches back over many steps: `total += loss`, a hidden state never detached.


_MOST_NODES: Final = 50_000
_LEAST_USES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LongGraph:
    """A variable and how many times its graph uses the same parameter."""

    name: str
    scope: str
    uses: int
    lines: tuple[Line, ...]


def find_long_graph(steps: int) -> LongGraph | None:
    """Return the variable of a running function whose graph uses one parameter about once for every step."""
    needed = max(_LEAST_USES, steps // 2)
    for frame in user_frames():
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), Tensor) and value.grad_fn is not None:
                uses = _most_uses(value.grad_fn)
                if uses >= needed:
                    lines = feeding_lines(frame.f_code.co_filename, name, frame.f_code.co_firstlineno)
                    return LongGraph(name=name, scope=f"{frame.f_code.co_name}()", uses=uses, lines=tuple(lines))
    return None


def _most_uses(root: Any) -> int:
    """Return how often the most used leaf of a graph is used."""
    uses: Counter[Any] = Counter()
    seen, stack = {root}, [root]
    while stack and len(seen) < _MOST_NODES:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if type(node).__name__ == "AccumulateGrad":
                uses[node] += 1
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return max(uses.values(), default=0)
