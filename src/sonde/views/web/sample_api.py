"""One sample: what was kept and captured of it, as a tree of values, and its tensors as raw bytes, one at a time."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response
from starlette.routing import Route

from sonde.analysis.query import parse, percentiles
from sonde.analysis.samples import columns_of, name_of, worst_rows
from sonde.analysis.scores import Evaluation
from sonde.errors import OptionError, RunDamaged, RunError, SelectionError
from sonde.store import BatchValue, DebugOutputs
from sonde.store.layout import CAPTURES, KEPT
from sonde.store.pages import Datapoint, Preview, nodes
from sonde.store.pages.record import BATCH
from sonde.views.web.answers import Query, as_json, raw_route
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.sample_store import SampleStore, few_enough, sample_from_text, sample_text

# --------------------------------------------------------------------------------
# What was captured of one sample as a tree of values and descriptions of tensors, of which only texts are read.


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


# --------------------------------------------------------------------------------


MOST_ELEMENTS: Final = 1 << 20  # of a tensor that is sent; what is larger is thinned, dimension by dimension
_MOST_EPOCHS: Final = 40  # whose scores of one sample are looked up; those with captures come on top
_PARTS: Final = (CAPTURES, KEPT)


def sample_routes(library: Library, store: SampleStore) -> list[Route]:
    """Return the routes of the page *Sample*."""
    api = SampleApi(store)
    return [raw_route(library, "sample", api.sample), raw_route(library, "tensor", api.tensor)]


class SampleApi:
    """Answers questions about one sample."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def sample(self, opened: OpenRun, query: Query) -> Response:
        """Describe one sample in one evaluation, and where else it is known."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        idx = sample_from_text(query.text("idx"))
        answer: dict[str, Any] = {
            "idx": sample_text(idx),
            "evaluation": evaluation.name,
            "words": name_of(evaluation),
            "run": opened.name,
            "epochs": self._epochs(opened, idx, evaluation.name),
            "problems": [],
        }
        notes = self._store.notes(evaluation)
        answer |= {"label": notes.labels.get(idx), "prediction": notes.predictions.get(idx)}
        for name, part in (("kept", KEPT), ("captured", CAPTURES)):
            answer[name] = self._tree(evaluation, part, idx, answer["problems"])
        answer["problems"] += self._store.table(evaluation).problems_of(idx)
        answer |= self._place(evaluation, idx, query)
        if answer["kept"] is None and answer["captured"] is None and answer["row"] is None:
            raise SelectionError(f"{name_of(evaluation)} of {opened.name} knows no sample {idx!r:.60}.")
        return as_json(answer)

    def tensor(self, opened: OpenRun, query: Query) -> Response:
        """Send one tensor as float32, thinned if it is large; headers hold its shape and the thinning steps."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        part = query.choice("part", _PARTS)
        outputs = self._store.outputs(evaluation, part)
        idx = sample_from_text(query.text("idx"))
        if outputs is None or idx not in outputs:
            raise SelectionError(f"Nothing was captured of sample {idx!r:.60} in {name_of(evaluation)}.")
        array = _read(outputs, idx, query.text("debugger"), query.text("path"))
        return send(array, query.text("fix"))

    def _tree(self, evaluation: Evaluation, part: str, idx: Datapoint, problems: list[str]) -> Any:
        outputs = self._store.outputs(evaluation, part)
        if outputs is None or idx not in outputs:
            problems += outputs.problems[:5] if outputs is not None else []
            return None
        try:
            return describe_outputs(outputs, idx)
        except (RunDamaged, OSError) as error:
            problems.append(str(error))
            return None

    def _epochs(self, opened: OpenRun, idx: Datapoint, current: str) -> list[dict[str, Any]]:
        """Return where this sample is known, and how it scored there."""
        found = []
        known = self._store.evaluations(opened)
        for each in few_enough(known, _MOST_EPOCHS, lambda one: one.name == current or one.has(CAPTURES)):
            try:
                table = self._store.table(each)
            except RunError:
                continue
            row = table.row_of(idx)
            captured, kept = (self._has(each, part, idx) for part in _PARTS)
            if row is None and not captured and not kept:
                continue
            scores = {} if row is None else {name: float(column[row]) for name, column in table.columns.items()}
            found.append(
                {"name": each.name, "words": name_of(each), "scores": scores, "captured": captured, "kept": kept}
            )
        return found

    def _has(self, evaluation: Evaluation, part: str, idx: Datapoint) -> bool:
        outputs = self._store.outputs(evaluation, part)
        return outputs is not None and idx in outputs

    def _place(self, evaluation: Evaluation, idx: Datapoint, query: Query) -> dict[str, Any]:
        """Return how the sample ranks among all, and the next worse and better ones that the filters select."""
        table = self._store.table(evaluation)
        row = table.row_of(idx)
        answer: dict[str, Any] = {"row": row, "scores": [], "position": None, "previous": None, "next": None, "of": 0}
        if row is None or not table.columns:
            return answer
        metric = query.text("metric") or next(iter(table.columns))
        answer["scores"] = [
            {
                "name": name,
                "value": column[row],
                "percentile": percentiles(column)[row],
                "direction": table.directions[name],
            }
            for name, column in table.columns.items()
        ]
        mask = np.ones(len(table.ids), bool)
        filters = query.texts("where")
        columns = columns_of(table, self._store.notes(evaluation)) if filters else None
        for each in filters:
            if columns is not None:
                mask &= parse(each).select(columns)
        order = [int(each) for each in worst_rows(table, mask, metric)]
        at = order.index(row) if row in order else None
        answer |= {"metric": metric, "position": at, "of": len(order)}
        # A sample that the filters leave out leads to the first that they pick.
        after, before = (0, None) if at is None else (at + 1, at - 1)
        if after < len(order):
            answer["next"] = sample_text(table.ids[order[after]])
        if before is not None and before >= 0:
            answer["previous"] = sample_text(table.ids[order[before]])
        return answer


def _read(outputs: DebugOutputs, idx: Datapoint, debugger: str, path: str) -> NDArray[Any]:
    try:
        value = outputs.tensor(idx, debugger, path)
    except KeyError as error:
        raise SelectionError(str(error.args[0] if error.args else error)[:500]) from None
    except OSError as error:  # its page was removed
        raise RunDamaged(str(error)) from None
    array = np.asarray(value.value if isinstance(value, BatchValue) else value)
    if array.dtype.kind in "OSUMmV" and not _is_number(array):
        raise OptionError(f"{debugger}/{path} holds {array.dtype}, not numbers.")
    return array


def _is_number(array: NDArray[Any]) -> bool:
    """Return whether the elements are numbers; numpy calls bfloat16 and the 8-bit floats void types."""
    return array.dtype.kind == "V" and array.dtype.fields is None and "float" in array.dtype.name


def send(array: NDArray[Any], fix: str = "", most: int = MOST_ELEMENTS) -> Response:
    """Send an array as little-endian float32.

    Args:
        array: Numbers; complex ones are sent as magnitudes.
        fix: Dimensions to hold at one index, as `0:3,1:5`.
        most: How many elements are sent at most.

    """
    full = array.shape
    array, held = _hold(array, fix)
    steps = thinning(array.shape, most)
    array = array[tuple(slice(None, None, step) for step in steps)]
    if array.dtype.kind == "c":
        array = np.abs(array)
    with np.errstate(all="ignore"):
        content = np.ascontiguousarray(array, dtype="<f4").tobytes()
    return Response(
        content,
        media_type="application/octet-stream",
        headers={
            "X-Sonde-Shape": json.dumps(array.shape),
            "X-Sonde-Full-Shape": json.dumps(full),
            "X-Sonde-Steps": json.dumps(steps),
            "X-Sonde-Held": json.dumps(held),
            "X-Sonde-Dtype": "float32",
        },
    )


def _hold(array: NDArray[Any], fix: str) -> tuple[NDArray[Any], list[list[int]]]:
    held: list[list[int]] = []
    index: list[Any] = [slice(None)] * array.ndim
    for pair in fix.split(",") if fix else ():
        dimension, _, at = pair.partition(":")
        if not (dimension.isdecimal() and at.isdecimal() and int(dimension) < array.ndim):
            raise OptionError(f"fix={fix!r:.60} should be like 0:3,1:5 for a tensor of {array.ndim} dimensions.")
        if int(at) >= array.shape[int(dimension)]:
            raise OptionError(f"Dimension {dimension} has {array.shape[int(dimension)]} entries; {at} is none of them.")
        index[int(dimension)] = int(at)
        held.append([int(dimension), int(at)])
    return np.asarray(array[tuple(index)]), held


def thinning(shape: tuple[int, ...], most: int) -> list[int]:
    """Return by which step each dimension is thinned so that few enough elements are left; the longest goes first.

    >>> thinning((4, 1000, 1000), 1_000_000)
    [1, 2, 2]
    """
    steps = [1] * len(shape)
    sizes = list(shape)
    while math.prod(sizes) > most:
        longest = max(range(len(shape)), key=lambda at: sizes[at])
        steps[longest] += 1
        sizes[longest] = -(-shape[longest] // steps[longest])
    return steps
