"""The timeline: one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sonde.core import files
from sonde.records import BASES, SEVERITIES, Event, Finding
from sonde.store.lines import LineFile, Memory


def encode_event(event: Event) -> bytes:
    """Return the line of an event."""
    try:
        return files.dumps(event) + b"\n"
    except (RecursionError, ValueError, TypeError) as error:
        # Better an event without its data than none.
        poor = replace(event, data={"unwritable": f"{type(error).__name__}: {error}"[:200]})
        return files.dumps(poor) + b"\n"


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

    def __init__(self, path: Path, memory: Memory | None = None) -> None:
        super().__init__(path, decode_event, memory)

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

    def __init__(self, path: Path, memory: Memory | None = None) -> None:
        super().__init__(path, decode_finding, memory)


def current_findings(lines: Iterable[Finding]) -> list[Finding]:
    """Return what holds after these lines, in the order of `rank_of_finding`."""
    last = {finding.kind: finding for finding in lines}
    return sorted((finding for finding in last.values() if not finding.withdrawn), key=rank_of_finding)


def closed_findings(lines: Iterable[Finding]) -> list[Finding]:
    """Return the findings that were withdrawn, with the steps from which and to which each held.

    A kind that came again is listed once for each time that it was withdrawn; the last one, if it holds, is not.
    """
    began: dict[str, int] = {}
    closed: list[Finding] = []
    for finding in lines:
        if not finding.withdrawn:
            began.setdefault(finding.kind, finding.step)
            continue
        first = began.pop(finding.kind, finding.step)
        closed.append(replace(finding, step=first, last_step=max(first, finding.last_step)))
    return closed


def rank_of_finding(finding: Finding) -> tuple[bool, int, int, bool, float, int, str]:
    """Return the key that orders findings by their evidence: exact relations, experiments, then statistics.

    Notes come last. Among findings with the same kind of evidence the most severe come first, then those that explain
    others, then the most certain and the earliest.
    """
    severity = SEVERITIES.index(finding.severity)
    basis = BASES.index(finding.basis)
    doubt = -(finding.confidence or 0.0)
    return severity == 0, basis, -severity, not finding.explains, doubt, finding.step, finding.kind
