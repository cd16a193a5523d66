"""The timeline: one JSON object a line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, cast

from sonde import strict_json
from sonde.errors import RunDamaged
from sonde.records import SEVERITIES, Event, Evidence, Finding
from sonde.store.lines import LineFile

_NUMBERS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_event(event: Event) -> bytes:
    """Return the line of an event."""
    try:
        return strict_json.dumps(asdict(event)) + b"\n"
    except (RecursionError, ValueError, TypeError) as error:
        # Better an event without its data than none.
        poor = replace(event, data={"unwritable": f"{type(error).__name__}: {error}"[:200]})
        return strict_json.dumps(asdict(poor)) + b"\n"


def decode_event(line: bytes, where: str) -> Event:
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
        super().__init__(path, decode_event)

    @property
    def events(self) -> list[Event]:
        """The events read so far."""
        return self.items


def encode_finding(finding: Finding) -> bytes:
    """Return the line of a finding."""
    return strict_json.dumps(finding.to_json()) + b"\n"


def decode_finding(line: bytes, where: str) -> Finding:
    """Read one line.

    Raises:
        RunDamaged: It is no finding.

    """
    fields = strict_json.loads(line, where)
    try:
        finding = Finding.from_json(fields | {"data": _mapping(fields.get("data"))})
        if finding.severity not in SEVERITIES:
            raise ValueError(f"severity {finding.severity!r}")
        return _as_declared(finding)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunDamaged(f"{where} is not a finding: {type(error).__name__}: {error}") from None


def _as_declared(finding: Finding) -> Finding:
    """Return the finding with every field of its declared type: the file may be a stranger's."""
    return replace(
        finding,
        kind=str(finding.kind),
        cause=str(finding.cause),
        fix=str(finding.fix),
        refute=str(finding.refute),
        confidence=None if finding.confidence is None else float(finding.confidence),
        exact=bool(finding.exact),
        step=int(finding.step),
        last_step=int(finding.last_step),
        sites=tuple(map(str, finding.sites)),
        explains=tuple(map(str, finding.explains)),
        evidence=tuple(map(_evidence, finding.evidence)),
    )


def _evidence(item: Evidence) -> Evidence:
    threshold = None if item.threshold is None else _number(item.threshold)
    relation = None if item.relation is None else str(item.relation)
    return Evidence(
        name=str(item.name),
        value=_number(item.value),
        threshold=threshold,
        relation=cast(Any, relation),
        series=str(item.series),
    )


def _number(value: Any) -> float:
    return float(value)  # also of "nan", "inf" and "-inf", as strict JSON has them


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
