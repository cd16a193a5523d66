"""Heartbeats of ranks: a small file per rank with what its training thread is doing, and the state of all ranks.

Each rank of a distributed run replaces its own `beat.json` about once per second. No rank waits for another, and no
collective is added: a reader of all these files, in the training or outside of it, sees which rank holds the
others up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from sonde.core import files
from sonde.core.files import Finite, Natural

FILE: Final = "beat.json"
STACKS: Final = "stacks.txt"
"""The Python stacks of all threads of a rank, written when it makes no progress."""
COLLECTIVES: Final = "collectives.json"
"""The last entries of torch's flight recorder of a rank, written when it makes no progress."""
WAITING: Final = "communication"
"""The phase of a rank that is inside a collective."""
USUAL_INTERVAL_S: Final = 1.0
_BEATS_PER_S: Final = 256  # of all ranks together: what a shared file system takes without notice
_LONGEST_INTERVAL_S: Final = 30.0
SILENT_BEATS: Final = 10
"""How many beats a rank on another host may miss before it counts as dead."""
LEAST_SILENCE_S: Final = 20.0

State = Literal["live", "finished", "interrupted", "failed"]
Condition = Literal["running", "waiting", "stuck", "silent", "died", "ended"]


def interval_for(ranks: int) -> float:
    """Return the seconds between two beats of a rank, so that many ranks together do not load a shared file system.

    >>> interval_for(8), interval_for(1024), interval_for(16384)
    (1.0, 4.0, 30.0)
    """
    return min(max(USUAL_INTERVAL_S, ranks / _BEATS_PER_S), _LONGEST_INTERVAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank was doing at one moment. Times are in seconds since the epoch, by its own host's clock."""

    rank: Natural
    world: Natural
    host: str
    pid: Natural
    process_start: str = ""
    time: Finite
    interval: Finite = USUAL_INTERVAL_S
    state: State = "live"
    step: Natural = 0
    """The last step that ended."""
    phase: str = ""
    """One of `sonde.core.step_times.PHASES`."""
    since: Finite
    """When it last made progress: entered a phase, a collective or a step."""
    stuck_after: Finite = 0.0
    """Seconds without progress after which it counts as stuck."""
    collective: str = ""
    """The collective that it is in, or was in last; empty if none was called from Python."""
    collectives: Natural = 0
    """How many collectives it has called from Python."""
    module: str = ""
    """The module whose forward pass it was last seen in."""
    where: str = ""
    """The innermost line of the user's code that its training thread is at."""
    device: str = ""
    memory: Natural | None = None
    """Bytes of the process in main memory."""
    device_memory: Natural | None = None
    """Bytes that torch has allocated on the device."""
    stacks: bool = False
    """Whether `stacks.txt` belongs to the stop that it is in."""

    @property
    def still_s(self) -> float:
        """Seconds without progress when the beat was written."""
        return max(0.0, self.time - self.since)

    @property
    def is_still(self) -> bool:
        """Whether it has made no progress for so long that it counts as stuck. What came after the beat is unknown."""
        return self.still_s >= self.stuck_after > 0


def write(folder: Path, beat: Beat) -> None:
    """Replace a rank's beat in one step; it is not forced to the disk."""
    files.write(folder / FILE, beat, sync=False)


def read(folder: Path) -> Beat | None:
    """Read a rank's beat; None where there is none.

    Raises:
        RunDamaged: The file is something else.

    """
    path = folder / FILE
    try:
        plain = files.read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return files.convert(plain, Beat, str(path), "the heartbeat of a rank")


@dataclass(frozen=True, slots=True)
class Standing:
    """What all ranks do at one moment."""

    now: float
    beats: Mapping[int, Beat]
    conditions: Mapping[int, Condition]
    gone: Mapping[int, str] = field(default_factory=dict)
    """By rank: why it counts as dead."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stacks of some ranks that others wait for."""
    recorded: Mapping[int, str] = field(default_factory=dict)
    """By rank: the last collective that torch's flight recorder knew of."""

    def those(self, *conditions: Condition) -> list[int]:
        """Return the ranks in any of these conditions."""
        return [rank for rank, condition in self.conditions.items() if condition in conditions]

    def age_s(self, rank: int) -> float:
        """Return the seconds since a rank's last progress, as far as its beats tell."""
        beat = self.beats[rank]
        return max(
            0.0, (self.now if self.conditions[rank] in ("running", "waiting", "stuck") else beat.time) - beat.since
        )

    @property
    def behind(self) -> list[int]:
        """The ranks that others wait for; empty until a rank has waited for long.

        They are the ranks that are not in a collective. If all are in one, those that have called the fewest.
        """
        waiting = [rank for rank in self.those("waiting") if self.beats[rank].is_still]
        if not waiting:
            return []
        others = [rank for rank in self.beats if rank not in self.those("waiting")]
        if others:
            furthest = max(self._position(rank) for rank in waiting)
            return [rank for rank in others if self._position(rank) <= furthest]
        places = {rank: self._position(rank) for rank in waiting}
        least = min(places.values())
        behind = [rank for rank, place in places.items() if place == least]
        return behind if len(behind) < len(places) else []

    def _position(self, rank: int) -> tuple[int, int]:
        beat = self.beats[rank]
        return beat.step, beat.collectives


def stand(beats: Mapping[int, Beat], now: float, gone: Mapping[int, str]) -> Standing:
    """Work out in which condition each rank is.

    Args:
        beats: The last beat of each rank.
        now: The time to judge by: of the reader while the run is live, else of the last beat.
        gone: Ranks whose process is known to be dead, and how that is known.

    """
    lost = dict(gone)
    newest = max((beat.time for beat in beats.values()), default=now)
    conditions = {}
    for rank, beat in sorted(beats.items()):
        silence = newest - beat.time
        if rank not in lost and beat.state == "live" and silence > max(SILENT_BEATS * beat.interval, LEAST_SILENCE_S):
            lost[rank] = f"its heartbeat stopped {silence:.0f} s before those of the others"
        conditions[rank] = _condition(beat, now, rank in lost)
    return Standing(now, dict(sorted(beats.items())), conditions, lost)


def _condition(beat: Beat, now: float, is_lost: bool) -> Condition:
    if beat.state != "live":
        return "ended"
    if is_lost:
        return "died"
    if now - beat.time > max(SILENT_BEATS * beat.interval, LEAST_SILENCE_S):
        return "silent"
    if beat.phase == WAITING:
        return "waiting"
    return "stuck" if beat.is_still else "running"
