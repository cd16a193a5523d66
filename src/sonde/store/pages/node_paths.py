"""Where something is in nested values: as keys and indices, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sonde.store.pages.nodes import MAX_DEPTH, Path


def find(node: Any, keys: Sequence[Any]) -> Any:
    """Return the node at the end of a path of keys and indices.

    Raises:
        KeyError: There is none.

    """
    for key in keys:
        inside = dict(_children(node))
        if key not in inside:
            # A path that was written as text names an integer key or an index by its digits.
            key = next((other for other in inside if str(other) == str(key)), None)
        if key is None:
            raise KeyError
        node = inside[key]
    return node


def tensors(node: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path and number of every tensor in a structure."""
    if isinstance(node, dict) and "tensor" in node:
        yield path, node["tensor"]
    elif len(path) <= MAX_DEPTH + 1:
        for key, inside in _children(node):
            yield from tensors(inside, (*path, key))


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, list):
        return list(enumerate(node))
    if not isinstance(node, dict) or len(node) != 1:
        return []
    kind, held = next(iter(node.items()))
    if kind == "dict" and isinstance(held, dict):
        return list(held.items())
    if kind == "tuple" and isinstance(held, list):
        return list(enumerate(held))
    if kind == "objects" and isinstance(held, list) and len(held) == 2:
        return list(enumerate(held[1])) if isinstance(held[1], list) else []
    if kind == "pairs" and isinstance(held, list):
        return [_pair(pair) for pair in held]
    return []


def _pair(pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        return None, None
    key, inside = pair
    return (key if isinstance(key, str | int | float | bool) or key is None else str(key)), inside


def to_text(path: Path) -> str:
    """Return a path as text: its keys with slashes between; a slash inside a key is written %2F.

    >>> to_text(("maps", 0, "a/b"))
    'maps/0/a%2Fb'
    """
    return "/".join(escape(key) for key in path)


def from_text(text: str) -> Path:
    """Undo `to_text`, except that all keys are text."""
    return tuple(part.replace("%2F", "/").replace("%25", "%") for part in text.split("/")) if text else ()


def escape(key: object) -> str:
    """Return a key so that slashes can separate it from others, and any JSON parser takes it."""
    text = str(key).replace("%", "%25").replace("/", "%2F")
    return text.encode("utf-8", "replace").decode()
