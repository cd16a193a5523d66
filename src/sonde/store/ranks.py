"""Read the heartbeats, step times, stacks and collectives of the ranks of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sonde.core import files, heartbeat, step_times
from sonde.core.heartbeat import Beat, Standing
from sonde.core.step_times import RankTimes, StepTimes
from sonde.errors import RunDamaged
from sonde.store import layout, lease

_MOST_TEXT: Final = 1 << 18
_MOST_NUMBERS: Final = 1_000_000
_LEAST_WINDOWS: Final = 256
_MOST_STACKS: Final = 4
_MOST_STACK: Final = 8000


def read_beats(path: Path, ranks: Iterable[int] | None = None) -> dict[int, Beat]:
    """Return the last heartbeat of each rank that has one; a damaged one is left out."""
    found = {}
    for rank in layout.ranks(path) if ranks is None else ranks:
        try:
            beat = heartbeat.read(layout.rank_folder(path, rank))
        except (RunDamaged, OSError):
            continue
        if beat is not None:
            found[rank] = beat
    return found


def standing_of(path: Path, now: float, ranks: Iterable[int] | None = None) -> Standing | None:
    """Return what all ranks of a run do, or did last; None if it has no heartbeats.

    A process that is gone from this host is dead. While any rank is alive, the present time counts; later that of the
    last beat.
    """
    beats = read_beats(path, ranks)
    if not beats:
        return None
    here = socket.gethostname()
    live = {rank: beat for rank, beat in beats.items() if beat.state == "live"}
    gone = {
        rank: beat
        for rank, beat in live.items()
        if beat.host == here and not lease.is_running(beat.pid, beat.process_start)
    }
    is_over = len(gone) == len(live)
    newest = max(beat.time for beat in beats.values())
    # When all are gone, the rank that was killed last does not show what failed first.
    dead = {} if is_over else {rank: f"process {beat.pid} on {beat.host} is gone" for rank, beat in gone.items()}
    return heartbeat.stand(beats, newest if is_over else now, dead)


def with_stops(path: Path, standing: Standing) -> Standing:
    """Add where ranks are stuck, as they wrote it: those that others wait for, and one that waits."""
    behind = standing.behind
    if not behind:
        return standing
    waiting = [rank for rank in standing.those("waiting") if rank not in behind]
    shown = [rank for rank in behind[:_MOST_STACKS] if standing.beats[rank].stacks]
    stacks = {rank: stacks_of(path, rank)[:_MOST_STACK] for rank in shown}
    recorded = {rank: _last_collective(collectives_of(path, rank)) for rank in (*behind[:1], *waiting[:1])}
    return replace(standing, stacks=stacks, recorded={rank: words for rank, words in recorded.items() if words})


def _last_collective(entries: list[dict[str, Any]]) -> str:
    """Describe the last collective of a flight recorder."""
    if not entries:
        return ""
    entry = entries[-1]
    group = entry.get("process_group")
    name = f" of group {group[-1]}" if isinstance(group, list) and group else ""
    return f"{entry.get('profiling_name', 'a collective')} (number {entry.get('collective_seq_id', '?')}{name})"


def read_times(path: Path, *, last: int | None = None, ranks: Iterable[int] | None = None) -> dict[int, StepTimes]:
    """Return the times of steps of each rank that has any; a damaged file is left out."""
    found = {}
    for rank in layout.ranks(path) if ranks is None else ranks:
        try:
            times = step_times.read(layout.rank_folder(path, rank), last)
        except (RunDamaged, OSError):
            continue
        if times is not None:
            found[rank] = times
    return found


def rank_times(path: Path, *, most: int | None = None, last: int | None = None) -> RankTimes | None:
    """Return the times of all ranks side by side; None if fewer than two have any.

    Args:
        path: The run.
        most: How many windows of steps at most; None for as many as fit into some tens of megabytes.
        last: Only the last so many records of each rank.

    """
    times = read_times(path, last=last)
    fitting = max(_LEAST_WINDOWS, _MOST_NUMBERS // (len(step_times.PHASES) * max(1, len(times))))
    return step_times.align(times, fitting if most is None else most)


def stacks_of(path: Path, rank: int) -> str:
    """Return the stacks that a rank left when it made no progress, empty where there are none."""
    try:
        with files.open_file(layout.rank_folder(path, rank) / heartbeat.STACKS) as file:
            return file.read(_MOST_TEXT).decode("utf-8", "replace")
    except (OSError, RunDamaged):
        return ""


def collectives_of(path: Path, rank: int) -> list[dict[str, Any]]:
    """Return the last collectives that torch's flight recorder knew of when a rank made no progress, oldest first."""
    try:
        plain = files.read_object(layout.rank_folder(path, rank) / heartbeat.COLLECTIVES)
    except (RunDamaged, OSError):
        return []
    entries = plain.get("entries")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
