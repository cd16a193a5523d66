"""Samples as pictures: thumbnails with overlays, scores by class, what changed between runs, a map of embeddings."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.classes import by_class, changes, histogram
from sonde.analysis.embedding import Method, embed, methods, vector_of
from sonde.analysis.scores import Evaluation
from sonde.errors import OptionError, RunDamaged
from sonde.store import BatchValue, DebugOutputs
from sonde.store.layout import CAPTURES, KEPT
from sonde.store.pages import Datapoint, Preview
from sonde.views.web.answers import Query
from sonde.views.web.sample_store import SampleStore, sample_from_text, sample_text

MOST_PICTURES: Final = 120
_SIDE: Final = 64  # pixels of a thumbnail
_MOST_POINTS: Final = 3000
_MOST_CHANGES: Final = 200
_MOST_SIGNS: Final = 160
_CURVE: Final = 96


class Pictures:
    """Answers what the page *Samples* asks beyond its list."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def thumbnails(self, evaluation: Evaluation, query: Query) -> dict[str, Any]:
        """Draw some samples small: their inputs, or else the first of their captures that is a picture."""
        kept, captured = (self._store.outputs(evaluation, part) for part in (KEPT, CAPTURES))
        overlay = query.text("overlay")
        drawn: dict[str, Any] = {}
        for text in query.texts("idx")[:MOST_PICTURES]:
            idx = sample_from_text(text)
            picture = _input(kept, idx) or _preview(captured, idx)
            if picture is not None and overlay:
                picture["overlay"] = _overlay(kept, captured, idx, overlay)
            drawn[text] = picture
        first = next(iter(captured or kept or ()), None)
        return {"pictures": drawn, "overlays": _overlays(kept, captured, first)}

    def classes(self, evaluation: Evaluation, metric: str, mask: NDArray[np.bool_]) -> dict[str, Any]:
        """Return the histogram of scores, and classes with their confusion where labels and predictions are known."""
        table, notes = self._store.table(evaluation), self._store.notes(evaluation)
        found = by_class(table, notes, metric, mask)
        counted = histogram(table.column(metric), mask)
        answer: dict[str, Any] = {"histogram": asdict(counted), "classes": None}
        if found is not None:
            rows = [asdict(row) | {"recall": row.recall, "precision": row.precision} for row in found.rows]
            answer["classes"] = {"rows": rows, "confusion": found.confusion, "known": found.known, "of": found.of}
        return answer

    def changed(self, mine: Evaluation, theirs: Evaluation, metric: str) -> dict[str, Any]:
        """Return how the samples of two runs differ: predictions that became right or wrong, and scores."""
        found = changes(
            [self._store.table(each) for each in (mine, theirs)],
            [self._store.notes(each) for each in (mine, theirs)],
            metric,
        )
        known = [each for each in found if None not in (each.before, each.after)]
        moved = [each for each in known if each.before != each.after]
        shown = sorted(found, key=lambda each: each.before == each.after)  # changed predictions first
        return {
            "shared": len(found),
            "known": len(known),
            "changed": len(moved),
            "fixed": sum(each.after == each.label for each in moved),
            "broken": sum(each.before == each.label for each in moved),
            "direction": self._store.table(mine).directions[metric],
            "rows": [asdict(each) | {"idx": sample_text(each.idx)} for each in shown[:_MOST_CHANGES]],
        }

    def embedding(self, evaluation: Evaluation, query: Query) -> dict[str, Any]:
        """Place samples in the plane by what a debugger captured of each."""
        outputs = self._store.outputs(evaluation, CAPTURES)
        choices = _vectors(outputs)
        if outputs is None or not choices:
            return {"choices": [], "methods": methods(), "points": [], "ids": []}
        chosen = query.text("of") or choices[0]
        if chosen not in choices:
            raise OptionError(f"{chosen!r:.80} was not captured as numbers; there is: {', '.join(choices)[:300]}.")
        method: Method = "umap" if query.text("method") == "umap" and "umap" in methods() else "pca"
        ids, vectors = _read_vectors(outputs, chosen)
        placed = embed(vectors, method)
        notes = self._store.notes(evaluation)
        return {
            "choices": choices,
            "methods": methods(),
            "method": method,
            "of": chosen,
            "ids": [sample_text(each) for each in ids],
            "points": np.round(placed.points, 5),
            "labels": [notes.labels.get(each) for each in ids],
            "wrong": [_is_wrong(notes, each) for each in ids],
            "explained": placed.explained,
            "total": len(outputs),
        }


def _is_wrong(notes: Any, idx: Datapoint) -> bool | None:
    label, prediction = notes.labels.get(idx), notes.predictions.get(idx)
    return None if label is None or prediction is None else bool(label != prediction)


# --------------------------------------------------------------------------------
# Thumbnails.


def _read(outputs: DebugOutputs | None, idx: Datapoint, debugger: str, path: str = "") -> Any:
    """Return a stored value, or None where there is none or it cannot be read."""
    if outputs is None or idx not in outputs:
        return None
    try:
        value = outputs.tensor(idx, debugger, path)
    except (KeyError, RunDamaged, OSError):
        return None
    return None if isinstance(value, BatchValue) else value


def _input(kept: DebugOutputs | None, idx: Datapoint) -> dict[str, Any] | None:
    if kept is None or idx not in kept:
        return None
    try:
        known = kept[idx]
        texts = [known[name] for name in ("inputs", "tokens", "text") if name in known]
    except (RunDamaged, OSError):
        return None
    for value in texts:
        if isinstance(value, str):
            return {"kind": "text", "text": value[:_MOST_SIGNS]}
        if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
            return {"kind": "text", "text": " ".join(value)[:_MOST_SIGNS]}
    value = _read(kept, idx, "inputs")
    return None if value is None else _picture(np.asarray(value))


def _picture(array: NDArray[Any]) -> dict[str, Any] | None:
    """Return an image, a spectrogram or a curve as a few bytes; None for what is neither."""
    if array.dtype.kind not in "biuf":
        return None
    array = np.squeeze(array).astype(np.float32)
    if array.ndim == 1 and array.size > 2:
        step = -(-array.size // _CURVE)
        return {"kind": "curve", "values": array[::step]}
    if array.ndim == 3 and array.shape[0] in (3, 4) and min(array.shape[1:]) > 4:
        array = np.moveaxis(array[:3], 0, -1)
    elif array.ndim == 3 and not (array.shape[-1] in (3, 4) and min(array.shape[:2]) > 4):
        array = array[np.argmax(np.abs(array).reshape(len(array), -1).mean(1))]  # the most active plane
    if array.ndim not in (2, 3) or not array.size:
        return None
    array = array[..., :3] if array.ndim == 3 else array
    levels = _levels(_shrunk(array))
    return {"kind": "rgb" if levels.ndim == 3 else "grey", **_packed(levels)}


def _shrunk(array: NDArray[np.float32]) -> NDArray[np.float32]:
    steps = [-(-length // _SIDE) for length in array.shape[:2]]
    return array[:: steps[0], :: steps[1]]


def _levels(array: NDArray[np.float32]) -> NDArray[np.uint8]:
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scaled = (np.nan_to_num(array, nan=low, posinf=high, neginf=low) - low) * (255 / ((high - low) or 1.0))
    return np.asarray(scaled.clip(0, 255), np.uint8)


def _packed(levels: NDArray[np.uint8]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(levels).tobytes()).decode()
    return {"height": levels.shape[0], "width": levels.shape[1], "data": data}


def _preview(captured: DebugOutputs | None, idx: Datapoint) -> dict[str, Any] | None:
    for debugger, path, preview in _previews(captured, idx):
        if preview.thumbnail is not None:
            return {"kind": "grey", "of": f"{debugger}/{path}", **_packed(np.minimum(preview.thumbnail, 254))}
    return None


def _previews(outputs: DebugOutputs | None, idx: Datapoint | None) -> list[tuple[str, str, Preview]]:
    if outputs is None or idx is None or idx not in outputs:
        return []
    try:
        found = outputs.previews(idx)
    except (RunDamaged, OSError):
        return []
    return [(debugger, path, preview) for debugger, each in found.items() for path, preview in each.items()]


def _overlays(kept: DebugOutputs | None, captured: DebugOutputs | None, idx: Datapoint | None) -> list[str]:
    """Return what can be laid over a picture: stored planes that are not inputs."""
    planes = [
        f"{debugger}/{path}"
        for outputs in (captured, kept)
        for debugger, path, preview in _previews(outputs, idx)
        if debugger != "inputs" and sum(length > 1 for length in preview.shape) == 2 and preview.stats
    ]
    return sorted(dict.fromkeys(planes), key=lambda name: "cam" not in name.lower() and "mask" not in name.lower())


def _overlay(kept: DebugOutputs | None, captured: DebugOutputs | None, idx: Datapoint, name: str) -> Any:
    debugger, _, path = name.partition("/")
    for outputs in (captured, kept):
        value = _read(outputs, idx, debugger, path)
        array = None if value is None else np.squeeze(np.asarray(value))
        if array is not None and array.ndim == 2 and array.dtype.kind in "biuf":
            return _packed(_levels(_shrunk(array.astype(np.float32))))
    return None


# --------------------------------------------------------------------------------
# Vectors of captures.


def _vectors(outputs: DebugOutputs | None) -> list[str]:
    """Return the captures that can be placed in the plane, what is called an embedding first."""
    first = next(iter(outputs), None) if outputs is not None else None
    usable = [
        (f"{debugger}/{path}", preview)
        for debugger, path, preview in _previews(outputs, first)
        if preview.stats and np.prod(preview.shape) > 2 and "cam" not in path.lower()
    ]
    return [name for name, _ in sorted(usable, key=lambda each: "embed" not in each[0].lower())]


def _read_vectors(outputs: DebugOutputs, name: str) -> tuple[list[Datapoint], NDArray[np.float64]]:
    debugger, _, path = name.partition("/")
    every = list(outputs)
    ids: list[Datapoint] = []
    vectors: list[NDArray[np.float64]] = []
    for idx in every[:: -(-len(every) // _MOST_POINTS) or 1]:
        value = _read(outputs, idx, debugger, path)
        vector = None if value is None else vector_of(np.asarray(value))
        if vector is not None and (not vectors or len(vector) == len(vectors[0])):
            ids.append(idx)
            vectors.append(vector)
    return ids, np.stack(vectors) if vectors else np.zeros((0, 2))
