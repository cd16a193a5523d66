"""Compare the ranks of a run: what each does, how fast it is, and where one diverges from the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sonde.core.heartbeat import Beat, Condition, Standing
from sonde.core.robust import mad
from sonde.core.step_times import PHASES, RankTimes, Score, scores
from sonde.diagnosis.ranks.monitor import judge_ranks
from sonde.records import Finding, Site
from sonde.store import Run
from sonde.store.ranks import rank_times, standing_of, with_stops

_ORDER: tuple[Condition, ...] = ("died", "stuck", "silent", "waiting", "running", "ended")


@dataclass(frozen=True, slots=True)
class RankRow:
    """What is known of one rank. What was not measured is None."""

    rank: int
    beat: Beat | None
    condition: Condition | None
    still_s: float | None
    """Seconds since it last made progress."""
    score: Score | None
    phases: dict[str, float] | None
    """Its own mean seconds per step by phase, and `waiting` for the others."""


@dataclass(frozen=True, slots=True)
class RankPage:
    """All ranks of a run at one moment."""

    rows: list[RankRow]
    standing: Standing | None
    times: RankTimes | None
    findings: list[Finding]

    def worst_first(self) -> list[RankRow]:
        """Return the rows: ranks that died or make no progress first, then the slowest, then by number."""
        behind = set(self.standing.behind) if self.standing is not None else set()
        named = {site for finding in self.findings for site in finding.sites}

        def key(row: RankRow) -> tuple[bool, bool, int, int]:
            place = len(_ORDER) if row.condition is None else _ORDER.index(row.condition)
            return row.rank not in behind, f"rank {row.rank}" not in named, place, row.rank

        return sorted(self.rows, key=key)


def read_ranks(path: Path, *, most: int | None = None, now: float | None = None) -> RankPage:
    """Read what all ranks of a run do and how fast they are, over at most `most` windows of steps."""
    standing = standing_of(path, time.time() if now is None else now)
    times = rank_times(path, most=most)
    if standing is not None:
        standing = with_stops(path, standing)
    by_rank = {} if times is None else {each.rank: each for each in scores(times)}
    phases = {} if times is None else _phases(times)
    ranks = sorted({*by_rank, *(standing.beats if standing is not None else ())})
    rows = [_row(rank, standing, by_rank.get(rank), phases.get(rank)) for rank in ranks]
    return RankPage(rows, standing, times, judge_ranks(standing, times))


def _row(rank: int, standing: Standing | None, score: Score | None, phases: dict[str, float] | None) -> RankRow:
    if standing is None or rank not in standing.beats:
        return RankRow(rank, None, None, None, score, phases)
    return RankRow(rank, standing.beats[rank], standing.conditions[rank], standing.age_s(rank), score, phases)


def _phases(times: RankTimes) -> dict[int, dict[str, float]]:
    waits = times.waits()
    own, waited = np.nanmean(times.spent - waits, axis=1), np.nanmean(waits.sum(2), axis=1)
    return {
        int(rank): dict(zip(PHASES, own[row].tolist(), strict=True)) | {"waiting": float(waited[row])}
        for row, rank in enumerate(times.ranks)
    }


# --------------------------------------------------------------------------------
# Any statistic over ranks.


@dataclass(frozen=True, slots=True)
class Spread:
    """One statistic of one site on several ranks: quantiles over ranks by step, and where one leaves the others."""

    ranks: list[int]
    steps: NDArray[np.int64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]
    parted: tuple[int, int] | None
    """The first step at which a rank lies outside of the others, and the rank."""


_FAR: float = 8.0
_LEAST: float = 1e-9


def spread_over_ranks(run: Run, site: Site, stat: str, ranks: Sequence[int]) -> Spread:
    """Compare a statistic between ranks, over the steps that most of them recorded."""
    curves = {rank: run.series(site, stat, rank=rank) for rank in ranks}
    curves = {rank: curve for rank, curve in curves.items() if len(curve.steps)}
    empty = np.zeros(0)
    nothing = Spread([], np.zeros(0, np.int64), empty, empty, empty, None)
    if not curves:
        return nothing
    steps, counts = np.unique(np.concatenate([curve.steps for curve in curves.values()]), return_counts=True)
    steps = steps[counts * 2 > len(curves)]
    values = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves.values()):
        known = np.isin(curve.steps, steps)
        values[row, np.searchsorted(steps, curve.steps[known])] = curve.values[known]
    known = np.isfinite(values).any(0)
    steps, values = steps[known], values[:, known]
    if not len(steps):  # no two of them recorded the same step
        return nothing
    low, middle, high = np.nanquantile(np.where(np.isfinite(values), values, np.nan), (0.0, 0.5, 1.0), axis=0)
    return Spread(list(curves), steps, low, middle, high, _parting(list(curves), steps, values, middle))


def _parting(
    ranks: list[int], steps: NDArray[np.int64], values: NDArray[np.float64], middle: NDArray[np.float64]
) -> tuple[int, int] | None:
    """Return the first step at which one rank lies far outside of what the others show, if more than two are there.

    Far is beyond eight times the usual distance of a rank from the middle, over all steps; equal replicas have none.
    """
    if len(ranks) < 2:
        return None
    away = np.abs(values - middle)
    usual = float(mad(away[np.isfinite(away)])) if np.isfinite(away).any() else 0.0
    limit = np.maximum(_FAR * (usual + float(np.nanmedian(away))), _LEAST * np.maximum(np.abs(middle), 1e-30))
    out = (away > limit) | (~np.isfinite(values) & np.isfinite(middle))
    found = np.flatnonzero(out.any(0))
    if not len(found):
        return None
    return int(steps[found[0]]), int(ranks[int(out[:, found[0]].argmax())])
