"""`sonde report RUN`: write one run into one file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.answer import print_text
from sonde.cli.export import check_target
from sonde.cli.opening import RunPath, open_run
from sonde.errors import OptionError

if TYPE_CHECKING:
    from sonde.store import Run

EXAMPLES = """
sonde report runs/first  # writes first.html, which opens in any browser
sonde report runs/first --format md  # for an issue or a pull request
sonde report runs/first --format text  # on the terminal
sonde report runs/first --format json --out - | jq .findings
"""


class ReportFormat(StrEnum):
    """File formats, and text for the terminal."""

    html = "html"
    md = "md"
    json = "json"
    text = "text"


Form = Annotated[
    ReportFormat | None,
    typer.Option(
        "--format",
        metavar="html|md|json|text",
        help="The format; by default that of --out, else html. text is printed.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="The file to write, - for standard output; by default named after the run."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


def report(run: RunPath, form: Form = None, out: Out = None, force: Force = False) -> None:
    """Write a run into one file: findings, figures, events, environment.

    The HTML file holds everything it needs: it opens from disk, without a network, and runs nothing but its own script.
    """
    chosen = form or _form_of(out)
    opened = open_run(run)
    if chosen is ReportFormat.text and out is None:
        from sonde.views.report import report_document

        report_document(opened).print()
        return
    if str(out) == "-":
        from sonde.views.report import render_report

        print_text(render_report(opened, chosen.value))
        return
    name = (run.resolve().name or "run") + f".{chosen.value}"
    _write(opened, chosen, out or Path(name), force)


def _form_of(out: Path | None) -> ReportFormat:
    """Return the format that a file's name asks for.

    >>> _form_of(Path("first.md")).value, _form_of(None).value
    ('md', 'html')
    """
    endings = {".md": ReportFormat.md, ".markdown": ReportFormat.md, ".json": ReportFormat.json}
    endings |= {".txt": ReportFormat.text}
    endings |= dict.fromkeys(("", ".html", ".htm"), ReportFormat.html)
    suffix = out.suffix.lower() if out else ""
    if suffix not in endings:
        raise OptionError(f"{out}: a report is .html, .md, .json or .txt. Name it so, or choose one with --format.")
    return endings[suffix]


def _write(opened: Run, form: ReportFormat, target: Path, force: bool) -> None:
    from sonde.analysis.export_formats import replacing
    from sonde.views.report import render_report
    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import size

    check_target(target, force)
    text = render_report(opened, form.value)
    with replacing(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    make_console().print(f"{target} ({size(target.stat().st_size)})", soft_wrap=True)
