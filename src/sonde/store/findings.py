"""What was found wrong with a run: one JSON object a line, written as it is found.

A line says of a kind of finding what holds from then on: a later line of the same kind replaces an earlier one, and a
line that says `withdrawn` takes it back (the symptom turned out to have a cause that is named instead).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sonde import strict_json
from sonde.errors import RunDamaged
from sonde.records import SEVERITIES, Evidence, Finding
from sonde.store.lines import LineFile


def encode(finding: Finding) -> bytes:
    """Return the line of a finding."""
    return strict_json.dumps(finding.to_json()) + b"\n"


def decode(line: bytes, where: str) -> Finding:
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
        confidence=float(finding.confidence),
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


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class FindingFile(LineFile[Finding]):
    """Follows a file of findings."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, decode)


def current(lines: Iterable[Finding]) -> list[Finding]:
    """Return what holds after these lines, best first: the gravest, then the surest, then the earliest."""
    last = {finding.kind: finding for finding in lines}
    return sorted((finding for finding in last.values() if not finding.withdrawn), key=rank)


def rank(finding: Finding) -> tuple[int, float, int, str]:
    """Return the key by which findings are ordered."""
    return -SEVERITIES.index(finding.severity), -finding.confidence, finding.step, finding.kind
