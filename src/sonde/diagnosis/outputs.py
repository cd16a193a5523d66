"""What the numbers that a loss is given look like: probabilities, log-probabilities or logits."""

from __future__ import annotations

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import last_module
from sonde.diagnosis.seen_loss import SeenLoss
from sonde.diagnosis.track import Track, Values

_COARSE = ("bfloat16", "float16")
# What is known to be neither a squashing nor a rectifying operation, unless it is asked for.
_OTHERS = ("addmm", "mm", "bmm", "baddbmm", "linear", "convolution", "add", "sigmoid", "softmax", "logsoftmax", "relu")


def need_sign(loss: SeenLoss, name: str) -> Track:
    """Return the last readings of a vital sign of a loss.

    Raises:
        NotMeasured: It was not measured.

    """
    track = loss.vital(name)
    if track is None:
        raise NotMeasured(f"{vitals.LOSS}:vital{vitals.part_of(name)}")
    return track


def bounds(track: Track) -> tuple[Values, Values]:
    """Return the smallest and the largest number at each step."""
    return track.rows[:, schema.MIN], track.rows[:, schema.MAX]


def tolerance(loss: SeenLoss) -> float:
    """Return how far a sum of probabilities may be from 1 in the precision at hand."""
    coarse = loss.values.site.dtype in _COARSE
    return (thresholds.COARSE_SUM_ERROR if coarse else thresholds.ROW_SUM_ERROR).value


def are_all(track: Track, number: float, margin: float) -> bool:
    """Say whether all numbers of several readings are the given one."""
    low, high = bounds(track)
    # Of what is not finite there are no bounds.
    clean = not (track.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0).any()
    enough = clean and len(track) >= thresholds.LOSS_LOOKS.value
    return enough and bool(np.all(np.abs(low - number) <= margin) and np.all(np.abs(high - number) <= margin))


def may_come_from(loss: SeenLoss, *operations: str) -> bool:
    """Say whether what a loss was given was returned by one of these operations, as far as is known.

    Numbers of a plain layer may happen to look like those of a sigmoid or a rectifier for a while.
    """
    makers = {each.made_by for each in loss.case.facts.losses if each.kind == loss.kind} - {""}
    return not makers or any(maker in operations or maker not in _OTHERS for maker in makers)


def ends_in(case: Case, *kinds: str) -> str | None:
    """Return the module that ran last, if it is of one of these classes."""
    name = last_module(case)
    module = case.modules.get(name) if name is not None else None
    return name if module is not None and module.kind in kinds else None
