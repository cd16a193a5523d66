"""The timeline: one JSON object a line."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from sonde import strict_json
from sonde.errors import RunDamaged
from sonde.records import Event
from sonde.store.lines import LineFile

_NUMBERS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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


class EventFile(LineFile[Event]):
    """Follows a file of events."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, decode)

    @property
    def events(self) -> list[Event]:
        """The events read so far."""
        return self.items
