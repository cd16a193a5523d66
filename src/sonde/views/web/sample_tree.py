"""What was captured of one sample as a tree of plain values and descriptions of tensors; no tensor is read for it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

from sonde.store import DebugOutputs
from sonde.store.pages import Datapoint, Preview, nodes

_MOST_NODES: Final = 2000
_MOST_SIGNS: Final = 20_000
_MOST_DEPTH: Final = 32

Path = tuple[Any, ...]


def describe_outputs(outputs: DebugOutputs, idx: Datapoint) -> list[dict[str, Any]]:
    """Describe all outputs of a sample, debugger by debugger."""
    entry, _ = outputs.entry(idx)
    previews = outputs.previews(idx)
    described = []
    for name, node in entry.outputs.items():
        described.append({"name": name, "node": _Describer(previews.get(name, {}), entry.places).node(node, ())})
    return described


class _Describer:
    """Describes the stored nodes of one debugger's output; docs/page-format.md lists the kinds there are."""

    def __init__(self, previews: dict[str, Preview], places: Sequence[Any]) -> None:
        self._previews, self._places = previews, places
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
        text = nodes.to_text(path)
        known = self._previews.get(text)
        if known is None or not (isinstance(number, int) and 0 <= number < len(self._places)):
            return {"kind": "value", "value": "(damaged)"}
        told: dict[str, Any] = {
            "kind": "tensor",
            "path": text,
            "shape": list(known.shape),
            "dtype": known.dtype,
            "origin": self._places[number].origin,
            "numeric": bool(known.stats),
            "stats": known.stats,
            "channels": list(known.channels),
        }
        if known.thumbnail is not None:
            told["thumbnail"] = {
                "height": known.thumbnail.shape[0],
                "width": known.thumbnail.shape[1],
                "levels": base64.b64encode(known.thumbnail.tobytes()).decode(),
            }
        return told


def _words(kind: str, held: Any) -> Any:
    if kind in ("float", "int") and isinstance(held, str):
        return held[:60]
    if kind == "unsupported" and isinstance(held, dict):
        return f"({held.get('unsupported', '?')}) {str(held.get('text', ''))[:400]}"
    return f"({kind}) {str(held)[:400]}"
