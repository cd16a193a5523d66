"""The timeline: one JSON object a line."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from sonde.errors import RunDamaged
from sonde.records import Event
from sonde.store import strict_json
from sonde.store.appender import Appender

_NUMBERS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(event: Event) -> bytes:
    """Return the line of an event."""
    return strict_json.dumps(asdict(event)) + b"\n"


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
            timestamp=float(_NUMBERS.get(stamp, stamp)) if isinstance(stamp, str | int | float) else math.nan,
            data=_mapping(fields.get("data")),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunDamaged(f"{where} is not an event: {type(error).__name__}: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def open_for_append(path: Path) -> Appender:
    """Open a file of events, ending a line that a crash cut short."""
    appender = Appender(path, new=False)
    if appender.size:
        with path.open("rb") as file:
            file.seek(-1, 2)
            torn = file.read(1) != b"\n"
        if torn:
            appender.append(b"\n")
    return appender


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
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.end:  # replaced by a shorter file
                    self.events, self.bad_lines, self.end = [], [], 0
                file.seek(self.end)
                fresh = file.read()
        except FileNotFoundError:
            return False
        whole = fresh[: fresh.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            self._take(line)
            self.end += len(line)
        return bool(whole)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self.events.append(decode(line, f"{self.path} at byte {self.end}"))
        except RunDamaged as error:
            self.bad_lines.append((self.end, str(error)))
