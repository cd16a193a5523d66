"""Reports: one run in one file, for people (HTML, Markdown) and for programs (JSON).

import sonde
from sonde.views.report import render_report

text = render_report(sonde.open_run("runs/first"), "md")
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from sonde.errors import OptionError
from sonde.store import Run, open_run
from sonde.views.report.content import Report, read_report

Format = Literal["html", "md", "json"]
FORMATS: Final[tuple[Format, ...]] = ("html", "md", "json")

__all__ = ["FORMATS", "Format", "Report", "read_report", "render_report"]


def render_report(run: Run | str | Path, form: Format = "html") -> str:
    """Return the report of a run, or of the one at a path, as `html`, `md` or `json`. Only HTML needs plotly.

    Raises:
        OptionError: There is no such format.
        MissingExtra: HTML was asked for, and plotly is not installed.

    """
    run = run if isinstance(run, Run) else open_run(run)
    report = read_report(run)
    if form == "html":
        from sonde.views.report.html import to_html

        return to_html(run, report)
    if form == "md":
        from sonde.views.report.markdown import to_markdown

        return to_markdown(report)
    if form == "json":
        from sonde.views.report.as_json import to_json

        return to_json(report)
    raise OptionError(f"There is no report format {form!r}. There are: {', '.join(FORMATS)}.")
