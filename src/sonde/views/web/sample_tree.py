"""What was captured of one sample as a tree of values and descriptions of tensors, of which only texts are read."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from sonde.store import DebugOutputs
from sonde.store.pages import Datapoint, Preview, nodes
from sonde.store.pages.record import BATCH

_MOST_NODES: Final = 2000
_MOST_SIGNS: Final = 20_000
_MOST_DEPTH: Final = 32
_MOST_TEXT: Final = 256 << 10  # bytes of a text that is stored like a tensor

Path = tuple[Any, ...]


def describe_outputs(outputs: DebugOutputs, idx: Datapoint) -> list[dict[str, Any]]:
    """Describe all outputs of a sample, debugger by debugger."""
    entry, _ = outputs.entry(idx)
    previews = outputs.previews(idx)
    batch = len(outputs.info(idx).get(BATCH, ()))
    described = []
    for name, node in entry.outputs.items():
        describer = _Describer(previews.get(name, {}), entry.places, partial(outputs.tensor, idx, name), batch)
        described.append({"name": name, "node": describer.node(node, ())})
    return described


class _Describer:
    """Describes the stored nodes of one debugger's output; docs/page-format.md lists the kinds there are."""

    def __init__(
        self, previews: dict[str, Preview], places: Sequence[Any], read: Callable[[Path], Any], batch: int
    ) -> None:
        self._previews, self._places, self._read = previews, places, read
        self._batch = batch
        self._room = _MOST_NODES

    def node(self, node: Any, path: Path) -> dict[str, Any]:
        self._room -= 1
        if self._room < 0 or len(path) > _MOST_DEPTH:
            return {"kind": "value", "value": "…"}
        if isinstance(node, list):
            return self._items("list", list(enumerate(node)), path)
        if not isinstance(node, dict):
            return {"kind": "value", "value": node[:_MOST_SIGNS] if isinstance(node, str) else node}
        kind, held = next(iter(node.items()), ("", None))
        return self._object(kind, held, path)

    def _object(self, kind: str, held: Any, path: Path) -> dict[str, Any]:
        if kind == "batch":
            return self.node(held, path) | {"batch": self._batch}
        if kind == "tensor":
            return self._tensor(held, path)
        if kind == "dict" and isinstance(held, dict):
            return self._items("dict", list(held.items()), path)
        if kind == "pairs" and isinstance(held, list):
            return self._items(
                "dict", [tuple(pair) for pair in held if isinstance(pair, list) and len(pair) == 2], path
            )
        if kind in ("tuple", "set", "frozenset") and isinstance(held, list):
            return self._items("list", list(enumerate(held)), path)
        return {"kind": "value", "value": _words(kind, held)}

    def _items(self, kind: str, items: list[Any], path: Path) -> dict[str, Any]:
        inside: list[list[Any]] = []
        for key, item in items:
            if self._room <= 0:
                inside.append(["…", {"kind": "value", "value": f"and {len(items) - len(inside)} more"}])
                break
            inside.append([str(key)[:200], self.node(item, (*path, key))])
        return {"kind": kind, "items": inside}

    def _tensor(self, number: Any, path: Path) -> dict[str, Any]:
        text = nodes.path_to_text(path)
        known = self._previews.get(text)
        if known is None or not (isinstance(number, int) and 0 <= number < len(self._places)):
            return {"kind": "value", "value": "(damaged)"}
        place = self._places[number]
        if place.nbytes <= _MOST_TEXT and (place.origin == nodes.TEXT or known.dtype.startswith("<U")):
            return self._texts(self._read(path))
        described: dict[str, Any] = {
            "kind": "tensor",
            "path": text,
            "shape": list(known.shape),
            "dtype": known.dtype,
            "origin": place.origin,
            "numeric": bool(known.stats),
            "stats": known.stats,
            "channels": list(known.channels),
        }
        if known.thumbnail is not None:
            described["thumbnail"] = {
                "height": known.thumbnail.shape[0],
                "width": known.thumbnail.shape[1],
                "levels": base64.b64encode(known.thumbnail.tobytes()).decode(),
            }
        return described

    def _texts(self, value: Any) -> dict[str, Any]:
        """Return a long text, or an array of texts, as what it says: it cannot be drawn."""
        if isinstance(value, str):
            return {"kind": "value", "value": value[:_MOST_SIGNS]}
        listed = [[str(at), {"kind": "value", "value": str(each)}] for at, each in enumerate(value.reshape(-1))]
        self._room -= len(listed)
        return {"kind": "list", "items": listed[:_MOST_NODES]}


def _words(kind: str, held: Any) -> Any:
    if kind in ("float", "int") and isinstance(held, str):
        return held[:60]
    if kind == "unsupported" and isinstance(held, dict):
        return f"({held.get('unsupported', '?')}) {str(held.get('text', ''))[:400]}"
    return f"({kind}) {str(held)[:400]}"
