"""Judge the ranks of a run while it is recorded: which one is slow, stuck or dead."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from sonde.core import heartbeat
from sonde.core.heartbeat import Beat, Standing
from sonde.core.step_times import RankTimes
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ranks.comparison import RankComparison, compare_ranks
from sonde.diagnosis.rules.rank_progress import dead_rank, slow_rank, stuck_rank
from sonde.diagnosis.rules.ranks import (
    buffers_differ_between_ranks,
    ddp_replicas_diverge,
    ranks_differ_in_settings,
    same_batch_on_every_rank,
)
from sonde.records import Finding
from sonde.store import layout, lease, open_run
from sonde.store.fingerprints import Suspicion, suspect
from sonde.store.ranks import rank_times, standing_of, with_stops

logger = logging.getLogger("sonde")

LAST: Final = 256
"""How many of the last steps are compared while a run goes on; fewer of very many ranks."""
_LEAST_LAST: Final = 32
_MOST_RECORDS: Final = 1 << 16
_RULES: Final = (
    dead_rank,
    stuck_rank,
    slow_rank,
    ddp_replicas_diverge,
    buffers_differ_between_ranks,
    same_batch_on_every_rank,
    ranks_differ_in_settings,
)
_LASTING: Final = (dead_rank.kind, slow_rank.kind)
_TAKE_OVER_BEATS: Final = 3  # a launcher that ends all ranks one by one must not make one report the others
_TIMES_S: Final = 3.0  # between two looks at the times of steps
# A rank that is a step ahead or behind shows in the step after the one in which it parts.
_LEAST_STEPS: Final = 3
_BEFORE: Final = 16
"""How many steps before the first difference are read."""


class LiveComparison:
    """Reads a few bytes per step and rank; the readings themselves only if something differs, each time half as often.

    Ranks on different devices may always differ in the last bits: that is read again at every doubling of the steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: RankComparison | None = None
        self._known = Suspicion()

    def look(self) -> RankComparison | None:
        """Return how the ranks compare; None as long as nothing differs."""
        found = suspect(self._path, least=_LEAST_STEPS)
        is_new = found.kinds - self._known.kinds
        if is_new or (found.kinds and found.until >= 2 * self._known.until):
            self._known = found
            start = found.since - _BEFORE if found.since > _BEFORE else None
            self._last = compare_ranks(open_run(self._path), start=start)
        return self._last


def judge_ranks(
    standing: Standing | None, times: RankTimes | None, comparison: RankComparison | None = None
) -> list[Finding]:
    """Return what is wrong with the ranks of a run: dead, stuck or slow ones, and those that differ, gravest first."""
    case = Case()
    case.ranks = comparison
    case.standing = standing
    case.rank_times = None if times is None else [times]
    steps = [int(times.steps[-1])] if times is not None else []
    steps += [beat.step for beat in standing.beats.values()] if standing is not None else []
    case.history.step = max(steps, default=0)
    found = []
    for rule in _RULES:
        try:
            finding = rule.check(case)
        except NotMeasured:
            continue
        if finding is not None:
            found.append(finding)
    return found


class RankMonitor:
    """Looks at the files of all ranks and reports what is new. The lowest rank that is alive does this for all."""

    def __init__(
        self, path: Path, rank: int, publish: Callable[[Finding], None], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._rank, self._publish, self._clock = path, rank, publish, clock
        self._reported: dict[str, Finding] = {}
        self._timed = -_TIMES_S
        self._comparison = LiveComparison(path)

    def __call__(self, final: bool) -> None:
        """Look, and report what has changed; `final` looks at everything once more."""
        if not self._is_on_duty():
            return
        standing, times, now = standing_of(self._path, self._clock()), None, time.monotonic()
        if final or now - self._timed >= _TIMES_S:
            self._timed = now
            ranks = max(1, len(standing.beats) if standing is not None else 1)
            times = rank_times(self._path, last=min(LAST, max(_LEAST_LAST, _MOST_RECORDS // ranks)))
        found = {
            finding.kind: finding
            for finding in judge_ranks(
                None if standing is None else with_stops(self._path, standing), times, self._comparison.look()
            )
        }
        for rule in _RULES:
            self._update(rule.kind, found.get(rule.kind))

    def _is_on_duty(self) -> bool:
        for rank in range(self._rank):
            beat = heartbeat.read(layout.rank_folder(self._path, rank))
            if beat is not None and _is_alive(beat, self._clock()):
                return False
        return True

    def _update(self, kind: str, found: Finding | None) -> None:
        before = self._reported.get(kind)
        if found is None:
            if before is not None and kind not in _LASTING:
                del self._reported[kind]
                self._publish(replace(before, withdrawn=True))
        elif before is None or _gist(before) != _gist(found):
            self._reported[kind] = found
            self._publish(found)  # first: the launcher may end this rank in a moment
            if before is None or before.sites != found.sites:
                logger.warning("%s", found)


def _gist(finding: Finding) -> tuple[object, ...]:
    """Return what makes a finding worth saying again: other ranks, or stacks that were written meanwhile."""
    return finding.sites, finding.severity, finding.data.get("files")


def _is_alive(beat: Beat, now: float) -> bool:
    if beat.state != "live":
        return False
    if beat.host == socket.gethostname() and lease.is_running(beat.pid, beat.process_start):
        return True
    if beat.host == socket.gethostname():
        return now - beat.time <= _TAKE_OVER_BEATS * beat.interval
    return now - beat.time <= max(heartbeat.SILENT_BEATS * beat.interval, heartbeat.LEAST_SILENCE_S)
