"""Write findings for people: what is wrong, where and since when, the evidence, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sonde.analysis import Ending
from sonde.analysis.source_lines import line_of
from sonde.core import signals
from sonde.diagnosis import Diagnosis
from sonde.records import Evidence, Finding, Severity
from sonde.views.terminal.events import one_line
from sonde.views.terminal.style import BAD, GOOD, ODD, QUIET, TITLE, Look, plural, short

# --------------------------------------------------------------------------------
# Describe in words what a run lacked for a rule to judge it.


_KEY: Final = re.compile(r"([^\s:]+):vital\.(\w+)")

_VITALS: Final = {
    signals.FORWARDS: "forward passes",
    signals.BACKWARDS: "backward passes",
    signals.ROOT: "what backward() was called on",
    signals.DROPPED: "dropout outside training",
    signals.DATA_WAIT: "waiting for a data loader",
    signals.STEP_TIME: "the time of a step",
    signals.LEFTOVER: "gradients of two steps in a row",
    signals.NO_GRADIENT: "parameters without a gradient",
    signals.BACKWARDS_SEEN: "backward passes of an optimizer",
    signals.CLIP_NORM: "gradient clipping",
    signals.CLIP_MAX: "gradient clipping",
    signals.SCALED_CLIP: "clipping under a gradient scaler",
    signals.EVER_ACTIVE: "a ReLU",
    signals.SATURATED: "a sigmoid, tanh or hardtanh",
    signals.TRAINING: "modes of modules",
    signals.UNIT_SAMPLES: "a ReLU",
    signals.ATTENTION_ENTROPY: "attention weights",
    signals.UNIT_GRADIENT: "gradients of a weight's rows",
    signals.ROW_SPREAD: "the rows of a weight",
    signals.ROW_SUM: "a loss over classes",
    signals.ROW_MIN: "a loss over classes",
    signals.COLUMN_SUM: "a loss over classes",
    signals.ZERO_SHARE: "what the loss is given",
    signals.SAMPLE_SPREAD: "what the loss is given",
    signals.TARGET_SPREAD: "a target of real numbers",
    signals.LABEL_ENTROPY: "class labels",
    signals.LABEL_COUNTS: "class labels",
    signals.RUNNING_LABEL_ENTROPY: "class labels",
    signals.LABEL_RUN: "class labels",
    signals.VALID_TARGETS: "a loss with ignore_index",
    signals.PREDICTED_ENTROPY: "predicted classes",
    signals.LOG_Z: "logits",
    signals.COLUMN_LOG_Z: "logits",
    signals.NEIGHBOUR_AGREEMENT: "enough samples with labels",
    signals.COLUMN_SCALE: "a table of features as input",
    signals.COLUMN_OFFSET: "a table of features as input",
}
_SERIES: Final = {
    "scheduler.last_epoch": "a scheduler: watch(..., scheduler=scheduler)",
    "scaler.scale": "a gradient scaler: watch(..., scaler=scaler)",
    "the data loader": "a data loader: watch(..., loader=loader)",
    "process.rss": "the memory of the process",
    "loss_fn:input.target": "what the loss is given",
    "loss_fn:output": "a loss function",
}


def in_words(lack: str) -> str:
    """Describe what was missing; what has no description is returned as it is.

    >>> in_words("optimizer:vital.clip_norm and gradients"), in_words("a validation loss")
    ('gradient clipping and gradients', 'a validation loss')
    """
    if lack in _SERIES:
        return _SERIES[lack]
    return " and ".join(_part(part) for part in lack.split(" and "))


def _part(lack: str) -> str:
    found = _KEY.fullmatch(lack)
    if found is None:
        return _SERIES.get(lack, lack)
    return _VITALS.get(found[2], f"{found[2].replace('_', ' ')} of {found[1]}")


# --------------------------------------------------------------------------------
# How a training ended that did not finish, as a line.


def ending_line(ending: Ending, look: Look) -> Text:
    """Return how a run ended, in a line."""
    style = QUIET if ending.by_hand else BAD
    sign = look.pick("· ", "- ") if ending.by_hand else look.pick("✗ ", "x ")
    at = "" if ending.step is None else f"step {ending.step:,}: "
    return Text.assemble((sign, style), (at, QUIET), (ending.text, style))


# --------------------------------------------------------------------------------


STYLES: Final[dict[Severity, str]] = {"critical": BAD, "warning": ODD, "info": "cyan"}
_SIGNS: Final[dict[Severity, tuple[str, str]]] = {"critical": ("●", "!"), "warning": ("●", "?"), "info": ("·", "-")}
_RELATIONS: Final = {">=": ("≥", ">="), "<=": ("≤", "<=")}
_MOST_SITES: Final = 4
_ROOM_FOR_WHERE: Final = 120


def finding_lines(findings: Sequence[Finding], look: Look, *, most: int = 5) -> Group:
    """Return one line per finding: severity, kind and place; further ones are counted."""
    lines = [_short_line(finding, look) for finding in findings[:most]]
    if len(findings) > most:
        lines.append(Text(f"  and {plural(len(findings) - most, 'finding')} more", QUIET))
    return Group(*lines)


def _short_line(finding: Finding, look: Look) -> Text:
    # Where and when have room beside the cause on a wide screen only; the cause names the culprit, mostly.
    sites = f" ({_sites(finding, 1)})" if finding.sites else ""
    where = f"{sites}, {_when(finding)}" if look.width >= _ROOM_FOR_WHERE else ""
    line = Text.assemble(
        (look.pick(*_SIGNS[finding.severity]), STYLES[finding.severity]),
        " ",
        (one_line(finding.kind), STYLES[finding.severity]),
        (f"{where}: ", QUIET),
        _clean(finding.cause),
        no_wrap=True,
        overflow="ellipsis",
    )
    line.truncate(look.width, overflow="ellipsis")
    return line


def render_diagnosis(
    diagnosis: Diagnosis, look: Look, *, everything: bool = False, ending: Ending | None = None
) -> Iterator[RenderableType]:
    """Return the page about what is wrong, top to bottom; `everything` shows notes and unknowns in full."""
    if ending is not None:
        yield ending_line(ending, look)
    grave = [finding for finding in diagnosis.findings if finding.severity != "info"]
    notes = [finding for finding in diagnosis.findings if finding.severity == "info"]
    yield _headline(diagnosis, len(grave), len(notes), look, ending)
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
    if diagnosis.steps or diagnosis.findings:
        yield Text("")
        yield from _coverage(diagnosis, everything=everything)


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
    sure = "" if finding.confidence is None else f"{look.pick(' · ', ', ')}{finding.confidence:.0%} sure"
    title.append(f"  {_when(finding)}{sure}", QUIET)
    rows = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    rows.add_column(style=QUIET, no_wrap=True, min_width=10)
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
    line = _source_line(finding)
    if line is not None:
        yield "line", line
    if finding.fix:
        yield "fix", Text(_clean(finding.fix), GOOD)
    share = False
    for index, evidence in enumerate(finding.evidence):
        share = "share of " in evidence.name or (share and evidence.name.startswith("the same "))
        yield ("because" if index == 0 else ""), _evidence(evidence, look, share=share)
    if finding.refute:
        yield "refute", Text(_clean(finding.refute), QUIET)
    if finding.explains:
        yield "explains", Text(", ".join(map(one_line, finding.explains)), QUIET)


def _evidence(evidence: Evidence, look: Look, *, share: bool) -> Text:
    text = Text.assemble(f"{_clean(evidence.name)}: ", (_amount(evidence.value, share=share), "bold"))
    if evidence.threshold is not None and evidence.relation is not None:
        pretty, plain = _RELATIONS.get(evidence.relation, (evidence.relation, evidence.relation))
        text.append(f" ({look.pick(pretty, plain)} {_amount(evidence.threshold, share=share)})", QUIET)
    return text


def _amount(value: float, *, share: bool = False) -> str:
    """Write a number of the evidence: three digits at most, and a share of a whole in percent.

    >>> _amount(64.0), _amount(0.5), _amount(0.001), _amount(1.37e16), _amount(0.79625, share=True)
    ('64', '0.5', '0.001', '1.37e16', '79.6%')
    """
    if share and 0 <= value <= 1:
        return f"{100 * value:.3g}%"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    digits = f"{value:.3g}"
    return digits if abs(value) >= 1e-3 and "e" not in digits else short(value)


def _source_line(finding: Finding) -> Text | None:
    line = line_of(finding)
    if line is None:
        return None
    return Text.assemble((one_line(line.place), "bold"), "  ", (one_line(line.text), "cyan"))


def _sites(finding: Finding, most: int) -> str:
    more = f" and {len(finding.sites) - most} more" if len(finding.sites) > most else ""
    return ", ".join(map(one_line, finding.sites[:most])) + more


def _when(finding: Finding) -> str:
    return "from the start" if finding.step <= 1 else f"since step {finding.step:,}"


def _clean(text: str) -> str:
    return one_line(text)


def _headline(diagnosis: Diagnosis, grave: int, notes: int, look: Look, ending: Ending | None) -> Text:
    steps = plural(diagnosis.steps, "step")
    if grave:
        style = STYLES[diagnosis.severity or "info"]
        noted = f" and {plural(notes, 'note')}" if notes else ""
        return Text.assemble((f"{plural(grave, 'finding')}{noted}", style), f" in {steps}")
    if not diagnosis.steps and not notes:
        return Text("No steps were recorded, so there is nothing to judge.")
    failed = ending is not None and not ending.by_hand
    what = "nothing else" if failed else "nothing"
    words = f"{plural(diagnosis.asked, 'rule')} found {what} wrong in {steps}."
    noted = f" {plural(notes, 'note')}:" if notes else ""
    sign = "" if failed else look.pick("✓ ", "+ ")
    return Text.assemble((sign, GOOD), words, noted)


def _coverage(diagnosis: Diagnosis, *, everything: bool) -> Iterator[RenderableType]:
    """Report how many rules ran and which could not judge."""
    missing: dict[str, list[str]] = {}
    for kind, lack in sorted(diagnosis.unmeasured.items()):
        missing.setdefault(in_words(one_line(lack)), []).append(kind)
    judged_rules = diagnosis.asked - len(diagnosis.unmeasured) - len(diagnosis.broken)
    rest = "; the rest had nothing to judge" if missing else ""
    hint = " (see --all)" if missing and not everything else ""
    yield Text(f"{judged_rules} of {plural(diagnosis.asked, 'rule')} gave a verdict{rest}{hint}.", QUIET)
    if everything and missing:
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(style=QUIET, overflow="fold", ratio=2)
        table.add_column(style=QUIET, overflow="fold", ratio=3)
        table.add_row(Text("the run has no measure of", TITLE), Text("so nothing is known about", TITLE))
        for lack, kinds in missing.items():
            table.add_row(lack, ", ".join(kinds))
        yield table
    if diagnosis.thinned:
        longest = max(diagnosis.thinned.values())
        yield Text(
            f"{plural(len(diagnosis.thinned), 'rule')} judged fewer readings, down to one step in {longest}, "
            "because recording kept within its budget (budget=None records every step).",
            QUIET,
        )
    for kind in sorted(diagnosis.broken):
        yield Text(f"the rule {kind} failed; sonde diagnose --json has its traceback", BAD)
