"""Show a run in a notebook: findings and figures in a frame below the cell.

import sonde

sonde.open_run("runs/first").show()

`LiveView` is drawn again while the run trains: `session.show()`, `run.show(live=True)`, `%%sonde`.
"""

from __future__ import annotations

import contextvars
import logging
import shlex
import sys
import threading
import time
from html import escape
from typing import Any, Final

from sonde.errors import MissingExtra, SondeError
from sonde.store import Run
from sonde.views.document import Document
from sonde.views.report import brief_document, render_report

logger = logging.getLogger("sonde")

USUAL_HEIGHT: Final = 760
LIVE_HEIGHT: Final = 420
LEAST_HEIGHT: Final = 120
_SHARE: Final = 0.02
"""How much of the time may be spent on drawing a live view."""


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
        return f"sonde view {shlex.quote(self._run.address)}"

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


def brief_html(run: Run, height: int = LIVE_HEIGHT) -> str:
    """Return what matters most about a run in a frame without Plotly: a few kilobytes, nothing from the network."""
    document = brief_document(run)
    try:
        return _frame(run.path.name, document.to_html(), height)
    except MissingExtra as error:
        return f"<p>{escape(str(error))}</p><pre>{escape(document.to_markdown())}</pre>"


class LiveView:
    """A run below a notebook's cell, drawn again while it trains.

    Args:
        run: The run, which may have begun just now.
        height: Of the frame, in pixels.
        every_s: How often to draw, in seconds. A run that takes long to draw is drawn less often.

    """

    def __init__(self, run: Run, *, height: int = LIVE_HEIGHT, every_s: float = 1.0) -> None:
        self._run = run
        self.height = max(int(height), LEAST_HEIGHT)
        self._every_s = max(float(every_s), 0.05)
        self._handle: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return repr(self._run)

    def _repr_html_(self) -> str:
        self._run.refresh()
        return brief_html(self._run, self.height)

    def start(self) -> bool:
        """Show the run below the cell and begin to follow it; return False where there is no notebook."""
        if not _in_notebook():
            logger.warning("there is no notebook to show the run in. Run: sonde top %s", self._run.path)
            return False
        from IPython.display import display

        self._handle = display(self, display_id=True)
        # The thread's output belongs to the cell that started it.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._follow,), name="sonde-notebook", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> None:
        """Draw it for the last time."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(10)
            self._handle.update(self)

    def _follow(self) -> None:
        wait = self._every_s
        try:
            while not self._done.wait(wait):
                is_over = self._run.status != "live"
                if self._run.refresh() or is_over:
                    begun = time.perf_counter()
                    self._handle.update(self)
                    wait = max(self._every_s, (time.perf_counter() - begun) / _SHARE)
                if is_over:
                    return
        except (SondeError, OSError) as error:  # the folder was removed; all else is a fault, which Python prints
            logger.warning("the view in the notebook stopped: %s", error)


def _in_notebook() -> bool:
    """Return whether a kernel runs this process: a terminal cannot replace what it has shown."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


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
