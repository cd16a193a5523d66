"""Findings for continuous integration: annotations of GitHub, SARIF 2.1.0 and JUnit XML.

All three name the user's file and line where they are known; a finding without a line names the script that was run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from sonde.analysis import Ending
from sonde.analysis.source_lines import SourceLine, locate, locate_ending, relative_to_checkout
from sonde.core import files
from sonde.records import Finding, Severity, words_of
from sonde.store import Run
from sonde.version import VERSION
from sonde.views.document import evidence_line
from sonde.views.terminal.findings import in_words

if TYPE_CHECKING:
    from sonde.diagnosis import Diagnosis
    from sonde.diagnosis.rule import Rule

_GITHUB: Final[dict[Severity, str]] = {"critical": "error", "warning": "warning", "info": "notice"}
_SARIF: Final[dict[Severity, str]] = {"critical": "error", "warning": "warning", "info": "note"}
_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_RAISED: Final = "training_failed"
_DAMAGED: Final = "run_damaged"
_MOST_SITES: Final = 4
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding, or the exception that ended the training, with its place in the repository."""

    kind: str
    severity: Severity
    title: str
    text: str
    """Cause, fix and evidence, a line each."""
    file: str | None = None
    line: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


def problems_of(run: Run, diagnosis: Diagnosis, ending: Ending | None, root: Path | None = None) -> list[Problem]:
    """Return what is wrong with a run; paths are written relative to `root`, by default the present folder."""
    place = partial(_place, run, root or Path.cwd())
    found = [
        Problem(
            finding.kind,
            finding.severity,
            words_of(finding.kind),
            "\n".join(lines_of(finding)),
            *place(locate(run, finding)),
            data=finding.to_json(),
        )
        for finding in diagnosis.findings
    ]
    if run.problems:
        text = "Parts of the run cannot be read and were not judged.\n" + "\n".join(run.problems)
        found.insert(0, Problem(_DAMAGED, "warning", "The run is damaged", text))
    if ending is not None and not ending.by_hand:
        where = place(locate_ending(run, ending))
        found.insert(0, Problem(_RAISED, "critical", "The training failed", ending.text, *where))
    return found


def _place(run: Run, root: Path, line: SourceLine | None) -> tuple[str | None, int | None]:
    return (None, None) if line is None else (relative_to_checkout(run, line.file, root), line.line)


def lines_of(finding: Finding) -> Iterator[str]:
    """Yield what there is to know about a finding, in lines: cause, fix, where, evidence."""
    yield finding.cause
    if finding.fix:
        yield f"Fix: {finding.fix}"
    if finding.sites:
        yield f"Where: {', '.join(finding.sites[:_MOST_SITES])}"
    for item in finding.evidence:
        yield f"Evidence: {evidence_line(item.name, item.value, item.relation, item.threshold)}"
    if finding.experiment:
        yield f"Experiment: {finding.experiment}"


# --------------------------------------------------------------------------------
# GitHub: a workflow command a line, which the runner shows beside the source.


def to_github(run: Run, diagnosis: Diagnosis, ending: Ending | None = None) -> str:
    """Return workflow commands: `::error file=train.py,line=12,title=…::cause and fix`."""
    lines = [_command(problem) for problem in problems_of(run, diagnosis, ending)]
    return "".join(f"{line}\n" for line in lines)


def _command(problem: Problem) -> str:
    properties = {"file": problem.file, "line": problem.line, "title": f"{problem.title} ({problem.kind})"}
    given = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items() if value is not None)
    return f"::{_GITHUB[problem.severity]} {given}::{_escaped(problem.text)}"


def _escaped(text: str, more: str = "") -> str:
    """Escape what ends a message, and in properties also what separates them.

    >>> _escaped("50%: a, b", ":,")
    '50%25%3A a%2C b'
    """
    for sign in ("%", "\r", "\n", *more):
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


# --------------------------------------------------------------------------------
# SARIF, which code scanning services and editors read.


def to_sarif(run: Run, diagnosis: Diagnosis, ending: Ending | None = None) -> str:
    """Return a SARIF 2.1.0 log with one result for each finding."""
    problems = problems_of(run, diagnosis, ending)
    kinds = list(dict.fromkeys(problem.kind for problem in problems))
    driver = {"name": "Sonde", "semanticVersion": VERSION, "rules": [_sarif_rule(kind) for kind in kinds]}
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "automationDetails": {"id": f"sonde/{run.path.name}"},
                "columnKind": "unicodeCodePoints",
                "results": [_sarif_result(problem, kinds.index(problem.kind)) for problem in problems],
            }
        ],
    }
    return files.text(log) + "\n"


def _sarif_rule(kind: str) -> dict[str, Any]:
    rule = _rules().get(kind)
    described: dict[str, Any] = {"id": kind, "name": words_of(kind).title().replace(" ", "")}
    summary = rule.summary if rule is not None else f"{words_of(kind)}."
    return described | {"shortDescription": {"text": summary}}


def _sarif_result(problem: Problem, index: int) -> dict[str, Any]:
    place = f"{problem.kind}:{problem.file}:{problem.line}"
    result: dict[str, Any] = {
        "ruleId": problem.kind,
        "ruleIndex": index,
        "level": _SARIF[problem.severity],
        "message": {"text": problem.text},
        "partialFingerprints": {"sondeFinding/v1": sha256(place.encode(errors="replace")).hexdigest()[:32]},
    }
    if problem.file is not None:
        result["locations"] = [{"physicalLocation": _sarif_place(problem.file, problem.line)}]
    return result | ({"properties": problem.data} if problem.data else {})


def _sarif_place(file: str, line: int | None) -> dict[str, Any]:
    path = Path(file)
    if path.is_absolute():
        artifact = {"uri": path.as_uri()}
    else:
        from urllib.parse import quote

        artifact = {"uri": quote(file, errors="surrogateescape"), "uriBaseId": "%SRCROOT%"}
    return {"artifactLocation": artifact} | ({"region": {"startLine": line}} if line else {})


def _rules() -> dict[str, Rule]:
    from sonde.diagnosis.rules import RULES

    return {rule.kind: rule for rule in RULES}


# --------------------------------------------------------------------------------
# JUnit: a test case for each rule, which every CI server shows.


def to_junit(run: Run, diagnosis: Diagnosis, ending: Ending | None = None) -> str:
    """Return JUnit XML: rules that gave a verdict passed or failed; those that could not judge were skipped."""
    problems = {problem.kind: problem for problem in problems_of(run, diagnosis, ending)}
    others = [kind for kind in problems if kind not in _rules()]
    cases = [_junit_case(run, kind, problems.get(kind), diagnosis) for kind in (*others, *_rules())]
    suite = ElementTree.Element("testsuite", name=_xml(f"sonde {run.path.name}"), tests=str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _junit_case(run: Run, kind: str, problem: Problem | None, diagnosis: Diagnosis) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=_xml(f"sonde.{run.path.name}"), name=_xml(kind))
    if problem is not None:
        return _junit_problem(case, problem)
    if kind in diagnosis.broken:
        ElementTree.SubElement(case, "error", message="the rule failed").text = _xml(diagnosis.broken[kind])
    elif kind in diagnosis.unmeasured:
        ElementTree.SubElement(case, "skipped", message=_xml(f"not measured: {in_words(diagnosis.unmeasured[kind])}"))
    return case


def _junit_problem(case: ElementTree.Element, problem: Problem) -> ElementTree.Element:
    if problem.file is not None:
        case.set("file", _xml(problem.file))
    if problem.line is not None:
        case.set("line", str(problem.line))
    if problem.severity == "info":
        ElementTree.SubElement(case, "system-out").text = _xml(problem.text)
        return case
    message = _xml(problem.text.partition("\n")[0])
    tag = "error" if problem.kind in (_RAISED, _DAMAGED) else "failure"
    ElementTree.SubElement(case, tag, type=problem.severity, message=message).text = _xml(problem.text)
    return case


def _xml(text: str) -> str:
    """Return the text without characters that XML cannot hold."""
    return _NOT_XML.sub("\ufffd", text)
