"""`sonde diagnose RUN`: what is wrong with a run, why, and what to do about it."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json, print_text
from sonde.cli.guard import FOUND, OK
from sonde.cli.opening import AsJson, OneRank, RunPath, Width, open_run

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
sonde diagnose runs/first --format github  # annotations in a workflow
sonde diagnose runs/first --format sarif > sonde.sarif  # also junit
"""

Examine = Annotated[
    bool, typer.Option("--examine/--no-examine", help="Whether to repeat a taped step first, if that was not done.")
]
All = Annotated[bool, typer.Option("--all", help="Show notes in full, and all that was not measured.")]


class DiagnosisFormat(StrEnum):
    """What is printed: a page for people, or the findings for a program."""

    text = "text"
    json = "json"
    github = "github"
    sarif = "sarif"
    junit = "junit"


Form = Annotated[
    DiagnosisFormat,
    typer.Option(
        "--format",
        metavar="text|json|github|sarif|junit",
        help="What to print: for people, for programs, or for continuous integration.",
    ),
]


def diagnose(
    run: RunPath,
    everything: All = False,
    examine: Examine = True,
    rank: OneRank = None,
    width: Width = None,
    json: AsJson = False,
    form: Form = DiagnosisFormat.text,
) -> None:
    """Report what is wrong with a run, why, and how to fix it.

    Names the cause, the evidence, a fix, and a test that would refute it. Judges the run from its files, finished or
    not. If something is wrong and the run has a tape, the taped step is repeated first (see sonde examine).

    Exits with 0 if nothing is wrong (notes do not count), with 1 if there are warnings, the training failed or a part
    of the run is damaged, with 2 if something is critical, and with 3 if the run cannot be read at all or the call is
    wrong.
    """
    from sonde.analysis import ending_of
    from sonde.diagnosis import diagnose as judge

    opened = open_run(run, rank)
    diagnosis = judge(opened)
    if examine and rank is None and _examine(opened, diagnosis):
        diagnosis = judge(opened)
    ending = ending_of(opened)
    if json or form is DiagnosisFormat.json:
        print_json(describe_diagnosis(opened, diagnosis, ending))
    elif form is not DiagnosisFormat.text:
        from sonde.views import ci

        write = {"github": ci.to_github, "sarif": ci.to_sarif, "junit": ci.to_junit}[form]
        print_text(write(opened, diagnosis, ending))
    else:
        _print(opened, diagnosis, ending, width=width, everything=everything)
    failed = ending is not None and not ending.by_hand
    code = max(exit_code(diagnosis.severity), FOUND if failed or opened.problems else OK)
    if code:
        raise typer.Exit(code)


def _examine(run: Run, diagnosis: Diagnosis) -> bool:
    """Repeat the last taped step of a run that looks ill, if torch is there, and return whether that was done."""
    from importlib.util import find_spec

    from sonde.core import examination, tape

    folders = tape.folders(run.path)
    if not folders or not diagnosis.looks_ill or run.status == "live" or find_spec("torch") is None:
        return False
    if os.environ.get("SONDE_EXAMINE") == "0" or examination.of_run(run.path).get(max(folders)) is not None:
        return False
    if not os.access(folders[max(folders)], os.W_OK):
        return False
    examination.examine(folders[max(folders)])
    return True


def exit_code(severity: Severity | None) -> int:
    """Return what to exit with, by the most severe finding.

    >>> exit_code("info"), exit_code("warning"), exit_code("critical")
    (0, 1, 2)
    """
    return {"warning": 1, "critical": 2}.get(severity or "", 0)


def describe_diagnosis(run: Run, diagnosis: Diagnosis, ending: Ending | None = None) -> dict[str, Any]:
    """Describe a diagnosis as JSON-ready values."""
    from sonde.analysis import verdict_on

    return {
        "run": run.address,
        "status": run.status,
        "verdict": verdict_on(run, diagnosis.findings).text,
        "ending": ending,
        "steps": diagnosis.steps,
        "severity": diagnosis.severity,
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "rules_asked": diagnosis.asked,
        "not_measured": diagnosis.unmeasured,
        "judged_on_one_step_in": diagnosis.thinned,
        "refuted_by_experiment": diagnosis.refuted,
        "broken": diagnosis.broken,
        "problems": run.problems,
    }


def _print(run: Run, diagnosis: Diagnosis, ending: Ending | None, *, width: int | None, everything: bool) -> None:
    from rich.text import Text

    from sonde.analysis import verdict_on
    from sonde.views.terminal import Look, make_console
    from sonde.views.terminal.findings import render_diagnosis
    from sonde.views.terminal.style import BAD, STATUS_STYLES, TITLE, plural
    from sonde.views.terminal.summary import verdict_line

    console = make_console(width=width)
    look = Look.of(console)
    status = (run.status, STATUS_STYLES.get(run.status, ""))
    console.print(Text.assemble((run.path.name, TITLE), look.pick(" · ", " | "), status))
    if diagnosis.steps and ending is None:
        console.print(verdict_line(verdict_on(run, diagnosis.findings)))
    if run.problems:
        parts = plural(len(run.problems), "part")
        words = f"{parts} of it could not be read, and is not judged: sonde verify {run.address}"
        console.print(Text(words, BAD), soft_wrap=True)
    for part in render_diagnosis(diagnosis, look, everything=everything, ending=ending):
        console.print(part)
