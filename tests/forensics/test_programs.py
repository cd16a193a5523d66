"""The first bad operation of programs that go non-finite: its kind, place, line, samples and reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PROGRAMS = sys.modules["forensics_programs"].PROGRAMS  # made known by conftest.py


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_bad_operation_is_named(name, reported):
    program = PROGRAMS[name]
    findings = reported(program.run)
    assert len(findings) == 1, [finding.cause for finding in findings]
    finding = findings[0]
    origin = finding.data["origin"]
    assert finding.kind == program.kind, finding.cause
    assert program.site in finding.sites, finding.cause
    if program.call:
        assert origin["call"] == program.call, finding.cause
    if program.op:
        assert origin["op"] == program.op
    if program.reason:
        assert finding.data["reason"] == program.reason, finding.cause
    if program.line:
        assert (Path(origin["line"]["file"]).name, origin["line"]["line"]) == ("programs.py", program.line)
    if program.samples is not None:
        assert origin["samples"] == program.samples, finding.cause
    assert finding.severity == "critical"
    assert finding.cause
    assert finding.fix


def test_there_are_enough_programs():
    assert len(PROGRAMS) >= 40
