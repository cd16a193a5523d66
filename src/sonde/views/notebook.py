"""A run as a notebook shows it: what is wrong, and the figures, in a frame of its own below the cell.

import sonde

sonde.open_run("runs/first").show()
"""

from __future__ import annotations

import shlex
from html import escape
from typing import Any, Final

from sonde.errors import MissingExtra
from sonde.store import Run
from sonde.views.document import Document
from sonde.views.report import render_report

USUAL_HEIGHT: Final = 760
LEAST_HEIGHT: Final = 120


class RunView:
    """What `run.show()` returns: read and drawn when a notebook displays it, so a live run is shown as it is then.

    The frame holds all that it needs. It may run its own scripts and nothing else: it cannot reach the notebook around
    it, and no name in a stranger's run can become a script.
    """

    def __init__(self, run: Run, *, height: int = USUAL_HEIGHT) -> None:
        self._run = run
        self.height = max(int(height), LEAST_HEIGHT)

    def __repr__(self) -> str:
        return f"{self._run!r}\nSee all of it: {self.command}"

    @property
    def command(self) -> str:
        """The command that opens this run in the viewer."""
        return f"sonde view {shlex.quote(str(self._run.path))}"

    def _repr_html_(self) -> str:
        self._run.refresh()
        try:
            page = render_report(self._run, "html")
        except MissingExtra as error:
            return f"{self._hint()}<p>{escape(str(error))}</p>{self._plain()}"
        return self._hint() + _frame(self._run.path.name, page, self.height)

    def _hint(self) -> str:
        return f"<p>Layers, samples and other runs are in the viewer: <code>{escape(self.command)}</code></p>"

    def _plain(self) -> str:
        return f"<pre>{escape(render_report(self._run, 'md'))}</pre>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return all forms a front end may choose from; a terminal takes the text, which costs nothing."""
        makers = {"text/plain": self.__repr__, "text/html": self._repr_html_}
        wanted = set(include or makers) - set(exclude or ())
        return {kind: make() for kind, make in makers.items() if kind in wanted}


class DocumentView:
    """A document that a notebook displays in a frame of its own, and a terminal as text."""

    def __init__(self, document: Document, *, height: int = USUAL_HEIGHT) -> None:
        self.document = document
        self.height = max(int(height), LEAST_HEIGHT)

    def __repr__(self) -> str:
        return self.document.to_markdown()

    def _repr_html_(self) -> str:
        return _frame(self.document.title, self.document.to_html(), self.height)


def _frame(title: str, page: str, height: int) -> str:
    return (
        f'<iframe title="Sonde: {escape(title)}" sandbox="allow-scripts" width="100%" height="{height}" '
        f'style="border:1px solid #8884;border-radius:6px" srcdoc="{escape(page)}"></iframe>'
    )
