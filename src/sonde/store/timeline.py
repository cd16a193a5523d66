"""The timeline: one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from sonde.core import files
from sonde.records import SEVERITIES, Event, Finding
from sonde.store.lines import LineFile


def encode_event(event: Event) -> bytes:
    """Return the line of an event."""
    try:
        return files.dumps(asdict(event)) + b"\n"
    except (RecursionError, ValueError, TypeError) as error:
        # Better an event without its data than none.
        poor = replace(event, data={"unwritable": f"{type(error).__name__}: {error}"[:200]})
        return files.dumps(asdict(poor)) + b"\n"


def decode_event(line: bytes, where: str) -> Event:
    """Read one line.

    Raises:
        RunDamaged: It is not an event.

    """
    plain = files.loads(line, where)
    if isinstance(plain, dict):
        plain = {"message": "", **plain, "timestamp": files.number(plain.get("timestamp"))}
    return files.convert(plain, Event, where, "an event")


class EventFile(LineFile[Event]):
    """Follows a file of events."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, decode_event)

    @property
    def events(self) -> list[Event]:
        """The events read so far."""
        return self.items


def encode_finding(finding: Finding) -> bytes:
    """Return the line of a finding."""
    return files.dumps(finding.to_json()) + b"\n"


def decode_finding(line: bytes, where: str) -> Finding:
    """Read one line.

    Raises:
        RunDamaged: It is not a finding.

    """
    return Finding.from_json(files.loads(line, where), where)


class FindingFile(LineFile[Finding]):
    """Follows a file of findings."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, decode_finding)


def current_findings(lines: Iterable[Finding]) -> list[Finding]:
    """Return what holds after these lines, in the order of `rank_of_finding`."""
    last = {finding.kind: finding for finding in lines}
    return sorted((finding for finding in last.values() if not finding.withdrawn), key=rank_of_finding)


def rank_of_finding(finding: Finding) -> tuple[int, bool, float, int, str]:
    """Return the key that puts the most severe first, then exact relations, then the most certain and the earliest."""
    severity = SEVERITIES.index(finding.severity)
    return -severity, not finding.exact, -(finding.confidence or 0.0), finding.step, finding.kind
