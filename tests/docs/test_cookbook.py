"""Every program of the cookbook is recorded as it is, and its cause is found: all twelve in one process."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import sonde
from sonde.integrations.discovery import Discovery

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(ROOT.glob("examples/cookbook/*.py"))
PAGE = (ROOT / "docs" / "cookbook.md").read_text()


def kind_in(code):
    return re.search(r"Finding: (\w+)", code)[1]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_cause_is_found_first(program, tmp_path, monkeypatch):
    monkeypatch.setenv("SONDE_BUDGET", "none")
    discovery = Discovery(str(tmp_path / "run"), {})
    discovery.install()
    try:
        runpy.run_path(str(program))
    finally:
        why_not = discovery.finish()
    assert not why_not
    (path,) = sonde.list_runs(tmp_path)
    findings = sonde.diagnose(sonde.open_run(path.path)).findings
    assert [finding.kind for finding in findings][:1] == [kind_in(program.read_text())]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_page_shows_the_program_its_line_and_the_finding(program):
    code = program.read_text()
    assert f"examples/cookbook/{program.name}" in PAGE
    (line,) = [line.strip() for line in code.splitlines() if "# the fault" in line]
    assert line in PAGE
    assert f"findings/{kind_in(code)}.md" in PAGE
    assert f"images/cookbook-{program.stem}.svg" in PAGE
    assert kind_in(code) in (ROOT / "docs" / "images" / f"cookbook-{program.stem}.svg").read_text()


def test_there_are_twelve():
    assert len(PROGRAMS) == 12
