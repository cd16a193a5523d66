"""What the pages of the viewer ask, and so what a copy answers.

Everything that can be asked without parameters is found from the server's routes and figures. What the pages ask about
one site, sample or trace is asked here within the limits of a copy; a browser test opens every page of a copy and fails
if one asks what is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sonde.views.site.ask import Answer, Asker, Words, spell
from sonde.views.site.shelf import Shelf

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

_OF_RUN: Final = "/api/run/{run}"
_NARROWED: Final = ("steps", "evaluations")  # a copy lists only those that it holds


def ask_all(asker: Asker, run: str, shelf: Shelf) -> None:
    """Ask what the pages ask about a run, and file the answers."""
    from sonde.views.site.layer_questions import ask_layers
    from sonde.views.site.sample_questions import ask_samples

    ask = Questions(asker, run, shelf)
    ask.say("A copy shows no more than this; what was written to the run later is not in it.")
    overview = ask("", {}) or {}
    for path, of_run in questions_without_parameters(asker.routes):
        if path not in _NARROWED:
            ask(path, {}, of_run=of_run)
    _ask_profile(ask)
    ask_layers(ask, overview)
    ask_samples(ask)


def questions_without_parameters(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, bool]]:
    """Yield the paths that can be asked as they are, and whether each is about a run; figures are asked by name."""
    from sonde.views.web.figures_api import FIGURES
    from sonde.views.web.live_api import STREAM

    for path in (str(getattr(route, "path", "")) for route in routes):
        rest = path.removeprefix(_OF_RUN).strip("/") if path.startswith(_OF_RUN) else None
        if rest == "figure/{name}":
            yield from ((f"figure/{name}", True) for name in FIGURES)
        elif rest is not None and "{" not in rest and rest != STREAM:
            yield rest, True
        elif rest is None and path.startswith("/api/"):
            yield path.removeprefix("/api/"), False


def _ask_profile(ask: Questions) -> None:
    traces = (ask("traces", {}) or {}).get("traces", [])
    for trace in traces:
        ask("trace-summary", {"name": trace["name"]})
    if traces:
        ask.say("Traces are summed up here; the traces themselves are in the run.")


class Questions:
    """Asks about one run, and files what is answered."""

    def __init__(self, asker: Asker, run: str, shelf: Shelf) -> None:
        self._asker, self.run, self.shelf = asker, run, shelf

    @property
    def limits(self) -> Any:
        """How much the copy may hold."""
        return self.shelf.limits

    def __call__(self, path: str, words: Words, *, group: str | None = None, of_run: bool = True) -> Any:
        """Ask, file the answer, and return it if it is JSON; None where there is none."""
        whole = self._whole(path) if of_run else path
        question = spell(whole, words)
        answer = self._asker.ask(whole, words)
        if answer.status != 200:
            return None
        self.shelf.put(group or question, question, answer)
        return answer.json()

    def look(self, path: str, words: Words) -> Any:
        """Ask without filing the answer."""
        return self._asker.ask(self._whole(path), words).json()

    def put(self, path: str, words: Words, value: Any) -> None:
        """File an answer that is narrower than the server's, so that the pages offer only what is here."""
        question = spell(self._whole(path), words)
        body = json.dumps(value, allow_nan=False).encode()
        self.shelf.put(question, question, Answer(200, "application/json", body))

    def say(self, line: str) -> None:
        """Note in the copy what it leaves out."""
        self.shelf.done.left_out.append(line)

    def _whole(self, path: str) -> str:
        return f"run/{self.run}{'/' + path if path else ''}"
