"""The timeline: one JSON object a line."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from sonde.errors import RunDamaged
from sonde.records import Event
from sonde.store import strict_json
from sonde.store.appender import Appender

_NUMBERS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_CHUNK: Final = 64 << 10


def encode(event: Event) -> bytes:
    """Return the line of an event."""
    try:
        return strict_json.dumps(asdict(event)) + b"\n"
    except (RecursionError, ValueError, TypeError) as error:
        # Better an event without its data than none.
        poor = replace(event, data={"unwritable": f"{type(error).__name__}: {error}"[:200]})
        return strict_json.dumps(asdict(poor)) + b"\n"


def decode(line: bytes, where: str) -> Event:
    """Read one line.

    Raises:
        RunDamaged: It is no event.

    """
    fields = strict_json.loads(line, where)
    try:
        step, stamp = fields.get("step"), fields["timestamp"]
        return Event(
            event_type=str(fields["event_type"]),
            message=str(fields.get("message", "")),
            step=None if step is None else int(step),
            timestamp=_NUMBERS[stamp] if isinstance(stamp, str) else float(stamp),
            data=_mapping(fields.get("data")),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunDamaged(f"{where} is not an event: {type(error).__name__}: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def open_for_append(path: Path) -> Appender:
    """Open a file of events, without the line that a crash cut short: it was never acknowledged."""
    appender = Appender(path, new=False)
    if appender.size:
        with path.open("rb") as file:
            end = _end_of_last_line(file, appender.size)
        if end < appender.size:
            appender.cut(end)
    return appender


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    while size:
        start = max(0, size - _CHUNK)
        file.seek(start)
        found = file.read(size - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0


class EventFile:
    """Follows a file of events: each `refresh` reads what was added since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self.bad_lines: list[tuple[int, str]] = []
        """Offset of each line that is no event, and why."""
        self.end = 0
        """Where the last whole line ends; what follows is still being written, or was cut short."""

    def refresh(self) -> bool:
        """Read what is new; say whether there was anything."""
        before = self.end
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.end:  # replaced by a shorter file
                    self.events, self.bad_lines, self.end = [], [], 0
                while self._read(file):
                    pass
        except FileNotFoundError:
            return False
        return self.end != before

    def _read(self, file: BinaryIO) -> bool:
        """Read a piece; say whether there is more."""
        file.seek(self.end)
        fresh = file.read(strict_json.MAX_BYTES)
        whole = fresh[: fresh.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._take(line)
            self.end += len(line) + 1
        return bool(whole) and len(fresh) == strict_json.MAX_BYTES

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self.events.append(decode(line, f"{self.path} at byte {self.end}"))
        except RunDamaged as error:
            self.bad_lines.append((self.end, str(error)))
