"""Findings for a person: what is wrong, where and since when, how that is known, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sonde.diagnosis import Diagnosis
from sonde.records import Evidence, Finding, Severity
from sonde.views.terminal.events import one_line
from sonde.views.terminal.look import Look
from sonde.views.terminal.numbers import plural, short
from sonde.views.terminal.palette import BAD, GOOD, ODD, QUIET, TITLE

STYLES: Final[dict[Severity, str]] = {"critical": BAD, "warning": ODD, "info": "cyan"}
_SIGNS: Final[dict[Severity, tuple[str, str]]] = {"critical": ("●", "!"), "warning": ("●", "?"), "info": ("·", "-")}
_RELATIONS: Final = {">=": ("≥", ">="), "<=": ("≤", "<=")}
_MOST_SITES: Final = 4
_MOST_MISSING: Final = 4


def finding_lines(findings: Sequence[Finding], look: Look, *, most: int = 5) -> Group:
    """Return one line per finding: how grave, what, and where; more of them are counted."""
    lines = [_short_line(finding, look) for finding in findings[:most]]
    if len(findings) > most:
        lines.append(Text(f"  and {plural(len(findings) - most, 'finding')} more", QUIET))
    return Group(*lines)


def _short_line(finding: Finding, look: Look) -> Text:
    where = f" ({_sites(finding, 1)})" if finding.sites else ""
    line = Text.assemble(
        (look.pick(*_SIGNS[finding.severity]), STYLES[finding.severity]),
        " ",
        (one_line(finding.kind), STYLES[finding.severity]),
        (f"{where}, {_when(finding)}: ", QUIET),
        _clean(finding.cause),
        no_wrap=True,
        overflow="ellipsis",
    )
    line.truncate(look.width, overflow="ellipsis")
    return line


def render_diagnosis(diagnosis: Diagnosis, look: Look, *, everything: bool = False) -> Iterator[RenderableType]:
    """Return the page about what is wrong, top to bottom; `everything` shows notes and unknowns in full."""
    grave = [finding for finding in diagnosis.findings if finding.severity != "info"]
    notes = [finding for finding in diagnosis.findings if finding.severity == "info"]
    yield _headline(diagnosis, len(grave), len(notes), look)
    for finding in grave:
        yield Text("")
        yield finding_card(finding, look)
    if notes:
        yield Text("")
        if everything:
            for finding in notes:
                yield finding_card(finding, look)
                yield Text("")
        else:
            yield Group(*(_short_line(finding, look) for finding in notes))
    yield Text("")
    yield from _coverage(diagnosis, look, everything=everything)


def finding_card(finding: Finding, look: Look) -> Group:
    """Return a finding in full: its name, the cause, and a line for each thing to know."""
    style = STYLES[finding.severity]
    title = Text.assemble(
        (look.pick(*_SIGNS[finding.severity]), style),
        " ",
        (finding.severity.upper(), style),
        "  ",
        (one_line(finding.kind), TITLE),
    )
    title.append(f"  {_when(finding)}{look.pick(' · ', ', ')}{finding.confidence:.0%} sure", QUIET)
    rows = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    rows.add_column(style=QUIET, no_wrap=True, min_width=9)
    rows.add_column(overflow="fold")
    for name, value in _rows(finding, look):
        rows.add_row(f"  {name}", value)
    return Group(title, _indented(_clean(finding.cause)), rows)


def _indented(text: str) -> Table:
    table = Table.grid(padding=0, pad_edge=False)
    table.add_column(width=2)
    table.add_column(overflow="fold")
    table.add_row("", Text(text))
    return table


def _rows(finding: Finding, look: Look) -> Iterator[tuple[str, RenderableType]]:
    if finding.sites:
        yield "where", Text(_sites(finding, _MOST_SITES), "bold")
    line = _source_line(finding.data)
    if line is not None:
        yield "line", line
    for index, evidence in enumerate(finding.evidence):
        yield ("because" if index == 0 else ""), _evidence(evidence, look)
    if finding.fix:
        yield "fix", Text(_clean(finding.fix), GOOD)
    if finding.refute:
        yield "refute", Text(_clean(finding.refute), QUIET)
    if finding.explains:
        yield "explains", Text(", ".join(map(one_line, finding.explains)), QUIET)


def _evidence(evidence: Evidence, look: Look) -> Text:
    text = Text.assemble(f"{_clean(evidence.name)}: ", (_amount(evidence.value), "bold"))
    if evidence.threshold is not None and evidence.relation is not None:
        pretty, plain = _RELATIONS.get(evidence.relation, (evidence.relation, evidence.relation))
        text.append(f" ({look.pick(pretty, plain)} {_amount(evidence.threshold)})", QUIET)
    return text


def _amount(value: float) -> str:
    return f"{int(value):,}" if abs(value) < 1e9 and value == int(value) else short(value)


def _source_line(data: Mapping[str, Any]) -> Text | None:
    origin = data.get("origin")
    line = origin.get("line") if isinstance(origin, Mapping) else None
    if not isinstance(line, Mapping) or not line.get("file"):
        return None
    place = f"{Path(str(line['file'])).name}:{line.get('line', '')}"
    code = next((str(line[name]) for name in ("text", "code", "source") if line.get(name)), "")
    return Text.assemble((one_line(place), "bold"), "  ", (one_line(code), "cyan"))


def _sites(finding: Finding, most: int) -> str:
    more = f" and {len(finding.sites) - most} more" if len(finding.sites) > most else ""
    return ", ".join(map(one_line, finding.sites[:most])) + more


def _when(finding: Finding) -> str:
    return "from the start" if finding.step <= 1 else f"since step {finding.step:,}"


def _clean(text: str) -> str:
    return one_line(text)


def _headline(diagnosis: Diagnosis, grave: int, notes: int, look: Look) -> Text:
    steps = plural(diagnosis.steps, "step")
    if grave:
        style = STYLES[diagnosis.severity or "info"]
        noted = f" and {plural(notes, 'note')}" if notes else ""
        return Text.assemble((f"{plural(grave, 'finding')}{noted}", style), f" in {steps}")
    words = f"Nothing is wrong that {plural(diagnosis.asked, 'rule')} could tell from {steps}."
    noted = f" {plural(notes, 'note')}:" if notes else ""
    return Text.assemble((look.pick("✓ ", "+ "), GOOD), words, noted)


def _coverage(diagnosis: Diagnosis, look: Look, *, everything: bool) -> Iterator[RenderableType]:
    """Say what was asked and what could not be told."""
    missing: dict[str, list[str]] = {}
    for kind, lack in sorted(diagnosis.unmeasured.items()):
        missing.setdefault(lack, []).append(kind)
    told = diagnosis.asked - len(diagnosis.unmeasured) - len(diagnosis.broken)
    line = f"{told} of {plural(diagnosis.asked, 'rule')} gave a verdict."
    if missing and not everything:
        named = look.pick(" · ", "; ").join(one_line(lack) for lack in list(missing)[:_MOST_MISSING])
        more = f" and {len(missing) - _MOST_MISSING} more" if len(missing) > _MOST_MISSING else ""
        line += f" Not measured: {named}{more}. --all lists them."
    yield Text(line, QUIET)
    if everything and missing:
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(style=QUIET, overflow="fold", ratio=2)
        table.add_column(style=QUIET, overflow="fold", ratio=3)
        table.add_row(Text("not measured", TITLE), Text("so nothing is known about", TITLE))
        for lack, kinds in missing.items():
            table.add_row(one_line(lack), ", ".join(kinds))
        yield table
    for kind in sorted(diagnosis.broken):
        yield Text(f"the rule {kind} failed; sonde diagnose --json has its traceback", BAD)
