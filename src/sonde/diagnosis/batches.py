"""What the model was fed: its inputs by step, and which batches were the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde import schema, vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.track import Track
from sonde.records import Phase

MIN_ELEMENTS = 16
"""Of fewer elements two batches may look the same by chance."""
# What tells one batch from another. Sums are left out: their last digits depend on the order of additions.
_IDENTITY = [schema.COUNT, schema.MIN, schema.MAX, schema.MEAN, schema.M2, schema.ZERO]


def model_input(case: Case, phase: Phase = "train") -> Track:
    """Return the first input of the model; raises NotMeasured if there is none.

    Where the first is made of whole numbers (tokens), it is that one: what is asked is what the program was fed.
    """
    tracks = [track for track in case.of("input", phase) if track.name != vitals.LOSS and track.site.call == 0]
    if not tracks:
        raise NotMeasured("inputs of the model")
    return tracks[0]


def is_real(track: Track) -> bool:
    """Say whether an input is made of real numbers, not of ids."""
    return "float" in track.site.dtype


def identities(track: Track) -> NDArray[np.int64]:
    """Return a number for each step that is the same where the batches are; -1 for batches too small to tell."""
    rows = track.rows[:, _IDENTITY]
    result: NDArray[np.int64] = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    result[track.rows[:, schema.COUNT] < MIN_ELEMENTS] = -1
    result[track.rows[:, schema.M2] == 0] = -1  # a constant says nothing
    return result


def normalises_inside(case: Case) -> bool:
    """Say whether the first thing that the model does is to normalise its input."""
    first = case.modules.get(case.facts.order[0]) if case.facts.order else None
    return first is not None and "Norm" in first.kind
