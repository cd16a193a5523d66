"""`sonde diagnose RUN`: what is wrong with a run, why, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.guard import FOUND, OK
from sonde.cli.opening import AsJson, RunPath, Width

if TYPE_CHECKING:
    from sonde.analysis import Ending
    from sonde.diagnosis import Diagnosis
    from sonde.records import Severity
    from sonde.store import Run

EXAMPLES = """
sonde diagnose runs/first  # the findings, most severe first
sonde diagnose runs/first --all  # notes and unknowns in full
sonde diagnose runs/first --json | jq .findings  # for programs
sonde diagnose runs/first && echo sound  # for scripts
"""

All = Annotated[bool, typer.Option("--all", help="Show notes in full, and all that was not measured.")]


def diagnose(run: RunPath, everything: All = False, width: Width = None, json: AsJson = False) -> None:
    """Report what is wrong with a run, why, and how to fix it.

    Names the cause, the evidence, a fix, and a test that would refute it. Judges the run from its files, finished or
    not. Exits with 0 if nothing is wrong (notes do not count), with 1 if there are warnings, the training failed or a
    part of the run is damaged, with 2 if something is critical, and with 3 if the run cannot be read at all or the call
    is wrong.
    """
    from sonde.analysis import ending_of
    from sonde.cli.opening import open_run
    from sonde.diagnosis import diagnose as judge

    opened = open_run(run)
    diagnosis = judge(opened)
    ending = ending_of(opened)
    if json:
        from sonde.cli.answer import print_json

        print_json(describe_diagnosis(opened, diagnosis, ending))
    else:
        _print(opened, diagnosis, ending, width=width, everything=everything)
    failed = ending is not None and not ending.by_hand
    code = max(exit_code(diagnosis.severity), FOUND if failed or opened.problems else OK)
    if code:
        raise typer.Exit(code)


def exit_code(severity: Severity | None) -> int:
    """Return what to exit with, by the most severe finding.

    >>> exit_code("info"), exit_code("warning"), exit_code("critical")
    (0, 1, 2)
    """
    return {"warning": 1, "critical": 2}.get(severity or "", 0)


def describe_diagnosis(run: Run, diagnosis: Diagnosis, ending: Ending | None = None) -> dict[str, Any]:
    """Describe a diagnosis as JSON-ready values."""
    return {
        "run": str(run.path),
        "status": run.status,
        "ending": ending,
        "steps": diagnosis.steps,
        "severity": diagnosis.severity,
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "rules_asked": diagnosis.asked,
        "not_measured": diagnosis.unmeasured,
        "broken": diagnosis.broken,
        "problems": run.problems,
    }


def _print(run: Run, diagnosis: Diagnosis, ending: Ending | None, *, width: int | None, everything: bool) -> None:
    from rich.text import Text

    from sonde.views.terminal import Look, make_console
    from sonde.views.terminal.findings import render_diagnosis
    from sonde.views.terminal.style import BAD, STATUS_STYLES, TITLE, plural

    console = make_console(width=width)
    look = Look.of(console)
    status = (run.status, STATUS_STYLES.get(run.status, ""))
    console.print(Text.assemble((run.path.name, TITLE), look.pick(" · ", " | "), status))
    if run.problems:
        words = (
            f"{plural(len(run.problems), 'part')} of it could not be read, and is not judged: sonde verify {run.path}"
        )
        console.print(Text(words, BAD), soft_wrap=True)
    for part in render_diagnosis(diagnosis, look, everything=everything, ending=ending):
        console.print(part)
