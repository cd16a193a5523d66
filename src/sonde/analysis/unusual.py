"""What makes a site stand out, in one short phrase: the reason a row comes first in a table.

This is not a diagnosis. It compares a site with its peers (sites that measure the same quantity of the same sort of
tensor) and with its own past, in decades, because the statistics of layers differ by factors, not by amounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sonde import vitals
from sonde.analysis.downsample import Steps, Values
from sonde.core.robust import mad, median
from sonde.records import Site

Level = Literal["bad", "odd", "fine"]
LEVELS: Final[tuple[Level, ...]] = ("bad", "odd", "fine")

RECENT: Final = 20  # readings that make up "now", and the past that a jump is held against
# The very first readings of a run are unlike the rest; drift counts from the readings after them.
_EARLY: Final = slice(RECENT // 2, RECENT // 2 + RECENT)
MIN_PEERS: Final = 4  # below this there is no telling which of them is the odd one
# A factor of ten stands out; the number of deviations guards against peers that are far apart anyway.
_ODD_DECADES: Final = 1.0
_ODD_DEVIATIONS: Final = 4.0
_FIRST_OF_A_JUMP: Final = 0.8
_DRIFT_DECADES: Final = 1.5
_DRIFT_BEGINS: Final = 0.5
# Peers that agree closely would make any difference look huge: 0.15 decades is a factor of 1.4.
_LEAST_DEVIATION: Final = 0.15
TIMES: Final = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Mark:
    """How much a site stands out and why. `score` sorts within a level; `step` says where it began, if it did."""

    level: Level = "fine"
    score: float = 0.0
    reason: str = ""
    step: int | None = None

    @property
    def sort_key(self) -> tuple[int, float]:
        """Sort worst first by this."""
        return LEVELS.index(self.level), -self.score


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What a mark is made from: for each reading of a site a magnitude, and how many elements were not finite."""

    site: Site
    steps: Steps
    values: Values
    nonfinite: Values

    @property
    def logs(self) -> Values:
        """Magnitudes in decades; NaN where they are zero or unknown."""
        sizes = np.abs(self.values)
        return np.log10(sizes, out=np.full(len(sizes), np.nan), where=np.isfinite(sizes) & (sizes > 0))


def mark_all(histories: Sequence[History]) -> list[Mark]:
    """Return a mark for each history, comparing those that are peers of each other."""
    logs = [history.logs for history in histories]
    own = _own_moves(histories, logs)
    now = np.array([median(log[-RECENT:]) for log in logs])
    drift = now - np.array([median(log[_EARLY]) for log in logs])
    groups: dict[object, list[int]] = {}
    for index, history in enumerate(histories):
        groups.setdefault(peer_group(history.site), []).append(index)
    marks = [Mark()] * len(histories)
    for members in groups.values():
        now_shift, now_scale = _against_peers(now[members])
        drift_shift, _ = _against_peers(drift[members])
        for place, index in enumerate(members):
            history = histories[index]
            if history.site.quantity == "vital":
                continue  # a zero or a jump of a vital means what the rules of a diagnosis say it means
            marks[index] = (
                _non_finite(history)
                or _all_zero(history)
                or (Mark() if is_one_number(history.site) else None)
                or _jump(history.steps, own[index])
                or _drift(history.steps, logs[index], drift_shift[place])
                or _far_from_peers(now_shift[place], now_scale)
            )
    return marks


def peer_group(site: Site) -> object:
    """Return what sites must share to be compared: quantity, phase, and for parameters the same sort of tensor.

    Weights, biases and norm scales differ by nature. Scalars have no peers: a loss is not a learning rate. Nor have
    inputs and vitals.
    """
    if site.quantity in ("input", "vital") or is_one_number(site):
        return site.key
    if site.quantity in ("output", "output_gradient", "value"):
        return site.quantity, site.phase
    leaf = "matrix" if len(site.shape) > 1 else site.name.rpartition(".")[2]
    return site.quantity, site.phase, leaf, site.part


def is_one_number(site: Site) -> bool:
    """Say whether a site is a logged number or a loss: one that falls is what a training is for."""
    return site.quantity == "scalar" or (site.name == vitals.LOSS and site.quantity == "output")


def _against_peers(values: Values) -> tuple[Values, float]:
    """Return how far each value is from the median of all, and the robust spread of those distances."""
    if np.isfinite(values).sum() < MIN_PEERS:
        return np.full(len(values), np.nan), _LEAST_DEVIATION
    shift = values - median(values)
    return shift, max(mad(shift, about=0.0), _LEAST_DEVIATION)


def _own_moves(histories: Sequence[History], logs: Sequence[Values]) -> list[Values]:
    """Return the logs; those of updates less the move that all updates make together.

    A learning-rate schedule moves all updates at once, which is no news of any one layer.
    """
    own = list(logs)
    updates = [index for index, history in enumerate(histories) if history.site.quantity == "update"]
    together = all(np.array_equal(histories[index].steps, histories[updates[0]].steps) for index in updates)
    if len(updates) < MIN_PEERS or not together:
        return own
    stacked = np.stack([logs[index] for index in updates])
    known = np.isfinite(stacked).any(0)
    common = np.zeros(stacked.shape[1])
    common[known] = np.nanmedian(stacked[:, known], axis=0)
    for index in updates:
        own[index] = logs[index] - common
    return own


def _non_finite(history: History) -> Mark | None:
    where = np.flatnonzero(history.nonfinite > 0)
    if not len(where):
        return None
    step = int(history.steps[where[0]])
    # One bad step that passed, or bad ever since?
    word = "since" if len(where) > 1 and history.nonfinite[-1] > 0 else "at"
    return Mark("bad", float(len(where)), f"non-finite {word} step {step}", step)


def _all_zero(history: History) -> Mark | None:
    if not len(history.values) or history.values[-1] != 0:
        return None
    alive = np.flatnonzero(history.values != 0)
    # A bias that starts at zero, or a parameter that is meant to be zero, is no alarm; a gradient of zero is.
    level: Level = "bad" if history.site.quantity in ("gradient", "output_gradient") else "odd"
    if not len(alive):
        return Mark(level, 0.0, "all zero")
    step = int(history.steps[alive[-1] + 1])
    return Mark(level, 1.0, f"all zero since step {step}", step)


def largest_jump(logs: Values) -> tuple[int, float, float] | None:
    """Find the first reading that is about as far as any from the median of the `RECENT` readings before it.

    Returns:
        Its index, the jump in decades (negative when it fell), and the jump in deviations of the usual such distance;
        None where the past is too short to tell.

    """
    known = np.flatnonzero(np.isfinite(logs))
    if len(known) <= RECENT + 1:
        return None
    values = logs[known]
    before = np.median(sliding_window_view(values, RECENT)[:-1], axis=-1)
    jumps = values[RECENT:] - before
    # After a jump that lasts, the next readings are as far; noise must not pick one of them.
    place = int((np.abs(jumps) >= _FIRST_OF_A_JUMP * np.abs(jumps).max()).argmax())
    usual = max(mad(jumps, about=0.0), _LEAST_DEVIATION)
    return int(known[place + RECENT]), float(jumps[place]), float(abs(jumps[place]) / usual)


def _jump(steps: NDArray[np.int64], logs: Values) -> Mark | None:
    known = logs[np.isfinite(logs)]
    # No jump is larger than the whole range; most sites are done here, without their running medians.
    if not len(known) or known.max() - known.min() < _ODD_DECADES:
        return None
    found = largest_jump(logs)
    if found is None or abs(found[1]) < _ODD_DECADES or found[2] < _ODD_DEVIATIONS:
        return None
    index, decades, deviations = found
    verb = "jumped" if decades > 0 else "fell"
    return Mark("odd", deviations, f"{verb} {times(decades)} at step {steps[index]}", int(steps[index]))


def _drift(steps: NDArray[np.int64], logs: Values, decades: float) -> Mark | None:
    if not abs(decades) >= _DRIFT_DECADES:
        return None
    verb = "grew" if decades > 0 else "faded"
    # It began after the last reading that was still near where it came from.
    near = np.flatnonzero(np.abs(logs - median(logs[_EARLY])) < _DRIFT_BEGINS)
    step = int(steps[min(near[-1] + 1, len(steps) - 1)]) if len(near) else None
    since = "" if step is None else f" since step {step}"
    return Mark("odd", abs(decades) / _LEAST_DEVIATION, f"{verb} {times(decades)}{since}", step)


def _far_from_peers(decades: float, scale: float) -> Mark:
    if not np.isfinite(decades):
        return Mark()
    deviations = abs(decades) / scale
    if abs(decades) < _ODD_DECADES or deviations < _ODD_DEVIATIONS:
        return Mark("fine", deviations)
    side = "above" if decades > 0 else "below"
    return Mark("odd", deviations, f"{times(decades)} {side} its peers")


def times(decades: float) -> str:
    """Write a factor given in decades, to two digits and with a multiplication sign; its direction is not written.

    >>> [times(decades).rstrip(TIMES) for decades in (0.5, 1.6, -2.08, 5.2, 9.0)]
    ['3.2', '40', '120', '160,000', '1e9']
    """
    factor = 10 ** abs(decades)
    if factor >= 1e6:
        return f"{factor:.0e}{TIMES}".replace("e+0", "e").replace("e+", "e")
    rounded = float(f"{factor:.1e}")
    return f"{rounded:,.0f}{TIMES}" if rounded >= 10 else f"{rounded:.1f}{TIMES}"
