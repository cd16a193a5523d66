"""The labels and predictions of the samples that were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sonde.analysis.evaluations import Evaluation
from sonde.errors import RunDamaged
from sonde.store.layout import KEPT
from sonde.store.pages import Datapoint

_MOST_NOTED: Final = 5000  # samples whose label and prediction are looked up


@dataclass(frozen=True, slots=True)
class Notes:
    """What kept samples say of themselves: a label and a prediction, where those are single values."""

    labels: dict[Datapoint, Any]
    predictions: dict[Datapoint, Any]


def read_notes(evaluation: Evaluation, most: int = _MOST_NOTED) -> Notes:
    """Read the labels and predictions of the samples that were kept."""
    notes = Notes({}, {})
    kept = evaluation.outputs(KEPT)
    for sample in list(kept or ())[:most]:
        try:
            entry, _ = kept.entry(sample)  # type: ignore[union-attr]
            for name, into in (("labels", notes.labels), ("prediction", notes.predictions)):
                if _is_small(entry.outputs.get(name), entry.places):
                    value = as_scalar(kept[sample][name])  # type: ignore[index]
                    if value is not None:
                        into[sample] = value
        except (RunDamaged, OSError):
            continue  # one damaged page hides its samples only
    return notes


def _is_small(node: Any, places: Sequence[Any]) -> bool:
    if isinstance(node, dict) and set(node) == {"tensor"}:
        number = node["tensor"]
        return isinstance(number, int) and 0 <= number < len(places) and math.prod(places[number].shape) == 1
    return isinstance(node, int | float | str)


def as_scalar(value: Any) -> Any:
    """Return a single number or text, or None if a value is neither."""
    if isinstance(value, np.ndarray | np.generic) and np.size(value) == 1:
        value = np.asarray(value).reshape(-1)[0].item()
    return value if isinstance(value, int | float | str) else None
