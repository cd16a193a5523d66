"""Paths within nested values: as keys and indices, and as text."""

from __future__ import annotations

import base64
import dataclasses
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files
from sonde.store.pages import dtypes


def find_node(node: Any, keys: Sequence[Any]) -> Any:
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


def find_tensors(node: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path and number of every tensor in a structure."""
    node = _inside_batch(node)
    if isinstance(node, dict) and "tensor" in node:
        yield path, node["tensor"]
    elif len(path) <= MAX_DEPTH + 1:
        for key, inside in _children(node):
            yield from find_tensors(inside, (*path, key))


def find_batch_values(node: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value that was computed over a whole batch."""
    if _inside_batch(node) is not node:
        yield path
    elif len(path) <= MAX_DEPTH + 1:
        for key, inside in _children(node):
            yield from find_batch_values(inside, (*path, key))


def _inside_batch(node: Any) -> Any:
    return node["batch"] if isinstance(node, dict) and set(node) == {"batch"} else node


def _children(node: Any) -> list[tuple[Any, Any]]:
    node = _inside_batch(node)
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


def path_to_text(path: Path) -> str:
    """Return a path as text: its keys with slashes between; a slash inside a key is written %2F.

    >>> path_to_text(("maps", 0, "a/b"))
    'maps/0/a%2Fb'
    """
    return "/".join(escape_key(key) for key in path)


def path_from_text(text: str) -> Path:
    """Undo `path_to_text`, except that all keys are text."""
    return tuple(part.replace("%2F", "/").replace("%25", "%") for part in text.split("/")) if text else ()


def escape_key(key: object) -> str:
    """Return a key so that slashes can separate it from others, and any JSON parser takes it."""
    text = str(key).replace("%", "%25").replace("/", "%2F")
    return files.utf8(text)


Path = tuple[Any, ...]

MAX_DEPTH: Final = 64
MAX_NODES: Final = 200_000
_SHORT_BYTES: Final = 1 << 10  # longer ones are stored raw, beside the tensors
_SHORT_TEXT: Final = 16 << 10
_SHORT_LIST: Final = 1 << 10

PLAIN: Final = ""
BYTES: Final = "python.bytes"
TEXT: Final = "python.str"
LIST: Final = "python.list"


class BadNode(Exception):
    """A structure that no writer would have written."""


class Unsupported(dict[str, str]):
    """Placeholder for a value that cannot be stored: its type and its representation.

    >>> Unsupported.of(object)
    {'unsupported': 'type', 'text': "<class 'object'>"}
    """

    @classmethod
    def of(cls, value: object, text: str | None = None) -> Unsupported:
        """Describe a value; `text` replaces its own words."""
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls(unsupported=name[:200], text=_words(value) if text is None else text[:200])


def _words(value: object) -> str:
    short = reprlib.Repr()
    short.maxother = 200
    return short.repr(value)[:400]  # it also survives a __repr__ that raises


@dataclass(frozen=True, slots=True, repr=False)
class BatchValue:
    """A value that was computed over a whole batch. It belongs to no single sample of it.

    >>> BatchValue(0.5, (3, 4, 5))
    BatchValue(0.5, of 3 samples)
    """

    value: Any
    samples: tuple[int | str, ...] = ()
    """The samples of the batch."""

    def __repr__(self) -> str:
        return f"BatchValue({self.value!r}, of {len(self.samples)} samples)"


@dataclass(frozen=True, slots=True, eq=False)
class FromTorch:
    """An array that was a torch tensor, so that it can become one again."""

    array: NDArray[Any]
    dtype: str
    """The tensor's own type, such as `torch.bfloat16`."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """An array taken out of a structure."""

    path: Path
    array: NDArray[Any]
    origin: str = PLAIN


@dataclass(slots=True)
class Encoder:
    """Turns values into nodes, and keeps the arrays it finds on the way."""

    leaves: list[Leaf] = field(default_factory=list)
    batch: tuple[int | str, ...] = ()
    """The samples of the batch that some values were computed over."""
    _left: int = MAX_NODES

    def encode(self, value: object, path: Path) -> Any:
        """Return the node of a value; what cannot be stored, or is too much, becomes a placeholder."""
        before, self._left = len(self.leaves), MAX_NODES
        node = self._encode(value, path, MAX_DEPTH)
        if self._left >= 0:
            return node
        del self.leaves[before:]
        return _placeholder(value, f"more than {MAX_NODES:,} values")

    def _encode(self, value: Any, path: Path, depth: int) -> Any:  # noqa: C901 - one line a kind of value
        self._left -= 1
        if self._left < 0:
            return None
        if isinstance(value, np.ndarray | FromTorch | np.generic):
            return self._array(value, path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**64 else {"int": hex(value)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, str):
            return str(value) if len(value) <= _SHORT_TEXT else self._text(str(value), path)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._bytes(bytes(value), path)
        if isinstance(value, complex):
            return {"complex": [self._encode(part, path, depth) for part in (value.real, value.imag)]}
        if isinstance(value, Unsupported):
            return {"unsupported": dict(value)}
        if isinstance(value, BatchValue):
            self.batch = value.samples
            return {"batch": self._encode(value.value, path, depth)}
        if not depth:
            return _placeholder(value, f"nested more than {MAX_DEPTH} deep")
        return self._container(value, path, depth - 1)

    def _container(self, value: Any, path: Path, depth: int) -> Any:
        if isinstance(value, list):
            return self._list(value, path, depth)
        if isinstance(value, tuple):
            return {"tuple": self._items(value, path, depth)}
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, frozenset | set):
            kind = "set" if isinstance(value, set) else "frozenset"
            return {kind: self._items(value, path, depth)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
            return self._mapping(named, path, depth)
        return _placeholder(value)

    def _items(self, values: Iterable[Any], path: Path, depth: int) -> list[Any]:
        return [self._encode(item, (*path, at), depth) for at, item in enumerate(values)]

    def _list(self, value: list[Any], path: Path, depth: int) -> Any:
        if len(value) > _SHORT_LIST and (array := _as_numbers(value)) is not None:
            return self._keep(Leaf(path, array, LIST))
        return self._items(value, path, depth)

    def _mapping(self, value: Mapping[Any, Any], path: Path, depth: int) -> Any:
        pairs = list(value.items())
        if all(type(key) is str for key, _ in pairs):
            return {"dict": {key: self._encode(item, (*path, key), depth) for key, item in pairs}}
        return {"pairs": [[self._encode(k, path, depth), self._encode(v, (*path, k), depth)] for k, v in pairs]}

    def _array(self, value: Any, path: Path) -> Any:
        array, origin = (value.array, value.dtype) if isinstance(value, FromTorch) else (value, PLAIN)
        if isinstance(array, np.ma.MaskedArray):
            return _placeholder(array)
        if array.dtype.hasobject:
            return self._objects(array, path)
        if isinstance(array, np.generic):
            text = base64.b64encode(np.asarray(array).tobytes()).decode()
            return {"scalar": [dtypes.describe(array.dtype), text]}
        return self._keep(Leaf(path, np.asarray(array), origin))

    def _objects(self, array: Any, path: Path) -> Any:
        if array.dtype != np.dtype(object) or isinstance(array, np.generic):
            return _placeholder(array)
        items = self._items(array.reshape(-1).tolist(), path, MAX_DEPTH // 2)
        return {"objects": [list(array.shape), items]}

    def _bytes(self, value: bytes, path: Path) -> Any:
        if len(value) <= _SHORT_BYTES:
            return {"bytes": base64.b64encode(value).decode()}
        return self._keep(Leaf(path, np.frombuffer(value, np.uint8), BYTES))

    def _text(self, value: str, path: Path) -> Any:
        return self._keep(Leaf(path, np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8), TEXT))

    def _keep(self, leaf: Leaf) -> Any:
        self.leaves.append(leaf)
        return {"tensor": len(self.leaves) - 1}


def _placeholder(value: object, text: str | None = None) -> dict[str, Any]:
    return {"unsupported": dict(Unsupported.of(value, text))}


def _as_numbers(values: list[Any]) -> NDArray[Any] | None:
    """Return a long list of plain numbers as an array that converts back to exactly these, or None."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return np.array(values, dtype=np.float64)
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(values, dtype=np.int64)
    return None


@dataclass(frozen=True, slots=True)
class Decoder:
    """Turns nodes back into values; `tensor` fetches the one with a number."""

    tensor: Any  # Callable[[int], Any]
    batch: tuple[int | str, ...] = ()
    """The samples of the batch that some values were computed over."""

    def decode(self, node: Any, depth: int = 0) -> Any:
        """Return the value of a node.

        Raises:
            BadNode: It is none.

        """
        if depth > 2 * MAX_DEPTH:
            raise BadNode("it is nested too deep")
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise BadNode(f"an object of {len(node)} keys where one is due")
        kind, held = next(iter(node.items()))
        try:
            return self._decode(kind, held, depth + 1)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError, RecursionError) as error:
            raise BadNode(f"{kind!r:.40} cannot hold {held!r:.80}: {error}") from None

    def _decode(self, kind: str, held: Any, depth: int) -> Any:  # noqa: C901 - one line a kind of value
        if kind == "tensor":
            return self.tensor(_natural(held))
        if kind == "dict":
            return {key: self.decode(item, depth) for key, item in held.items()}
        if kind == "pairs":
            return {self.decode(key, depth): self.decode(item, depth) for key, item in held}
        if kind in ("tuple", "set", "frozenset"):
            items = (self.decode(item, depth) for item in _list_of(held))
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        if kind == "int":
            return int(held, 16)
        if kind == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[held]
        if kind == "complex":
            real, imaginary = (self.decode(part, depth) for part in held)
            return complex(real, imaginary)
        if kind == "bytes":
            return base64.b64decode(held, validate=True)
        if kind == "scalar":
            return _scalar(*held)
        if kind == "objects":
            shape, items = held
            return self._objects(shape, items, depth)
        if kind == "batch":
            return BatchValue(self.decode(held, depth), self.batch)
        if kind == "unsupported":
            return Unsupported({str(key): str(text) for key, text in held.items()})
        raise BadNode(f"there is no kind {kind!r:.40}")

    def _objects(self, shape: Any, items: Any, depth: int) -> NDArray[Any]:
        items = _list_of(items)
        array = np.empty(len(items), dtype=object)
        array[:] = [self.decode(item, depth) for item in items]
        return array.reshape([_natural(length) for length in shape])


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not an index")
    return value


def _list_of(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _scalar(described: Any, text: str) -> Any:
    dtype = dtypes.parse(described)
    if dtype is None:
        raise ValueError(f"no type {described!r:.80}")
    content = base64.b64decode(text, validate=True)
    if len(content) != dtype.itemsize:
        raise ValueError(f"{len(content)} bytes")
    return np.frombuffer(content, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]
